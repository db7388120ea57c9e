"""``ringtune export``: write a run's adapter or model as a folder to publish."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ringtune import options


def export(
    folder: options.RunFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; absent or empty.")],
    base_model: Annotated[
        str, typer.Option(metavar="ID", help="Id of the base model, NAME or OWNER/NAME. Default: its folder's name.")
    ] = "",
    merge: Annotated[bool, typer.Option("--merge", help="The same as --format merged.")] = False,
    model: options.ModelFolder = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="adapterhub; peft for LoRA; merged, a whole model with linear or lora in its weights; gguf, such a "
            "model for llama.cpp, or gguf-lora.",
        ),
    ] = "adapterhub",
    user: options.User = "",
    json: options.Json = False,
) -> None:
    """Write the adapter or model of a run as a folder with a model card, checked and without local paths."""
    from coordinator.api.export import MERGED, export_run
    from coordinator.api.model_card import OURS
    from coordinator.screen.progress import WaitNotice
    from ringtune.errors import UsageError
    from ringtune.models.result_files import AUXILIARY_CONFIG_FILE

    merge = merge or form == MERGED
    if model is not None and not merge and not form.startswith("gguf"):
        raise UsageError("--model is the base model to merge into; give --merge too, or leave it out")
    with WaitNotice(f"merging {folder} into its base model" if merge or form == "gguf" else f"writing {out}"):
        done = export_run(folder, out, base_model=base_model, merge=merge, model=model, user=user, form=form)
    as_adapter = f"model.load_adapter({str(out)!r}, use_safetensors=True, set_active=True)"
    if form == "peft":
        as_adapter = f"peft.PeftModel.from_pretrained(model, {str(out)!r}), as its README.md says"
    elif done.library == OURS:
        as_adapter = "adapter.from of a job, as its README.md says"
    if AUXILIARY_CONFIG_FILE in done.sha256:
        as_adapter = f"edge.model.auxiliary.load_auxiliary(model, {str(out)!r})"
    if form.startswith("gguf"):
        as_adapter = "llama.cpp or Ollama, as its README.md says"
    load = _as_model(out) if "config.json" in done.sha256 else as_adapter
    lines = [
        *(f"{digest}  {name}" for name, digest in sorted(done.sha256.items())),
        f"exported to {out}; load it with {load}",
    ]
    options.show({"event": "export", "folder": str(out), "sha256": done.sha256}, lines, as_json=json)


def _as_model(out: Path) -> str:
    import json as json_module

    from coordinator.api.model_card import model_loader

    config = json_module.loads((out / "config.json").read_text(encoding="utf-8"))
    return f"{'.'.join(model_loader(config))}.from_pretrained({str(out)!r})"
