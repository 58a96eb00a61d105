"""Rules that all back ends share, so that they agree: texts, blob generations, filters, incidents, retries of a turn,
fairness. Pure.

Blob generations. A generation is never used twice for one sha256: a deleter that wakes up after an hour must not find new bytes
under the name that it was told to delete. While a condemned row exists, the next generation is higher by one. Once the row is
forgotten nothing remembers it, so generations also grow with time: a forgotten blob had been unused for the grace time of
collection, which is longer than the second in which two generations could meet.

Retries. A turn is one transaction, so all of it is tried again: nothing of the interrupted one was stored. `Fenced` and
`StaleEpoch` are final answers, not interruptions.

Fairness. The group that was served longest ago comes first, so that no group's flood delays another's job. The order of service
is not durable: after a restart all groups start level again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from tasuki.clocks import boot_time
from tasuki.core import subject as subjects
from tasuki.core.backoff import Backoff
from tasuki.core.job import BlobRef, JobIncident, JobSpec, Outcome, definition_of, first_clash
from tasuki.core.lifecycle import Disposition, JobEvent
from tasuki.core.store_messages import CachedFile, CacheEntry, CacheOrder, Filter, MissingBlobs, Report
from tasuki.errors import CacheConflict, InterruptCause, InvalidInput, StaleEpoch

GENERATIONS_BEGIN_AT = 1_767_225_600  # 2026-01-01T00:00:00Z; in 32 bits there is room until 2094

RETRY_S = 30.0  # how long a lost connection is tried for: a restart of the database takes seconds, a failover some ten
LEADER_RETRY_S = 1.0  # the same for a leader's turn: what it is to end is decided anew after a longer time
CONFLICT_TRIES = 5
TIMEOUT_TRIES = 3  # a statement that ran out of time is tried twice more: the third time it is not bad luck
FIRST_WAIT_S = 0.01
LOST_WAIT_MAX_S = 2.0

TAKEN_BACK = "its worker had not fetched it, and the leader chooses another"
LEASES_ENDED_MAX = 500  # of one holder in one call: some 20 ms of a transaction; the caller asks again

INCIDENT_OF: dict[JobEvent, str] = {
    JobEvent.RETRY: "failed",
    JobEvent.FAIL: "dead_lettered",
    JobEvent.TIME_OUT: "dead_lettered",
    JobEvent.LOSE: "lost",
    JobEvent.ORPHAN: "orphaned",
    JobEvent.CANCEL: "canceled",
    JobEvent.SKIP: "skipped",
}
"""Incident kind for each event that ends an attempt, or a job, without success."""

matches = lru_cache(65_536)(subjects.matches)  # leasing asks for the same few pairs again and again


class SystemClock:
    """The clocks of this machine: the boot clock for leases, the wall clock for times that people read."""

    def lease(self) -> float:
        return boot_time()

    def wall(self) -> float:
        return time.time()


class Retries:
    """The tries of one interrupted turn, `leads`: a leader's. `random()` returns 0 to 1; waiting is the caller's."""

    def __init__(self, now: float, random: Callable[[], float], *, leads: bool = False) -> None:
        self._until = now + (LEADER_RETRY_S if leads else RETRY_S)
        self._lost = Backoff(FIRST_WAIT_S, LOST_WAIT_MAX_S, random)
        self._conflict = Backoff(FIRST_WAIT_S, jitter=random)
        self._seen = dict.fromkeys(InterruptCause, 0)

    def wait_s(self, why: InterruptCause, now: float) -> float | None:
        """Return how long to wait before the next try; None if there is none."""
        self._seen[why] += 1
        seen = self._seen[why]
        if why is InterruptCause.CONNECTION:
            if now >= self._until:
                return None
            # At once first: a new connection is enough after a backend was ended or a connection idled too long.
            return 0.0 if seen == 1 else self._lost.delay_s(seen)
        if seen >= (CONFLICT_TRIES if why is InterruptCause.CONFLICT else TIMEOUT_TRIES):
            return None
        return self._conflict.delay_s(seen)


def lowest_generation(wall: float) -> int:
    """Return the generation of a blob that has no row at this time."""
    return max(0, int(wall) - GENERATIONS_BEGIN_AT)


def check_on_failed(on_failed: str) -> bool:
    """Return whether failed jobs are to be run again; InvalidInput for an unknown word."""
    if on_failed not in ("return", "rerun"):
        raise InvalidInput(f"on_failed must be 'return' or 'rerun', got {on_failed!r}")
    return on_failed == "rerun"


def stale_epoch(epoch: int, current: int, holder: str) -> StaleEpoch:
    """Return the error for a leader's verb with an epoch that is not the registered one."""
    return StaleEpoch(f"epoch {epoch} does not lead, {current} does ({holder or 'nobody'}); step down")


