"""Data and operations behind the screens: `Backend` is what they ask, `ProjectBackend` answers from a Django project's database.

`server_backend` answers from a tasuki server. Jobs, workers and reasons are dicts as `tasuki status`, `workers` and `explain`
show them, so that a screen does not know where it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from django.contrib import auth
from django.core.cache import DEFAULT_CACHE_ALIAS, caches
from django.core.cache.backends.base import BaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.locmem import LocMemCache
from django.db import connections
from django.http import HttpRequest
from django.utils.translation import gettext as _

from tasuki.blobs.files import check_free
from tasuki.config import DISK_FLOOR_BYTES, DISK_FLOOR_INODES, data_folder, default_url
from tasuki.core.address import AGENTS
from tasuki.core.job import State
from tasuki.core.statistics import describe_periods, periods
from tasuki.django import operations
from tasuki.django.commands import allowed_commands
from tasuki.django.conf import file_of, project_settings
from tasuki.django.definitions import scheduler_settings
from tasuki.django.enqueueing import project_store
from tasuki.django.logs import ERRORS, log_bytes, log_tail
from tasuki.django.models import AdminActionLog, DefinitionState, Event, JobRun
from tasuki.errors import DiskFull, InvalidInput
from tasuki.server.queries import describe

LATE_S = 60.0
View = dict[str, Any]


class Backend(Protocol):
    """The source of what the screens show, and the target of what they change. Errors are TasukiErrors."""

    screens: frozenset[str]
    """Names of the screens that not every backend has."""
    streams: tuple[str, ...]
    """Names of the logs of a job."""
    start_worker: str
    """Command that starts a worker."""
    token_file: str
    """Place of the token to log in with; empty: people log in with names and passwords."""

    def log_in(self, request: HttpRequest) -> bool: ...

    def login_problem(self, request: HttpRequest) -> str:
        """Say why a login failed."""

    def log_out(self, request: HttpRequest) -> None: ...

    def agents(self) -> list[View]:
        """Return the node agents that TASUKI_URL names, the best first, as `tasuki nodes` shows them."""

    def counts(self) -> dict[str, dict[str, int]]:
        """Count jobs by group and state."""

    def statistics(self, since: int, until: int, step_s: int, groups: int) -> list[View]:
        """Return the sums of all servers for each step, as the request `statistics` does."""

    def leader(self) -> tuple[str, int | None]:
        """Return the name of the leader, or "", and its epoch, if there is one."""

    def workers(self) -> list[View]:
        """Return the live workers, each with the `actions` that it can be asked for."""

    def servers(self) -> list[View]:
        """Return the live servers, as `tasuki servers` shows them; in a project none, where each node is one."""

    def alerts(self) -> Iterable[str]:
        """Yield what needs somebody's attention, besides missing workers."""

    def find(self, *, limit: int, cursor: str | None = None, **wanted: Any) -> tuple[list[View], str | None]:
        """Return a page of jobs, the newest first, and the cursor of the next one."""

    def job(self, job_id: str) -> View: ...
    def explain(self, job_id: str) -> View: ...

    def log_tail(self, job_id: str, stream: str, max_bytes: int) -> tuple[bytes, bool]:
        """Return the end of a log so far, and whether there is more before it."""

    def log(self, job_id: str, stream: str) -> Iterator[bytes] | AsyncIterator[bytes]:
        """Yield the whole log, as the handler of this backend's requests can send it."""

    def log_lines(self, job_id: str, stream: str) -> Iterator[bytes]:
        """Yield the whole log, in pieces, to a view."""

    def audit(self, *, before: int | None, limit: int) -> list[View]:
        """Return up to 1,000 entries of the audit, the newest first; `before`: those with lower numbers."""

    def cancel(self, job_ids: Sequence[str], reason: str) -> list[State]: ...

    def rerun(self, job_ids: Sequence[str], reason: str) -> list[str]:
        """Run ended jobs again, and return for each that cannot the reason."""

    def programs(self) -> list[str]:
        """Return the names of the programs that a job may run; none: any program."""

    def submit(self, program: str, arguments: Sequence[str], subject: str) -> str:
        """Submit a job, and return its id. `subject`: a queue of a project; empty: the default."""

    def steer(self, worker_id: str, action: str, reason: str) -> None:
        """Do one of the `actions` of a worker: detach, attach, drain, undrain, degrade (the leader steps down)."""

    def pauses(self) -> list[View]:
        """Return the paused patterns, as `tasuki pause` shows them."""

    def set_paused(self, pattern: str, paused: bool, reason: str) -> None:
        """Pause the subjects of a pattern, or resume them."""


