"""The question of a worker that was cut off or detached, whether it may continue its runs. Pure; one per worker.

Theory of operation. Two things make a worker ask. Its leases near their deadlines, since no renewal was answered: it is cut off
from the store. Or a leader has detached it: somebody believes that it is gone. It asks the leader and the sub-leaders, some
times, and continues if one of them has renewed the lease for it.

    cut off      nobody says yes: the worker's own deadline ends the attempt, as ever, before the store gives the run to another
    detached     the run is CONFIRMING in the store from before the first question, which also extends its lease; if nobody says
                 yes, the attempt is stopped; its lease is renewed until nothing of it is left

A store that takes the mark late holds the questions up, but not beyond the time that they need before the deadline.

A lease that was confirmed is asked for again only if its deadline nears again.

Whoever is asked renews the lease, and says yes if the store took that. While the store is away for the leader too, the leader may
promise it (`may_promise`) instead: nobody else can end leases before a takeover, which renews all, and this leader ends none any
more under its epoch. The promise counts if the coordination says afterwards that the lock was held all along.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.scheduler.thresholds import QUESTIONS_SLACK_S, Thresholds

RENEWED_SLACK_S = 1.0  # a question about a lease is on its way for less


def may_promise(epoch: int, leads_since: float, renewed_ago_s: float, now: float) -> bool:
    """Return whether a leader that cannot reach the store may say that a run goes on whose lease was renewed so long ago: if that
    was since it leads. An older lease may be one that ended while nobody led, and that the takeover did not renew."""
    return bool(epoch) and now - renewed_ago_s - RENEWED_SLACK_S > leads_since


class Confirming(msgspec.Struct, frozen=True):
    """Mark this run in the store as one whose worker asks, for so long, and report `marked`; 0 takes the mark away."""

    lease_id: str
    for_s: float


class AskLeaders(msgspec.Struct, frozen=True):
    """Ask the leader and the sub-leaders about this run; report `answered` for each answer."""

    lease_id: str


class Deny(msgspec.Struct, frozen=True):
    """Stop this run."""

    lease_id: str


Command = Confirming | AskLeaders | Deny


class _Question(msgspec.Struct):
    is_detached: bool
    ask_at: float
    asked: int = 0


class Continuation:
    """The questions of one worker about its runs, by lease_id."""

    def __init__(self) -> None:
        self.thresholds = Thresholds()
        self._questions: dict[str, _Question] = {}
        self._settled: set[str] = set()
        """Leases of a detached worker that were confirmed or denied."""

    def look(self, deadlines: Mapping[str, float], *, detached: bool, now: float) -> list[Command]:
        """Return what to do for the runs with these leases and deadlines."""
        self._settled &= deadlines.keys() if detached else set()
        self._questions = {lease_id: asked for lease_id, asked in self._questions.items() if lease_id in deadlines}
        commands: list[Command] = []
        asks_for_s = self.thresholds.questions_s
        for lease_id, deadline in deadlines.items():
            latest_at = deadline - asks_for_s - QUESTIONS_SLACK_S
            is_cut_off = latest_at <= now
            if not is_cut_off and not detached:
                dropped = self._questions.pop(lease_id, None)
                commands += [Confirming(lease_id, 0.0)] if dropped is not None and dropped.is_detached else []
            elif lease_id not in self._questions and (is_cut_off or lease_id not in self._settled):
                self._questions[lease_id] = _Question(detached, latest_at)
                commands += [Confirming(lease_id, asks_for_s + LEASE_MARGIN_S)] if detached else []
            if lease_id in self._questions:
                commands += self._ask(lease_id, self._questions[lease_id], now)
        return commands

    def _ask(self, lease_id: str, question: _Question, now: float) -> list[Command]:
        if now < question.ask_at:
            return []
        if question.asked < self.thresholds.continuation_retry_count:
            question.asked += 1
            is_last = question.asked == self.thresholds.continuation_retry_count
            wait_s = self.thresholds.continuation_retry_interval_seconds
            question.ask_at = now + max(wait_s, self.thresholds.grpc_ping_timeout_seconds if is_last else 0.0)
            return [AskLeaders(lease_id)]
        if not question.is_detached or lease_id in self._settled:
            return []
        self._settled.add(lease_id)
        return [Deny(lease_id)]

    def marked(self, lease_id: str) -> list[Command]:
        """Ask from now on: the store shows that the worker asks, or cannot be told."""
        question = self._questions.get(lease_id)
        if question is None:  # it was answered before the store took the mark
            return [Confirming(lease_id, 0.0)]
        if not question.asked:
            question.ask_at = 0.0
        return []

    def answered(self, lease_id: str, may_go_on: bool) -> list[Command]:
        """Take the answer of a leader or a sub-leader: it has renewed the lease, or the attempt must stop, since the store has
        another one by now, or the job was canceled."""
        question = self._questions.pop(lease_id, None)
        if question is None:
            return []
        self._settled.add(lease_id)
        return [] if may_go_on else [Deny(lease_id)]
