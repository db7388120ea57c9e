"""Write ``docs/job.md`` from the code that reads a job: ``python -m docs.make_job``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ringtune.job.job_reference import KeyFacts, SectionFacts, describe_job
from ringtune.models.adapter_config import known_configurations, option_rules, other_names, refused_configurations
from ringtune.models.decoders import METHODS
from ringtune.models.families import DESCRIBED, GENERIC_ENCODERS
from ringtune.models.family import Family
from ringtune.models.generic_decoders import GENERIC
from ringtune.models.text_towers import TOWERS

_OLD = 4
PAGE = Path(__file__).parent / "job.md"
EXAMPLES = {
    "model.path": '"models/all-MiniLM-L6-v2"',
    "data.train": '"train.csv"',
    "data.eval": '"test.csv"',
    "data.held_out": "0.1",
    "data.labels": '["bad", "good"]',
    "data.split": '"dirichlet:0.5"',
    "data.owners": "2",
    "data.stride": "42",
    "adapter.config": '"seq_bn[reduction_factor=8]|lora[r=4]"',
    "adapter.from": '"last-month/adapter"',
    "train.momentum": "0.9",
    "train.lr_schedule": '"cosine"',
    "train.warmup_steps": "100",
    "train.warmup_share": "0.06",
    "train.weight_decay": "0.01",
    "train.dropout": "0.1",
    "train.rounds": "5",
    "train.epochs": "3",
    "train.max_steps": "300",
    "train.eval_every": "50",
    "train.patience_evals": "3",
    "train.keep_best": "true",
    "train.sample_prompt": '"Once upon a time"',
    "train.turns": '"rows"',
    "train.seed": "1",
    "generation.rows": "100",
    "generation.at_once": "8",
    "unfreeze.every_steps": "40",
    "unfreeze.at": "[40, 100, 160]",
    "unfreeze.patience_steps": "20",
    "unfreeze.min_improvement": "0.01",
    "hift.group_size": "2",
    "hift.always_active": '["head"]',
    "hift.state": '"disk"',
    "wire.dtype": '"bfloat16"',
    "privacy.private_blocks": "1",
    "operations.policy": '"two-stage"',
    "operations.heads": "2",
    "operations.by_slice": "true",
    "operations.compute": "0.6",
    "operations.full": "3",
    "operations.forward_only": "1",
    "operations.balance": "true",
    "operations.backward_score": '"taylor"',
    "operations.scores": '"adapter"',
    "operations.refresh_rounds": "5",
    "operations.table": '"before/operations.json"',
    "memory.activations": '"auto"',
    "offload.mode": '{ "pi-1" = "laptop" }',
    "offload.interval": "4",
    "offload.pairs": '"bfloat16"',
    "offload.projected": '"all"',
    "offload.users": '"alone"',
    "offload.adapters": '{ "anna" = "linear" }',
    "data.template": '"chatml"',
    "data.append_eos": "false",
    "train.loss_on": '"all"',
    "train.packing": "true",
    "train.compute": '"bfloat16"',
    "data.user": '"author"',
    "placement.replicas": '"never"',
    "placement.follow": '"auto"',
    "placement.replan": '"never"',
    "placement.microbatches": '"auto"',
    "recovery.copies": '"next"',
    "velora.layers": '["adapter_down:down"]',
    "velora.parts": "16",
    "velora.values": "32",
    "runtime.threads": "2",
    "runtime.record": "true",
}
"""Values for keys whose default shows little; the others are shown with their default."""

_BEGIN = """\
# Every key of job.toml

Written by `python -m docs.make_job` from the code that reads a job; do not edit it here. `ringtune init` writes a job
with the common keys. A key that is left out has its default; a key or a value that is not below is refused, with the
nearest one. On the command line `--set SECTION.KEY=VALUE` replaces a key: `--set train.seed=1`.
"""
_ADAPTERS = """\
## Adapters

