"""Verdicts on clients and workers: what they were told, what ran where; and on the end, when all must be over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tasuki.testing.sim.checker import Checker
from tasuki.testing.sim.history import AnyLine, DriftedEvent
from tests.sim.history_lines import (
    HEALED,
    UNSTAMPED,
    answered,
    arrived,
    asked,
    began,
    broken,
    busy,
    canceled,
    denied,
    ended,
    failed,
    finished,
    gone,
    granted,
    process,
    reaped,
    removed,
    repeated,
    requeued,
    row,
    settled,
    submitted,
    told,
)

Story = Sequence[AnyLine]
ONCE: Story = (asked(), submitted(), answered(), granted(), finished(), row("SUCCEEDED"))
OVER: Story = (HEALED, ended())
W1_DRIFTED = DriftedEvent(at=UNSTAMPED, name="w1")
KEPT = granted(on_disconnect="keep")
SECOND: Story = (granted(attempt=2, worker="w2"), began(attempt=2, worker="w2"))
"""The job runs once more, elsewhere."""


def at_end(state: str, job_id: str = "j", **given: Any) -> AnyLine:
    return row(state, job_id, at_end=True, **given)


def gone_first() -> AnyLine:
    """Some other attempt that ended: from here on it is known that the observer sees ends."""
    return gone("k")


GOOD: dict[str, list[Story]] = {
    "I1": [
        (*ONCE, *OVER),
        (asked(), answered(), at_end("SUCCEEDED"), *OVER),
        (*ONCE, removed(), at_end("PENDING", "k", attempt=0), asked("submit", "k")),
        (asked(), submitted(), answered(), at_end("PENDING", attempt=0)),
    ],
    "I2": [
        (asked(), answered(created=("j",)), asked(call="2"), answered(call="2")),
        (asked(), answered(), asked(call="2", bodies=("other",)), answered(call="2", answer="refused")),
    ],
    "I9": [
        (granted(), began(), gone(how="killed"), reaped(), *SECOND),
        (KEPT, began(), gone_first(), reaped(state="ORPHANED"), *SECOND),
        (granted(), began(), gone_first(), W1_DRIFTED, reaped(), *SECOND),
        (granted(), began(), gone_first(), process("crashed", "w1/keeper"), process("crashed"), reaped(), *SECOND),
        (granted(), began(), reaped(), *SECOND),
    ],
    "I21": [
        (began(at=0.0), denied(at=1.0), gone(how="stopped", at=3.0)),
        (began(at=0.0), denied(at=1.0), gone(at=1.5)),
    ],
    "I10": [
        (granted(), began(), process("crashed"), gone(how="killed"), *OVER),
        (granted(), began(), gone_first(), process("crashed", "w1/keeper"), process("crashed"), *OVER),
        (granted(), began(), gone(how="killed"), granted("k"), began("k", incarnation="life 2"), gone("k")),
        (granted(), began(), gone_first(), *OVER),
        (granted(), began(), gone_first(), reaped()),
    ],
    "I13": [
        (*ONCE, arrived(), arrived(client="c2")),
        (arrived(), at_end("SUCCEEDED")),
        (submitted(), granted(), finished(result_sha256=""), row("SUCCEEDED"), arrived()),
        (*ONCE, asked("requeue"), requeued(), row("PENDING", generation=1), arrived()),
    ],
    "I14": [
        (*ONCE, asked("cancel"), canceled(state="SUCCEEDED"), answered("cancel", states=("SUCCEEDED",))),
        (asked(), asked("cancel"), answered("cancel", states=("CANCELED",)), at_end("CANCELED")),
        (asked(), asked("cancel"), answered("cancel", states=("CANCELED",)), at_end("SUCCEEDED", generation=1)),
        (submitted(), canceled(), row("CANCELED", attempt=0), arrived(attempt=0, state="CANCELED")),
        (submitted(), granted(), finished(), settled()),
        (submitted(), granted(), reaped(), finished(accepted=False), settled(recorded=False)),
        (submitted(), granted(), finished(), requeued(), finished(accepted=False), settled(recorded=False)),
        (arrived(state="FAILED"), at_end("FAILED", failures=4)),
    ],
    "I16": [
        (asked(), submitted(), answered(answer="unknown"), at_end("PENDING", attempt=0)),
        (asked(), answered(answer="unknown")),
    ],
    "credit": [(busy(1, 2), busy(2, 2)), (busy(1, 1, waiting=8, ahead=2),)],
    "liveness": [
        (asked(), submitted(), row("PENDING", attempt=0), canceled(), row("CANCELED", attempt=0), answered(), *OVER),
        (*ONCE, asked(call="2"), process("crashed", "c1"), *OVER),
        (row("RUNNING"), ended()),
        (HEALED, ended(at=10.0, events=2_000)),
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
    "I1": [
        (asked("submit", "k"), submitted("k"), asked(), answered(), submitted()),
        (asked(), answered(), at_end("SUCCEEDED", "k"), asked("submit", "k")),
        (*ONCE, at_end("PENDING", "k", attempt=0), asked("submit", "k")),
        (asked(), submitted(), answered(), row("PENDING", attempt=0), *OVER),
    ],
    "I2": [
        (asked(), answered(created=("j",)), asked(call="2"), answered(call="2", created=("j",))),
        (asked(), answered(), asked(call="2", bodies=("other",)), answered(call="2")),
        (asked(), submitted(body="other"), answered()),
        (asked(), answered(), at_end("PENDING", attempt=0, body="other")),
    ],
    "I5": [
        (granted(), began(), gone(), began()),
        (began(), began(worker="w2")),
        (granted("k"), began()),
    ],
    "I9": [
        (granted(), began(), gone_first(), reaped(), *SECOND),
        (granted(), granted("k"), gone_first(), reaped(), *SECOND, began()),
        (granted(), began(), gone_first(), DriftedEvent(at=UNSTAMPED, name="w2"), reaped(), *SECOND),
        (process("crashed", "w1/keeper"), granted(), began(), gone_first(), reaped(), *SECOND),
    ],
    "I21": [
        (began(at=0.0), denied(at=1.0), gone(at=3.0)),
    ],
    "I10": [
        (granted(), began(), gone_first(), process("crashed"), *OVER),
        (granted(), began(), gone_first(), reaped(), *OVER),
        (granted(), began(), gone_first(), finished(), *OVER),
        (process("crashed", "w1/keeper"), granted(), began(), gone_first(), process("crashed"), *OVER),
        (granted(), began(), gone_first(), granted("k"), began("k", incarnation="life 2")),
    ],
    "I13": [
        (*ONCE, arrived(result_sha256="another")),
        (*ONCE, arrived(attempt=2)),
        (finished("k"), arrived(), submitted(), granted(), finished()),
        (arrived(), at_end("SUCCEEDED", result_sha256="another")),
        (arrived(), arrived(client="c2", result_sha256="another")),
    ],
    "I14": [
        (*ONCE, canceled("k"), asked("cancel"), answered("cancel", states=("CANCELED",)), row("SUCCEEDED")),
        (asked("cancel"), answered("cancel", states=("CANCELED",)), at_end("SUCCEEDED"), asked()),
        (*ONCE, arrived(state="CANCELED")),
        (arrived(state="CANCELED"), at_end("SUCCEEDED")),
        (submitted(), granted(), finished("k"), settled()),
        (submitted(), granted(), finished(), settled(recorded=False)),
    ],
    "credit": [(busy(3, 2),), (busy(1, 1, waiting=9, ahead=2),)],
    "liveness": [
        (*ONCE, asked(call="2"), *OVER),
        (asked(), submitted(), row("PENDING", attempt=0), answered(answer="unknown"), *OVER),
        (submitted(), repeated(), granted(), row("ASSIGNED"), *OVER),
        (failed(), row("PENDING", failures=1), *OVER),
    ],
}


@pytest.mark.parametrize(("invariant", "story"), [(name, story) for name, stories in BAD.items() for story in stories])
def test_what_breaks_an_invariant_is_found_under_its_name(invariant: str, story: Story) -> None:
    assert broken(told(*story)) == [invariant]