class ProjectBackend:
    """A Django project: its database, on the connection of the request's thread, with the rights of one of its users."""

    screens = frozenset({"definitions", "events", "settings"})
    streams: tuple[str, ...] = ("stdout", "stderr", ERRORS)
    start_worker = "python manage.py tasuki_worker"
    token_file = ""

    def __init__(self, user: Any) -> None:
        self._user = user

    def log_in(self, request: HttpRequest) -> bool:
        from django.contrib.auth.forms import AuthenticationForm  # a server has no users of Django

        form = AuthenticationForm(request, data=request.POST)
        if form.is_valid():
            auth.login(request, form.get_user())
        return form.is_valid()

    def login_problem(self, request: HttpRequest) -> str:
        return _("This name and password do not belong to an active user.")

    def log_out(self, request: HttpRequest) -> None:
        auth.logout(request)

    def agents(self) -> list[View]:
        return asyncio.run(ranked_agents(data_folder().root))

    def counts(self) -> dict[str, dict[str, int]]:
        return {queue: msgspec.structs.asdict(counts) for queue, counts in project_store().counts().items()}

    def statistics(self, since: int, until: int, step_s: int, groups: int) -> list[View]:
        return describe_periods(periods(project_store().rollups(since, until), step_s, begin=since), groups)

    def leader(self) -> tuple[str, int | None]:
        status = operations.cluster_status()
        return status["leader"] or "", status["epoch"]

    def workers(self) -> list[View]:
        known = {row["worker_id"]: row for row in operations.cluster_status()["workers"]}
        views = [worker.view(server_id) for server_id, worker in operations.live_workers()]
        ttl_s = scheduler_settings().heartbeat_ttl_seconds
        rows = [{**view, "ttl_s": ttl_s, **known.get(view["worker_id"], {})} for view in views]
        return [{**row, "actions": _actions(row)} for row in rows]

    def servers(self) -> list[View]:
        return []

    def alerts(self) -> Iterator[str]:
        alias = project_settings().database
        if (waits := operations.longest_waiting()) is not None and waits[1] > LATE_S:
            yield _("Job %(job)s has waited for %(age)d s.") % {"job": waits[0], "age": waits[1]}
        states = DefinitionState.objects.using(alias).select_related("definition")
        due_by = time.time() - project_settings().alerts.late_seconds
        for state in states.filter(next_at__lt=due_by, problem="", definition__enabled=True)[:10]:
            age_s = time.time() - state.next_at.timestamp()
            yield _("Definition %(name)s is late: it was due %(age)d s ago.") % {"name": state.definition.name, "age": age_s}
        for place, problem in _disk_problems(alias):
            yield _("Disk or store of %(server)s: %(problem)s") % {"server": place, "problem": problem}
        for state in states.exclude(problem="")[:10]:
            yield _("Definition %(name)s cannot be run: %(problem)s") % {
                "name": state.definition.name,
                "problem": state.problem,
            }
        for event in Event.objects.using(alias).exclude(problem="").order_by("-id")[:10]:
            yield _("Event %(id)s lacks a run: %(problem)s. Correct it, then: python manage.py tasuki_events retry %(id)s") % {
                "id": event.pk,
                "problem": event.problem,
            }

    def find(self, *, limit: int, cursor: str | None = None, **wanted: Any) -> tuple[list[View], str | None]:
        page = operations.find_page(**wanted, limit=limit, cursor=cursor)
        return [describe(job, in_list=True) for job in page.jobs], page.cursor

    def job(self, job_id: str) -> View:
        view = describe(operations.get_run(job_id))
        rows = JobRun.objects.using(project_settings().database).filter(idempotency_key=job_id)
        return {**view, "log_ref": rows.values_list("log_ref", flat=True).first() or ""}

    def explain(self, job_id: str) -> View:
        return operations.explain_run(job_id)

    def log_tail(self, job_id: str, stream: str, max_bytes: int) -> tuple[bytes, bool]:
        return log_tail(job_id, stream, max_bytes)

    def log(self, job_id: str, stream: str) -> Iterator[bytes]:
        return log_bytes(job_id, stream)

    log_lines = log

    def audit(self, *, before: int | None, limit: int) -> list[View]:
        found = AdminActionLog.objects.using(project_settings().database).order_by("-id")
        page = (found if before is None else found.filter(id__lt=before))[:limit]
        columns = ("at", "actor", "action", "target", "detail")
        return [{name: getattr(row, name) for name in columns} | {"number": row.pk} for row in page]

    def cancel(self, job_ids: Sequence[str], reason: str) -> list[State]:
        return operations.cancel_runs(job_ids, actor=self._user, reason=reason)

    def rerun(self, job_ids: Sequence[str], reason: str) -> list[str]:
        try:
            operations.rerun(job_ids, actor=self._user, reason=reason)
        except InvalidInput as error:
            if len(job_ids) == 1:
                return [error.message]
            return [problem for job_id in job_ids for problem in self.rerun([job_id], reason)]
        return []

    def programs(self) -> list[str]:
        return sorted(allowed_commands())

    def submit(self, program: str, arguments: Sequence[str], subject: str) -> str:
        return operations.enqueue(program, arguments, queue=subject, actor=self._user)

    def steer(self, worker_id: str, action: str, reason: str) -> None:
        if action in ("detach", "attach"):
            operations.set_detached(worker_id, action == "detach", actor=self._user, reason=reason)
        elif action in ("drain", "undrain"):
            operations.drain(worker_id, action == "drain", actor=self._user, reason=reason)
        else:
            operations.degrade_leader(actor=self._user, reason=reason)

    def pauses(self) -> list[View]:
        return [msgspec.structs.asdict(one) for one in operations.pauses()]

    def set_paused(self, pattern: str, paused: bool, reason: str) -> None:
        operations.set_paused(pattern, paused, actor=self._user, reason=reason)


