"""The checker on whole histories: good ones pass with evidence for everything, in whole and in part; damage to them is found."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tasuki.testing.sim.checker import INVARIANTS, Checker
from tasuki.testing.sim.checker_store import ViolationFound
from tasuki.testing.sim.history import (
    AnsweredEvent,
    AnyLine,
    ArrivedEvent,
    BeganEvent,
    DriftedEvent,
    EndedEvent,
    GoneEvent,
    GrantedEvent,
    HealedEvent,
    LedEvent,
    ProcessEvent,
    ReapedEvent,
    RemovedEvent,
    ReportedEvent,
    RowEvent,
    ShownEvent,
    SubmittedEvent,
    TookOverEvent,
    WatchingEvent,
    read,
    write,
)
from tests.sim.generated import Model
from tests.sim.history_lines import HEALED, broken, ended, finished, reaped, row, submitted, told

seeds = st.integers(0, 1 << 32)
EXCUSES = (RemovedEvent, DriftedEvent, ProcessEvent, HealedEvent, EndedEvent)
"""Without them a history says something else, and not merely less."""


@settings(max_examples=60, deadline=None)
@given(seed=seeds)
def test_a_good_history_passes(seed: int) -> None:
    checker = Checker(whole=True).check(Model(seed).history())

    assert not checker.violations, checker.report()


@settings(max_examples=100, deadline=None)
@given(seed=seeds, chance=st.randoms(use_true_random=False))
def test_a_part_of_a_good_history_passes(seed: int, chance: object) -> None:
    """An observer may not see some kinds of lines."""
    lines = Model(seed).history()
    kinds = sorted({type(line) for line in lines} - set(EXCUSES), key=lambda kind: kind.__name__)
    unseen = set(chance.sample(kinds, chance.randint(1, len(kinds))))  # type: ignore[attr-defined]

    checker = Checker().check(line for line in lines if type(line) not in unseen)

    assert not checker.violations, f"without {[kind.__name__ for kind in unseen]}: {checker.report()}"


def test_good_histories_are_evidence_for_everything() -> None:
    checker = Checker(whole=True).check(Model(5).history(steps=300))

    # The model has no delays, no schedules, no nodes, and no pauses.
    assert sorted(set(INVARIANTS) - set(checker.evidence)) == ["I12", "I15", "I18", "I19", "I20", "I21", "I23"]


def test_a_history_is_the_same_when_it_was_written_to_a_file_and_read() -> None:
    lines = Model(1).history()
    file = io.BytesIO()
    write(lines, file)
    file.seek(0)

    assert list(read(file)) == lines


# ---------------------------------------------------------------------------------------------------- damage

Lines = list[AnyLine]
Damage = Callable[[Lines], Lines | None]


def _one(lines: Lines, wanted: Callable[[AnyLine], bool]) -> int | None:
    """The place of the middle one of those that fit."""
    found = [n for n, line in enumerate(lines) if wanted(line)]
    return found[len(found) // 2] if found else None


def changed(kind: type[AnyLine], wanted: Callable[[AnyLine], bool], **fields: object) -> Damage:
    def damage(lines: Lines) -> Lines | None:
        n = _one(lines, lambda line: isinstance(line, kind) and wanted(line))
        return None if n is None else [*lines[:n], replace(lines[n], **fields), *lines[n + 1 :]]

    return damage


def doubled(kind: type[AnyLine], wanted: Callable[[AnyLine], bool]) -> Damage:
    def damage(lines: Lines) -> Lines | None:
        n = _one(lines, lambda line: isinstance(line, kind) and wanted(line))
        return None if n is None else [*lines[: n + 1], *lines[n:]]

    return damage


def answered_too_early(lines: Lines) -> Lines | None:
    for n, line in enumerate(lines):
        if isinstance(line, SubmittedEvent) and line.created:
            m = next(
                m for m, other in enumerate(lines) if isinstance(other, AnsweredEvent) and other.call == f"submit {line.job_id}"
            )
            if lines[m].accepted:  # type: ignore[union-attr]
                return [*lines[:n], lines[m], *lines[n:m], *lines[m + 1 :]]
    return None


def not_gone(lines: Lines) -> Lines | None:
    """An attempt goes on, and the next one begins."""
    for n, line in enumerate(lines):
        if isinstance(line, GoneEvent):
            later = [other for other in lines[n:] if isinstance(other, BeganEvent) and other.job_id == line.job_id]
            elsewhere = bool(later) and later[0].worker_id != line.worker_id
            if elsewhere and any(isinstance(other, GoneEvent) for other in lines[:n]):
                return [*lines[:n], *lines[n + 1 :]]
    return None


def still_there(lines: Lines) -> Lines | None:
    """The last attempt of all never ends."""
    n = max((n for n, line in enumerate(lines) if isinstance(line, GoneEvent)), default=None)
    return None if n is None else [*lines[:n], *lines[n + 1 :]]


def never_answered(lines: Lines) -> Lines | None:
    n = _one(lines, lambda line: isinstance(line, AnsweredEvent))
    return None if n is None else [*lines[:n], *lines[n + 1 :]]


def lost(lines: Lines) -> Lines | None:
    """An acknowledged job is not among the rows of the end."""
    answers = [line for line in lines if isinstance(line, AnsweredEvent) and line.call.startswith("submit")]
    acked = {job_id for line in answers for job_id in line.accepted}
    rows = [n for n, line in enumerate(lines) if isinstance(line, RowEvent) and line.at_end]
    n = next((n for n in rows if len(rows) > 1 and lines[n].job_id in acked), None)  # type: ignore[union-attr]
    return None if n is None else [*lines[:n], *lines[n + 1 :]]


def reaped_too_early(lines: Lines) -> Lines | None:
    over = next((line for line in lines if isinstance(line, ReapedEvent)), None)
    if over is None:
        return None
    lease = (over.job_id, over.attempt)
    n = next(n for n, line in enumerate(lines) if isinstance(line, GrantedEvent) and (line.job_id, line.attempt) == lease)
    return [*lines[:n], replace(lines[n], ttl_s=9e9), *lines[n + 1 :]]


DAMAGES: list[tuple[str, Damage]] = [
    ("I1", answered_too_early),
    ("I1", lost),
    ("I2", doubled(SubmittedEvent, lambda line: line.created)),
    ("I2", changed(SubmittedEvent, lambda line: not line.created, body="other")),
    ("I3", doubled(ReportedEvent, lambda line: line.accepted)),
    ("I4", changed(RowEvent, lambda line: line.at_end, state="PENDING")),
    ("I5", changed(GrantedEvent, lambda line: line.attempt > 1, attempt=99)),
    ("I5", doubled(BeganEvent, lambda line: True)),
    ("I6", changed(ReportedEvent, lambda line: line.accepted, lease_id="stale")),
    ("I7", doubled(TookOverEvent, lambda line: True)),
    ("I8", changed(LedEvent, lambda line: line.epoch > 1, epoch=1)),
    ("I9", not_gone),
    ("I10", still_there),
    ("I11", changed(RowEvent, lambda line: line.state == "PENDING", losses=4)),
    ("I11", changed(RowEvent, lambda line: line.state == "RUNNING", failures=9)),
    ("I12", changed(GrantedEvent, lambda line: True, not_before=9e9)),
    ("I13", changed(RowEvent, lambda line: line.state == "SUCCEEDED", result_sha256="another")),
    ("I13", changed(ArrivedEvent, lambda line: line.state == "SUCCEEDED", result_sha256="another")),
    ("I14", changed(AnsweredEvent, lambda line: line.states == ("CANCELED",), states=("TIMED_OUT",))),
    ("I17", changed(ShownEvent, lambda line: True, worker_id="stranger")),
    ("I17", changed(LedEvent, lambda line: True, server_id="stranger")),
    ("lease", reaped_too_early),
    ("liveness", never_answered),
]


@pytest.mark.parametrize(("invariant", "damage"), DAMAGES)
@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_damage_to_a_good_history_is_found(invariant: str, damage: Damage, seed: int) -> None:
    damaged = damage(Model(seed).history())
    assume(damaged is not None)
    assert damaged is not None

    assert invariant in broken(damaged, whole=True)


# ---------------------------------------------------------------------------------------------------- the checker itself


def test_violations_are_collected_with_their_place() -> None:
    checker = Checker().check(told(submitted(), submitted(), row("PENDING", attempt=0, failures=9)))

    assert [(violation.invariant, violation.line, violation.at) for violation in checker.violations] == [
        ("I2", 1, 1.0),
        ("I11", 2, 2.0),
    ]
    assert "I2: j was created a second time (line 1, at 1)" in checker.report()


def test_the_first_violation_is_raised_where_that_is_asked_for() -> None:
    checker = Checker(raises=True)
    checker.observe(told(submitted())[0])

    with pytest.raises(ViolationFound, match="I2: j was created a second time"):
        checker.observe(submitted())


def test_nothing_is_evidence_for_nothing() -> None:
    assert not Checker().check([]).evidence


WATCHING = WatchingEvent(at=0.0, kinds=("reported", "reaped", "shown"))


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([row("SUCCEEDED", attempt=2)], []),
        ([WATCHING, finished(attempt=2), row("SUCCEEDED", attempt=2)], ["I5"]),
        ([WATCHING, reaped(), finished(attempt=2), row("SUCCEEDED", attempt=2, losses=1)], []),
        ([WATCHING, reaped(attempt=3), finished(), row("SUCCEEDED", losses=1)], ["I5"]),
        ([WATCHING, row("PENDING", attempt=0, losses=1)], ["I11"]),
    ],
)
def test_who_watches_all_ends_of_attempts_can_miss_one(story: Sequence[AnyLine], expected: list[str]) -> None:
    assert broken(told(*story)) == expected


def test_the_bound_on_events_is_the_callers() -> None:
    story = told(HEALED, ended(at=10.0, events=5_000))

    assert broken(story) == []
    assert broken(story, events_per_s_max=400.0) == ["liveness"]
