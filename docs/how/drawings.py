"""Draw the pictures of the pages beside this file: ``python -m docs.how.drawings`` writes them as SVG."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ringtune.schedule.course import Course
from ringtune.schedule.methods import RingAda
from ringtune.schedule.run_shape import Owner
from ringtune.schedule.versions import depth

FOLDER: Final = Path(__file__).parent
_FROZEN, _TRAINS, _WIRE, _INK, _BACK = "#dbe4ee", "#f4b183", "#2f6f9f", "#333333", "#b5532a"
_HEAD: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">\n'
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="context-stroke"/></marker></defs>\n'
    '<rect width="{width}" height="{height}" fill="white"/>\n'
)


def drawing(width: int, height: int, parts: Iterable[str]) -> str:
    """Put parts together to an SVG of so many units."""
    return _HEAD.format(width=width, height=height) + "\n".join(parts) + "\n</svg>\n"


def box(x: float, y: float, width: float, height: float, fill: str, text: str = "") -> str:
    """Draw a rectangle with a text in its middle."""
    middle = (
        f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4.5:g}" text-anchor="middle" fill="{_INK}">{text}</text>'
    )
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{_INK}"/>' + (
        middle if text else ""
    )


def words(x: float, y: float, text: str, *, anchor: str = "middle", fill: str = _INK) -> str:
    """Write a text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}">{text}</text>'


