"""Operations on the jobs of a project, for management commands and screens: look, explain, cancel, run again, prune.

Each works on the project's database with the calling thread's connection; a worker need not be there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from django.db import connections, transaction

from tasuki.coords.coordination import MEMBER_TIMEOUT_S
from tasuki.core.cluster_messages import Hint, ServerInfo, WorkerInfo
from tasuki.core.explain import ExplainContext, explain
from tasuki.core.job import Job, State
from tasuki.core.store_messages import Filter, Page
from tasuki.core.subject import check_pattern
from tasuki.django.conf import project_settings
from tasuki.django.enqueueing import hint_after_commit, patterns_of, project_store
from tasuki.django.models import Event, LogChunk
from tasuki.errors import InvalidInput, NotFound, quoted
from tasuki.server.queries import describe

DAY_S = 86_400.0
_decode_server = msgspec.msgpack.Decoder(ServerInfo).decode


def find_page(
    *,
    states: Sequence[str] = (),
    subject: str | None = None,
    worker_id: str | None = None,
    text: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page:
    """Return a page of jobs, the newest first."""
    for state in states:
        if state not in State.__members__:
            raise InvalidInput(f"state {quoted(state)} is none of {', '.join(State.__members__)}")
    if subject is not None:
        check_pattern(subject)
    wanted = Filter(states=tuple(State(state) for state in states), subject=subject, worker_id=worker_id, text=text)
    return project_store().find(wanted, limit=limit, cursor=cursor)


def find_runs(*, limit: int = 50, **wanted: Any) -> Iterator[dict[str, Any]]:
    """Yield jobs, the newest first, as `describe` shows them; filtered as by `find_page`."""
    cursor, found = None, 0
    while found < limit:
        page = find_page(**wanted, limit=min(limit - found, 100), cursor=cursor)
        yield from (describe(job, in_list=True) for job in page.jobs)
        found, cursor = found + len(page.jobs), page.cursor
        if cursor is None:
            return


def get_run(job_id: str) -> Job:
    """Return a job, or raise NotFound."""
    [job] = project_store().get([job_id])
    if job is None:
        raise NotFound(f"there is no job {quoted(job_id)} in this project")
    return job


def explain_run(job_id: str) -> dict[str, Any]:
    """Return why a job waits, runs where it does, or ended as it did."""
    job, store = get_run(job_id), project_store()
    workers = [worker.view(server_id) for server_id, worker in live_workers()]
    around = ExplainContext(
        workers=workers,
        ahead=store.ready_ahead(job_id),
        top_band=store.top_band(),
        now_wall=store.clock.wall(),
        start_worker="python manage.py tasuki_worker",
        run_again="python manage.py tasuki_runs rerun",
    )
    return explain(job, store.incidents(job_id), around)


def live_workers() -> list[tuple[str, WorkerInfo]]:
    """Return the live workers with the ids of their servers."""
    alias = project_settings().database
    if connections[alias].vendor == "sqlite":
        return _owner_of(Path(str(connections[alias].settings_dict["NAME"])).resolve())
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT info FROM tasuki_member WHERE abs(extract(epoch FROM clock_timestamp()) - beat_at) < %s", [MEMBER_TIMEOUT_S]
        )
        servers = [_decode_server(bytes(info)) for (info,) in cursor.fetchall()]
    return [(server.server_id, worker) for server in servers for worker in server.workers]


def _owner_of(file: Path) -> list[tuple[str, WorkerInfo]]:
    """Return the one node of a SQLite file, if it runs: it holds the lock beside the file. Its queues are not known here."""
    try:
        descriptor = os.open(file.with_name(file.name + ".owner"), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        name = os.read(descriptor, 200).decode("utf-8", "replace").partition(" since")[0]
        return [(name, WorkerInfo(name, "", patterns=patterns_of("*")))]
    finally:
        os.close(descriptor)
    return []


def cancel_runs(job_ids: Sequence[str], *, actor: str, reason: str = "") -> list[State]:
    """Cancel jobs, and return their states: a running one is CANCELED when its worker has ended it."""
    jobs = [get_run(job_id) for job_id in job_ids]
    canceled = project_store().cancel([job.job_id for job in jobs], actor=actor, reason=reason)
    leases = tuple((one.worker_id, one.lease_id) for one in canceled if one.requested and one.worker_id and one.lease_id)
    if leases:
        hint_after_commit(project_settings().database, Hint(canceled=leases))
    return [one.state for one in canceled if one.state is not None]


def rerun(job_ids: Sequence[str], *, actor: str, reason: str = "") -> None:
    """Run ended jobs again, under their ids: all or none. InvalidInput for one that has not ended, or that another run of its
    definition keeps from it by the definition's concurrency_policy."""
    alias = project_settings().database
    jobs = [get_run(job_id) for job_id in job_ids]
    with transaction.atomic(using=alias):
        answers = project_store().requeue([job.job_id for job in jobs], actor=actor, reason=reason)
        for job, answer in zip(jobs, answers, strict=True):
            if answer.still_running is not None:
                text = f"run {answer.still_running} of the same definition has not ended, and its concurrency_policy forbids two"
                raise InvalidInput(f"job {quoted(job.job_id)} cannot run now: {text}; wait for that one, or cancel it")
            if not answer.done:
                raise InvalidInput(f"job {quoted(job.job_id)} is {answer.state}, not ended; cancel it first")
        hint_after_commit(alias, Hint(ready=tuple({job.spec.subject for job in jobs})))


def prune(*, days: float, logs_days: float) -> dict[str, int]:
    """Delete jobs that ended, events that were processed, and logs that were written longer ago than so many days."""
    alias, store = project_settings().database, project_store()
    now = store.clock.wall()
    before = now - days * DAY_S
    events, _ = Event.objects.using(alias).filter(processed_at__lt=before).delete()
    logs, _ = LogChunk.objects.using(alias).filter(at__lt=now - logs_days * DAY_S).delete()
    runs = 0
    # Under the epoch of whoever leads now: only rows of ended jobs are deleted, each once, whoever does it.
    while count := store.prune(before=before, epoch=store.epoch()[0]):
        runs += count
    return {"runs": runs, "events": events, "log_chunks": logs}
