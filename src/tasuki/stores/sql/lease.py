"""How the SQL store grants work: lease by patterns or by job_ids, assign, held. What is ready it learns from `sql_ready.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasuki.core.fairness import FairTurns
from tasuki.core.job import OnDisconnect, State
from tasuki.core.lifecycle import LEASE_MARGIN_S, is_late
from tasuki.core.store_messages import Assignment, Grant, LeaseRequest
from tasuki.errors import Unavailable
from tasuki.stores.sql.base import must_change
from tasuki.stores.sql.database import Queues
from tasuki.stores.sql.ready_index import Place, ReadyIndex
from tasuki.stores.sql.report import SqlReport
from tasuki.stores.sql.rows import READY
from tasuki.stores.store import Clock

LEASE_ID_BYTES = 16
_PENDING = State.PENDING.value
_ORPHANED = State.ORPHANED.value


class SqlLease(SqlReport):
    """Verbs that hand out attempts."""

    _fair: FairTurns
    _starts: dict[Place, str]
    """Where subjects that take turns go on. A hint, like the memory of `_fair`."""

    def lease(self, requests: Sequence[LeaseRequest]) -> list[list[Grant]]:
        if not requests:
            return []
        with self._turn:
            ready = ReadyIndex(self._session.rows, self._starts)
            answers = [
                self._lease_named(request) if request.job_ids else self._lease_next(request, ready) for request in requests
            ]
            self._at("lease.written")
            return answers

    def _lease_next(self, request: LeaseRequest, ready: ReadyIndex) -> list[Grant]:
        grants: list[Grant] = []
        if request.limit <= 0:
            return grants
        for priority in ready.bands():

            def take(group: str, limit: int, band: int = priority) -> list[Grant]:
                return self._take(ready, band, group, limit, request)

            for groups in ready.groups(priority, request.patterns):
                grants += self._fair.fill(groups, request.limit - len(grants), take)
                if len(grants) >= request.limit:
                    return grants
        return grants

    def _take(self, ready: ReadyIndex, priority: int, group: str, limit: int, request: LeaseRequest) -> list[Grant]:
        taken: list[Grant] = []
        for subjects in ready.windows(priority, group, request):
            members = [(subject, kind) for subject in subjects for kind in map(int, request.takes.kinds)]
            prefix = self._lease_id_prefix()
            rows = self._session.claim(
                Queues(priority, group, members, limit - len(taken)), self._terms(prefix, request, epoch=None)
            )
            taken += self._granted(rows, group, prefix, request)
            if len(taken) == limit:
                break
        return taken

    def _lease_named(self, request: LeaseRequest) -> list[Grant]:
        grants: list[Grant] = []
        for job_id in dict.fromkeys(request.job_ids):
            if len(grants) >= request.limit:
                break
            found = self._session.rows("named", (job_id,))
            if not found:
                continue
            *row, group, ready, expires_at, not_after = found[0]
            if is_late(not_after, self.clock.wall()):
                continue
            is_over = expires_at is not None and expires_at <= self.clock.lease()
            if ready == READY or (is_over and self._take_from_lost(job_id, request.worker_id)):
                grants.append(self._grant(row, group, request))
        return grants

    def _take_from_lost(self, job_id: str, by: str) -> bool:
        """A lease that is over, asked for by job_id before the reaper came: the loss counts. False if that ended the job."""
        row = self._row(job_id)
        assert row is not None
        verdict = self._loss(row)
        if verdict.state.terminal:
            self._end_attempt(row, verdict, None)
            self._write_settled()
            return False
        reason = f"{verdict.reason}; taken over by {by}"
        self._incident(row, "taken_over", worker_id=row.assigned_worker_id or "", reason=reason)
        must_change(1, self._session.change("take_from_lost", (row.id, row.version, verdict.losses, self.clock.lease())))
        return True

    def _grant(self, row: list[Any], group: str, to: LeaseRequest | Assignment, epoch: int | None = None) -> Grant:
        """Lease a row that was just read as ready, and locked: (id, job_id, spec, submitter, attempt, state, result_sha256)."""
        prefix = self._lease_id_prefix()
        changed = self._session.change("grant", (*self._terms(prefix, to, epoch), self._session.ids([row[0]])))
        if changed != 1:
            raise Unavailable(f"job {row[1]!r} was leased by another writer meanwhile; nothing of this was stored")
        return self._granted([row], group, prefix, to)[0]

    def _lease_id_prefix(self) -> str:
        """128 random bits nobody can guess, once per call; the row id behind them makes each lease_id its own."""
        return self._random(LEASE_ID_BYTES).hex() + "."

    def _terms(self, prefix: str, to: LeaseRequest | Assignment, epoch: int | None) -> tuple[Any, ...]:
        """The parameters of a grant."""
        return (
            prefix,
            to.worker_id,
            to.incarnation,
            lease_over_at(self.clock, to),
            to.ttl_s,
            to.on_disconnect.value,
            to.reconnect_grace_s,
            self.clock.wall(),
            epoch,
        )

    def _granted(self, rows: list[Any], group: str, prefix: str, to: LeaseRequest | Assignment) -> list[Grant]:
        """What follows from grants of rows of one group."""
        if not rows:
            return []
        self._count_grants(rows, group)
        self._clear_results([row[0] for row in rows if row[6] is not None])
        ttl_s = to.ttl_s
        return [Grant(row[1], row[2], row[3], f"{prefix}{row[0]}", row[4] + 1, ttl_s) for row in rows]

    def _count_grants(self, rows: list[Any], group: str) -> None:
        states = [row[5] for row in rows]
        pending, orphaned = states.count(_PENDING), states.count(_ORPHANED)
        self._count(group, State.PENDING, -pending)
        self._count(group, State.ORPHANED, -orphaned)
        self._count(group, State.ASSIGNED, pending + orphaned)

    def assign(self, assignments: Sequence[Assignment], *, epoch: int) -> list[Grant | None]:
        with self._turn:
            self._check_epoch(epoch)
            return [self._assign(assignment, epoch) for assignment in assignments]

    def _assign(self, assignment: Assignment, epoch: int) -> Grant | None:
        found = self._session.rows("named", (assignment.job_id,))
        if not found:
            return None
        *row, group, ready, _expires_at, not_after = found[0]
        if ready != READY or is_late(not_after, self.clock.wall()):
            return None
        return self._grant(row, group, assignment, epoch)

    def held(self, holders: Sequence[tuple[str, str]]) -> list[list[Grant]]:
        grants: dict[tuple[str, str], list[Grant]] = {holder: [] for holder in holders}
        now = self.clock.lease()
        for row in self._read(lambda session: session.rows("held", session.holders(list(grants)))):
            worker_id, incarnation, job_id, spec, submitter, lease_id, attempt, over_at, on_disconnect, grace_s = row
            expires_at = over_at - (grace_s if on_disconnect == OnDisconnect.KEEP.value else 0.0)
            if expires_at > now:
                # What is left, not the whole: this does not renew. The worker counts from its last answered heartbeat, so its
                # own deadline lies before ours.
                left_s = max(0.0, expires_at - LEASE_MARGIN_S - now)
                grants[worker_id, incarnation].append(Grant(job_id, spec, submitter, lease_id, attempt, left_s))
        return [list(grants[holder]) for holder in holders]


def lease_over_at(clock: Clock, to: LeaseRequest | Assignment) -> float:
    """When reaping may end a lease that is granted now."""
    grace_s = to.reconnect_grace_s if to.on_disconnect is OnDisconnect.KEEP else 0.0
    return clock.lease() + to.ttl_s + LEASE_MARGIN_S + grace_s
