"""Draws the life of a job into docs/concepts.md from the one table that decides it, `tasuki.core.lifecycle.TRANSITIONS`.

    python scripts/draw_states.py            write the drawing between the markers
    python scripts/draw_states.py --check    exit 1 if the drawing there is not the table's

Reads and writes that one file, nothing else.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from tasuki.core.job import TERMINAL, State
from tasuki.core.lifecycle import TRANSITIONS, JobEvent

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "concepts.md"
BEGIN = "<!-- states: drawn by scripts/draw_states.py, do not edit by hand -->"
END = "<!-- states end -->"


def drawing() -> str:
    """The diagram, and below it the same as a table for those whose viewer draws no diagrams."""
    return f"```mermaid\n{_diagram()}\n```\n\n{_table()}"


def _diagram() -> str:
    """One arrow for each pair of states, with all the events that lead from the one to the other."""
    arrows: dict[tuple[State, State], list[JobEvent]] = defaultdict(list)
    for (state, event), target in TRANSITIONS.items():
        arrows[state, target].append(event)
    lines = ["stateDiagram-v2", "    [*] --> PENDING: submit"]
    for state, target in sorted(arrows, key=_place):
        lines.append(f"    {state} --> {target}: {', '.join(arrows[state, target])}")
    lines += [f"    {state} --> [*]" for state in State if state in TERMINAL]
    return "\n".join(lines)


def _place(arrow: tuple[State, State]) -> tuple[int, int]:
    order = list(State)
    return order.index(arrow[0]), order.index(arrow[1])


def _table() -> str:
    lines = ["| event | from | to |", "| --- | --- | --- |"]
    for event in JobEvent:
        sources: dict[State, list[str]] = defaultdict(list)
        for (state, happening), target in TRANSITIONS.items():
            if happening is event:
                sources[target].append(state)
        lines += [f"| {event} | {', '.join(names)} | {target} |" for target, names in sources.items()]
    return "\n".join(lines)


def with_drawing(text: str) -> str:
    """The document with the present drawing between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT} has no line {BEGIN!r} followed by {END!r}")
    return f"{before}{BEGIN}\n\n{drawing()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    present = DOCUMENT.read_text(encoding="utf-8")
    wanted = with_drawing(present)
    if arguments == ["--check"]:
        return int(present != wanted)
    DOCUMENT.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
