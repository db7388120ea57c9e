"""Export an adapter of a family that is plugged in: with its interface, and the lines that load it."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.export.export import export_run
from tests.support.saved_runs import write_run


def test_export_of_a_plugged_model_says_how_it_loads(tmp_path: Path) -> None:
    """The interface is given away as it is; the card has the lines, with what this family and task need."""
    run = write_run(tmp_path / "run")
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    (run / "adapter/adapter_config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    (run / "adapter/adapter_interface.json").write_text('{"interface": {}}')
    digests = export_run(run, tmp_path / "out", base_model="acme/tiny")
    assert (tmp_path / "out/adapter_interface.json").read_text() == '{"interface": {}}'
    assert "adapter_interface.json" in digests
    card = (tmp_path / "out/README.md").read_text()
    load = "model = AutoModelForSequenceClassification.from_pretrained"
    assert (
        f'{load}("acme/tiny", num_labels=2, attn_implementation="eager")\nadapters.init(model, interface=inter' in card
    )
    assert 'interface = adapters.AdapterModelInterface(**json.load(file)["interface"])' in card
    assert (
        "The head reads the last token of a text, whatever that token is. transformers finds it by the padding" in card
    )


def test_card_says_how_transformers_4_loads_a_base_model_of_5(tmp_path: Path) -> None:
    """It would take the default base of rotary positions without a word."""
    run, base = write_run(tmp_path / "run"), tmp_path / "base"
    job = (run / "job.toml").read_text()
    (run / "job.toml").write_text(job.replace("/srv/carol/models/tiny", str(base)))
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}))
    export_run(run, tmp_path / "out", base_model="acme/tiny")
    assert "Load the base model with `rope_theta=500000.0` there." in (tmp_path / "out/README.md").read_text()
