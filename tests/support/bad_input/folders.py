"""Folders and files: a run that did not end, what nobody can write, a run of which half a file is left."""

from __future__ import annotations

from tests.support.bad_input.case import BASE_JOB, Case, Place


def _unfinished(place: Place) -> None:
    place.write("taken", "a file")
    place.write("half/job.toml", BASE_JOB)
    for name in ("plan.json", "profile.json"):
        place.write(f"half/{name}", (place.run / name).read_bytes())


def _cut(name: str) -> Case:
    def prepare(place: Place) -> None:
        for path in place.run.rglob("*"):
            if path.is_file() and "logs" not in path.parts:
                place.write(f"copy/{path.relative_to(place.run)}", path.read_bytes())
        file = place.folder / "copy" / name
        content = file.read_bytes()
        end = content.index(b'"') + 2 if name == "job.toml" else len(content) // 2
        place.write(f"copy/{name}", content[:end])

    command: tuple[str, ...] = ("eval", "copy", "--data", "eval.csv")
    if name.endswith("json"):
        command = ("export", "copy", "--out", "given") if "adapter" in name else ("sim", "copy")
    code = 5 if name == "job.toml" else 7
    return Case(
        name=f"a run with half of {name}", arguments=command, code=code, says=(name.split("/")[-1],), prepare=prepare
    )


def cases() -> list[Case]:
    """All of them."""
    sweep = ("what-if", "{run}", "--sweep", "*.compute=1,2")
    measure = ("measure", "job.toml", "--local", "1")
    halves = ("plan.json", "profile.json", "job.toml", "adapter/adapter.safetensors", "adapter/adapter_config.json")
    return [
        _folder("eval of an unfinished run", "half", 5, "eval", "half", "--data", "eval.csv"),
        _folder("export of an unfinished run", "half", 5, "export", "half", "--out", "given"),
        _folder("train --out is a file", "taken", 9, *_train_to("taken")),
        _folder("train --out below a file", "taken", 9, *_train_to("taken/run")),
        _folder("train --out where nobody writes", "/proc", 9, *_train_to("/proc/run")),
        _folder("train --out of a finished run", "--replace", 2, *_train_to("{run}")),
        _folder("export --out is a file", "taken", 2, "export", "{run}", "--out", "taken"),
        _folder("export --out where nobody writes", "/proc", 9, "export", "{run}", "--out", "/proc/given"),
        _folder("export --out is full", "model", 2, "export", "{run}", "--out", "model"),
        _folder("measure --save where nobody writes", "/proc", 9, *measure, "--save", "/proc/p.json"),
        _folder("measure --save is a folder", "model", 9, *measure, "--save", "model"),
        _folder("sim --out where nobody writes", "/proc", 9, "sim", "{run}", "--out", "/proc/sim"),
        _folder("sim --out is a file", "taken", 9, "sim", "{run}", "--out", "taken"),
        _folder("what-if --csv where nobody writes", "/proc", 9, *sweep, "--csv", "/proc/a.csv"),
        _folder("what-if --csv is a folder", "model", 9, *sweep, "--csv", "model"),
        _folder("what-if --plot where nobody writes", "/proc", 9, *sweep, "--plot", "/proc/a.svg"),
        *(_cut(name) for name in halves),
    ]


def _train_to(folder: str) -> tuple[str, ...]:
    return ("train", "job.toml", "--local", "1", "--out", folder)


def _folder(name: str, says: str, code: int, *arguments: str) -> Case:
    """A command and the folders ``half`` (a run that did not end) and ``taken`` (a file)."""
    return Case(name=name, arguments=arguments, code=code, says=(says,), prepare=_unfinished)
