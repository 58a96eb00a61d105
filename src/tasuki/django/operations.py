"""Operations on the jobs and nodes of a project, for management commands and screens.

Each works on the project's database with the calling thread's connection; a worker need not be there. `actor` is the user who
asks, whose permissions are checked, or the name of somebody who may do everything (a management command's). What was done is
noted in AdminActionLog: in the same transaction, or, of an order to a node, before it and again with its outcome.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from django.core.exceptions import ValidationError
from django.db import connections, models, transaction

from tasuki.coords.sql import SqlCoordination
from tasuki.core.cluster_messages import Hint, ServerInfo, WorkerInfo
from tasuki.core.explain import ExplainContext, explain, why_not_again
from tasuki.core.job import Job, State
from tasuki.core.pauses import PAUSES_MAX, PauseAnswer, PausedPattern, PauseOrder
from tasuki.core.scheduler.thresholds import Thresholds
from tasuki.core.store_messages import Filter, Page
from tasuki.core.subject import check_job_pattern
from tasuki.django import definitions
from tasuki.django.commands import enqueue_command
from tasuki.django.conf import file_of, project_settings
from tasuki.django.definitions import Applied, scheduler_settings
from tasuki.django.enqueueing import DEFAULT_QUEUE, hint_after_commit, new_id, patterns_of, project_store
from tasuki.django.log_archive import LogArchive
from tasuki.django.models import (
    AdminActionLog,
    Detached,
    Event,
    JobDefinition,
    JobRun,
    SchedulerSettings,
    ScopeEpoch,
)
from tasuki.errors import ConfigError, Forbidden, InvalidInput, NotFound, quoted
from tasuki.server.assembly import open_scheduler_coordination
from tasuki.server.queries import describe

if TYPE_CHECKING:
    from tasuki.coords.scheduler_redis import SchedulerCoordination

DAY_S = 86_400.0
QUEUES_LOOKED_AT = 20
ORDER_TIMEOUT_S = 5.0  # a person waits for it
ASKED = "asked, outcome unknown: "
"""Beginning of the detail of an order whose outcome was not noted yet, or never, as this process died."""
_decode_server = msgspec.msgpack.Decoder(ServerInfo).decode


OPERATE = "tasuki.change_jobrun"
"""Permission to cancel jobs, run them again, run definitions now and emit events."""
MANAGE = "tasuki.change_member"
"""Permission to detach workers, to pause subjects, and to have the leader step down."""
CONFIGURE = "tasuki.change_schedulersettings"
DEFINE = "tasuki.change_jobdefinition"
Actor = Any
"""A user of the project, or a name."""


@contextmanager
def _noted(actor: Actor, permission: str, action: str, targets: Sequence[str], reason: str = "") -> Iterator[str]:
    """Check that the actor may do it, and note in its transaction that it was done; yield the actor's name."""
    name = _permitted(actor, permission)
    alias = project_settings().database
    with transaction.atomic(using=alias):
        yield name
        AdminActionLog.objects.using(alias).bulk_create(_entry(name, action, target, reason) for target in targets)


@contextmanager
def _ordered(actor: Actor, permission: str, action: str, target: str, reason: str) -> Iterator[None]:
    """Check that the actor may give an order to a node, and note it, then its outcome: no transaction waits for the network."""
    alias = project_settings().database
    entry = _entry(_permitted(actor, permission), action, target, f"{ASKED}{reason}")
    entry.save(using=alias)
    try:
        yield
    except Exception as error:
        entry.detail = f"not confirmed ({error}): {reason}"
        entry.save(using=alias, update_fields=["detail"])
        raise
    entry.detail = reason
    entry.save(using=alias, update_fields=["detail"])


def _permitted(actor: Actor, permission: str) -> str:
    """Return the name of an actor who has the permission, or raise Forbidden."""
    if isinstance(actor, str):
        return actor
    name = str(actor.get_username())
    if not actor.has_perm(permission):
        raise Forbidden(f"{quoted(name)} may not do this; it needs the permission {permission}")
    return name


def _entry(name: str, action: str, target: str, reason: str) -> AdminActionLog:
    return AdminActionLog(at=time.time(), actor=name[:255], action=action, target=target[:255], detail=reason)


