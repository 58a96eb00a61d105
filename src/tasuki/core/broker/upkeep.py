"""The leader's upkeep: end expired leases, skip late jobs, promote delayed ones, fire definitions, prune, collect blobs. Pure.

Theory of operation. Upkeep happens in turns of its own, which carry the epoch. If the store refuses the epoch (`StaleEpoch`),
another server leads: nothing else was in that turn, nothing is asked again, and this server steps down. Between two such turns
the broker takes one of its own if anything waits, however much there is to reap or to prune: the hot path never waits for more
than one small batch.

Delayed jobs and definitions start at their time, not at the next tick: `fire` says how long it is until the next one, and
`until_due_s` tells the driver. Changed definitions and new events are found by a look each second, or at once after a hint.
A leader of nodes that take orders has runs stored ahead of their times; after each look it decides who gets them and who is told
to start (`core.scheduler.leader`).

A leader can keep its lock while the store is away, if the coordination is another service. Meanwhile nobody can renew a lease.
So after half a ttl without a committed turn it ends no lease under its epoch any more: when the store takes a turn again, it
gives the epoch up (`Lapsed`), and the takeover under the next one renews every lease whose worker spoke before.

Blobs are deleted in three steps: the store condemns some (from then on nothing can refer to them), the driver deletes their
bytes, the store forgets them. A leader that dies in between leaves them condemned, and the next one begins with those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from tasuki.core.broker.client_messages import ask_ends, stop_canceled
from tasuki.core.broker.events import Command, DeleteBlobs, NoteAssigned, StartRuns
from tasuki.core.broker.state import BrokerState
from tasuki.core.broker.worker_messages import read_back
from tasuki.core.cluster_messages import WorkerInfo
from tasuki.core.election import EpochFenced, Lapsed, TookOver
from tasuki.core.job import TERMINAL
from tasuki.core.machine import Now
from tasuki.core.scheduler.leader import ASSIGNED_PER_TURN, WorkerLoad, plan
from tasuki.core.store_messages import (
    AheadRun,
    Answers,
    Assignment,
    BlobPlace,
    Collection,
    FiredRuns,
    FireOrder,
    Offer,
    Reaped,
    Retention,
    Turn,
)
from tasuki.errors import StaleEpoch, TasukiError

FIRE_INTERVAL_S = 1.0  # looking for changed definitions and new events
FIRE_BATCH = 256
DUTY_INTERVAL_S = 0.25  # reaping, skipping and promoting: three index seeks when there is nothing to do
IDLE_DUTY_INTERVAL_S = 0.5  # when the last look found nothing, and no attempt runs at this server
PRUNE_INTERVAL_S = 10.0
PRUNE_BATCH = 256  # jobs deleted in one turn: small, so that pruning never stalls the hot path
PRUNE_AGAIN = 128  # jobs pruned in one turn: there may be many more, and the next turn continues; fewer wait for the interval
COLLECT_INTERVAL_S = 30.0
SQUEEZED_GRACE_S = 300.0  # while the blobs are over their budget, one that was touched longer ago than this may go
REAP_BATCH = 256
SKIP_BATCH = 1024
PROMOTE_BATCH = 1024
COLLECT_BATCH = 256
LAPSE_SHARE = 0.5  # of a lease's ttl: one that was renewed every third of it, until the store was away, is not over by then


class UpkeepCounts(msgspec.Struct):
    """Totals of this server's upkeep since its start."""

    reaped: int = 0
    skipped: int = 0
    promoted: int = 0
    fired: int = 0
    pruned: int = 0
    blobs_deleted: int = 0