def unknown_cursor(cursor: str) -> InvalidInput:
    """Return the error for a cursor that no page ended with."""
    return InvalidInput(f"cursor {cursor[:40]!r} is not one that find gave")


def outcome_of_unstarted(worker_id: str) -> Outcome:
    """Return the outcome of a canceled job that its worker gives back."""
    return Outcome(error_code="CANCELED", message=f"canceled; {worker_id} had not started it")


def outcome_of_lost(disposition: Disposition) -> Outcome:
    """Return the outcome of a job whose last attempt ended without a report."""
    return Outcome(error_code="CANCELED" if disposition.event is JobEvent.CANCEL else "LOST", message=disposition.reason)


def input_refs(spec: JobSpec) -> list[BlobRef]:
    """Return the inputs of a job that are blobs."""
    return [BlobRef(file.sha256, file.size_bytes or 0) for file in spec.files if file.sha256 is not None]


def judge_cache(
    order: CacheOrder, known: Mapping[str, CachedFile], target: str | None, stored: Collection[BlobRef]
) -> list[CacheEntry] | CacheConflict | MissingBlobs:
    """Return the files that are new in a cache, or why the order cannot be carried out.

    `known` are those of its names that the cache has, `target` is the cache's own (None: it is new), `stored` the blobs among
    those of the order that may be referred to.
    """
    if target is not None and target != order.target:
        return other_target(order.cache_id, target, order.target)
    for entry in order.entries:
        if (there := known.get(entry.name)) is not None and there.entry != entry:
            return other_file(order.cache_id, entry.name, there.sha256)
    missing = {entry.sha256 for entry in order.entries if BlobRef(entry.sha256, entry.size_bytes) not in stored}
    if missing:
        return MissingBlobs(order.cache_id, tuple(sorted(missing)))
    return [entry for entry in order.entries if entry.name not in known]


def judge_names(order: CacheOrder, known: Iterable[str], new: Iterable[CacheEntry]) -> CacheConflict | None:
    """Return why these files cannot be in the cache beside those of these names."""
    there = set(known)
    clash = first_clash({*there, *(entry.name for entry in new)})
    return None if clash is None else clashing_names(order.cache_id, *sorted(clash, key=lambda name: name not in there))


def clashing_names(cache_id: str, there: str, name: str) -> CacheConflict:
    return CacheConflict(
        f"cache {cache_id!r} has {there!r}, and cannot have {name!r} too: they differ only in case, or one is the folder of the "
        "other; rename the file, or use another cache_id",
        name=name,
    )


def other_target(cache_id: str, target: str, wanted: str) -> CacheConflict:
    return CacheConflict(f"cache {cache_id!r} is for {target!r}, not {wanted!r}; use that target, or another cache_id")


def other_file(cache_id: str, name: str, sha256: str) -> CacheConflict:
    return CacheConflict(
        f"cache {cache_id!r} has a file {name!r} with other bytes (sha256 {sha256}), which are not overwritten; "
        f"use another cache_id, or remove it first: tasuki cache rm {cache_id}",
        name=name,
    )


def missing_result(ref: BlobRef) -> str:
    """Return why a report is not recorded whose result is not stored, or has another size."""
    return f"its result, blob {ref.sha256} of {ref.size_bytes} bytes, is not stored; bring it again"


def fenced_reason(report: Report, attempt: int, state: str) -> str:
    """Return why a report that does not show the current lease is refused."""
    return f"attempt {report.attempt} of worker {report.worker_id} does not hold the lease; attempt {attempt} is {state}"


