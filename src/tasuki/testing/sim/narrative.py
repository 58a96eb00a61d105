"""One run told to people: when, who, what; with the end of a failing run marked, and what befell the job that it is about.

A `Story` listens to a run (`observe` and `trace` of `run.check_plan`) and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from tasuki.testing.sim.cases import CaseFailure
from tasuki.testing.sim.history import AnyLine, FaultEvent, WatchingEvent, kind_of
from tasuki.testing.sim.process import WALL_START_S

LAST_MARKED = 12  # lines of the history before a failure that are marked
SHORT_HASH = 8  # characters of a sha256 or a body's hash that are shown
HASH_MIN = 32  # texts of so many hexadecimal digits are hashes

# Lines of the history, and the beginnings of faults, come by `observe`; timers that find nothing to do are left out.
_TOLD_ELSEWHERE = re.compile(r"^· |^fault (?!.* is over$)| ticks$")
_JOB = re.compile(r"\bjob-\d+\b")
_HASH = re.compile(rf"\b[0-9a-f]{{{HASH_MIN},}}\b")
_SPEAKERS = ("client", "worker_id", "server_id", "name")
_WALL = ("wall", "highest_wall", "not_before", "not_after")  # shown from the start of the world on


class StoryLine(msgspec.Struct, frozen=True):
    """One line of a story."""

    at: float
    who: str
    what: str
    line: int | None
    """Its place in the history, from 0; None: an event that left no line."""

    def text(self, mark: str = " ") -> str:
        return f"{mark} {self.at:9.4f}  {self.who:<12} {self.what}".rstrip()


class Story:
    """`events`: not only what the history has but each delivery, timer and commit, as `--trace` shows."""

    def __init__(self, *, events: bool = False) -> None:
        self.told: list[StoryLine] = []
        self._events = events
        self._lines = 0

    def observe(self, line: AnyLine) -> None:
        number, self._lines = self._lines, self._lines + 1
        if not isinstance(line, WatchingEvent):
            who, what = in_words(line)
            self.told.append(StoryLine(line.at, who, what, number))

    def trace(self, at: float, label: str) -> None:
        """An event of the world."""
        if self._events and not _TOLD_ELSEWHERE.search(label):
            who, _, what = label.partition(" ")
            self.told.append(StoryLine(at, who, what.replace("> ", "to ", 1) if what.startswith("> ") else what, None))

    def lines(self, failure: CaseFailure | None = None) -> Iterator[str]:
        """All of it. Of a failing run the last lines are marked with `>`, the one that broke it with `!`."""
        end = failure.line if failure is not None else None
        for told in self.told:
            before = end - told.line if end is not None and told.line is not None else None
            mark = " " if before is None or not 0 <= before <= LAST_MARKED else "!" if before == 0 else ">"
            yield told.text(mark)
        if failure is not None:
            yield f"! {short(str(failure))}"

    def of_the_job(self, failure: CaseFailure) -> list[str]:
        """What befell the job that the failure names, and what was done to everybody meanwhile; empty: it names none."""
        named = _JOB.search(failure.message)
        if named is None:
            return []
        about = re.compile(rf"\b{named.group()}\b")
        found = [told for told in self.told if told.line is not None and (about.search(told.what) or told.who == "fault")]
        first = next((place for place, told in enumerate(found) if told.who != "fault"), len(found))
        marked = (told.text("!" if told.line == failure.line else " ") for told in found[first:])
        return [f"what befell {named.group()}:", *marked]


def in_words(line: AnyLine) -> tuple[str, str]:
    """(who, what) of a line of the history; who is `store` where it tells of a commit."""
    if isinstance(line, FaultEvent):
        return "fault", f"{line.fault} {line.target}"
    fields = {name: getattr(line, name) for name in line.__struct_fields__ if name != "at"}
    kind = kind_of(type(line).__name__)
    is_commit = "accepted" in fields or "held" in fields or kind in ("granted", "reaped")
    speaker = None if is_commit and kind != "answered" else next((name for name in _SPEAKERS if fields.get(name)), None)
    who = str(fields.pop(speaker)) if speaker is not None else "store"
    words = [kind, *(str(fields.pop(name)) for name in ("what", "job_id") if name in fields)]
    fields.update({name: fields[name] - WALL_START_S for name in _WALL if fields.get(name) is not None})
    words += [f"{name}={_shown(value)}" for name, value in fields.items() if value not in (None, "", (), False, 0)]
    return who, " ".join(words)


def _shown(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value:.3f}" if isinstance(value, float) else str(value)
    return short(text)


def short(text: str) -> str:
    """With hashes cut: nobody compares more of them by eye."""
    return _HASH.sub(lambda found: found.group()[:SHORT_HASH] + "…", text)
