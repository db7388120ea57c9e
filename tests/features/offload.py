"""Helpers that fit adapters for the hosts of blocks, and users with adapters of their own."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ringtune.config.sections import learning_rate
from ringtune.schedule.course import ALONE, COLLABORATION, FrozenWeights, HelperSettings, Offload
from ringtune.schedule.operation_tables import Choice, Score
from ringtune.schedule.placement import Helper
from ringtune.schedule.plan import Plan
from ringtune.schedule.run_shape import Owner, UserRows
from ringtune.schedule.saved_activations import merged
from ringtune.schedule.turns import StartPoint
from ringtune.schedule.units import Range
from ringtune.techniques.offload import helped
from tests.features.feature import FOUR, ONE, TWO, Feature, Run, Tensors, Wanted, inputs, on_one_node, plan_of
from tests.features.memory import NATIVE, NATIVELY, SGD, in_bfloat16
from tests.features.models import FUSED, LINEAR_MLP, LORA_LINEAR, of_family
from tests.features.operations import CHOICES, StaleWithMasks, random_table, with_idle
from tests.support import reference, users_reference
from tests.support.choosing import make_choice
from tests.support.moves import Slices
from tests.support.plans import changed, train_items
from tests.support.torch_ring import Case, TorchCarrier

THREE: Slices = (("a", 0, 2), ("b", 2, 3), ("c", 3, 4))


def helper(node: str, start: int, stop: int) -> Helper:
    """A helper of the blocks [start, stop)."""
    return Helper(node=node, start=start, stop=stop)


SLICES: dict[str, Slices] = {
    "one-idle-helper": ONE,
    "two-idle-helpers": ONE,
    "a-host-helps": TWO,
    "hosts-help-each-other": TWO,
    "some-of-several-hosts": THREE,
}
HELPERS: dict[str, tuple[Helper, ...]] = {
    "one-idle-helper": (helper("z", 0, 4),),
    "two-idle-helpers": (helper("z", 0, 1), helper("y", 1, 4)),
    "a-host-helps": (helper("a", 0, 1),),
    "hosts-help-each-other": (helper("a", 0, 1), helper("b", 2, 4)),
    "some-of-several-hosts": (helper("z", 0, 1), helper("a", 2, 3), helper("z", 3, 4)),
}


def helped_plan(case: Case, slices: Slices, way: str, **settings: Any) -> Plan:
    """The plan of a case with helpers; ``settings`` are those that change its result."""
    helpers = HELPERS[way]
    blocks = merged(Range(one.start, one.stop) for one in helpers)
    offload = Offload(blocks=blocks, **settings) if settings else None
    return changed(plan_of(case, slices), helpers=helpers, offload=offload)


def keep_on_disk(carrier: TorchCarrier, folder: Path, start: StartPoint | None) -> None:
    """Hosts keep the adapters of merged matrices in a file of each node."""
    for node, executor in carrier.executors.items():
        executor.offloading.keep_on_disk(folder / node, {"node": node})


def with_helpers(name: str, way: str, settings: Any = (), **arguments: Any) -> Feature:
    """A run with helpers in one way; more of the feature may be given."""
    plan = functools.partial(helped_plan, way=way, **dict(settings))
    return Feature(**{"name": f"helpers{name}", "splits": {way: SLICES[way]}, "plan": plan, **arguments})


# ---- what plain loops train ---------------------------------------------------------------------------


def _update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _adapters(model: Any, blocks: Collection[int]) -> list[torch.nn.Parameter]:
    values = (value for index, block in model.iter_layers() if index in blocks for value in block.parameters())
    return [value for value in values if value.requires_grad]


def _helped_blocks(plan: Plan) -> set[int]:
    return {index for one in plan.placement.helpers for index in range(one.start, one.stop)}


def accumulated(case: Case, run: Run) -> Wanted:
    """A plain loop: gradients of helped blocks' adapters are summed over an interval, all else steps every time."""
    assert run.plan.course.offload is not None
    job, datasets, plan, interval = case.job, case.datasets(), run.plan, run.plan.course.offload.interval
    model = reference.whole_model(job, plan, case.folder / "model")
    at = reference.seed_units(model, job)
    adapters = _adapters(model, _helped_blocks(plan))
    ids = {id(parameter) for parameter in adapters}
    others = [value for value in model.parameters() if value.requires_grad and id(value) not in ids]
    rare, often = reference.plain_optimizer(job, adapters), reference.plain_optimizer(job, others)
    every = train_items(plan)
    num_updates = math.ceil(len(every) / interval)
    model.eval()
    for module in (model.heads[model.active_head], *(block for _, block in model.iter_layers())):
        module.train()
    for item in every:
        reference.backward(model, job, plan, item, datasets[item.owner], at)
        _update(often, learning_rate(job.train, item.step, len(every)))
        if (item.step + 1) % interval == 0 or item is every[-1]:
            _update(rare, learning_rate(job.train, item.step // interval, num_updates))
    return Wanted(tensors=reference.adapter_of(model) | reference.Trained(model=model).head())


def lagging(case: Case, run: Run) -> Wanted:
    """A plain loop: helped blocks compute with the adapters of the step before, and within a turn only.

    Gradients of linear adapters do not depend on the adapters themselves, so the newest ones take them as they are.
    """
    job, datasets, plan = case.job, case.datasets(), run.plan
    model = reference.whole_model(job, plan, case.folder / "model")
    at = reference.seed_units(model, job)
    optimizer = reference.plain_optimizer(job, [value for value in model.parameters() if value.requires_grad])
    behind = _adapters(model, _helped_blocks(plan))
    before = [parameter.detach().clone() for parameter in behind]
    for item in train_items(plan):
        newest = [parameter.detach().clone() for parameter in behind]
        if item.step % plan.course.local_iterations:
            _put(behind, before)
        reference.backward(model, job, plan, item, datasets[item.owner], at)
        _put(behind, newest)
        before = newest
        _update(optimizer, learning_rate(job.train, item.step, plan.course.num_steps))
    return Wanted(tensors=reference.adapter_of(model) | reference.Trained(model=model).head())


class LaggingWithMasks(StaleWithMasks):
    """The same rule with an operation table; versions of blocks are kept in a list."""

    def seen(self, block: int, first_step: int, k: int) -> Tensors:
        """One update of the turn less, where a helper trains the block."""
        return self.past[block][first_step + max(0, k - (block in _helped_blocks(self.plan)))]


def lagging_with_masks(case: Case, run: Run) -> Wanted:
    """Linear adapters of helped blocks in one process, one step behind, with what the table leaves out masked."""
    done = LaggingWithMasks(case.job, run.plan, case.folder / "model", case.datasets()).train()
    return Wanted(tensors=done.tensors(), losses=done.losses)


def _put(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


# ---- helpers ------------------------------------------------------------------------------------------

FITTED = [
    "seq_bn",
    "double_seq_bn",
    "seq_bn[reduction_factor=4,scaling=3.0]",
    "lora[r=4,alpha=16]",
    "lora[r=4,alpha=2,selfattn_lora=False,intermediate_lora=True,output_lora=True]",
    "linear",
    "mlp[hidden=8]",
]
MERGED = [
    "lora[r=4,alpha=16]",
    "linear[alpha=2.0]",
    "lora[r=4,attn_matrices=['q']]|linear[alpha=2.0,attn_matrices=['v']]",
]


def _mixture(model_type: str, task: str, config: str, **settings: Any) -> Feature:
    """Adapters of several kinds, in a model of a family."""
    arguments = of_family("", model_type, task, adapter=config, method="all")
    name = f"-adapter/mixture-{model_type}-{config}-{settings}"
    given = {key: arguments[key] for key in ("folder", "changes")}
    return with_helpers(name, "some-of-several-hosts", settings, **given)


def _with_choice(name: str, choice: Choice) -> Feature:
    """Hosts score their blocks, of which helpers train some; the table is that of a run without helpers."""
    feature = CHOICES[0]
    way = "some-of-several-hosts"
    return dataclasses.replace(
        feature,
        name=f"helpers-choice/{name}",
        changes=feature.changes | {"adapter": "lora"},
        splits={way: SLICES[way]},
        plan=lambda case, slices: changed(helped_plan(case, slices, way), choice=choice),
        reference=lambda case, run: on_one_node(case, dataclasses.replace(run, plan=changed(run.plan, helpers=()))),
    )


WHOLE_BLOCKS = {
    "two-stage": make_choice(subnets=1, refresh_steps=2, backward_score=Score.TAYLOR.value),
    "random": make_choice("random", subnets=1, refresh_steps=2),
}
EXACT_HELPERS = [
    *(
        with_helpers(f"-way/{way}-{microbatches}", way, changes={"microbatches": microbatches})
        for way in SLICES
        for microbatches in (1, 4)
    ),
    *(
        with_helpers(
            f"-adapter/{adapter}-{dropout}",
            "some-of-several-hosts",
            changes={"adapter": adapter, "dropout": dropout, "method": "all"},
        )
        for adapter in FITTED
        for dropout in (0.0, 0.1)
    ),
    _mixture("bert", "sequence-classification", LINEAR_MLP),
    _mixture("gpt2", "causal-lm", FUSED),
    _mixture("gpt2", "causal-lm", LORA_LINEAR),
    *(_with_choice(name, choice) for name, choice in WHOLE_BLOCKS.items()),
]
MERGED_HELPERS = [
    *(
        with_helpers(
            f"-adapter/merged-{adapter}",
            "some-of-several-hosts",
            {"merged": True},
            changes={"adapter": adapter, "method": "all"},
            prepare=keep_on_disk,
        )
        for adapter in MERGED
    ),
    _mixture("bert", "sequence-classification", LORA_LINEAR, merged=True),
    _mixture("gpt2", "causal-lm", LORA_LINEAR, merged=True),
]
INTERVALS = [
    with_helpers(
        f"-interval/{steps}-{interval}-{optimizer}",
        "two-idle-helpers",
        {"interval": interval},
        changes={"method": "all", "num_steps": steps, "optimizer": optimizer, "dropout": 0.1, "checkpoint_every": 6},
        splits={"two-idle-helpers": TWO},
        reference=accumulated,
    )
    for steps, interval in ((8, 4), (10, 4), (3, 5))
    for optimizer in ("adamw", "sgd")
]
OVERLAP = [
    with_helpers(
        f"-overlap/{way}",
        way,
        {"overlap": True},
        changes={
            "method": "all",
            "adapter": "linear[alpha=2.0]",
            "local_iterations": 4,
            "num_steps": 6,
            "checkpoint_every": 4,
        },
        reference=lagging,
    )
    for way in ("some-of-several-hosts", "one-idle-helper")
]
OVERLAP += [
    with_helpers(
        "-overlap/table",
        "some-of-several-hosts",
        {"overlap": True},
        changes={
            "method": "all",
            "adapter": "linear[alpha=2.0]",
            "local_iterations": 4,
            "num_steps": 8,
            "microbatches": 4,
            "checkpoint_every": 4,
            "owners": ("a", "b"),
            "operations": with_idle(random_table(3, ("a", "b"), "12233")),
        },
        reference=lagging_with_masks,
    )
]

OVERLAP_AND_INTERVAL = [
    with_helpers(
        f"-overlap-and-interval/{adapter}",
        "hosts-help-each-other",
        {"overlap": True, "interval": 3},
        changes={"method": "all", "adapter": adapter, "num_steps": 12, "local_iterations": 4, "checkpoint_every": 8},
    )
    for adapter in ("seq_bn", "lora[r=4]")
]
INVERTIBLE_HELPERS = [
    with_helpers(
        f"-invertible/{model_type}-{way}",
        way,
        folder=functools.partial(inputs, model_type, task),
        changes={"adapter": "seq_bn_inv", "num_steps": 6, "local_iterations": 1, "checkpoint_every": 4, "task": task},
    )
    for model_type, task in (("bert", "sequence-classification"), ("gpt2", "causal-lm"))
    for way in ("one-idle-helper", "some-of-several-hosts")
]
HELPED = [*EXACT_HELPERS, *INVERTIBLE_HELPERS, *MERGED_HELPERS, *INTERVALS, *OVERLAP]

# ---- users --------------------------------------------------------------------------------------------

HELPER_OF = {"a": "z", "b": "a", "c": "z"}
LORA_AND_LINEAR = "lora[r=4,alpha=4,attn_matrices=['q']]|linear[attn_matrices=['v']]"
LORA, MLP, LINEAR = "lora[r=4,alpha=16]", "mlp[hidden=8,alpha=2.0]", "linear[alpha=0.5]"
MIXTURE = "lora[r=2,attn_matrices=['k']]|linear[attn_matrices=['q']]|mlp[hidden=8,attn_matrices=['v'],alpha=2.0]"


def plan_of_users(case: Case, slices: Slices, **manner: Any) -> Plan:
    """The plan with two users at the first owner, whose batches mix them, and helpers for every block."""
    plan = plan_of(case, slices)
    first, second = plan.course.owners
    users = (
        UserRows(name="anna", train_rows=first.train_rows // 3, eval_rows=first.eval_rows),
        UserRows(name="ben", train_rows=first.train_rows - first.train_rows // 3),
    )
    mixed = Owner(node="a", train_rows=first.train_rows, eval_rows=first.eval_rows, users=users)
    course = dataclasses.replace(plan.course, owners=(mixed, second))
    return helped(Plan(course, plan.placements), HELPER_OF, HelperSettings(**manner))


def sets_at_hosts(carrier: TorchCarrier) -> Tensors:
    """All users' adapters, as the hosts of the blocks have them."""
    found: Tensors = {}
    for executor in carrier.executors.values():
        found |= executor.offloading.installed
    return found


def sets_at_helpers(carrier: TorchCarrier) -> Tensors:
    """All users' adapters, as the helpers have them."""
    return {
        name: value.detach()
        for executor in carrier.executors.values()
        for models in executor._hosted.parts.helped
        for name, value in models.parameters(models.units.start, models.units.stop).items()
    }


def head_of(carrier: TorchCarrier, holder: str) -> Tensors:
    """The head of the owner that had it last."""
    owner = carrier.executors[holder]._hosted.owner
    assert owner is not None
    return {f"heads.{reference.NAME}.{name}": value for name, value in owner.head.named_parameters()}


def sets_and_head(carrier: TorchCarrier, plan: Plan, holder: str) -> Tensors:
    """The sets of all users and the head; hosts and helpers have the very bits of one another."""
    at_hosts, at_helpers = sets_at_hosts(carrier), sets_at_helpers(carrier)
    assert at_hosts.keys() == at_helpers.keys()
    assert all(torch.equal(at_hosts[name], value) for name, value in at_helpers.items())
    return at_helpers | (head_of(carrier, holder) if plan.course.labels else {})


def sets_of_collaboration(carrier: TorchCarrier, plan: Plan, holder: str) -> Tensors:
    """The sets of all users; hosts have nothing but the sum of their changes."""
    assert not any(user in name for name in sets_at_hosts(carrier) for user in ("anna", "ben"))
    return sets_at_helpers(carrier)


def copies_of_layers(case: Case, run: Run) -> Wanted:
    """Copies of every layer, one for each user; whoever has no row in an interval is not updated by it."""
    offload = run.plan.course.offload
    assert offload is not None
    sets, head = users_reference.alone(case, run.plan, interval=offload.interval)
    return Wanted(tensors=sets | head)


def matrix_of_the_sum(case: Case, run: Run) -> Wanted:
    """One matrix with the sum of all users' changes; a user's own change gets the gradient of own rows."""
    return Wanted(tensors=users_reference.together(case, run.plan))


def users(name: str, manner: dict[str, Any], adapters: dict[str, str], **more: Any) -> Feature:
    """Two owners and three users, some of whom may have an adapter of another kind."""
    is_alone = manner["users"] == ALONE
    lines = ""
    if adapters:
        chosen = ", ".join(f'{user} = "{config}"' for user, config in adapters.items())
        words = f'mode = "auto"\nusers = "{manner["users"]}"\nmerged = {str(not is_alone).lower()}\n'
        lines = f"{words}adapters = {{ {chosen} }}"
    arguments: dict[str, Any] = {key: more.pop(key) for key in ("folder", "reference") if key in more}
    values = {"method": "all", "adapter": LORA, "offload": lines, **more}
    return Feature(
        **{
            "name": f"users{name}",
            "changes": values,
            "splits": {"three": THREE},
            "plan": functools.partial(plan_of_users, **manner),
            "tensors": sets_and_head if is_alone else sets_of_collaboration,
            "reference": copies_of_layers if is_alone else matrix_of_the_sum,
            "prepare": keep_on_disk,
            **arguments,
        }
    )


ON_THEIR_OWN: dict[str, Any] = {"users": ALONE}
TOGETHER: dict[str, Any] = {"users": COLLABORATION, "merged": True}
OF_OTHER_KINDS = {"ben": MIXTURE, "c": "seq_bn"}
OTHER_FAMILIES = ("gpt2", "llama", "distilbert", "vit")


def users_of_family(name: str, model_type: str, adapters: dict[str, str], adapter: str) -> Feature:
    """Where query, key and value are one matrix, where the head is a frozen decoder, and where there are images."""
    arguments = of_family("", model_type, "sequence-classification" if model_type == "distilbert" else "")
    values = {**arguments["changes"], "adapter": adapter, "num_steps": 6}
    return users(name, ON_THEIR_OWN, adapters, folder=arguments["folder"], **values)


USERS = [
    *(
        users(f"-alone/{adapter}-{dropout}", ON_THEIR_OWN, {}, adapter=adapter, dropout=dropout)
        for adapter in ("seq_bn", LORA_AND_LINEAR, MLP)
        for dropout in (0.0, 0.1)
    ),
    *(users(f"-alone/interval-{n}", ON_THEIR_OWN | {"interval": n}, {}, dropout=0.1, num_steps=6) for n in (3, 4)),
    *(
        users(f"-alone/other-kinds-{at}-{dropout}", ON_THEIR_OWN, adapters, dropout=dropout)
        for at, adapters in enumerate((OF_OTHER_KINDS, {"anna": LINEAR, "ben": LINEAR, "c": "lora[r=8]"}))
        for dropout in (0.0, 0.1)
    ),
    users("-alone/other-kinds-interval", ON_THEIR_OWN | {"interval": 3}, {"ben": LINEAR}, dropout=0.1),
    *(
        users(f"-together/{adapter}", TOGETHER, {}, adapter=adapter)
        for adapter in ("linear", LORA, "lora[r=8,alpha=16]", LORA_AND_LINEAR)
    ),
    *(
        users(f"-together/other-kinds-{at}", TOGETHER, adapters)
        for at, adapters in enumerate(
            ({"ben": LORA_AND_LINEAR}, {"anna": LINEAR, "ben": "lora[r=2]", "c": LINEAR}, {"ben": LINEAR})
        )
    ),
    *(users_of_family(f"-alone/{name}", name, {}, "lora[r=4,intermediate_lora=True]") for name in OTHER_FAMILIES),
    *(
        users_of_family(
            f"-alone/{name}-of-other-kinds", name, {"anna": "linear[intermediate_lora=True]", "c": MLP}, LORA
        )
        for name in ("gpt2", "llama")
    ),
]
"""What plain loops with a set for each user train."""
USERS_WITHOUT_BLOCKS = [
    users("-left-out/alone", ON_THEIR_OWN, {"ben": "seq_bn[leave_out=[1]]"}, adapter="lora[r=4,leave_out=[1,2]]"),
    users("-left-out/together", TOGETHER, {}, adapter="linear[leave_out=[2]]"),
]
"""Users whose adapters are in some blocks only."""
USERS_IN_ANY_TIMING = [
    users("-timing/overlap", ON_THEIR_OWN | {"overlap": True}, {}, local_iterations=4),
    users(
        "-timing/rounded", ON_THEIR_OWN | {"interval": 3, "pairs": "bfloat16"}, {}, method="ringada", dtype="float32"
    ),
    users(
        "-timing/velora",
        ON_THEIR_OWN | {"pairs": "velora", "overlap": True},
        {"ben": MLP},
        microbatches=4,
        dropout=0.1,
        eval_every=2,
    ),
    users(
        "-timing/velora-wide",
        ON_THEIR_OWN | {"pairs": "velora", "projected": "wide", "overlap": True},
        {},
        adapter="lora[r=4,output_lora=True]",
        microbatches=4,
    ),
    users("-timing/together-overlap", TOGETHER | {"overlap": True}, {}, local_iterations=4),
    users(
        "-timing/together-frozen",
        TOGETHER | {"interval": 3, "pairs": "bfloat16"},
        {"ben": LINEAR},
        method="ringada",
        frozen=FrozenWeights(dtype="bfloat16"),
        dtype="float32",
    ),
]
"""Hosts that do not wait, pairs that are rounded or projected: no plain loop is written for them."""


def helped_anyhow(case: Case, slices: Slices) -> Plan:
    """The plan on the slices of a way, with its helpers; on others without."""
    way = next((name for name in FIXED_WAYS if SLICES[name] == slices), "")
    return helped_plan(case, slices, way) if way else plan_of(case, slices)


FIXED_WAYS = ("one-idle-helper", "a-host-helps", "some-of-several-hosts")
COMPUTE_HELPERS = [
    Feature(
        name=f"compute-helpers/{adapter}",
        changes={**SGD, "compute": "bfloat16", "adapter": adapter, "frozen": frozen},
        splits={"four": FOUR, **{way: SLICES[way] for way in FIXED_WAYS}},
        plan=helped_anyhow,
        bound=NATIVE,
    )
    for adapter, frozen in (("seq_bn", None), ("lora[r=4]", NATIVELY), ("linear", NATIVELY), ("mlp[hidden=8]", None))
]
COMPUTE_HELPERS += in_bfloat16("helpers", [*MERGED_HELPERS[::2], *INTERVALS[::3], *OVERLAP[::2], *USERS[::5]])
COMPUTE_IN_ANY_TIMING = in_bfloat16("helpers", USERS_IN_ANY_TIMING[2:4])
WITH_HELPERS = [*HELPED, *OVERLAP_AND_INTERVAL, *USERS, *USERS_IN_ANY_TIMING]
