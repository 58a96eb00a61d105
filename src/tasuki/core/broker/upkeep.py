"""What the leader does besides: end leases that are over, skip what is too late to start, make delayed jobs ready, delete what
is old, collect blobs. Pure.

Theory of operation. Duties are turns of their own, which carry the epoch. If the store refuses it (`StaleEpoch`), somebody else
leads: nothing else was in that turn, nothing is sent again, and this server steps down. Between two turns of duties the broker
takes one of its own if anything waits, however much there is to reap or to prune: the hot path never waits for more than one
small batch.

Blobs are deleted in three steps: the store condemns some (from then on nothing can refer to them), the driver deletes their
bytes, the store forgets them. A leader that dies in between leaves them condemned, and the next one begins with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tasuki.core.broker.events import DeleteBlobs, Deposed, TakeoverDone
from tasuki.core.job import TERMINAL
from tasuki.core.machine import Now
from tasuki.core.store_messages import Answers, BlobPlace, Collection, Retention, Turn
from tasuki.errors import StaleEpoch, TasukiError

if TYPE_CHECKING:
    from tasuki.core.broker.broker import Broker
    from tasuki.core.broker.events import BrokerConfig, Command

DUTY_INTERVAL_S = 0.25  # reaping, skipping and promoting: three index seeks when there is nothing to do
PRUNE_INTERVAL_S = 10.0
PRUNE_BATCH = 256  # jobs deleted in one turn: small, so that pruning never stalls the hot path
PRUNE_AGAIN = 128  # jobs pruned in one turn: then there may be many more, and the next turn goes on; fewer wait for the interval
COLLECT_INTERVAL_S = 30.0
SQUEEZED_GRACE_S = 300.0  # while the blobs are over their budget, one that was touched longer ago than this may go
REAP_BATCH = 256
SKIP_BATCH = 1024
PROMOTE_BATCH = 1024
COLLECT_BATCH = 256


class UpkeepConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long things are kept."""

    retention_s: float = 30 * 86400.0
    """Finished jobs and their results."""
    blob_grace_s: float = 3600.0
    """Blobs that no job refers to: so long after they were last brought or asked for."""
    blob_budget_bytes: int | None = None
    """While all blobs take more than this, unused ones go after SQUEEZED_GRACE_S; new ones are refused if that does not help."""
    collects: bool = True
    """Blobs. Not for a leader that cannot reach their bytes."""

    @classmethod
    def of(cls, config: BrokerConfig) -> UpkeepConfig:
        return cls(
            retention_s=config.retention_s,
            blob_grace_s=config.blob_grace_s,
            blob_budget_bytes=config.blob_budget_bytes,
            collects=config.collects_blobs,
        )


class DutyCounts(msgspec.Struct):
    """What a leader's turns came to."""

    reaped: int = 0
    skipped: int = 0
    promoted: int = 0
    pruned: int = 0
    blobs_deleted: int = 0