`adapter.config` names one configuration of AdapterHub, with options in brackets, or several joined by `|`:
`seq_bn`, `lora[r=16, attn_matrices=['q','k','v']]`, `seq_bn[reduction_factor=8]|lora[r=4]`. Texts stand in quotes. An
option that is left out has the library's default, which is shown for those that decide what is computed. `linear` and
`mlp` are no configurations of AdapterHub but RingTune's own ([below](#auxiliary-models)); they join with the others.
"""
_AUXILIARY = """\
### Auxiliary models

`linear` and `mlp` put a small model g beside each chosen matrix, which then gives `h + alpha * g(x)` for its input x:

- `linear`: `g(x) = x W^T`, W as large as the matrix and zero at the start;
- `mlp[hidden=128]`: `g(x) = relu(x V^T + b) U^T + c`, with U and c zero at the start.

The options that choose matrices are LoRA's: `attn_matrices` (and `selfattn_lora = False` for none of the attention),
`intermediate_lora`, `output_lora`. Where query, key and value are one matrix (GPT-2) each has a g of its own. There is
no dropout inside g. Both work with every method but `hift`, with `[memory]`, `[velora]`, `runtime.frozen`, and with
`[operations]` over whole blocks (`operations.heads = 0`).

**Each matrix may have another kind.** `|` joins them with each other, one kind several times
too, and with what AdapterHub has:

- `linear[attn_matrices=['q']]|mlp[attn_matrices=['v'], hidden=16]`;
- `lora[attn_matrices=['q']]|linear[attn_matrices=['v']]`;
- `seq_bn|linear[leave_out=[0, 1]]|mlp[leave_out=[2, 3]]`, of a model with four blocks.

A matrix has one: two of which one is `linear` or `mlp` are refused by its name, in any block that both have. Where
query, key and value are one matrix their auxiliary models have one `alpha`. A mixture can do what each of its parts
can: helpers fit it, hosts hold it merged, and `export --merge` writes it into the weights, if they do so with every
part.

AdapterHub has no form for them. The folder `adapter` of the run holds `adapter.json` instead of `adapter_config.json`:

```
{
  "format": "ringtune-auxiliary", "version": 2,
  "parts": [
    {"kind": "linear", "alpha": 1.0, "hidden": 0, "places": ["query"], "leave_out": []},
    {"kind": "mlp", "alpha": 0.5, "hidden": 128, "places": ["value"], "leave_out": []}
  ],
  "library": null,
  "name": "ringtune",
  "model_type": "bert", "model_name": "all-MiniLM-L6-v2"
}
```

`hidden` is 0 for `linear`; `places` are some of `query`, `key`, `value`, `intermediate`, `output`. `library` is what
AdapterHub's own `adapter_config.json` would say of the adapters beside them; their tensors are in the same
`adapter.safetensors`, under AdapterHub's names. So `load_adapter` finds nothing in the folder that it could take for
the whole, and `load_auxiliary` loads both halves. (Version 1, of one kind alone, is read too.) The names in
`adapter.safetensors` are dotted paths: of the module with the matrix, then `ringtune`, then the part of g. Of a
`linear` that is `bert.encoder.layer.0.attention.self.query.ringtune.weight` (W, a row for each output), of an `mlp`
`....ringtune.down.weight` and `.down.bias` (V and b), `.up.weight` and `.up.bias` (U and c). In a GPT-2 the place
stands between: `transformer.h.0.attn.c_attn.ringtune.query.weight`. With RUN for the run's folder and BASE for the base
model:

```python
from adapters import AutoAdapterModel
from edge.model.auxiliary import load_auxiliary

model = AutoAdapterModel.from_pretrained(BASE)
model.load_head(f"{RUN}/adapter", use_safetensors=True)
load_auxiliary(model, f"{RUN}/adapter")
```

Any model of transformers will do, so for a causal language model `AutoModelForCausalLM` without `load_head`.
`ringtune eval` and `ringtune export` take such a run. A `linear` is a change of its matrix, as LoRA is:
`ringtune export RUN --merge --out DIR` writes a normal model of transformers with it (or with LoRA) in the weights,
which needs torch on that machine; `merge_auxiliary(model, folder)` of the same module merges a `linear` into a loaded
model, if nothing of AdapterHub is beside it.
"""
_USERS = """\
### Adapters of each user