def arrow(points: Iterable[tuple[float, float]], color: str) -> str:
    """Draw a line through points with an arrow at its end."""
    line = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2" marker-end="url(#arrow)"/>'


def ring() -> str:
    """Draw three nodes, what they host and own, and what travels in a step of node-0."""
    parts = []
    for index, (blocks, trains) in enumerate((("blocks 0, 1", False), ("blocks 2, 3", True), ("blocks 4, 5", True))):
        x = 40 + 240 * index
        parts += [box(x, 70, 180, 130, "white"), words(x + 90, 62, f"node-{index}")]
        parts.append(box(x + 20, 85, 140, 34, _TRAINS if trains else _FROZEN, blocks))
        parts.append(box(x + 20, 125, 80, 28, _FROZEN, "embedding"))
        parts.append(box(x + 105, 125, 55, 28, _TRAINS if index == 0 else _FROZEN, "head"))
        parts.append(words(x + 90, 178, "rows, labels: stay here"))
    for index in range(2):
        x = 220 + 240 * index
        parts += [arrow([(x, 95), (x + 60, 95)], _WIRE), words(x + 30, 88, "hidden", fill=_WIRE)]
    parts += [arrow([(520, 165), (460, 165)], _BACK), words(490, 182, "gradient", fill=_BACK)]
    parts += [arrow([(610, 200), (610, 235), (100, 235), (100, 200)], _WIRE)]
    parts.append(words(355, 228, "hidden states of the last block, to the head of the initiator", fill=_WIRE))
    parts += [arrow([(130, 200), (130, 265), (640, 265), (640, 200)], _BACK)]
    parts.append(words(385, 258, "its gradient, back to the top block", fill=_BACK))
    parts.append(words(380, 25, "a step of node-0: orange trains now, grey is frozen; no gradient goes below block 2"))
    return drawing(760, 285, parts)


def unfreezing() -> str:
    """Draw which of six blocks train at which step, as the rule of the code says."""
    blocks, every, steps = 6, 20, 140
    parts = [words(340, 20, f"unfreeze.every_steps = {every}: one more block, top-down")]
    course = _course(blocks, every, steps)
    for column in range(steps // every):
        trained = depth(course, column * every)
        x = 90 + 80 * column
        parts.append(words(x + 40, 48, f"{column * every + 1} to {(column + 1) * every}"))
        for block in range(blocks):
            fill = _TRAINS if block >= blocks - trained else _FROZEN
            parts.append(box(x + 2, 90 + 30 * (blocks - 1 - block), 76, 26, fill))
        parts.append(box(x + 2, 60, 76, 26, _TRAINS))
    parts += [words(80, 48, "steps", anchor="end"), words(80, 78, "head", anchor="end")]
    parts += [words(80, 107 + 30 * (blocks - 1 - block), f"block {block}", anchor="end") for block in range(blocks)]
    return drawing(660, 280, parts)


def _course(num_blocks: int, every_steps: int, num_steps: int) -> Course:
    owners = (Owner(node="a", train_rows=num_steps, eval_rows=0),)
    return Course(
        num_blocks=num_blocks,
        owners=owners,
        method=RingAda(every_steps=every_steps),
        num_steps=num_steps,
        local_iterations=every_steps,
        batch_size=1,
        microbatches=1,
        max_length=8,
        hidden_size=8,
    )


def pipelining() -> str:
    """Draw what three hosts do in two steps of three micro-batches; on the lowest one nothing trains."""
    unit, left = 36, 110
    parts = [words(360, 20, "two steps of three micro-batches: the frozen host runs ahead, backward goes first")]
    for host in range(_HOSTS):
        name = f"node-{host}, {'trains' if host else 'frozen'}"
        parts.append(words(left - 6, 62 + 50 * host, name, anchor="end"))
    for host, start, text in _schedule():
        fill = _TRAINS if text[0] == "B" else _FROZEN
        parts.append(box(left + unit * start, 42 + 50 * host, unit, 34, fill, text))
    parts.append(words(left, 205, "F forward, B backward; the number before the point is the step", anchor="start"))
    return drawing(left + unit * (1 + max(start for _, start, _ in _schedule())) + 20, 220, parts)


_HOSTS: Final = 3
_MICROS: Final = 3


def _schedule() -> list[tuple[int, int, str]]:
    """Give each host, time by time, the first of its work that can begin: (host, start, what)."""
    last = _HOSTS - 1
    open_ = [(host, step, micro) for step in range(2) for micro in range(_MICROS) for host in range(_HOSTS)]
    work = [("F", *each) for each in open_] + [("B", *each) for each in open_ if each[0]]
    done: dict[tuple[str, int, int, int], int] = {}
    cells: list[tuple[int, int, str]] = []
    for now in range(60):
        for host in range(_HOSTS):
            ready = [
                piece for piece in work
                if piece[1] == host and piece not in done
                and all(done.get(need, 99) < now for need in _needs(piece, last))
            ]  # fmt: skip
            if ready:
                kind, _, step, micro = piece = min(ready, key=lambda piece: (piece[0] == "F", piece[2], piece[3]))
                done[piece] = now
                cells.append((host, now, f"{kind}{step + 1}.{micro + 1}"))
    return cells


def _needs(piece: tuple[str, int, int, int], last: int) -> list[tuple[str, int, int, int]]:
    """What has to be done before: the host below or above, and where something trains the update of the step before."""
    kind, host, step, micro = piece
    if kind == "F":
        below = [("F", host - 1, step, micro)] if host else []
        updated = [("B", host, step - 1, each) for each in range(_MICROS)] if host and step else []
        return below + updated
    return [("F", host, step, micro)] if host == last else [("B", host + 1, step, micro)]


def recovery() -> str:
    """Draw where copies of the last turn lie, and what is left when a host is lost."""
    parts = [words(330, 20, "every host keeps the end of the last turn, the next host has a copy of it")]
    for index in range(3):
        x, is_lost, before = 30 + 220 * index, index == 1, (index - 1) % 3
        own_color, copy = ("#eeeeee", "#eeeeee") if is_lost else (_TRAINS, _FROZEN)
        parts += [box(x, 50, 160, 110, "white"), words(x + 80, 44, f"node-{index}{' is lost' if is_lost else ''}")]
        parts.append(box(x + 15, 62, 130, 34, own_color, f"its blocks {2 * index}, {2 * index + 1}"))
        parts.append(box(x + 15, 112, 130, 34, copy, f"copy of {2 * before}, {2 * before + 1}"))
    for index in range(2):
        parts.append(arrow([(175 + 220 * index, 79), (265 + 220 * index, 129)], _WIRE))
    parts.append(
        words(330, 190, "blocks 2, 3 come from the copy on node-2; all go back to that turn's end and train on")
    )
    return drawing(660, 205, parts)


DRAWINGS: Final = {"ring": ring, "unfreezing": unfreezing, "pipelining": pipelining, "recovery": recovery}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")
