"""What blocks keep: policies, layers and parts of VeLoRA, and boards with too little memory."""

from __future__ import annotations

from tests.support.bad_input.case import BASE_JOB, PLAN, TRAIN, Case

VELORA = '[memory]\nactivations = "velora"\n[velora]\n'
FULL = '[adapter]\nconfig = "full"\n'


def cases() -> list[Case]:
    """All of them."""
    return [*_words(), *_velora(), *_of_the_model(), *_memory()]


def _job(name: str, keys: str, *says: str, code: int = 5, arguments: tuple[str, ...] = TRAIN) -> Case:
    """A job with some sections more; by default it is to be trained."""
    return Case(
        name=f"activations: {name}",
        arguments=arguments,
        code=code,
        says=says,
        prepare=lambda place: place.write("job.toml", BASE_JOB + keys + "\n"),
    )


def _words() -> list[Case]:
    known = "none, velora, recompute, both, auto"
    return [
        _job("an unknown policy", '[memory]\nactivations = "recomputed"', "memory.activations", known, "'recompute'"),
        _job("a policy in capitals", '[memory]\nactivations = "AUTO"', "memory.activations = 'AUTO'", known),
        _job("the key in another section", 'activations = "auto"', "train.activations", "[memory]"),
        _job("velora without its policy", "[velora]\nparts = 4", "[velora]", "memory.activations = 'none'", "'auto'"),
        _job("velora beside recompute", '[memory]\nactivations = "recompute"\n[velora]', "[velora]", "remove"),
    ]


def _velora() -> list[Case]:
    return [
        _job("an unknown layer", VELORA + 'layers = ["values"]', "velora.layers", "'values'", "did you mean 'value'?"),
        _job("a layer twice", VELORA + 'layers = ["adapter_down", "adapter_down"]', "velora.layers", "twice"),
        _job("a frozen layer", VELORA + 'layers = ["down"]', "velora.layers", "'down'", "does not train", "seq_bn"),
        _job("an adapter that is not there", FULL + VELORA + 'layers = ["adapter_down"]', "'adapter_down'", "full"),
        _job("a site of no adapter", FULL + VELORA + 'layers = ["adapter_down:key"]', "'adapter_down:key'", "full"),
        _job("a site twice", VELORA + 'layers = ["adapter_down", "adapter_down:up"]', "includes", "keep one of them"),
        _job(
            "sub-tokens twice", VELORA + "parts = 4\nvalues = 8", "velora.parts = 4", "velora.values = 8", "remove one"
        ),
    ]


def _of_the_model() -> list[Case]:
    lora = '[adapter]\nconfig = "lora"\n'
    return [
        _job("a gate that is not there", FULL + VELORA + 'layers = ["gate"]', "'gate'", "this model", arguments=PLAN),
        _job("more parts than values", VELORA + "parts = 33", "velora.parts is 33", "32 values", arguments=PLAN),
        _job("more values than an input", VELORA + "values = 33", "velora.values is 33", "32 values", arguments=PLAN),
        _job(
            "a site without LoRA",
            lora + VELORA + 'layers = ["adapter_down:up"]',
            "'adapter_down:up'",
            "those that train are adapter_down, adapter_down:query, adapter_down:value",
            arguments=PLAN,
        ),
    ]


def _memory() -> list[Case]:
    memory = (*PLAN, "--memory")
    return [
        _job(
            "auto would fit",
            'method = "all"',
            "needs",
            "memory.activations = 'auto' would fit",
            code=6,
            arguments=(*memory, "560KiB"),
        ),
        _job(
            "auto does not fit either",
            '[memory]\nactivations = "auto"',
            "needs",
            "but has 300.0 KiB",
            code=6,
            arguments=(*memory, "300KiB"),
        ),
    ]
