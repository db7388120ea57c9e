"""Jobs: every key out of range, a key of each section misspelt or of another kind; files that are no job."""

from __future__ import annotations

from collections.abc import Iterator

from ringtune.storage.strict import Bounds, OneOf
from tests.support.bad_input.case import BASE_JOB, Case, job_case, set_case, text_case
from tests.support.job_keys import KEYS, Key

HUGE = "1" + "0" * 22
OF_NO_RULE: dict[str, tuple[str, ...]] = {
    "train.microbatches": ("9",),
    "model.path": ('""', '" "', '"no-such-model"', '"train.csv"', '"bert-base-uncased"'),
    "data.train": ('"no-such.csv"', '"model"', '"train.txt.gz"'),
    "data.eval": ('"no-such.csv"', '"model"'),
    "data.text": ('""', '"label"'),
    "data.label": ('""', '"text"'),
    "data.labels": ('["a"]', '["a","a"]', '["good",""]'),
    "data.split": ('"even"', '"dirichlet:0"', '"dirichlet:x"', '"dirichlet:-1"', '"dirichlet:inf"'),
    "data.owners": ("3",),
    "adapter.config": (
        '""',
        '"lora[r=0]"',
        '"lora[r=-3]"',
        '"lora[r=1000000000]"',
        '"lora[r=2.5]"',
        "\"lora[r='8']\"",
        '"lora[rank=8]"',
        "\"lora[alpha='x']\"",
        "\"lora[attn_matrices=['z']]\"",
        "\"lora[attn_matrices='q']\"",
        '"lora[dropout=2]"',
        "\"lora[composition_mode='minus']\"",
        '"lora[r=8,r=4]"',
        '"lora[leave_out=[99]]"',
        '"lora[leave_out=3]"',
        "\"lora[init_weights='nothing']\"",
        '"seq_bn[reduction_factor=0]"',
        '"seq_bn[reduction_factor=-2]"',
        "\"seq_bn[reduction_factor='x']\"",
        '"seq_bn[reduction=8]"',
        "\"seq_bn[non_linearity='none']\"",
        "\"seq_bn[scaling='big']\"",
        '"seq_bn[mh_adapter=1]"',
        '"seq_bn[output_adapter=False]"',
        '"seq_bn[cross_adapter=True]"',
        '"seq_bn[dropout=-1]"',
        "\"seq_bn[is_parallel='yes']\"",
        '"loreft[r=0]"',
        '"loreft[layers=[99]]"',
        '"loreft[prefix_positions=-1]"',
        '"loreft[rank=2]"',
        '"mtl_lora[n_up_projection=0]"',
        '"mlp[hidden=2.5]"',
        '"mlp[leave_out=[99]]"',
        '"|"',
        "\"seq_bn[reduction_factor=__import__('os').getpid()]\"",
    ),
    "unfreeze.at": ("[0]", "[3,2]", "[2,2]", '"soon"', "[-1]", f"[{HUGE}]"),
    "privacy.private_blocks": ("99",),
    "operations.table": ('"none.json"', '"model"', '"train.csv"', '"{}"', '"a\\u0000b"', '"~nouser_x/t.json"'),
}
"""Values that no rule of a single key refuses."""

NOT_TOML = {
    "a duplicate key": (BASE_JOB + "rounds = 2\n", "rounds"),
    "a duplicate section": (BASE_JOB + '[data]\ntrain = "train.csv"\n', "data"),
    "a backslash path": (BASE_JOB.replace('"model"', '"C:\\models\\mini"'), "backslash"),
    "a text without an end": (BASE_JOB.replace('"model"', '"model'), "line"),
    "a value without quotes": (BASE_JOB.replace('"model"', "model"), "line"),
    "a key without a value": (BASE_JOB + "seed =\n", "line"),
    "a colon for the equals sign": (BASE_JOB + "seed: 3\n", "line"),
    "JSON": ('{"model": {"path": "model"}}', "toml"),
    "YAML": ("model:\n  path: model\n", "toml"),
    "a python file": ("import os\n", "toml"),
    "a byte order mark before a wrong key": ("\ufeff" + BASE_JOB + "seeds = 3\n", "train.seeds"),
    "deep nesting": ("a = " + "[" * 3000, "toml"),
}


def cases() -> list[Case]:
    """All of them."""
    found = [set_case(key, value) for key, values in OF_NO_RULE.items() for value in values]
    found += [set_case(key.name, value) for key in KEYS.values() for value in _out_of_range(key)]
    first = {name.partition(".")[0]: name for name in reversed(KEYS)}.values()
    found += [set_case(name, "{}", "table") for name in first] + [_misspelt(name) for name in first]
    found += [text_case(f"job with {name}", text, says) for name, (text, says) in NOT_TOML.items()]
    found += _files() + _sections()
    return found


def _out_of_range(key: Key) -> Iterator[str]:
    """One value beyond each end, and another word; every other one is in the tests of the keys."""
    for rule in key.rules:
        if isinstance(rule, OneOf):
            yield '["word"]' if tuple in key.kinds else '"word"'
        elif isinstance(rule, Bounds):
            yield from ("nan", "-1.0") if float in key.kinds else (HUGE, "-1")
            if rule.le is not None:
                yield repr(rule.le * 2)


def _misspelt(name: str) -> Case:
    """A key with its last letters swapped for others."""
    section, _, key = name.partition(".")
    return Case(
        name=f"misspelt {name}",
        arguments=("plan", "job.toml", "--assume", "2", "--set", f"{section}.{key}x=1"),
        code=5,
        says=(f"{section}.{key}x", "did you mean"),
    )


def _files() -> list[Case]:
    """Files that are no job at all."""
    plan = ("plan", "job.toml", "--assume", "2")
    return [
        Case(name="no job file", arguments=("plan", "none.toml", "--assume", "2"), code=5, says=("none.toml",)),
        Case(name="a folder as job", arguments=("plan", "model", "--assume", "2"), code=5, says=("model", "folder")),
        Case(name="a CSV as job", arguments=("plan", "train.csv", "--assume", "2"), code=5, says=("train.csv", "toml")),
        text_case("an empty job", "", "model"),
        text_case("a job of bytes", bytes(range(256)), "utf-8"),
        text_case("a job in UTF-16", BASE_JOB.encode("utf-16"), "utf-8"),
        Case(
            name="a job that is too large",
            arguments=plan,
            code=5,
            says=("bytes",),
            prepare=lambda place: place.write("job.toml", BASE_JOB + "#" * 20_000_000),
        ),
    ]


def _sections() -> list[Case]:
    """Sections and keys that are somewhere else, or nowhere."""
    return [
        job_case("train.path", "rounds = 1", 'rounds = 1\npath = "model"', "train.path", "[model]"),
        job_case("model.batch_size", 'path = "model"', 'path = "model"\nbatch_size = 3', "model.batch_size", "[train]"),
        job_case("data.rounds", 'train = "train.csv"', 'train = "train.csv"\nrounds = 3', "data.rounds", "[train]"),
        job_case("train.labels", "rounds = 1", 'rounds = 1\nlabels = ["a", "b"]', "train.labels", "[data]"),
        job_case("a key before the sections", "[model]", "seed = 3\n[model]", "seed", "[train]"),
        job_case("train.dtype", "rounds = 1", 'rounds = 1\ndtype = "int8"', "train.dtype"),
        job_case("a batch that fits nowhere", "batch_size = 8", "batch_size = 20000000", "train.batch_size", code=6),
    ]