def find_page(
    *,
    states: Sequence[str] = (),
    subject: str | None = None,
    worker_id: str | None = None,
    text: str | None = None,
    created_from: float | None = None,
    created_until: float | None = None,
    definition: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page:
    """Return a page of jobs, the newest first. `definition`: name of the definition whose runs they are."""
    for state in states:
        if state not in State.__members__:
            raise InvalidInput(f"state must be one of {', '.join(State.__members__)}, got {quoted(state)}")
    if subject is not None:
        subject = check_job_pattern(subject)
    chosen = tuple(State(state) for state in states)
    definition_id = None
    if definition is not None:
        named = JobDefinition.objects.using(project_settings().database).filter(name=definition)
        if (definition_id := named.values_list("pk", flat=True).first()) is None:
            raise InvalidInput(f"there is no definition {quoted(definition)}")
    wanted = Filter(
        states=chosen,
        subject=subject,
        worker_id=worker_id,
        text=text,
        created_from=created_from,
        created_until=created_until,
        definition_id=definition_id,
    )
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


def longest_waiting() -> tuple[str, float] | None:
    """Return a ready job and for how many seconds it has waited, delays not counted: of the first queues, the oldest of each is
    looked at. There is no order by age over all, and a search for it would read what millions of finished jobs left behind."""
    store = project_store()
    subjects = dict.fromkeys(queue.subject for queue in store.ready_queues(limit=QUEUES_LOOKED_AT).queues)
    jobs = store.get([job_id for subject in subjects for job_id in store.ready_jobs(subject, limit=1)])
    waits = {job.job_id: max(job.created_at, job.not_before or 0.0) for job in jobs if job is not None}
    if not waits:
        return None
    job_id = min(waits, key=lambda one: waits[one])
    return job_id, store.clock.wall() - waits[job_id]


def get_run(job_id: str) -> Job:
    """Return a job, or raise NotFound."""
    [job] = project_store().get([job_id])
    if job is None:
        raise NotFound(f"there is no job {quoted(job_id)} in this project")
    return job


def explain_run(job_id: str) -> dict[str, Any]:
    """Return why a job waits, runs where it does, or ended as it did."""
    job, store = get_run(job_id), project_store()
    detached = _detached()
    workers = [{**one.view(server_id), "detached": one.worker_id in detached} for server_id, one in live_workers()]
    around = ExplainContext(
        workers=workers,
        ahead=store.ready_ahead(job_id),
        top_band=store.top_band(),
        has_leader=_is_led(),
        now_wall=store.clock.wall(),
        start_worker="python manage.py tasuki_worker",
        run_again="python manage.py tasuki_runs rerun",
        pauses=store.paused(),
        resume="python manage.py tasuki_ops resume",
    )
    return explain(job, store.incidents(job_id), around)


def _is_led() -> bool:
    """Return whether a node leads; on SQLite its only one does."""
    if connections[project_settings().database].vendor == "sqlite":
        return bool(live_workers())
    return any(server.epoch for server, _ in live_servers())


def live_workers() -> list[tuple[str, WorkerInfo]]:
    """Return the live workers with the ids of their servers."""
    alias = project_settings().database
    if connections[alias].vendor == "sqlite":
        owner = _owner_of(file_of(alias))
        return [*owner, *_workers_with_jobs(alias, owner[0][0])] if owner else []
    return [(server.server_id, worker) for server, _ in live_servers() for worker in server.workers]


def live_servers() -> list[tuple[ServerInfo, float]]:
    """Return the live processes that share the PostgreSQL of the project, and how many seconds ago each was heard of."""
    with _coordination() as shared:
        shared.member_timeout_s = scheduler_settings().heartbeat_ttl_seconds
        return [(_decode_server(bytes(one.info or b"")), one.age_s) for one in shared.live()]


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


def _workers_with_jobs(alias: str, server_id: str) -> Iterator[tuple[str, WorkerInfo]]:
    """Yield the workers of a SQLite file that have jobs and have renewed their leases lately."""
    now = project_store().clock.lease()
    rows = JobRun.objects.using(alias).filter(lease_expires_at__gt=now + models.F("lease_ttl_s") / 2)
    for worker_id, incarnation in rows.values_list("assigned_worker_id", "incarnation").distinct():
        yield server_id, WorkerInfo(worker_id, incarnation, patterns=patterns_of("*"))


def cancel_runs(job_ids: Sequence[str], *, actor: Actor, reason: str = "") -> list[State]:
    """Cancel jobs, and return their states: a running one is CANCELED when its worker has ended it."""
    jobs = [get_run(job_id) for job_id in job_ids]
    with _noted(actor, OPERATE, "run.cancel", job_ids, reason) as name:
        canceled = project_store().cancel([job.job_id for job in jobs], actor=name, reason=reason)
    leases = tuple((one.worker_id, one.lease_id) for one in canceled if one.requested and one.worker_id and one.lease_id)
    if leases:
        hint_after_commit(project_settings().database, Hint(canceled=leases))
    return [one.state for one in canceled if one.state is not None]


def rerun(job_ids: Sequence[str], *, actor: Actor, reason: str = "") -> None:
    """Run ended jobs again, under their ids: all or none. InvalidInput for one that has not ended, or that another run of its
    definition keeps from it by the definition's concurrency_policy."""
    alias = project_settings().database
    jobs = [get_run(job_id) for job_id in job_ids]
    with _noted(actor, OPERATE, "run.rerun", job_ids, reason) as name:
        answers = project_store().requeue([job.job_id for job in jobs], actor=name, reason=reason)
        for job, answer in zip(jobs, answers, strict=True):
            if not answer.done:
                raise InvalidInput(why_not_again(job.job_id, answer.state, answer.still_running))
        hint_after_commit(alias, Hint(ready=tuple({job.spec.subject for job in jobs})))


def enqueue(command: str, arguments: Sequence[str], *, queue: str = "", actor: Actor) -> str:
    """Enqueue a management command that jobs may run, and return the job's id."""
    job_id = new_id()
    with _noted(actor, OPERATE, "run.enqueue", [job_id]):
        return enqueue_command(command, *arguments, queue=queue or DEFAULT_QUEUE, job_id=job_id)


def pauses() -> list[PausedPattern]:
    """Return the patterns of subjects that are paused."""
    return project_store().paused()


def set_paused(pattern: str, paused: bool, *, actor: Actor, reason: str = "") -> bool:
    """Start no more jobs of the subjects of a pattern, or start them again; return whether that was a change."""
    alias = project_settings().database
    pattern = check_job_pattern(pattern)
    with _noted(actor, MANAGE, "subject.pause" if paused else "subject.resume", [pattern], reason) as name:
        [answer] = project_store().pause([PauseOrder(pattern, name, reason, resume=not paused)])
        if answer is PauseAnswer.TOO_MANY:
            raise InvalidInput(f"{PAUSES_MAX} patterns are paused, which is the limit; resume one first")
        if answer is PauseAnswer.DONE and not paused:
            hint_after_commit(alias, Hint(everything=True))
    return answer is PauseAnswer.DONE


def save_definition(definition: JobDefinition, *, actor: Actor) -> None:
    """Store a definition that was checked (`full_clean`)."""
    with _noted(actor, DEFINE, "definition.change", [definition.name]):
        definition.save(using=project_settings().database)


def apply_definitions(entries: Mapping[str, Any], *, source: str, actor: Actor) -> Applied:
    """Make the definitions of a source those of `entries`; see `definitions.apply`."""
    changed, deleted, reason = list[str](), list[str](), f"applied from {source}"
    with _noted(actor, DEFINE, "definition.change", changed, reason), _noted(actor, DEFINE, "definition.delete", deleted, reason):
        done = definitions.apply(entries, source=source)
        changed += [*done.created, *done.changed]
        deleted += done.deleted
    return done


def set_enabled(definition: JobDefinition, enabled: bool, *, actor: Actor) -> None:
    """Fire a definition by its schedule or events, or do so no more; runs that are stored continue."""
    with _noted(actor, DEFINE, "definition.enable" if enabled else "definition.disable", [definition.name]):
        definition.enabled = enabled
        definition.save(using=project_settings().database, update_fields=["enabled"])


def delete_definition(definition: JobDefinition, *, actor: Actor) -> None:
    """Delete a definition; its runs stay."""
    with _noted(actor, DEFINE, "definition.delete", [definition.name]):
        definition.delete(using=project_settings().database)


def run_now(definition: JobDefinition, *, payload: Any = None, actor: Actor) -> str:
    """Ask for one run of a definition, and return its job_id; see `definitions.run_now`."""
    with _noted(actor, OPERATE, "definition.run", [definition.name]):
        return definitions.run_now(definition, payload)


def emit_event(event_type: str, payload: Any, *, dedupe_key: str | None = None, actor: Actor) -> Event:
    """Store an event; see `definitions.emit`."""
    with _noted(actor, OPERATE, "event.emit", [event_type]):
        return definitions.emit(event_type, payload, dedupe_key=dedupe_key)


def retry_events(event_ids: Sequence[int], *, actor: Actor) -> None:
    """Have events processed again; see `definitions.process_again`."""
    with _noted(actor, OPERATE, "event.retry", [str(one) for one in event_ids]):
        definitions.process_again(event_ids)


def prune(*, days: float, logs_days: float) -> dict[str, int]:
    """Delete jobs that ended and events that were processed longer ago than so many days, and archive the logs of others."""
    alias, store = project_settings().database, project_store()
    now = store.clock.wall()
    before = now - days * DAY_S
    events, _ = Event.objects.using(alias).filter(processed_at__lt=before).delete()
    runs = logs = 0
    # Under the epoch of whoever leads now: only rows of ended jobs are deleted, each once, whoever does it.
    while count := store.prune(before=before, epoch=store.epoch()[0]):
        runs += count
    archive, more = LogArchive(alias), True
    while more:
        moved, more = archive.step(days=logs_days, epoch=store.epoch()[0])
        logs += moved
    return {"runs": runs, "events": events, "archived_logs": logs}


# ---------------------------------------------------------------------------------------------------- nodes


def cluster_status() -> dict[str, Any]:
    """Return leader, epoch and workers with their roles, loads and the ages of their heartbeats."""
    alias = project_settings().database
    if connections[alias].vendor == "sqlite":
        workers = [{"worker_id": info.worker_id, "role": "leader", "detached": False} for _, info in live_workers()]
        return {"leader": next((worker["worker_id"] for worker in workers), None), "epoch": None, "workers": workers}
    detached = _detached()
    servers = live_servers()
    leading = {server.server_id: server.epoch for server, _ in servers if server.epoch}
    registered = ScopeEpoch.objects.using(alias).filter(scope="leader").values_list("epoch", "holder").first()
    epoch, holder = registered or (0, "")
    workers = [
        {
            "worker_id": worker.worker_id,
            "node_id": server.node_id,
            "role": _role_of(worker, server, leads=worker.worker_id == holder and leading.get(server.server_id) == epoch),
            "load": worker.running,
            "slots": worker.slots,
            "detached": worker.worker_id in detached,
            "heartbeat_age_s": round(age_s, 1),
            "grpc": server.grpc_address,
        }
        for server, age_s in servers
        for worker in server.workers
    ]
    return {"leader": holder if leading.get(holder) == epoch else None, "epoch": epoch, "workers": workers}


def _role_of(worker: WorkerInfo, server: ServerInfo, *, leads: bool) -> str:
    if leads:
        return "leader"
    return "subleader" if server.sub_leads and worker.worker_id == server.server_id else "worker"


def _detached() -> frozenset[str]:
    with _coordination() as shared:
        return shared.detached() | ProjectCoordination(project_settings().database).detached()


def set_detached(worker_id: str, detached: bool, *, actor: Actor, reason: str = "") -> bool:
    """Give a worker no more jobs, or give it jobs again; return whether that was a change. A worker that leads steps down."""
    _several_nodes()
    if detached and not any(worker.worker_id == worker_id for _, worker in live_workers()):
        raise NotFound(f"there is no live worker {quoted(worker_id)}; see: manage.py tasuki_ops status")
    action = "worker.detach" if detached else "worker.attach"
    kept = ProjectCoordination(project_settings().database)
    with _noted(actor, MANAGE, action, [worker_id], reason) as name, _coordination() as shared:
        # The row first: `keep_detached` waits for it, and finds none after an attach.
        changes = [one.set_detached(worker_id, detached, actor=name, reason=reason) for one in (kept, shared)]
        return any(changes)


def keep_detached(alias: str, worker_ids: Iterable[str]) -> None:
    """Write the flags of workers anew that people detached and Redis has lost, unless they were attached meanwhile."""
    try:
        with transaction.atomic(using=alias), _coordination() as shared:
            for row in Detached.objects.using(alias).select_for_update().filter(worker_id__in=worker_ids):
                shared.set_detached(row.worker_id, True, actor=row.actor, reason=row.reason)
    finally:
        connections[alias].close()


def drain(worker_id: str, on: bool = True, *, actor: Actor, reason: str = "") -> None:
    """Have a worker take no new jobs until it is told otherwise, or ends. It needs `--grpc`; Unavailable: it does not answer."""
    _several_nodes()
    found = next((server for server, _ in live_servers() if any(one.worker_id == worker_id for one in server.workers)), None)
    if found is None:
        raise NotFound(f"there is no live worker {quoted(worker_id)}; see: manage.py tasuki_ops status")
    if found.server_id != worker_id or not found.grpc_address:
        raise InvalidInput(f"worker {quoted(worker_id)} cannot be told to drain: start it with --grpc HOST:PORT, or detach it")
    from tasuki.django.node_door import order_drain, pb  # needs grpcio

    epoch, _ = project_store().epoch()
    order = pb.DrainRequest(leader_epoch=epoch, worker_id=worker_id, on=on, reason=reason)
    with _ordered(actor, MANAGE, "worker.drain" if on else "worker.undrain", worker_id, reason):
        said = asyncio.run(order_drain(found.grpc_address, found.node_id, order, ORDER_TIMEOUT_S))
        if said != "ACCEPTED":
            raise InvalidInput(f"worker {quoted(worker_id)} did not accept the order: {said}")


def degrade_leader(*, actor: Actor, reason: str = "") -> None:
    """Have the leader step down: it stands again only after another one had the time to be elected."""
    _several_nodes()
    with _ordered(actor, MANAGE, "leader.degrade", str(cluster_status()["leader"] or ""), reason), _coordination() as shared:
        shared.degrade()


def _several_nodes() -> None:
    if connections[project_settings().database].vendor == "sqlite":
        raise ConfigError("on SQLite there is one node, which leads; stop or start it instead")


class ProjectCoordination(SqlCoordination):
    """Coordination in the database of the project, on the calling thread's connection and in its transaction."""

    def __init__(self, alias: str) -> None:
        self._alias = alias  # and no connection of its own, which would need psycopg, on SQLite too

    def close(self) -> None:
        """Leave the connection to Django."""

    def _execute(self, statement: bytes, values: Mapping[str, Any]) -> tuple[list[tuple[Any, ...]], int]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(statement.decode(), values)
            return (cursor.fetchall() if cursor.description else []), cursor.rowcount


@contextmanager
def _coordination() -> Iterator[SchedulerCoordination | ProjectCoordination]:
    project = project_settings()
    in_redis = bool(project.coordination)
    shared = open_scheduler_coordination(project.coordination) if in_redis else ProjectCoordination(project.database)
    with closing(shared):
        yield shared


def change_settings(changes: Mapping[str, str], *, actor: Actor, reason: str = "") -> SchedulerSettings:
    """Change settings by name; all nodes follow within two ticks. InvalidInput names each value that cannot work."""
    alias = project_settings().database
    scheduler_settings()
    said = ", ".join(f"{name}={value}" for name, value in changes.items())
    with _noted(actor, CONFIGURE, "settings.change", ["scheduler"], f"{said}: {reason}" if reason else said):
        row = SchedulerSettings.objects.using(alias).select_for_update().get(id=1)
        known = set(Thresholds.__struct_fields__)
        if unknown := sorted(set(changes) - known):
            raise InvalidInput(f"unknown settings: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        for name, value in changes.items():
            setattr(row, name, value)
        try:
            row.clean_fields()
            row.clean()
        except ValidationError as error:
            problems = "; ".join(f"{name}: {' '.join(texts)}" for name, texts in error.message_dict.items())
            raise InvalidInput(f"these settings cannot work: {problems}") from None
        row.save(using=alias)
    return row
