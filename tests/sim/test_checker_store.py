"""Verdicts on the store's commits: for each invariant a history that keeps it, and the smallest that break it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import AnyLine, DefinitionEvent, DriftedEvent, DueEvent, FiredEvent, PausedEvent
from tests.sim.history_lines import (
    HEALED,
    UNSTAMPED,
    WALL,
    asked,
    began,
    broken,
    canceled,
    ended,
    failed,
    finished,
    gone,
    granted,
    leading,
    led,
    process,
    promised,
    reaped,
    removed,
    repeated,
    requeued,
    row,
    shown,
    submitted,
    told,
    took_over,
)

Story = Sequence[AnyLine]
ONCE: Story = (submitted(), granted(), finished(), row("SUCCEEDED"))
ALL_STATES: Story = (failed("k1"), reaped("k2"), shown("start", "k3"), canceled("k4"))
"""From here on an observer that tells rows as well has told every state there was."""
STORE_DRIFTED = DriftedEvent(at=UNSTAMPED, name="store")


def defined(policy: str = "forbid", **given: bool | int) -> DefinitionEvent:
    return DefinitionEvent(at=UNSTAMPED, definition="nightly", policy=policy, **given)


def due(nominal: float) -> DueEvent:
    return DueEvent(at=UNSTAMPED, definition="nightly", nominal=nominal)


def fired(nominal: float, job_id: str) -> FiredEvent:
    return FiredEvent(at=UNSTAMPED, definition="nightly", nominal=nominal, job_id=job_id)


TWO: Story = (fired(10, "n-10"), fired(20, "n-20"), row("RUNNING", "n-10"), began("n-10"))

GOOD: dict[str, list[Story]] = {
    "I2": [
        (submitted(), repeated(), repeated(body="other", refused="CONFLICT")),
        (submitted(), removed(), submitted(body="other")),
        (repeated(refused="BLOB_MISSING"), submitted()),
        (submitted(), row("PENDING", attempt=0, body="body")),
    ],
    "I3": [
        (*ONCE, finished(accepted=False, repeated=True)),
        (submitted(), granted(), failed(), granted(attempt=2), finished(attempt=2)),
        (*ONCE, removed(), submitted(), granted(lease_id="new"), finished(lease_id="new")),
    ],
    "I4": [
        (*ONCE, row("SUCCEEDED", at_end=True)),
        (*ONCE, requeued(), row("PENDING", generation=1), granted(attempt=2, generation=1)),
        (submitted(), granted(), failed(state="FAILED"), row("FAILED", failures=1), repeated(generation=1)),
        (*ONCE, removed()),
    ],
    "I5": [
        ONCE,
        (submitted(), granted(), reaped(), granted(attempt=2, worker="w2"), row("ASSIGNED", attempt=2, losses=1)),
        (submitted(), granted(), shown("release"), row("PENDING"), granted(attempt=2)),
        (submitted(), granted(), reaped(state="ORPHANED"), row("ORPHANED", losses=1), granted(attempt=2)),
        (submitted(), granted(), reaped(state="ORPHANED"), shown("renew"), row("RUNNING", losses=1)),
    ],
    "I6": [
        ONCE,
        (submitted(), granted(), reaped(), finished(accepted=False)),
        (submitted(), granted(), reaped(state="ORPHANED"), finished(), row("SUCCEEDED", losses=1)),
        (submitted(), granted(), began(), finished(), gone()),
    ],
    "I7": [
        (took_over("s1", 1), took_over("s2", 2), took_over("s1", 2, done=False), took_over("s1", 5)),
        (took_over("s1", 1), leading("s1", 1), leading("s1", 0), took_over("s2", 2), leading("s2", 2)),
    ],
    "I8": [
        (took_over("s1", 1), led("s1", 1), took_over("s2", 2), led("s1", 1, done=False), led("s2", 2)),
        (row("PENDING", leader_epoch=1), row("PENDING", leader_epoch=1), row("PENDING", leader_epoch=3)),
    ],
    "I11": [
        (submitted(), granted(), failed(), row("PENDING", failures=1), granted(attempt=2)),
        (row("FAILED", failures=4, attempt=4),),
        (row("FAILED", losses=4, attempt=4, error_code="LOST"),),
        (submitted(), granted(), failed(state="FAILED"), row("FAILED", failures=1), requeued(), row("PENDING", generation=1)),
        (submitted(), granted(), failed(state="CANCELED"), row("CANCELED")),
    ],
    "I12": [
        (granted(not_before=WALL),),
        (granted(not_before=WALL + 5, highest_wall=WALL + 6),),
        (granted("k", wall=WALL + 9), granted(not_before=WALL + 5)),
        (granted(not_after=WALL),),
    ],
    "I13": [ONCE],
    "I14": [
        (
            submitted(),
            granted(),
            canceled(state="ASSIGNED", requested=True),
            finished(),
            row("SUCCEEDED"),
            canceled(state="SUCCEEDED"),
        ),
        (submitted(), granted(), canceled(state="ASSIGNED", requested=True), failed(state="CANCELED"), row("CANCELED")),
        (submitted(), canceled(), row("CANCELED", attempt=0), canceled()),
    ],
    "I15": [
        (due(10), fired(10, "n-10"), due(20), fired(20, "n-20"), HEALED, ended()),
        (due(10),),
        (defined(every_s=10), fired(10, "n-10"), defined(every_s=4), fired(12, "n-12"), defined(enabled=False)),
        (fired(10, "n-10"), row("SUCCEEDED", "n-10"), removed("n-10"), fired(10, "n-10")),
    ],
    "I16": [
        (asked("submit"), submitted(), canceled(), row("CANCELED", attempt=0), asked("requeue"), requeued()),
        (asked("rerun"), submitted(), canceled(), asked("rerun", call="again"), repeated(generation=1)),
    ],
    "I17": [
        (submitted(), granted(), shown("start"), shown("renew"), shown("renew", worker="w2", held=False), finished()),
        (took_over("s1", 1), led("s1", 1)),
    ],
    "I18": [
        (defined(), *TWO, gone("n-10"), row("SUCCEEDED", "n-10"), row("RUNNING", "n-20"), began("n-20")),
        (defined("allow"), *TWO, row("RUNNING", "n-20"), began("n-20")),
        (defined(), *TWO, defined("allow", enabled=False), row("RUNNING", "n-20"), began("n-20")),
    ],
    "I19": [
        (defined(by_event=True, every_s=3), fired(10, "e-10"), due(10), HEALED, ended()),
    ],
    "I21": [
        (granted(ttl_s=1.0, at=0.0), shown("renew", at=1.0, confirm_s=3.0), reaped(at=4.0)),
        (
            granted(ttl_s=1.0, at=0.0),
            shown("renew", at=1.0, confirm_s=3.0),
            shown("renew", at=2.0, confirm_s=0.0),
            reaped(at=3.0),
        ),
        (granted(ttl_s=1.0, at=0.0), promised(for_s=3.0, at=1.0), reaped(at=4.0)),
    ],
    "I23": [
        (PausedEvent(at=0.0, pattern="a.>"), submitted(), granted(subject="b.a")),
        (PausedEvent(at=0.0, pattern="*"), PausedEvent(at=0.0, pattern="*", paused=False), submitted(), granted(subject="x")),
        (PausedEvent(at=0.0, pattern="x"), submitted(), granted(subject="x.y")),
    ],
    "lease": [
        (granted(ttl_s=4.0, at=0.0), reaped(at=4.5)),
        (granted(ttl_s=4.0, at=0.0), shown("renew", at=3.0), reaped(at=7.0)),
        (granted(ttl_s=4.0, at=0.0), took_over(at=3.0), reaped(at=7.0)),
        (granted(ttl_s=4.0, at=0.0), took_over(at=3.0), took_over("s2", 2, at=5.0), reaped(at=7.0)),
        (granted(ttl_s=4.0, grace_s=3.0, at=0.0), reaped(at=7.0)),
        (granted(ttl_s=4.0, at=0.0), STORE_DRIFTED, reaped(at=2.0), granted("k", ttl_s=1.0, at=3.0)),
    ],
}


@pytest.mark.parametrize(("invariant", "story"), [(name, story) for name, stories in GOOD.items() for story in stories])
def test_what_keeps_an_invariant_passes(invariant: str, story: Story) -> None:
    checker = Checker().check(told(*story))

    assert not checker.violations, checker.report()


@pytest.mark.parametrize(("invariant", "stories"), list(GOOD.items()))
def test_what_keeps_an_invariant_is_evidence_for_it(invariant: str, stories: list[Story]) -> None:
    assert sum(Checker().check(told(*story)).evidence[invariant] for story in stories) >= len(stories) // 2 + 1


BAD: dict[str, list[Story]] = {
    "I2": [
        (submitted(), submitted()),
        (submitted(), repeated(body="other")),
        (submitted(), repeated(refused="CONFLICT")),
        (submitted(), row("PENDING", attempt=0, body="other")),
        (asked("submit", "k"), row("PENDING", attempt=0)),
    ],
    "I3": [
        (*ONCE, finished()),
        (submitted(), granted(), failed(), finished()),
        (submitted(), granted(), failed(), failed()),
    ],
    "I4": [
        (*ONCE, row("PENDING")),
        (row("FAILED", failures=4), row("TIMED_OUT", failures=4)),
        (*ONCE, granted(attempt=2)),
        (*ONCE, reaped()),
        (*ONCE, requeued(generation=2)),
        (row("FAILED", failures=1), requeued(), row("PENDING", generation=1, failures=1)),
        (row("FAILED", losses=1), requeued(), row("PENDING", generation=1, losses=1)),
        (*ONCE, requeued(), row("PENDING", generation=2)),
        (row("SUCCEEDED", generation=2), row("SUCCEEDED", generation=1)),
        (asked("submit"), *ONCE, requeued()),
        (asked("submit"), row("SUCCEEDED"), row("SUCCEEDED", generation=1)),
        (*ALL_STATES, submitted(), row("PENDING", attempt=0), requeued()),
        (*ALL_STATES, submitted(), row("PENDING", attempt=0), removed()),
    ],
    "I5": [
        (submitted(), granted(attempt=2)),
        (submitted(), granted(), reaped(), granted(attempt=3)),
        (submitted(), granted(), *ALL_STATES, granted(attempt=2)),
        (submitted(), granted(), reaped(), granted(attempt=2, lease_id="j.1")),
        (submitted(), granted(), reaped(), reaped()),
        (submitted(), granted(), row("ASSIGNED", attempt=2, lease_id="j.1")),
        (row("PENDING", attempt=2), row("PENDING", attempt=1)),
        (row("RUNNING", lease_id=None),),
        (row("SUCCEEDED", lease_id="j.1"),),
        (submitted(), granted(), row("ASSIGNED", lease_id="another")),
    ],
    "I6": [
        (submitted(), granted(), reaped(), finished()),
        (submitted(), granted(), reaped(), failed()),
        (submitted(), granted(), reaped(), granted(attempt=2), finished(attempt=1)),
        (submitted(), granted(), finished(lease_id="another")),
        (submitted(), granted(), shown("release"), finished()),
        (finished("k"), row("SUCCEEDED")),
        (reaped(), finished()),
        (began("k"), finished()),
    ],
    "I7": [
        (took_over("s1", 2), took_over("s2", 2)),
        (took_over("s1", 2), took_over("s2", 1)),
        (leading("s1", 1), leading("s2", 1)),
        (leading("s1", 1), leading("s1", 0), leading("s1", 1)),
        (took_over("s1", 1), leading("s2", 1)),
        (took_over("s1", 1), leading("s1", 1), leading("s1", 0), leading("s1", 2)),
    ],
    "I8": [
        (took_over("s1", 1), took_over("s2", 2), led("s1", 1)),
        (led("s1", 2), led("s2", 1)),
        (granted(), reaped(epoch=2), granted("k"), reaped("k", epoch=1)),
        (row("PENDING", leader_epoch=2), row("PENDING", leader_epoch=1)),
    ],
    "I11": [
        (row("PENDING", failures=4),),
        (row("PENDING", losses=4),),
        (row("FAILED", failures=5),),
        (row("FAILED", losses=5),),
        (row("SUCCEEDED", losses=4),),
        (row("CANCELED", failures=4),),
        (submitted(), granted(), failed(), row("PENDING")),
        (submitted(), granted(), reaped(), row("PENDING")),
        (submitted(), granted(), failed(), row("PENDING", failures=2)),
        (row("FAILED", failures=4, error_code=""),),
        (row("TIMED_OUT", failures=4, error_code=""),),
    ],
    "I12": [
        (granted(not_before=WALL + 1),),
        (granted("k", wall=WALL + 1), granted(not_before=WALL + 2)),
        (granted(not_after=WALL - 1),),
    ],
    "I13": [
        (submitted(), granted(), finished(), row("SUCCEEDED", result_sha256="another")),
        (submitted(), granted(), finished(), row("SUCCEEDED", result_sha256=None)),
        (submitted(), granted(), row("ASSIGNED", result_sha256="of an earlier attempt")),
    ],
    "I14": [
        (*ONCE, canceled()),
        (*ONCE, row("CANCELED")),
        (submitted(), granted(), canceled(), finished()),
        (submitted(), granted(), finished(state="CANCELED")),
        (submitted(), granted(), failed(state="SUCCEEDED")),
        (submitted(), granted(), failed(), row("PENDING", failures=1, cancel_requested=True)),
    ],
    "I15": [
        (due(10), fired(10, "n-10"), fired(10, "n-10 again")),
        (due(10), due(20), fired(10, "n-10"), HEALED, ended()),
        (fired(10, "n-10"), fired(10, "n-10")),
        (defined(enabled=False), fired(10, "n-10")),
        (defined(every_s=10), defined(every_s=4), fired(10, "n-10")),
    ],
    "I16": [
        (
            *(asked("submit"), submitted(), canceled(), row("CANCELED", attempt=0), asked("requeue"), requeued()),
            *(canceled(), row("CANCELED", attempt=0, generation=1), requeued(generation=2)),
        ),
    ],
    "I17": [
        (submitted(), granted(), shown("renew", worker="w2")),
        (submitted(), granted(), shown("renew", incarnation="life 2")),
        (submitted(), granted(), reaped(), shown("renew")),
        (submitted(), granted(), reaped(), granted(attempt=2), shown("start", attempt=1)),
        (submitted(), granted(), finished(worker="w2")),
        (took_over("s1", 1), led("s2", 1)),
        (took_over("s1", 1), led("s1", 2)),
        (took_over("s1", 1), row("PENDING", leader_epoch=2)),
    ],
    "I18": [
        (defined(), *TWO, row("ASSIGNED", "n-20")),
        (defined("replace"), *TWO[:2], row("PENDING", "n-10"), row("RUNNING", "n-20")),
        (defined(), *TWO[:2], granted("n-10"), began("n-10"), gone("k"), granted("n-20"), began("n-20", worker="w2")),
    ],
    "I19": [
        (defined(by_event=True), due(10), HEALED, ended()),
        (defined(by_event=True), fired(10, "e-10"), fired(10, "e-10 again")),
    ],
    "I21": [
        (granted(ttl_s=1.0, at=0.0), shown("renew", at=1.0, confirm_s=3.0), reaped(at=3.9)),
        (granted(ttl_s=1.0, at=0.0), promised(for_s=3.0, at=1.0), reaped(at=3.9)),
        (granted(ttl_s=1.0, at=0.0), reaped(at=1.0), promised(at=2.0)),
    ],
    "I23": [
        (PausedEvent(at=0.0, pattern="a.>"), submitted(), granted(subject="a.b")),
        (PausedEvent(at=0.0, pattern="*"), PausedEvent(at=0.0, pattern="a.>", paused=False), submitted(), granted(subject="x")),
    ],
    "lease": [
        (granted(ttl_s=4.0, at=0.0), reaped(at=3.9)),
        (granted(ttl_s=4.0, at=0.0), shown("renew", at=3.0), reaped(at=6.9)),
        (granted(ttl_s=4.0, at=0.0), took_over(at=3.0), reaped(at=6.9)),
        (took_over(at=1.0), granted(ttl_s=4.0, at=2.0), took_over("s2", 2, at=5.0), reaped(at=8.9)),
        (granted(ttl_s=4.0, at=0.0), took_over(at=3.0), shown("renew", at=4.0), took_over("s2", 2, at=5.0), reaped(at=8.9)),
        (granted(ttl_s=4.0, grace_s=3.0, at=0.0), reaped(at=6.9)),
    ],
    "liveness": [
        (leading("s1", 1), HEALED, leading("s1", 0), ended()),
        (leading("s1", 1), HEALED, process("crashed", "s1"), ended()),
        (leading("s1", 1), leading("s2", 2), HEALED, ended()),
        (took_over("s1", 1), leading("s1", 1), took_over("s2", 2), HEALED, ended()),
        (row("RUNNING"), HEALED, ended()),
        (HEALED, ended(quiet=False)),
        (HEALED, ended(at=10.0, events=20_000)),
    ],
}


@pytest.mark.parametrize(("invariant", "story"), [(name, story) for name, stories in BAD.items() for story in stories])
def test_what_breaks_an_invariant_is_found_under_its_name(invariant: str, story: Story) -> None:
    assert broken(told(*story)) == [invariant]