def belongs_to_story(report: Report, attempt: int, worker_id: str | None, incidents: Callable[[], Iterable[JobIncident]]) -> bool:
    """Return whether a fenced report becomes an incident: the first of its attempt, from a worker that had that attempt.

    A report of anybody else, however often it comes, leaves nothing behind in a job that is not theirs.
    """
    if not 0 < report.attempt <= attempt or (report.attempt == attempt and report.worker_id != worker_id):
        return False
    of_attempt = [incident for incident in incidents() if incident.attempt == report.attempt]
    if any(incident.kind == "fenced" for incident in of_attempt):
        return False
    return report.attempt == attempt or any(incident.worker_id == report.worker_id for incident in of_attempt)


def report_identity(report: Report, verb: str) -> tuple[str | int | None, ...]:
    """Return the fields by which a repeat of this report is recognized. Not the message: a program's log tail often differs."""
    outcome = report.outcome
    shown = (verb, report.worker_id, report.lease_id, report.attempt, report.owner)
    return (*shown, outcome.exit_code, outcome.error_code, outcome.result_sha256)


def requeue_reason(state: str, outcome: Outcome | None, reason: str) -> str:
    """Return the reason of the incident `requeued`, with the outcome that is about to be replaced."""
    was = f"was {state}"
    if outcome is not None and (outcome.message or outcome.error_code):
        was += f": {outcome.message or outcome.error_code}"
    return f"{reason}; {was}" if reason else was


def is_wanted(
    filter: Filter,
    job_id: str,
    state: str,
    subject: str,
    submitter: str,
    worker_id: str | bool | None,
    array_id: str | bool | None,
    created_at: float,
    texts: Iterable[str],
) -> bool:
    """Return whether a job with these fields passes the filter; `texts` are searched for `filter.text`."""
    if filter.states and state not in filter.states:
        return False
    if filter.subject is not None and not matches(filter.subject, subject):
        return False
    if filter.array_id is not None and array_id != filter.array_id:
        return False
    if filter.worker_id is not None and worker_id != filter.worker_id:
        return False
    if filter.definition_id is not None and definition_of(job_id) != filter.definition_id:
        return False
    if filter.created_from is not None and created_at < filter.created_from:
        return False
    if filter.created_until is not None and created_at >= filter.created_until:
        return False
    if filter.submitter is not None or filter.scope:
        is_own = submitter == filter.submitter
        if not is_own and not any(matches(pattern, subject) for pattern in filter.scope):
            return False
    return filter.text is None or any(filter.text in text for text in texts)


# ---------------------------------------------------------------------------------------------------- fairness

T = TypeVar("T")

REMEMBERED_GROUPS_MAX = 10_000  # past this the groups served longest ago are forgotten, which puts them first


class FairTurns:
    """Division of leases between groups, one round after the other."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, int] = OrderedDict()  # group -> number of its last service, the latest last
        self._number = 0

    def order(self, groups: Iterable[str]) -> list[str]:
        """Return the groups in order of service: never served ones first, by name, then those served longest ago."""
        return sorted(sorted(set(groups)), key=lambda group: self._served.get(group, 0))

    def fill(self, groups: Iterable[str], limit: int, take: Callable[[str, int], list[T]]) -> list[T]:
        """Take up to `limit` items evenly. `take(group, n)` returns at most n items of a group; fewer means it has no more."""
        taken: list[T] = []
        dealt: dict[str, int] = {}
        live = self.order(groups)
        while live and len(taken) < limit:
            quota, extra = divmod(limit - len(taken), len(live))
            still_live = []
            for place, group in enumerate(live):
                wanted = quota + (place < extra)
                got = take(group, wanted) if wanted else []
                taken += got
                dealt[group] = dealt.get(group, 0) + len(got)
                if len(got) == wanted:
                    still_live.append(group)
            # A group that got one item more than others comes after them for the next one, in this call and in the next.
            live = sorted(still_live, key=dealt.__getitem__)
        for group in sorted(filter(dealt.get, dealt), key=dealt.__getitem__):
            self._number += 1
            self._served[group] = self._number
            self._served.move_to_end(group)
            if len(self._served) > REMEMBERED_GROUPS_MAX:
                self._served.popitem(last=False)
        return taken
