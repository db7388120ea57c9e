"""What people do around a run: pages of one that is gone, tokens, models of a hub, and rows that ``init`` reads."""

from __future__ import annotations

from tests.support.bad_input.case import Case, Place, command_case, job_case

GONE = "r20200101-000000-00000000"
INIT = ("init", "--yes", "--data", "rows.csv", "--model", "model", "new.toml")
ROWS: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "nothing": ("", ("rows.csv is empty", "columns")),
    "a header alone": ("text,label\n", ("one line and no rows",)),
    "no text": ("a,b\n1,2\n3,4\n", ("can't tell what is to be learned", "'a' (whole number", "--column text=name")),
    "a quote that stays open": ('text,label\n"foo,x\nbar,y\n', ("line 3", "never closed")),
    "a name twice": ("text,text\nfoo,b\n", ("the same name",)),
    "half a UTF-16": ("text,label\nfoo,a\n".encode("utf-16")[:-1], ("utf-16",)),
    "classes that are all different": ("text,label\nfoo,a\nbar,b\n", ("all different", "causal-lm", "'bert'")),
}


def cases() -> list[Case]:
    """All of them."""
    found = [
        command_case("page gone", 2, "gone is no folder", "--out"),
        command_case("page model", 2, "plan.json", "--out"),
        command_case(f"page {GONE} --coordinator 127.0.0.1:1", 3, "answers"),
        command_case(f"page {GONE} --coordinator {{coordinator}}", 2, "runs"),
        Case(
            name="page with a token that others may read",
            arguments=("page", "{run}", "--web", "0.0.0.0:0", "--web-token", "token"),
            code=2,
            says=("others may read token", "chmod 600"),
            prepare=lambda place: place.write("token", "short").chmod(0o644),
        ),
        Case(
            name="page with a token that is too short",
            arguments=("page", "{run}", "--web", "0.0.0.0:0", "--web-token", "token"),
            code=2,
            says=("token",),
            prepare=lambda place: place.write("token", "short").chmod(0o600),
        ),
        job_case(
            "a model of a hub that is not here",
            'path = "model"',
            'path = "acme/none"',
            "acme/none",
            "hf download acme/none",
            "name a folder",
            code=3,
        ),
        command_case("predict {run} --data eval.csv --max-new-tokens 9999", 2, "--max-new-tokens", "4096"),
        job_case("the best of no evaluations", "rounds = 1", "rounds = 1\nkeep_best = true", "keep_best", "eval_every"),
        job_case("a prompt for classes", "rounds = 1", 'rounds = 1\nsample_prompt = "a"', "sample_prompt", "causal-lm"),
    ]
    return [*found, *(_init(name, *of) for name, of in ROWS.items())]


def _init(name: str, content: str | bytes, says: tuple[str, ...]) -> Case:
    def prepare(place: Place) -> object:
        return place.write("rows.csv", content)

    return Case(name=f"init with {name}", arguments=INIT, code=5, says=says, prepare=prepare)
