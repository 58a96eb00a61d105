"""The verbs of clients and operators on the SQL store: submit, cancel, requeue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from tasuki.core.election import LEADER_SCOPE
from tasuki.core.job import JobSpec, Outcome, State, differing_fields, is_run_id
from tasuki.core.lifecycle import JobEvent, after, attempt_again, cancel_is_immediate, not_after_again
from tasuki.core.scheduler.firing import FiringState
from tasuki.core.store_messages import Canceled, MissingBlobs, Requeued, Submission, Submitted, kind_of, storable_text
from tasuki.core.subject import group_of
from tasuki.errors import Conflict, Unavailable
from tasuki.stores.common import check_on_failed, input_refs, requeue_reason
from tasuki.stores.firing import going_on
from tasuki.stores.sql.database import NOTHING_STORED, Transaction, must_change
from tasuki.stores.sql.rows import READY, JobRow, decode_spec, encode_spec, job_of, outcome_of, ready_value
from tasuki.stores.store import Answered

if TYPE_CHECKING:
    from tasuki.stores.sql.postgres_session import PostgresSession

KNOWN_AT_ONCE = 64  # rows of known ids that are in memory at a time: with its lists one may have 3 MiB
_PLAIN = (5, 3, 3)  # the values of submit_plain, in the order of _is_plain; its backoff is HANDLER_BACKOFF_S


def submit(tx: Transaction, submissions: Sequence[Submission], *, on_failed: str = "return") -> list[Answered]:
    rerun = check_on_failed(on_failed)
    has_files = any(submission.spec.files for submission in submissions)
    answers = _insert_with_files(tx, submissions, rerun) if has_files else _insert(tx, submissions, rerun)
    tx.at("submit.written")
    return answers


def enqueue(session: PostgresSession, submissions: Sequence[Submission]) -> list[Answered]:
    """Insert jobs without input files in one statement of the caller's transaction; a second one reads ids that were known."""
    rows = [(*_plain_values(submission), *_further_values(submission)) for submission in submissions]
    new_ids = session.enqueue(rows)
    if len(new_ids) == len(submissions):
        return [Submitted(submission.spec.job_id, True) for submission in submissions]
    names = [submission.spec.job_id for submission in submissions]
    known = {row[1]: JobRow._make(row) for row in session.rows("rows_seen", (session.listed(names),))}
    new = {job_id for job_id, row in known.items() if row.id in new_ids}
    answers: list[Answered] = []
    for submission in submissions:
        job_id = submission.spec.job_id
        if job_id in new:
            new.remove(job_id)
            answers.append(Submitted(job_id, True))
        else:
            answers.append(_judge_known(submission, known))
    return answers


def _insert_with_files(tx: Transaction, submissions: Sequence[Submission], rerun: bool) -> list[Answered]:
    """Insert all but the new jobs whose input blobs are not all stored. A known id is answered as known, whatever its blobs."""
    inputs = [input_refs(submission.spec) for submission in submissions]
    stored = tx.stored_among(chain.from_iterable(inputs))
    missing = [tuple(sorted({ref.sha256 for ref in refs if ref not in stored})) for refs in inputs]
    ids = [submission.spec.job_id for submission in submissions]
    known = set(tx.rows_unlocked(job_id for job_id, sha256s in zip(ids, missing, strict=True) if sha256s))
    refused: dict[int, MissingBlobs] = {}
    for index, (job_id, sha256s) in enumerate(zip(ids, missing, strict=True)):
        if sha256s and job_id not in known:
            refused[index] = MissingBlobs(job_id, sha256s)
        else:
            known.add(job_id)  # for the same id again in this batch
    if not refused:
        return _insert(tx, submissions, rerun)
    rest = [submission for index, submission in enumerate(submissions) if index not in refused]
    answers = iter(_insert(tx, rest, rerun) if rest else ())
    return [refused[index] if index in refused else next(answers) for index in range(len(ids))]


def _insert(tx: Transaction, submissions: Sequence[Submission], rerun: bool) -> list[Answered]:
    wall = tx.clock.wall()
    # One statement kind for the whole batch: two would give the rows another order than the batch has.
    if all(_is_plain(submission.spec) for submission in submissions):
        name, rows = "submit_plain", [_plain_values(submission) for submission in submissions]
    else:
        name, rows = "submit_full", [_full_values(submission, wall) for submission in submissions]
    answers: list[Answered] = []
    start = 0
    for size, created, new_ids in tx.session.insert(name, wall, rows):
        batch = submissions[start : start + size]
        start += size
        if created == size:
            answers += [Submitted(submission.spec.job_id, True) for submission in batch]
            _count_created(tx, batch)
        else:
            answers += _answer_partly_known(tx, batch, new_ids, rerun)
    return answers