class Upkeep:
    """The leader's schedule. It rests while another server leads (`state.epoch` is 0)."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.counts = UpkeepCounts()
        self.tick_s = FIRE_INTERVAL_S
        self.ahead = FireOrder(FIRE_BATCH)
        """Order for runs that are stored and assigned ahead of their times (0 s: none), and reassigned after some more time."""
        self.max_jobs = 0
        """No worker is assigned more at once; 0: as many as it has slots."""
        self._assignments: tuple[Assignment, ...] = ()
        self.caught_up = False
        """Each kind of upkeep was done under this epoch, and left nothing that is due."""
        self._claim = 0
        """An epoch that was won and has to be registered."""
        self._duty_at = self._prune_at = self._collect_at = self._fire_at = 0.0
        self._planned_at = 0.0
        """Time at which the last turn was planned."""
        self._reached_at: float | None = None
        """Time at which the last turn that was committed under this epoch was planned, its registration included."""
        self._has_lapsed = False
        self._found_nothing = False
        """The last look for leases that are over, late and delayed jobs found none."""
        self._deleting = False
        self._deleted: list[BlobPlace] = []
        self._last = False
        """The last turn was one of upkeep: if anything else waits, it is next."""

    def claim(self, epoch: int) -> None:
        """Register this epoch at the next turn."""
        self._claim = epoch

    def lead(self, epoch: int) -> None:
        """Begin upkeep under this epoch; 0: end it."""
        self._state.epoch = epoch
        self.caught_up = False
        self._duty_at = self._prune_at = self._collect_at = self._fire_at = 0.0
        self._deleting, self._deleted = False, []
        self._assignments = ()
        self._has_lapsed = False
        if not epoch:
            self._reached_at = None

    def lapse(self) -> None:
        """End no lease under this epoch any more: the next turn that the store takes is the last one under it."""
        self._has_lapsed = True

    def led_ago_s(self, now: Now) -> float | None:
        """Return the time since the last turn that the store took under this epoch was planned; None: this server does not
        lead."""
        if not self._state.epoch:
            return None
        return 0.0 if self._reached_at is None else now.monotonic - self._reached_at

    def until_due_s(self, now: Now, most_s: float) -> float:
        """Return the time until the next job or definition is due, at most `most_s`. Overdue ones wait for the store."""
        leads = self._state.epoch and self._state.config.fires
        return min(most_s, self._fire_at - now.monotonic) if leads and self._fire_at > now.monotonic else most_s

    def look_for_events(self) -> None:
        """Look for new events and changed definitions in the next turn: a hint came."""
        self._fire_at = 0.0

    def blobs_deleted(self, epoch: int, places: Sequence[BlobPlace]) -> None:
        """Let the next turn forget blobs whose bytes the driver deleted."""
        if epoch and epoch == self._state.epoch:
            self._deleting = False
            self._deleted.extend(places)
            self.counts.blobs_deleted += len(places)

    def next_turn(self, now: Now, *, others_wait: bool) -> Turn | None:
        """Return the turn that is due, or None."""
        if self._last and others_wait:
            self._last = False
            return None
        turn = self._due(now)
        self._last = turn is not None
        return turn

    def _due(self, now: Now) -> Turn | None:
        config, epoch = self._state.config, self._state.epoch
        if self._claim:
            claim, self._claim = self._claim, 0
            self._planned_at = now.monotonic
            return Turn(epoch=claim, take_over=config.server_id)
        fire_at = self._fire_at if config.fires else math.inf
        if self._duty_at > now.monotonic + DUTY_INTERVAL_S and not self._state.is_idle:  # the last look was at idle
            self._duty_at = now.monotonic + DUTY_INTERVAL_S
        waits = now.monotonic < min(self._duty_at, self._prune_at, self._collect_at, fire_at)
        if not epoch or (waits and not self._deleted and not self._assignments):
            return None
        self._look_at_lapse(now)
        turn = Turn(epoch=epoch)
        if now.monotonic >= fire_at:
            self._fire_at = now.monotonic + self.tick_s
            turn.fire, turn.promote = self.ahead, PROMOTE_BATCH
            self._assignments = ()  # they follow from what this look finds
        turn.assign, self._assignments = self._assignments, ()
        if now.monotonic >= self._duty_at - (DUTY_INTERVAL_S if turn.fire else 0.0):  # a turn for it alone would follow soon
            is_idle = self._found_nothing and self._state.is_idle
            idle_s = FIRE_INTERVAL_S if config.fires else IDLE_DUTY_INTERVAL_S  # one turn for both; a tick is often as long
            self._duty_at = now.monotonic + (idle_s if is_idle else DUTY_INTERVAL_S)
            turn.reap = 0 if self._has_lapsed else REAP_BATCH
            turn.skip, turn.promote = SKIP_BATCH, PROMOTE_BATCH
        if now.monotonic >= self._prune_at:
            self._prune_at = now.monotonic + PRUNE_INTERVAL_S
            turn.prune = Retention(config.retention_s, PRUNE_BATCH)
        if now.monotonic >= self._collect_at:
            self._collect_at = now.monotonic + COLLECT_INTERVAL_S
            if not self._deleting and config.collects_blobs:
                squeezed_s = min(SQUEEZED_GRACE_S, config.blob_grace_s)
                turn.condemn_blobs = Collection(config.blob_grace_s, config.blob_budget_bytes, squeezed_s, COLLECT_BATCH)
        turn.forget_blobs, self._deleted = self._deleted, []
        return turn

    def _look_at_lapse(self, now: Now) -> None:
        self._planned_at = now.monotonic
        if self._reached_at is None:
            self._reached_at = now.monotonic
        if now.monotonic - self._reached_at > LAPSE_SHARE * self._state.config.lease_ttl_s:
            self._has_lapsed = True

    def done(self, turn: Turn, answers: Answers, now: Now) -> list[Command]:
        """Tell the peers concerned by a committed turn, and continue at once if there is more than one batch."""
        if turn.take_over:
            self._reached_at = self._planned_at
            return [TookOver(turn.epoch, answers.take_over)]
        if turn.epoch == self._state.epoch:
            self._reached_at = self._planned_at
        self._tell(answers)
        self.counts.fired += len(answers.fire.runs)
        if turn.fire and answers.fire.wait_s is not None:
            self._fire_at = min(self._fire_at, now.monotonic + answers.fire.wait_s)
        self.counts.reaped += len(answers.reap)
        self.counts.skipped += len(answers.skip)
        self.counts.promoted += answers.promote
        self.counts.pruned += answers.prune
        if turn.reap:
            self._found_nothing = not (answers.reap or answers.skip or answers.promote)
        if len(answers.reap) >= REAP_BATCH or len(answers.skip) >= SKIP_BATCH or answers.promote >= PROMOTE_BATCH:
            self._duty_at = 0.0
        if answers.prune >= PRUNE_AGAIN:
            self._prune_at = 0.0
        commands = self._condemned(answers) if turn.condemn_blobs is not None else []
        commands += self._replaced(answers.fire)
        if answers.fire.ahead and turn.epoch == self._state.epoch:
            commands += self._ahead_found(answers.fire.ahead)
        elif len(turn.assign) >= ASSIGNED_PER_TURN:
            self._fire_at = 0.0
        if self._has_lapsed and turn.epoch == self._state.epoch:
            commands.append(Lapsed(turn.epoch))
        self.caught_up = min(self._duty_at, self._prune_at, self._collect_at) > 0 and not self._deleting and not self._deleted
        return commands

    def _tell(self, answers: Answers) -> None:
        state = self._state
        if answers.reap:
            self._forget_deliveries(answers.reap)
            ended = [reaped.job_id for reaped in answers.reap if reaped.state in TERMINAL]
            ask_ends(state, ended)
            state.cluster.ended += ended
        if answers.skip:
            skipped = [job_id for job_id, _ in answers.skip]
            ask_ends(state, skipped)
            state.cluster.ended += skipped

    def _replaced(self, fired: FiredRuns) -> list[Command]:
        """Tell workers to stop the runs that new ones replace, and clients of runs that ended unstarted."""
        ended = [run.job_id for run in fired.runs if run.state in TERMINAL]
        ended += [job_id for job_id, canceled in fired.replaced if canceled.state in TERMINAL]
        ask_ends(self._state, ended)
        self._state.cluster.ended += ended
        return [command for _, canceled in fired.replaced for command in stop_canceled(self._state, canceled)]

    def _ahead_found(self, runs: Sequence[AheadRun]) -> list[Command]:
        """Assign runs that were stored ahead, and order workers to start those that are due."""
        state = self._state
        planned = plan(runs, self._worker_loads(), ttl_s=state.config.lease_ttl_s)
        self._assignments = planned.assign
        server_of = {worker.worker_id: state.cluster.servers[server_id] for server_id, worker in state.cluster.workers()}
        assigned = {one.job_id: one.worker_id for one in planned.assign if one.worker_id}
        commands: list[Command] = [NoteAssigned(assigned)] if assigned else []
        for worker_id, started in planned.start.items():
            if (own := state.workers.get(worker_id)) is not None:
                if not own.resuming:
                    read_back(state, own, again=True)
            elif (server := server_of.get(worker_id)) is not None:
                commands.append(StartRuns(state.epoch, worker_id, server.node_id, server.grpc_address, started))
        return commands

    def _worker_loads(self) -> list[WorkerLoad]:
        """Return the workers that can be ordered to start a run: those of this node, and of others that listen for orders."""
        state = self._state
        here = [worker for worker in state.workers.values() if worker.addressed]
        found = [_load_of(worker.info(), leads=worker is state.only_leads) for worker in here]
        for server_id, server in state.cluster.servers.items():
            if server.grpc_address:
                age_s = state.cluster.ages_s.get(server_id, 0.0)
                found += [_load_of(worker, age_s) for worker in server.workers if worker.addressed]
        limit = self.max_jobs or math.inf
        return [
            msgspec.structs.replace(one, slots=int(min(one.slots, limit)))
            for one in found
            if one.slots > 0 and one.worker_id not in state.cluster.detached
        ]

    def _forget_deliveries(self, lost: Sequence[Reaped]) -> None:
        """End attempts whose leases are over; a worker that let one go may never speak of it again."""
        for reaped in lost:
            worker = self._state.workers.get(reaped.worker_id)
            if worker is None:
                continue
            for lease_id, delivery in list(worker.deliveries.items()):
                if (delivery.claim.job_id, delivery.claim.attempt) == (reaped.job_id, reaped.attempt):
                    del worker.deliveries[lease_id]
                    worker.account.ended()

    def _condemned(self, answers: Answers) -> list[Command]:
        places, stored_bytes = answers.condemn_blobs.places, answers.condemn_blobs.stored_bytes
        budget = self._state.config.blob_budget_bytes
        self._state.over_budget = ""
        if budget is not None and stored_bytes is not None and stored_bytes > budget and not places:
            self._state.over_budget = f"blobs take {stored_bytes} bytes, the budget is {budget}, and jobs refer to all of them"
        if not places:
            return []
        self._deleting = True
        if len(places) >= COLLECT_BATCH:
            self._collect_at = 0.0
        return [DeleteBlobs(self._state.epoch, places)]

    def failed(self, turn: Turn, error: TasukiError) -> list[Command]:
        """Make everything in a failed turn due again, but firing only after its interval: what an application wrote must not keep
        leases from being ended. A stale epoch is final."""
        if turn.take_over:
            self._reached_at = self._planned_at
            return [TookOver(turn.epoch, False)]
        if isinstance(error, StaleEpoch):
            return [EpochFenced(turn.epoch)]
        self._deleted[:0] = turn.forget_blobs
        self._duty_at = 0.0 if turn.reap else self._duty_at
        self._prune_at = 0.0 if turn.prune is not None else self._prune_at
        self._collect_at = 0.0 if turn.condemn_blobs is not None else self._collect_at
        return []


def _load_of(worker: WorkerInfo, age_s: float = 0.0, *, leads: bool = False) -> WorkerLoad:
    return WorkerLoad(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        owner=worker.owner,
        patterns=worker.patterns,
        offer=Offer(worker.takes, worker.execs),
        slots=worker.slots,
        running=worker.running,
        age_s=age_s,
        leads=leads,
    )