class Upkeep:
    """The schedule of a leader. `epoch` is 0 while another one leads."""

    def __init__(self, config: UpkeepConfig, epoch: int = 0) -> None:
        self.config = config
        self.epoch = epoch
        self.over_budget = ""
        """Why no new blob can be taken; empty: there is room."""
        self.counts = DutyCounts()
        self.caught_up = False
        """Each duty was done under this epoch, and left nothing that is due."""
        self._claim: tuple[int, str] | None = None
        """An epoch that was won and has to be registered, and our name."""
        self._duty_at = self._prune_at = self._collect_at = 0.0
        self._deleting = False
        self._deleted: list[BlobPlace] = []
        self._last = False
        """The last turn was one of duties: if anything else waits, it is next."""

    def claim(self, epoch: int, holder: str) -> None:
        """Register this epoch at the next turn."""
        self._claim = (epoch, holder)

    def lead(self, epoch: int) -> None:
        """From now on the duties are ours, under this epoch; 0: no more."""
        self.epoch = epoch
        self.caught_up = False
        self._duty_at = self._prune_at = self._collect_at = 0.0
        self._deleting, self._deleted = False, []

    def blobs_deleted(self, epoch: int, places: Sequence[BlobPlace]) -> None:
        """The driver deleted these bytes."""
        if epoch and epoch == self.epoch:
            self._deleting = False
            self._deleted.extend(places)
            self.counts.blobs_deleted += len(places)

    def next_turn(self, now: Now, *, others_wait: bool) -> Turn | None:
        """What is due, or None."""
        if self._last and others_wait:
            self._last = False
            return None
        turn = self._due(now)
        self._last = turn is not None
        return turn

    def _due(self, now: Now) -> Turn | None:
        if self._claim is not None:
            (epoch, holder), self._claim = self._claim, None
            return Turn(epoch=epoch, take_over=holder, context=self)
        if not self.epoch or (now.monotonic < min(self._duty_at, self._prune_at, self._collect_at) and not self._deleted):
            return None
        turn = Turn(epoch=self.epoch, context=self)
        if now.monotonic >= self._duty_at:
            self._duty_at = now.monotonic + DUTY_INTERVAL_S
            turn.reap, turn.skip, turn.promote = REAP_BATCH, SKIP_BATCH, PROMOTE_BATCH
        if now.monotonic >= self._prune_at:
            self._prune_at = now.monotonic + PRUNE_INTERVAL_S
            turn.prune = Retention(self.config.retention_s, PRUNE_BATCH)
        if now.monotonic >= self._collect_at:
            self._collect_at = now.monotonic + COLLECT_INTERVAL_S
            if not self._deleting and self.config.collects:
                turn.condemn_blobs = self._collection()
        turn.forget_blobs, self._deleted = self._deleted, []
        return turn

    def _collection(self) -> Collection:
        config = self.config
        squeezed_s = min(SQUEEZED_GRACE_S, config.blob_grace_s)
        return Collection(config.blob_grace_s, config.blob_budget_bytes, squeezed_s, COLLECT_BATCH)

    def done(self, broker: Broker, turn: Turn, answers: Answers) -> list[Command]:
        """The turn is committed: tell those whom it concerns, and go on at once if there is more than one batch."""
        if turn.take_over:
            return [TakeoverDone(turn.epoch, answers.take_over)]
        self._tell(broker, answers)
        self._count(answers)
        if len(answers.reap) >= REAP_BATCH or len(answers.skip) >= SKIP_BATCH or answers.promote.count >= PROMOTE_BATCH:
            self._duty_at = 0.0
        if answers.prune >= PRUNE_AGAIN:
            self._prune_at = 0.0
        commands = self._condemned(answers) if turn.condemn_blobs is not None else []
        self.caught_up = min(self._duty_at, self._prune_at, self._collect_at) > 0 and not self._deleting and not self._deleted
        return commands

    def _tell(self, broker: Broker, answers: Answers) -> None:
        if answers.reap:
            broker.forget_deliveries(answers.reap)
            ended = [reaped.job_id for reaped in answers.reap if reaped.state in TERMINAL]
            broker.ask_ends(ended)
            broker.look_everywhere()
            broker.fellows.ended += ended
            broker.fellows.everything = True
        if answers.skip:
            broker.ask_ends(answers.skip)
            broker.fellows.ended += answers.skip
        if answers.promote.subjects:
            broker.look_for(answers.promote.subjects, backlog=True)
            broker.fellows.ready.add_some(answers.promote.subjects, answers.promote.count)

    def _count(self, answers: Answers) -> None:
        self.counts.reaped += len(answers.reap)
        self.counts.skipped += len(answers.skip)
        self.counts.promoted += answers.promote.count
        self.counts.pruned += answers.prune

    def _condemned(self, answers: Answers) -> list[Command]:
        places, stored_bytes = answers.condemn_blobs.places, answers.condemn_blobs.stored_bytes
        budget = self.config.blob_budget_bytes
        self.over_budget = ""
        if budget is not None and stored_bytes is not None and stored_bytes > budget and not places:
            self.over_budget = f"blobs take {stored_bytes} bytes, the budget is {budget}, and jobs refer to all of them"
        if not places:
            return []
        self._deleting = True
        if len(places) >= COLLECT_BATCH:
            self._collect_at = 0.0
        return [DeleteBlobs(self.epoch, places)]

    def failed(self, turn: Turn, error: TasukiError) -> list[Command]:
        """Nothing of it happened, and all of it is due again. A stale epoch is final."""
        if turn.take_over:
            return [TakeoverDone(turn.epoch, False)]
        if isinstance(error, StaleEpoch):
            return [Deposed(turn.epoch)]
        self._deleted[:0] = turn.forget_blobs
        self._duty_at = 0.0 if turn.reap else self._duty_at
        self._prune_at = 0.0 if turn.prune is not None else self._prune_at
        self._collect_at = 0.0 if turn.condemn_blobs is not None else self._collect_at
        return []
