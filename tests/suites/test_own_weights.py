"""Where no adapter is, the blocks' own weights train, and nothing else of them."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from ringtune.run_control import events as rd
from tests.features.models import own_weights
from tests.support.torch_ring import holder_of, make_carrier, run


def test_own_weights_train_and_nothing_else_does() -> None:
    """What trains has changed, norms and the biases of both ways out have not, and the file names the first only."""
    feature = own_weights("bert", "bert", method="all", num_steps=4)
    plan = feature.plan_on("two")
    carrier = make_carrier(feature.case, plan)
    result = run(plan, carrier, 0)
    assert result.finish == rd.Finish("", "")
    sent = carrier.collected(plan, holder_of(plan, result))
    own = {name: value for name, value in sent.items() if not name.startswith("heads.")}
    base = load_file(feature.case.folder / "model" / "model.safetensors")
    assert len(own) == 4 * 10
    assert all(not torch.equal(value.float(), base[name.removeprefix("bert.")]) for name, value in own.items())
    for executor in carrier.executors.values():
        for index, block in enumerate(executor._hosted.skeleton.blocks):
            for name, value in block.named_parameters():
                if f"bert.encoder.layer.{index}.{name}" not in own:
                    assert torch.equal(value.float(), base[f"encoder.layer.{index}.{name}"])
