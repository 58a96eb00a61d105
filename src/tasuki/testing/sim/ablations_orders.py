"""Safeguards of the stores against what clients order, and of the leader's duties. See `ablations_store.py`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tasuki.core.job import Outcome, State
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tasuki.core.store_messages import Canceled
from tasuki.stores.memory import reports
from tasuki.stores.memory.records import MemoryJob
from tasuki.stores.memory.store import MemoryStore
from tasuki.stores.sql import lease, report, submit
from tasuki.stores.sql.transaction import Transaction
from tasuki.testing.sim.ablations_store import BOTH, EARLY_S, LOSSES, Method, ahead
from tasuki.testing.sim.options import SimOptions
from tasuki.testing.sim.patches import Ablation, Instead, Reworded

_KNOWN = "ON CONFLICT (idempotency_key) DO NOTHING"

# What leaves a leader with a term that is over, and turns of it still to come.
RIVALS = ("pause", "store_cut", "store_slow", "coordination_cut", "coordination_lost", "coordination_late", "slow")


# ---------------------------------------------------------------------------------------------------- clients


def _created_again(submit: Method) -> Method:
    def _submit(self: Any, submission: Any, *, rerun: bool) -> Any:
        record = self._records.get(submission.spec.job_id)
        if record is not None and record.job.body_hash == submission.body_hash:
            self._put(submission.spec.job_id, None)
        return submit(self, submission, rerun=rerun)

    return _submit


def _any_body(submit: Method) -> Method:
    def _submit(self: Any, submission: Any, *, rerun: bool) -> Any:
        record = self._records.get(submission.spec.job_id)
        if record is not None:
            submission = replace(submission, body_hash=record.job.body_hash)
        return submit(self, submission, rerun=rerun)

    return _submit


def _any_body_in_sql(answer_known: Method) -> Method:
    def _answer_known(tx: Any, submission: Any, rows: Any, rerun: bool) -> Any:
        return answer_known(tx, replace(submission, body_hash=rows[submission.spec.job_id].body_hash), rows, rerun)

    return _answer_known


def _ends_what_is_over(cancel: Method) -> Method:
    def _cancel(self: Any, job_id: str, *rest: Any) -> Any:
        record = self._records.get(job_id)
        if record is not None and record.job.state.terminal:
            self._put(job_id, replace(record, job=replace(record.job, state=State.PENDING)))
        return cancel(self, job_id, *rest)

    return _cancel


def _ends_what_is_over_in_sql(cancel: Method) -> Method:
    def _cancel(tx: Any, row: Any, *rest: Any) -> Any:
        if not row.job_state.terminal:
            return cancel(tx, row, *rest)
        outcome = Outcome(error_code="CANCELED", message="canceled")
        tx.end_waiting(row, State.CANCELED, outcome)
        return Canceled(State.CANCELED)

    return _cancel


def _forgets_the_cancel(judge: Method) -> Method:
    return lambda *given, **named: judge(*given, **{**named, "cancel_requested": False})


def _any_state(requeue_one: Method) -> Method:
    def _requeue_one(self: Any, job_id: str, *rest: Any) -> Any:
        record = self._records.get(job_id)
        if record is not None and not record.job.state.terminal:
            ended = replace(record.job, state=State.FAILED, lease=None, finished_at=self.clock.wall())
            self._put(job_id, replace(record, job=ended, delayed=False))
        return requeue_one(self, job_id, *rest)

    return _requeue_one


def _spent(requeue: Method) -> Method:
    def _requeue(self: Any, record: Any, **named: Any) -> Any:
        spent = {"failures": record.job.failures, "losses": record.job.losses}
        again = requeue(self, record, **named)
        again = replace(again, job=replace(again.job, **spent))
        self._put(again.job.job_id, again)
        return again

    return _requeue


_OF_CLIENTS = (
    Ablation(
        name="unique_id",
        what="an id that is stored is not stored again",
        invariants=("I2",),
        seams=(
            Instead(MemoryStore, "_submit", _created_again),
            Reworded("submit_full", _KNOWN, "ON CONFLICT (idempotency_key) DO UPDATE SET created_at = excluded.created_at"),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="body_hash",
        what="the same id with another body is refused",
        invariants=("I2",),
        seams=(
            Instead(MemoryStore, "_submit", _any_body),
            Instead(submit, "_answer_known", _any_body_in_sql),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="cancel_after_the_end",
        what="a cancel leaves a terminal job as it is",
        invariants=("I4", "I14"),
        seams=(
            Instead(MemoryStore, "_cancel", _ends_what_is_over),
            Instead(submit, "_cancel", _ends_what_is_over_in_sql),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="cancel_is_kept",
        what="a job whose cancel was asked for is not tried again",
        invariants=("I14",),
        seams=tuple(
            Instead(module, name, _forgets_the_cancel) for module in (reports, report) for name in ("after_failure", "after_loss")
        ),
        stores=BOTH,
    ),
    Ablation(
        name="requeue_after_the_end",
        what="only a terminal job is set going again",
        invariants=("I4",),
        seams=(Instead(MemoryStore, "_requeue_one", _any_state),),
    ),
    Ablation(
        name="budgets_reset",
        what="a job that is set going again has both budgets whole",
        invariants=("I4", "I11"),
        seams=(
            Instead(MemoryStore, "_requeue", _spent),
            Reworded("requeue", "failures = 0, losses = 0, "),
        ),
        stores=BOTH,
    ),
)


# ---------------------------------------------------------------------------------------------------- the leader


def _any_epoch(take_over: Method) -> Method:
    def _take_over(self: Any, holder: str, epoch: int) -> bool:
        self._epoch = (min(self._epoch[0], epoch - 1), self._epoch[1])
        return bool(take_over(self, holder, epoch))

    return _take_over


def _renews_nothing(take_over: Method) -> Method:
    def _take_over(self: Any, holder: str, epoch: int) -> bool:
        leased, self._leased = self._leased, []
        try:
            return bool(take_over(self, holder, epoch))
        finally:
            self._leased = leased

    return _take_over


_OF_THE_LEADER = (
    Ablation(
        name="epoch_fence",
        what="a duty is written only under the latest epoch",
        invariants=("I8",),
        seams=(
            Instead(MemoryStore, "_check_epoch", lambda _: lambda *_: None),
            Instead(Transaction, "check_epoch", lambda _: lambda *_: None),
        ),
        options=SimOptions(servers=3, lock_ttl_s=2.0, kinds=RIVALS),
        stores=BOTH,
    ),
    Ablation(
        name="rising_epochs",
        what="an epoch is registered only if it is higher than the last",
        invariants=("I7",),
        seams=(
            Instead(MemoryStore, "take_over", _any_epoch),
            Reworded("take_over", " WHERE epoch < excluded.epoch"),
        ),
        options=SimOptions(servers=3, lock_ttl_s=2.0, kinds=("store_slow", "store_cut", "coordination_cut"), faults=30),
        stores=BOTH,
    ),
    Ablation(
        name="renewal_at_takeover",
        what="a new leader takes every live lease for renewed, once",
        invariants=("lease",),
        seams=(
            Instead(MemoryStore, "take_over", _renews_nothing),
            Reworded("renew_all", "WHERE lease_expires_at IS NOT NULL", "WHERE 0"),
        ),
        options=SimOptions(lease_ttl_s=2.0, kinds=("crash", "power", "store_cut", "partition")),
        stores=BOTH,
    ),
    Ablation(
        name="reap_expiry",
        what="a lease is ended by the leader only when it is over",
        invariants=("lease",),
        seams=(
            Instead(MemoryStore, "reap", ahead),
            Reworded("leases_over", "lease_expires_at <= ?1", f"lease_expires_at <= ?1 + {EARLY_S}"),
        ),
        stores=BOTH,
    ),
    Ablation(
        name="reconnect_grace",
        what="a lease with on_disconnect=keep lasts longer by its grace",
        invariants=("lease",),
        seams=(
            Instead(MemoryJob, "over_at", lambda _: property(lambda record: record.job.lease.expires_at)),
            Instead(lease, "lease_over_at", lambda _: lambda clock, to: clock.lease() + to.ttl_s + LEASE_MARGIN_S),
            Reworded("renew", " + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END"),
            Reworded("renew_all", " + CASE on_disconnect WHEN 'keep' THEN reconnect_grace_s ELSE 0 END"),
        ),
        options=SimOptions(kinds=LOSSES),
        stores=BOTH,
    ),
)

ORDERS = (*_OF_CLIENTS, *_OF_THE_LEADER)