def _count_created(tx: Transaction, batch: Sequence[Submission]) -> None:
    """Count new jobs, and write their references to input blobs."""
    specs = [submission.spec for submission in batch]
    for subject, n in Counter([spec.subject for spec in specs]).items():
        tx.count(group_of(subject), State.PENDING, n)
    for spec in specs:
        if spec.files:
            for sha256 in sorted({ref.sha256 for ref in input_refs(spec)}):
                tx.session.change("add_blob", (spec.job_id, sha256, "in"))


def _answer_partly_known(tx: Transaction, batch: Sequence[Submission], new_ids: Collection[int], rerun: bool) -> list[Answered]:
    """Return the answers for a batch of which some ids existed."""
    # Rows are locked only if they may be requeued: repeats are common, and change nothing. Locked at once, in one order.
    size = len(batch) if rerun else KNOWN_AT_ONCE
    left = set(new_ids)
    answers: list[Answered] = []
    created: list[Submission] = []
    for start in range(0, len(batch), size):
        some = batch[start : start + size]
        rows = (tx.rows if rerun else tx.rows_unlocked)(submission.spec.job_id for submission in some)
        for submission in some:
            job_id = submission.spec.job_id
            if job_id in rows and rows[job_id].id in left:
                left.remove(rows[job_id].id)  # the same id again in this batch is a repeat
                created.append(submission)
                answers.append(Submitted(job_id, True))
            else:
                answers.append(_answer_known(tx, submission, rows, rerun))
    _count_created(tx, created)
    return answers


def _answer_known(tx: Transaction, submission: Submission, rows: dict[str, JobRow], rerun: bool) -> Submitted | Conflict:
    answer = _judge_known(submission, rows)
    job_id = submission.spec.job_id
    row = rows[job_id]
    if isinstance(answer, Conflict) or not rerun or row.submitter != submission.submitter:
        return answer
    if row.job_state.terminal and row.job_state is not State.SUCCEEDED:
        _requeue(tx, [row], actor=submission.submitter, reason="submitted again")
        rows.update(tx.rows((job_id,)))
    return Submitted.before(job_of(rows[job_id]))


def _judge_known(submission: Submission, rows: dict[str, JobRow]) -> Submitted | Conflict:
    """Return the job that has the submission's id, or a Conflict if that is another one."""
    job_id = submission.spec.job_id
    row = rows.get(job_id)
    if row is None:
        raise Unavailable(f"job {job_id!r} was deleted while it was submitted again; {NOTHING_STORED}, try again")
    if row.body_hash != submission.body_hash:
        return Conflict(job_id, differing_fields(decode_spec(row.spec), submission.spec), (row.submitter, row.subject))
    return Submitted.before(job_of(row))


