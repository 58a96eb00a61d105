"""Rare events that happened are counted, those that did not are named, and counting changes nothing."""

from collections import Counter

import pytest

from tasuki.core.election import Election
from tasuki.core.job import State
from tasuki.testing.sim.coverage import EXPECTED, Coverage, cover_seed, missing
from tasuki.testing.sim.faults import DRAWN_KINDS
from tasuki.testing.sim.history import (
    AnyLine,
    CanceledEvent,
    GrantedEvent,
    LeadingEvent,
    LedEvent,
    ProcessEvent,
    ReapedEvent,
    ReportedEvent,
    RequeuedEvent,
    RowEvent,
    SettledEvent,
    ShownEvent,
    SubmittedEvent,
    TookOverEvent,
)
from tasuki.testing.sim.run import check_seed
from tasuki.testing.sim.world import SimOptions

SEEDS = range(1, 16)
MOST = 0.8  # of all that is expected of a run of many seeds
SMALL = SimOptions(jobs=12, chaos_s=6.0, faults=4)

GRANTED = GrantedEvent(
    at=0.0, job_id="j", attempt=1, generation=0, lease_id="l", worker_id="w", incarnation="w-1", wall=0.0, on_disconnect="keep"
)
ORPHANED = ReapedEvent(at=1.0, job_id="j", attempt=1, worker_id="w", state=State.ORPHANED)
RENEWED = ShownEvent(at=2.0, verb="renew", job_id="j", attempt=1, lease_id="l", worker_id="w", incarnation="w-1", held=True)
STARTED = ProcessEvent(at=0.0, name="w", what="started")
CANCEL = CanceledEvent(at=1.0, job_id="j", state=State.RUNNING, requested=True)


def report(verb: str, state: str = "", *, repeated: bool = False) -> ReportedEvent:
    accepted = bool(state)
    return ReportedEvent(
        at=2.0, verb=verb, job_id="j", attempt=1, lease_id="l", worker_id="w", accepted=accepted, state=state, repeated=repeated
    )


def row(state: str, error_code: str = "") -> RowEvent:
    return RowEvent(
        at=3.0,
        job_id="j",
        state=state,
        attempt=1,
        generation=0,
        failures=0,
        losses=0,
        max_retries=0,
        max_losses=0,
        error_code=error_code,
    )


def settled(*, recorded: bool) -> SettledEvent:
    return SettledEvent(at=3.0, worker_id="w", lease_id="l", recorded=recorded)


@pytest.mark.parametrize(
    ("branch", "lines"),
    [
        ("report fenced", [report("finish")]),
        ("report repeated", [report("finish", repeated=True)]),
        (
            "lease lost",
            [ShownEvent(at=0.0, verb="renew", job_id="j", attempt=1, lease_id="l", worker_id="w", incarnation="", held=False)],
        ),
        ("orphan resumed", [GRANTED, ORPHANED, RENEWED]),
        ("orphan finished", [GRANTED, ORPHANED, report("finish", State.SUCCEEDED)]),
        ("orphan granted", [GRANTED, ORPHANED, GRANTED]),
        ("lost for good", [row(State.FAILED, "LOST")]),
        ("failed for good", [row(State.FAILED, "EXIT_CODE")]),
        ("skipped", [row(State.SKIPPED)]),
        ("finish wins", [CANCEL, report("finish", State.SUCCEEDED)]),
        ("cancel wins", [CANCEL, report("fail", State.CANCELED)]),
        ("cancel too late", [row(State.SUCCEEDED), CanceledEvent(at=4.0, job_id="j", state=State.SUCCEEDED)]),
        ("cancel of a waiting job", [CanceledEvent(at=0.0, job_id="j", state=State.CANCELED)]),
        ("requeue refused", [RequeuedEvent(at=0.0, job_id="j", done=False)]),
        ("conflict", [SubmittedEvent(at=0.0, job_id="j", body="b", refused="CONFLICT")]),
        (
            "rerun",
            [
                SubmittedEvent(at=0.0, job_id="j", body="b", created=True),
                SubmittedEvent(at=1.0, job_id="j", body="b", generation=1),
            ],
        ),
        ("epoch refused", [LedEvent(at=0.0, server_id="s", epoch=1, done=False)]),
        ("takeover refused", [TookOverEvent(at=0.0, server_id="s", epoch=1, done=False)]),
        ("another leader", [LeadingEvent(at=0.0, server_id="s", epoch=1), LeadingEvent(at=1.0, server_id="t", epoch=2)]),
        ("the same leader again", [LeadingEvent(at=0.0, server_id="s", epoch=1), LeadingEvent(at=1.0, server_id="s", epoch=2)]),
        ("saved ending recorded", [STARTED, GRANTED, STARTED, settled(recorded=True)]),
        ("saved ending fenced", [STARTED, GRANTED, STARTED, settled(recorded=False)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_branch_is_seen_in_the_history(branch: str, lines: list[AnyLine]) -> None:
    coverage = Coverage()

    for line in lines:
        coverage.observe(line)

    assert coverage.counts[branch] == 1


@pytest.mark.parametrize(
    ("branch", "lines"),
    [
        ("orphan resumed", [GRANTED, RENEWED]),
        ("finish wins", [report("finish", State.SUCCEEDED)]),
        ("saved ending recorded", [STARTED, GRANTED, settled(recorded=True)]),
        ("another leader", [LeadingEvent(at=0.0, server_id="s", epoch=1)]),
        ("skipped", [row(State.SUCCEEDED)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_usual_is_no_rare_branch(branch: str, lines: list[AnyLine]) -> None:
    coverage = Coverage()

    for line in lines:
        coverage.observe(line)

    assert not coverage.counts[branch]


def test_to_look_changes_nothing() -> None:
    outcome, covered = cover_seed(3, SMALL)

    assert outcome.trace_hash == check_seed(3, SMALL).trace_hash
    assert covered["verb lease"] > 0


def test_nothing_is_counted_any_more_when_it_is_over() -> None:
    coverage = Coverage()
    before = vars(Election)["_step_down"]

    with coverage.watching():
        assert vars(Election)["_step_down"] is not before

    assert vars(Election)["_step_down"] is before


def test_what_never_came_is_named() -> None:
    counts = Counter(dict.fromkeys(EXPECTED, 1))
    del counts["orphan finished"]
    counts["fault pause"] = 0

    assert missing(counts) == ["fault pause", "orphan finished"]


def test_every_kind_of_fault_is_expected_to_come() -> None:
    assert {f"fault {kind}" for kind in DRAWN_KINDS} <= set(EXPECTED)


def test_some_seeds_cover_most_of_it() -> None:
    counts: Counter[str] = Counter()

    for seed in SEEDS:
        counts.update(cover_seed(seed)[1])

    assert len(missing(counts)) <= (1 - MOST) * len(EXPECTED), missing(counts)