With `offload.users = "alone"` or `"collaboration"` each user has adapters of their own. The run then has no folder
`adapter` but one for each user, with the same files, which loads in the same way:

```
RUN/users/anna/adapter.safetensors   adapter_config.json   model_head.safetensors   head_config.json
RUN/users/ben/...
```

The head's files are equal in all of them, since all users train one head. Auxiliary models have `adapter.json` in
place of `adapter_config.json`. Users are called as nodes are, in small letters, digits, `.`, `-` and `_`. A user whose
rows are all for evaluation has a folder too, with adapters as they began.

Users may choose their adapter: with `adapters = { "anna" = "linear", "dora" = "seq_bn" }` in `[offload]` these two have
another kind than the others, who have `adapter.config`. Each folder says which kind it has. In collaboration every kind
has to be a change of matrices: `lora` of any rank, `linear`, or both for different matrices.

`ringtune eval RUN --user anna` and `ringtune export RUN --user anna --out DIR` take anna's adapters (with `--merge`
too). Without `--user` they take, in collaboration, the sum of all users' adapters: every row goes through it, so that
is what the run trained, and what its figures are of. A sum is one adapter again: `linear` stays `linear`, and K
adapters of LoRA with rank r and factor alpha are LoRA with rank K r and factor K alpha, exactly, up to rank 4,096.
Adapters of several kinds add up to a `linear` beside all matrices that any of them changes. To add them up takes torch
on that machine. Of users who trained alone no forward saw the sum, and it is worse than
theirs (ColA, section 4.3), so there both commands ask for a name.
"""
_PLUGGED = """\
### Models that are plugged in

