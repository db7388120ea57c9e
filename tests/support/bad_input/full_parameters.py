"""HiFT: groups, orders and states that there are not, and what does not go with training of all parameters."""

from __future__ import annotations

from tests.support.bad_input.case import BASE_JOB, PLAN, Case, job_case

_METHOD = 'rounds = 1\nmethod = "hift"\n'


def cases() -> list[Case]:
    """All of them."""
    return [*_settings(), *_beside()]


def _hift(name: str, keys: str, *says: str, more: str = "") -> Case:
    """A job of HiFT with these keys in its section, and other sections."""
    text = BASE_JOB.replace("rounds = 1\n", _METHOD) + f"[hift]\n{keys}\n{more}"
    return Case(
        name=f"hift: {name}", arguments=PLAN, code=5, says=says, prepare=lambda place: place.write("job.toml", text)
    )


def _settings() -> list[Case]:
    return [
        _hift("groups larger than the model", "group_size = 99", "hift.group_size is 99", "units"),
        _hift("a misspelt order", 'order = "bottom_up"', "hift.order", "bottom2up"),
        _hift("a misspelt unit", 'always_active = ["heads"]', "hift.always_active", "did you mean", "head"),
        _hift("a unit twice", 'always_active = ["head", "head"]', "hift.always_active", "twice"),
        _hift("a misspelt state", 'state = "dsik"', "hift.state", "did you mean", "disk"),
    ]


def _beside() -> list[Case]:
    private = "[privacy]\nprivate_blocks = 1\n"
    operations = '[operations]\npolicy = "two-stage"\ncompute = 0.6\n'
    return [
        _hift("an adapter", "", "adapter.config", "hift", more='[adapter]\nconfig = "lora"\n'),
        _hift("adapters of two kinds", "", "adapter.config", "hift", more='[adapter]\nconfig = "seq_bn|lora"\n'),
        _hift("operations", "", "[operations]", "hift", more=operations),
        _hift("private blocks", "", "privacy.private_blocks", "hift", more=private),
        _hift("unfreezing", "", "unfreeze", "hift", more="[unfreeze]\nevery_steps = 2\n"),
        _hift("frozen weights in 8 bits", "", "runtime.frozen", "hift", more='[runtime]\nfrozen = "int8"\n'),
        job_case("hift: settings of another method", "[train]", "[hift]\ngroup_size = 2\n[train]", "hift", "method"),
        job_case(
            "hift: settings of all",
            "rounds = 1",
            'rounds = 1\nmethod = "all"\n[hift]\ngroup_size = 2',
            "hift",
            "method",
        ),
    ]