def has_agents() -> bool:
    """Return whether the environment of this process names node agents."""
    return (default_url() or "").startswith(AGENTS)


async def ranked_agents(folder: Path) -> list[View]:
    """Check all node agents, and return them with their breakers, which are remembered in the data folder."""
    from tasuki.client.agents.client import AsyncAgentsClient  # an HTTP client, which no other screen needs

    async with AsyncAgentsClient(default_url() or "", notes=folder) as client:
        return [node.view() for node in await client.ranking()]


def _disk_problems(alias: str) -> Iterator[tuple[str, str]]:
    """Yield the nodes that have no room for data, and why; on SQLite this machine."""
    if connections[alias].vendor == "postgresql":
        yield from (
            (server.server_id, server.blob_problem) for server, _age_s in operations.live_servers() if server.blob_problem
        )
        return
    file = file_of(alias)
    try:
        check_free(file.parent, 0, DISK_FLOOR_BYTES, DISK_FLOOR_INODES)
    except DiskFull as error:
        yield file.name, error.message


def _actions(row: View) -> list[str]:
    """Return what can be asked of a worker of a project: on SQLite, where one node does everything, nothing."""
    if "heartbeat_age_s" not in row:
        return []
    takes_orders = ["drain", "undrain"] if row["grpc"] and row["server_id"] == row["worker_id"] else []
    return ["attach" if row["detached"] else "detach", *takes_orders, *(["degrade"] if row["role"] == "leader" else [])]


def screen_cache() -> BaseCache:
    """Return the project's cache, or one of this process where the project's keeps nothing: logins are counted in it."""
    found = caches[DEFAULT_CACHE_ALIAS]
    return LocMemCache("tasuki-ops", {}) if isinstance(found, DummyCache) else found


def backend_of(request: HttpRequest) -> Backend:
    """Return the backend of a request: that of the server which serves it, else the project's."""
    found: Backend | None = getattr(request, "tasuki_backend", None)
    return ProjectBackend(getattr(request, "user", None)) if found is None else found