AdapterHub has no class for models with the `model_type` {families}. Their adapters are put in by its plug-in interface,
which takes configurations of the kinds {kinds}, and `full`, `linear` and `mlp` as everywhere. `mtl_lora` and what
stands outside the blocks are refused by name. A bottleneck reads what attention or feed-forward part gives plus the
residual, as in Llama, and never passes a norm of the block: Gemma's norms behind both parts come after it. The folder
of the result has `adapter_interface.json` besides; README.md has the lines that load it. These models have the tasks
`sequence-classification` and `regression` (by one matrix without bias, the architecture's own head), `causal-lm` and
`chat`.
"""
_ENCODERS = """\
### Generic encoders

These models run by their architecture's own forward, whose blocks are spread over the nodes, and have the tasks
`sequence-classification`, `regression`, `token-classification` and `question-answering` with the architecture's own
heads. A key of `config.json` that is not known is refused. Relative positions are on every host. LoRA with `v` is
beside the whole matrix where queries, keys and values are one. With `full` and `hift` the whole block trains, norms
too; relative positions stay frozen. `[velora]` projects the inputs of the matrices below and of `attention_out`; query
and key of DeBERTa 2 and 3 multiply relative positions too, and are refused there, also beside helpers. `[operations]`
takes whole blocks, without scores; subnets are refused by name, and so is ALBERT, whose blocks share one set of
weights. Each one equals plain transformers with `adapters` on one and on three hosts
(`tests/suites/test_generic_encoders.py`, `tests/suites/test_generic_techniques.py`).

{table}"""
_GENERIC = """\
### Generic decoders

These models run by their architecture's own forward, whose blocks are spread over the nodes; all keys of `config.json`
go to the library. They have the tasks `causal-lm` and `chat`. LoRA with `v` is beside the whole matrix where queries,
keys and values are one. The experts of a mixture stay together in their block, frozen beside adapters, and without an
auxiliary loss of their router. With `full` and `hift` the whole block trains: norms, experts and routers too.
`[velora]` projects the inputs of the matrices below and of `attention_out`, not those of experts; one matrix of
queries, keys and values has all three names. Where attention and feed-forward part read one tensor (Cohere, CodeGen,
Falcon, GPT-J, Phi, StableLM) `up` and `gate` are taken with them; where some blocks have other matrices than others
(DeepSeek, Gemma 4, LFM2, Qwen 3.5, Qwen3-Next) it is refused. `[operations]` takes whole blocks, without scores;
subnets are refused by name. Helpers fit LoRA and bottlenecks, but not LoRA beside the feed-forward part of OPT and the
last matrix of Falcon. Each one equals plain transformers with `adapters` on one and on three hosts, and packed where it
says so (`tests/suites/test_generic_decoders.py`, `tests/suites/test_generic_techniques.py`).

{table}"""
_TOWERS = """\
### Models of texts and pictures

Of a model with one of these `model_type`s the text part trains, as the text model that it is; tensors of pictures are
not read, which `ringtune init` and the nodes' log say. `ringtune export --merge` writes a text model, `--format peft`
a LoRA for the whole model. Each one computes of a text what the whole model does, with its LoRA too, and equals plain
transformers with `adapters` on one and on three hosts (`tests/suites/test_text_towers.py`).

{table}"""
_INVERTIBLE = """\
### Invertible adapters

A bottleneck with `inv_adapter='nice'`, as in `seq_bn_inv` and `double_seq_bn_inv` (MAD-X), has two small networks F
and G after the embedding: the halves x1 and x2 of a token become `y1 = x1 + F(x2)` and `y2 = x2 + G(y1)`. Before a
language model's decoder the same weights compute the inverse. Owners have it, and hand it over with the head. It
trains while block 0 does: with `ringada` from the last unfreezing on, with `[operations]` in each micro-batch that
takes part, with private blocks never; until then it is applied with the values with which it began. AdapterHub has it
for BERT, RoBERTa, XLM-R, ELECTRA, DistilBERT, GPT-2, Llama and Mistral. The result of a language model loads into an
`AutoAdapterModel`: `AutoModelForCausalLM` leaves the inverse out.
"""
_FULL = """\
### Without an adapter

`full` adds nothing: in every block the weights and biases of query, key, value and of the way into the feed-forward
part (with the gate) train, and the weights of both ways out. Norms and the biases of both ways out stay frozen. Every
method works with it. It stands alone, without options and without `|`.

There is no AdapterHub form of such a result. The folder `adapter` of the run then holds `blocks.safetensors` instead of
`adapter.safetensors` and `adapter_config.json`: the weights of all blocks that may train, in the type of `model.dtype`,
by the names that a model with a head gives them in its own checkpoint, such as
`bert.encoder.layer.0.attention.self.query.weight`. The files of a trained head, `model_head.safetensors` and
`head_config.json`, are those of AdapterHub. With RUN for the run's folder and BASE for the base model:

```python
from adapters import AutoAdapterModel
from safetensors.torch import load_file

model = AutoAdapterModel.from_pretrained(BASE)
model.load_state_dict(load_file(f"{RUN}/adapter/blocks.safetensors"), strict=False)
model.load_head(f"{RUN}/adapter", use_safetensors=True)
```

A causal language model has no head of its own: there `transformers.AutoModelForCausalLM` and `load_state_dict` are
enough. `ringtune eval` takes such a run; `ringtune export` refuses it, since it gives adapters away.

With the method `hift` every parameter trains, norms, embedding and head included. The result is then a whole model,
the folder `model` of the run: `config.json`, the weights in `model.safetensors` (more than 5 GB of them in several
files with an index), and the tokenizer's files. It loads like any other model, and may be the next job's base model:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(f"{RUN}/model")
tokenizer = AutoTokenizer.from_pretrained(f"{RUN}/model")
```

`architectures` in `config.json` says which class has the head too. Where AdapterHub's head is number for number an
architecture's own (classification with BERT, RoBERTa and XLM-R, whose first layer is BERT's pooler; images; questions
but for Llama and Mistral; every language model), that is the class of transformers, such as
`BertForSequenceClassification`. The other heads are AdapterHub's: `AutoModel` loads the model without it,
`adapters.AutoAdapterModel.from_pretrained(f"{RUN}/model")` with it, as it does for all of them. `ringtune predict` and
`ringtune eval` take every result without AdapterHub's library.

At the end every node sends its part of the model, which may take as long as its bytes come: `runtime.wait_s` is how
long they may stand still. The coordinator's disk holds the parts and the merged model for a while, so it needs room for
twice the model beside the run's folder; no process holds more than pieces of it. If there is no room, make some and
`--resume`.
"""


def example(key: KeyFacts) -> str:
    """A line of TOML that has the key."""
    return f"{key.name.partition('.')[2]} = {EXAMPLES.get(key.name, key.default)}"


def page() -> str:
    """The whole page."""
    adapters = [
        _ADAPTERS,
        _configurations(),
        *map(_options, _kinds()),
        _refused(),
        _INVERTIBLE,
        _plugged(),
        _generic_encoders(),
        _generic(),
        _towers(),
        _AUXILIARY,
        _USERS,
        _FULL,
    ]
    return "\n".join([_BEGIN, *map(_section, describe_job()), *adapters])


def table(titles: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Write a table of Markdown."""
    lines = [titles, ("---",) * len(titles), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _section(section: SectionFacts) -> str:
    rows = [
        (_code(key.name.partition(".")[2]), key.kind, _code(key.default), key.allowed, key.meaning, _code(example(key)))
        for key in section.keys
    ]
    titles = ("key", "type", "default", "allowed", "what it does", "example")
    return f"## [{section.name}]\n\n{section.meaning}\n\n{table(titles, rows)}"


def _kinds() -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in known_configurations().values()))


def _configurations() -> str:
    older = other_names()
    rows = []
    for name, (kind, defaults) in known_configurations().items():
        aliases = ", ".join(_code(alias) for alias, stands_for in older.items() if stands_for == name)
        shown = ", ".join(f"{option}={value!r}" for option, value in defaults.items() if option in option_rules(kind))
        rows.append((_code(name), aliases, kind, _code(shown)))
    return table(
        ("configuration", "also called", "kind", "options that decide size and computation, with defaults"), rows
    )


def _options(kind: str) -> str:
    rows = [(_code(name), words) for name, words in option_rules(kind).items()]
    return f"### Options of the kind {kind}\n\n{table(('option', 'has to be'), rows)}"


def _plugged() -> str:
    """Say which adapters the families have that are plugged in."""
    names = [f"`{name}`" for name, family in DESCRIBED.items() if family.plugged]
    kinds = ", ".join(_code(kind) for kind in METHODS)
    return _PLUGGED.format(families=", ".join(names), kinds=kinds)


def _generic_encoders() -> str:
    """List the encoders that run by their architecture's own forward."""
    titles = ("`model_type`", "query, key, value", "first and last matrix", "adapters")
    return _ENCODERS.format(table=table(titles, [row[:4] for row in _rows_of(GENERIC_ENCODERS)]))


def _generic() -> str:
    """List the decoders that run by their architecture's own forward."""
    titles = ("`model_type`", "query, key, value", "first and last matrix", "adapters", "`train.packing`")
    return _GENERIC.format(table=table(titles, _rows_of(GENERIC)))


def _towers() -> str:
    """List the models of texts and pictures whose text part trains."""
    rows = [(_code(name), _code(tower.family)) for name, tower in TOWERS.items()]
    return _TOWERS.format(table=table(("`model_type`", "trains as"), rows))


def _rows_of(families: Iterable[Family]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for family in families:
        layout = family.layout
        roles = ("query", "key", "value")
        attention = dict.fromkeys(name for role in roles for name in layout.matrices_of(role))
        rest = [_code(name) for name in (layout.up, layout.down) if name]
        rows.append(
            (
                _code(family.model_type) + (f" (transformers {family.since})" if family.since > _OLD else ""),
                ", ".join(map(_code, attention)),
                ", ".join(rest) or "experts, frozen",
                ", ".join(family.methods),
                "yes" if family.packs else "",
            )
        )
    return rows


def _refused() -> str:
    rows = [(_code(name), reason) for name, reason in refused_configurations().items()]
    return f"### Configurations that are refused\n\n{table(('configuration', 'why'), rows)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