def cancel(tx: Transaction, job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[Canceled]:
    rows = tx.rows(job_ids)
    requested: list[JobRow] = []
    answers = []
    for job_id in job_ids:
        row = rows.get(job_id)
        answers.append(Canceled(None) if row is None else _cancel(tx, row, requested, actor, reason))
        if row is not None:  # if the batch names the job again, that one sees what this one did
            canceled = answers[-1]
            rows[job_id] = row._replace(state=str(canceled.state), cancel_requested=int(canceled.requested))
    tx.write_state_changes()
    batch = [(row.id, row.version) for row in requested]
    must_change(len(batch), tx.session.changed("request_cancels", (), batch))
    return answers


def _cancel(tx: Transaction, row: JobRow, requested: list[JobRow], actor: str, reason: str) -> Canceled:
    state = row.job_state
    if state.terminal:
        return Canceled(state)
    if cancel_is_immediate(state) or row.is_unfetched:
        outcome = Outcome(error_code="CANCELED", message=storable_text(reason) or f"canceled by {actor}")
        tx.incident(row, "canceled", actor=actor, reason=reason)
        ended = after(state, JobEvent.CANCEL)
        tx.end_waiting(row, ended, outcome)
        return Canceled(ended, group=row.group)
    if not row.cancel_requested:
        tx.incident(row, "cancel_requested", worker_id=row.assigned_worker_id or "", actor=actor, reason=reason)
        requested.append(row)
    return Canceled(state, True, row.assigned_worker_id, row.lease_id)


def requeue(
    tx: Transaction, job_ids: Sequence[str], *, actor: str, reason: str = "", generation: int | None = None
) -> list[Requeued]:
    overlap = _Overlap(tx, [job_id for job_id in job_ids if is_run_id(job_id)])
    rows = tx.rows(job_ids)
    ended: list[JobRow] = []
    answers = []
    for job_id in job_ids:
        row = rows.get(job_id)
        may = row is not None and row.job_state.terminal and generation in (None, row.generation)
        still_running = overlap.still_running(job_id) if may else None
        if row is not None and may and still_running is None:
            ended.append(row)
            rows[job_id] = row._replace(state=State.PENDING.value)
            overlap.begins(job_id)
        answers.append(
            Requeued(may and still_running is None, rows[job_id].job_state, still_running, row.group)
            if row is not None
            else Requeued(False, None)
        )
    _requeue(tx, ended, actor=actor, reason=reason)
    overlap.write()
    return answers


class _Overlap:
    """The notes on definitions of which runs are to be run again: locked, so that neither the leader nor another requeue begins a
    run of the same definition meanwhile. Locked before the rows of jobs, everywhere."""

    def __init__(self, tx: Transaction, runs: list[str]) -> None:
        self._tx = tx
        found = tx.session.rows("notes_of_runs", (tx.session.listed(runs),)) if runs else ()
        self._definition_of: dict[str, int] = {job_id: number for job_id, number, *_ in found}
        self._notes = {number: FiringState(last_run_id=last, waits_for=waits_for) for _, number, last, waits_for in found}
        others = {job_id for notes in self._notes.values() for job_id in (notes.last_run_id, notes.waits_for) if job_id}
        self._states = {job_id: row.job_state for job_id, row in tx.rows_unlocked(others).items()}
        self._begun: dict[int, str] = {}

    def still_running(self, job_id: str) -> str | None:
        number = self._definition_of.get(job_id)
        return going_on(self._notes[number], self._states) if number is not None else None

    def begins(self, job_id: str) -> None:
        number = self._definition_of.get(job_id)
        if number is not None:
            self._notes[number] = FiringState(last_run_id=job_id)
            self._states[job_id] = State.PENDING
            self._begun[number] = job_id

    def write(self) -> None:
        self._tx.session.changed("run_again", (), list(self._begun.items()))


def _requeue(tx: Transaction, rows: list[JobRow], *, actor: str, reason: str) -> None:
    wall = tx.clock.wall()
    epoch = max((found for found, _ in tx.session.rows("epoch_seen", (LEADER_SCOPE,))), default=0)
    batch = []
    for row in rows:
        why = requeue_reason(row.state, outcome_of(row), reason)
        tx.incident(row, "requeued", worker_id=row.assigned_worker_id or "", actor=actor, reason=why)
        spec = decode_spec(row.spec)
        not_after = not_after_again(spec.not_after, wall)
        ready = ready_value(spec.not_before, wall)
        if ready == READY:
            tx.comes_back(row.queue, row.id)
        batch.append((row.id, row.version, ready, spec.not_before, not_after, attempt_again(row.attempt, epoch)))
        tx.count_move(row.group, row.job_state, after(row.job_state, JobEvent.REQUEUE))
    must_change(len(batch), tx.session.changed("requeue", (), batch))
    tx.clear_results([row.id for row in rows])


def _is_plain(spec: JobSpec) -> bool:
    """Return whether the statement with fewer columns will do: it has right values for the others."""
    return (
        spec.not_before is None
        and spec.not_after is None
        and spec.array_id is None
        and not spec.exec
        and spec.backoff_s is None
        and (spec.priority, spec.max_retries, spec.max_losses) == _PLAIN
    )


def _plain_values(submission: Submission) -> tuple[Any, ...]:
    spec = submission.spec
    subject = spec.subject
    return (spec.job_id, subject, group_of(subject), submission.submitter, submission.body_hash, encode_spec(spec))


def _full_values(submission: Submission, wall: float) -> tuple[Any, ...]:
    further = _further_values(submission)
    return (*_plain_values(submission), *further[:3], ready_value(submission.spec.not_before, wall), *further[3:])


def _further_values(submission: Submission) -> tuple[Any, ...]:
    spec = submission.spec
    return (
        spec.exec,
        int(kind_of(spec.exec, submission.submitter)),
        spec.priority,
        spec.not_before,
        spec.not_after,
        spec.max_retries,
        spec.max_losses,
        spec.retry_backoff_s,
        spec.array_id,
    )
