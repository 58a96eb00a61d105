"""The node: `manage.py tasuki_worker`. A guest server on the project's database and a worker, in one process.

    worker ──unix socket──► guest ──► database of the project
       ├─ processes of tasks: forked with Django set up, reused
       └─ keeper ──► warm interpreter ──fork──► manage.py COMMAND

On PostgreSQL any number of nodes may run; their guests elect the one that does the upkeep. On SQLite the guest is the only one
that leases, kept by a lock file beside the database; other processes of the project only enqueue. With `--workers N` there are
N - 1 more workers, processes that have the guest of the first one: the only way to have several on SQLite.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from django.db import Error, connections

from tasuki.blobs.files import durable_write
from tasuki.blobs.open_blobs import open_blobs
from tasuki.config import DataFolder, host_name
from tasuki.core.broker.events import Hinted
from tasuki.core.broker.upkeep import FIRE_BATCH
from tasuki.core.cluster_messages import Hint
from tasuki.core.job import Outcome
from tasuki.core.scheduler.firing import DJANGO_EXEC
from tasuki.core.scheduler.thresholds import Thresholds, problems_of
from tasuki.core.store_messages import FireOrder
from tasuki.core.worker.events import LeasesConfirmed, LeasesDenied
from tasuki.django import standalone
from tasuki.django.alerts import AlertLoop
from tasuki.django.commands import command_exec, python_path, refused_command
from tasuki.django.conf import ProjectSettings, file_of, node_id, project_settings
from tasuki.django.continuation import NodeContinuation
from tasuki.django.definitions import scheduler_settings
from tasuki.django.enqueueing import patterns_of
from tasuki.django.log_archive import LogArchiver
from tasuki.django.logs import HEAD_BYTES, TAIL_BYTES, KeptLogFollow, LogWriter
from tasuki.django.models import ScopeEpoch
from tasuki.django.operations import keep_detached
from tasuki.doors.guest import open_guest
from tasuki.errors import ConfigError, TasukiError, Unavailable
from tasuki.event_loop import break_connections_after
from tasuki.server.assembly import BLOB_MAX_BYTES, NoBlobs, StorageLocations, make_node_guest, open_scheduler_coordination
from tasuki.server.cluster import Cluster
from tasuki.server.server import Server, ServerConfig
from tasuki.stores.sql.sqlite import FileWatch, OwnerLock, SqliteReadOnly
from tasuki.stores.sql.store import SqlReader, SqlStore
from tasuki.worker.attempt import Attempt, RunResult, StopReason
from tasuki.worker.local_workers import LocalWorkers, end_with_stdin
from tasuki.worker.logs import LogCaps
from tasuki.worker.status import RunningJob
from tasuki.worker.worker import ActiveAttempt, Worker

if TYPE_CHECKING:
    from tasuki.doors.http.metrics import Metrics

logger = logging.getLogger("tasuki.django")
LOG_INTERVAL_S = 1.0
METRICS_INTERVAL_S = 10.0
END_WITHIN_S = 5.0  # from the end of the last job: for a database that does not answer, and for telling the others
SQLITE_LOOK_S = 0.05  # between two looks whether another process has changed the file: 10 µs each


class NodeWorker(Worker):
    """The worker of a node, and around it the guest that it takes its jobs from."""

    _archives = False  # the outcome of a command and its log are in the database

    def __init__(
        self,
        queues: Sequence[str] = (),
        *,
        grpc: str = "",
        metrics_file: str = "",
        guest_url: str = "",
        workers: int = 1,
        worker_arguments: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`grpc`: HOST:PORT to listen on for the orders of leaders; empty: jobs are only pulled. `metrics_file`: file that is
        written for Prometheus; empty: none. `workers`: processes that run jobs, this one counted; the others get
        `worker_arguments`, and as their `guest_url` the address of this one's guest."""
        if workers < 1:
            raise ConfigError(f"--workers must be at least 1, got {workers}")
        self._listen, self._door = grpc, AsyncExitStack()
        self._metrics_file, self._metrics = metrics_file, _new_metrics() if metrics_file else None
        self._guest_url, self._workers = guest_url, workers
        self._command = (sys.executable, "-P", "-m", "django", "tasuki_worker", *worker_arguments)
        self._others: LocalWorkers | None = None
        self._cluster: Cluster | None = None
        self._thresholds = Thresholds()
        self._refused: Thresholds | None = None
        self._draining: asyncio.Future[None] | None = None
        self._continuation: NodeContinuation | None = None
        self._comes_back = False
        self._project = project_settings()
        self._alias = self._project.worker_database or self._project.database
        self._is_sqlite = connections[self._alias].vendor == "sqlite"
        if self._is_sqlite:
            self._alias = writing_alias(self._alias)
        super().__init__(
            None,
            subjects=[pattern for queue in queues or ("*",) for pattern in patterns_of(queue)],
            execs={DJANGO_EXEC: command_exec(os.environ)},
            log_caps=LogCaps(head_bytes=HEAD_BYTES, tail_bytes=TAIL_BYTES),
            **options,
        )
        self._kept_logs = self._log_follow = KeptLogFollow(self._send)
        self._log_writer = LogWriter(self._alias)
        self._log_archiver = LogArchiver(self._alias)
        self._alerts = AlertLoop(self._alias, self._project.alerts, self._project.coordination)
        try:
            from tasuki.django.task_backend import handle_task

            self.handler(patterns_of("*")[0])(handle_task)
        except ConfigError:  # Django 5.2 without the package of tasks
            pass

    def run(self) -> None:
        """Work until a signal. No connection may be open: the processes of tasks are forked from here."""
        standalone.check_tables(self._alias)
        self._thresholds = scheduler_settings(self._alias).thresholds()  # the first node writes the project's values
        self.worker_id = str(new_worker_id(self._alias, self._project.coordination))
        close_connections()
        if not self._guest_url:
            queues = ", ".join(dict.fromkeys(pattern.partition(".")[0].replace("*", "all") for pattern in self.patterns))
            logger.info("jobs of the database %r, queues: %s. SIGTERM or Ctrl-C drains", self._project.database, queues)
        super().run()
        if self._comes_back:  # as a new process with the same pid: nothing of the old worker is left
            grpc = [f"--grpc={self._listen}"] if self._listen else []
            metrics = [f"--metrics-file={self._metrics_file}"] if self._metrics_file else []
            command = [*self._command, *grpc, *metrics, f"--workers={self._workers}"]
            os.execve(command[0], command, {**os.environ, "PYTHONPATH": python_path()})  # noqa: S606

    async def serve(self, *, signals: bool = False) -> None:
        if self._guest_url:
            self.url = self._guest_url
            end_with_stdin(lambda: self.connected, grace_s=0.0)  # no other process will have this guest
            await self._serve_beside(signals, self._store_logs(), self._follow_settings(None))
            break_connections_after(END_WITHIN_S)
            return
        async with open_guest(self._make_sqlite_guest if self._is_sqlite else self._make_guest) as (url, server):
            self.url, self._server = url, server
            archived = self._log_archiver.run(lambda: server.broker.epoch, lambda: self._thresholds.log_retention_days_db)
            beside = [self._store_logs(), self._follow_settings(server), archived, self._alerts.run()]
            if self._cluster is not None:
                self._continuation = NodeContinuation(self, server, self._cluster, self._rejoin)
                beside.append(self._continuation.run())
            if self._is_sqlite:
                beside.append(_watch_file(server, file_of(self._alias)))
            if self._metrics is not None:
                server.on_turn = self._metrics.turn
                beside.append(_write_metrics(self._metrics, server, Path(self._metrics_file)))
            env = {**os.environ, "PYTHONPATH": python_path()}
            command = (*self._command, "--guest-url", url)
            self._others = LocalWorkers(self._workers - 1, command, _warn_of_end, env=env, stdout=None)
            self._others.start()
            try:
                async with self._door:
                    await self._serve_beside(signals, *beside)
            finally:
                await (self._draining or self._others.drain())
                break_connections_after(END_WITHIN_S)

    async def _serve_beside(self, signals: bool, *beside: Coroutine[Any, Any, None]) -> None:
        tasks = [asyncio.ensure_future(one) for one in beside]
        try:
            await super().serve(signals=signals)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._log_writer.close()
            self._log_archiver.close()
            self._alerts.close()

    def _signaled(self) -> None:
        super()._signaled()
        self._comes_back = False
        if self._cluster is not None:
            self._cluster.set_willing(False)
        if self._others is None:
            return
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._others.drain())
        else:
            self._others.hurry()

    async def _prepare(self, folder: Path) -> None:
        await super()._prepare(folder)
        if self._listen:  # before any server knows of this worker, and after everything was forked
            from tasuki.django.node_door import NodeQuestions, open_door

            calls = await self._door.enter_async_context(open_door(self, self._server, self._cluster, self._listen))
            if self._continuation is not None:
                self._continuation.questions = NodeQuestions(calls)
            if self._cluster is not None:
                self._cluster.on_start = lambda order: calls.order_start(order, self._thresholds.grpc_ping_timeout_seconds)

    # ------------------------------------------------------------------------------------------------ continuation

    def renewed_at(self, lease_id: str) -> float:
        return self._machine.renewed_at(lease_id)

    def deadlines(self) -> dict[str, float]:
        """Return the deadlines of the leases of running attempts."""
        return self._machine.deadlines()

    def run_of(self, lease_id: str) -> RunningJob | None:
        """Return the attempt with this lease, if it is here."""
        active = self._active.get(lease_id)
        return None if active is None else RunningJob(active.attempt.spec.job_id, active.attempt.attempt, "", None)

    def confirm_leases(self, lease_ids: tuple[str, ...], asked_at: float) -> None:
        """Continue: somebody has renewed these leases after this time."""
        self._apply(LeasesConfirmed(lease_ids, asked_at))
        self._runner.renewed()
        if self._function_processes is not None:
            self._function_processes.renewed()

    def deny_leases(self, lease_ids: tuple[str, ...]) -> None:
        """Stop these attempts."""
        self._apply(LeasesDenied(lease_ids))

    def _rejoin(self) -> None:
        if not self._signals:
            self._comes_back = True
            self.stop()

    # ------------------------------------------------------------------------------------------------ management commands

    async def _run_command(self, active: ActiveAttempt, stop: asyncio.Future[StopReason]) -> None:
        if (refused := refused_command(next(iter(active.attempt.spec.args), ""))) is not None:
            self._end(active, refused)
            return
        self._job_log.started(active.attempt.spec, active.attempt.attempt, time.time())
        try:
            await super()._run_command(active, stop)
        finally:
            self._kept_logs.take_rest(active.attempt.lease_id)  # of an attempt that was given back

    def _end(self, active: ActiveAttempt, outcome: Outcome) -> None:
        attempt = active.attempt
        if attempt.spec.exec:
            self._job_log.ended(attempt.spec, attempt.attempt, outcome, self._started_at(attempt.lease_id), time.time())
        super()._end(active, outcome)

    async def _as_reported(self, attempt: Attempt, result: RunResult) -> RunResult:
        """Store the rest of the log before the end is reported."""
        await self._log_writer.write(self._kept_logs.take_rest(attempt.lease_id), {attempt.lease_id: attempt})
        return result

    async def _store_logs(self) -> None:
        while True:
            await asyncio.sleep(LOG_INTERVAL_S)
            attempts = {lease_id: active.attempt for lease_id, active in self._active.items()}
            await self._log_writer.write(self._kept_logs.take_new(), attempts)

    # ------------------------------------------------------------------------------------------------ settings

    async def _follow_settings(self, server: Server | None) -> None:
        """Look each tick whether the settings have changed, and do as they say. `server`: the guest, if it is of this process."""
        self._apply_settings(server)
        while True:
            await asyncio.sleep(self._thresholds.leader_tick_seconds)
            try:
                if server is None:
                    found = await asyncio.to_thread(_read_thresholds, self._alias)
                else:
                    found = await server.ask(lambda reader: reader.thresholds())  # type: ignore[attr-defined]
                    await self._keep_detached(server)
            except (TasukiError, Error) as error:
                logger.debug("the settings could not be read: %s", error)
                continue
            if found == self._thresholds:
                continue
            if problems := problems_of(found):
                if found != self._refused:
                    logger.warning("the changed settings are ignored, since they cannot work: %s", problems)
                self._refused = found
                continue
            self._thresholds = found
            logger.info("the settings have changed")
            self._apply_settings(server)

    async def _keep_detached(self, server: Server) -> None:
        """Keep workers detached that people detached, by the database, whatever Redis has lost."""
        if self._cluster is None or not self._project.coordination:
            return
        self._cluster.kept_detached = await server.ask(lambda reader: reader.detached())  # type: ignore[attr-defined]
        if self._cluster.lost_flags:
            await asyncio.to_thread(keep_detached, self._alias, self._cluster.lost_flags)

    def _apply_settings(self, server: Server | None) -> None:
        found = self._thresholds
        self.limit_slots(found.max_jobs_per_worker)
        if server is None:
            return
        upkeep = server.broker.upkeep
        upkeep.tick_s, upkeep.max_jobs = found.leader_tick_seconds, found.max_jobs_per_worker
        if self._cluster is not None:
            ahead_s = found.assign_ahead_seconds if self._listen else 0.0  # without a door it cannot give orders, either
            upkeep.ahead = FireOrder(FIRE_BATCH, ahead_s, found.reassign_after_seconds)
            self._cluster.set_times(
                beat_interval_s=found.heartbeat_interval_seconds,
                member_timeout_s=found.heartbeat_ttl_seconds,
                lock_ttl_s=found.leader_lock_ttl_seconds,
            )
            assert self._cluster.roles is not None
            self._cluster.roles.thresholds = found
        if self._continuation is not None:
            self._continuation.machine.thresholds = found

    # ------------------------------------------------------------------------------------------------ guests

    def _make_guest(self, folder: Path) -> Server:
        places = StorageLocations(
            DataFolder(folder),
            libpq_url(self._alias),
            self._project.blobs,
            lock_ttl_s=self._thresholds.leader_lock_ttl_seconds,
            coordination=self._project.coordination,
            migrates=False,
        )
        server, self._cluster = make_node_guest(places, _server_config(self.worker_id, folder, self._project))
        return server

    def _make_sqlite_guest(self, folder: Path) -> Server:
        file, alias = file_of(self._alias), self._alias
        config = _server_config(self.worker_id, folder, self._project, collects_blobs=bool(self._project.blobs))

        def open_store() -> SqlStore:
            try:
                OwnerLock(file)  # held until the process ends
            except Unavailable as error:
                fact, _, _ = error.message.partition(";")
                raise Unavailable(f"{fact}; SQLite takes one tasuki_worker, for more processes give it --workers N") from error
            return SqlStore.in_django(alias)

        blobs = _open_blobs(self._project, folder, config)
        return Server(config, open_store, lambda: SqlReader(SqliteReadOnly(file)), blobs)


def _read_thresholds(alias: str) -> Thresholds:
    try:
        return scheduler_settings(alias).thresholds()
    finally:
        connections[alias].close()


def _new_metrics() -> Metrics:
    try:
        from tasuki.doors.http.metrics import Metrics
    except ModuleNotFoundError as error:
        raise ConfigError(f"--metrics-file needs {error.name}, which is not installed: pip install 'tasuki[server]'") from error
    return Metrics()


async def _write_metrics(metrics: Metrics, server: Server, file: Path) -> None:
    """Write the metrics of this process again and again, as the HTTP door of a server shows them; remove them at the end."""
    problem = ""
    try:
        while True:
            counts = None
            with suppress(TasukiError):  # without the store the page says so
                counts = await server.ask(lambda reader: reader.counts())
            try:
                await asyncio.to_thread(durable_write, file, metrics.text(counts, server), 0o644)
                problem = ""
            except OSError as error:
                if str(error) != problem:
                    logger.warning("the metrics cannot be written to %s: %s", file, error)
                problem = str(error)
            await asyncio.sleep(METRICS_INTERVAL_S)
    finally:
        file.unlink(missing_ok=True)


def _warn_of_end(number: int, code: int, wait_s: float) -> None:
    logger.warning("worker process %d ended with %d; started again in %g s", number, code, wait_s)


def _open_blobs(project: ProjectSettings, folder: Path, config: ServerConfig) -> Any:
    if project.blobs:
        return open_blobs(project.blobs, max_blob_bytes=BLOB_MAX_BYTES, floor_free_bytes=config.disk_floor_bytes)
    return NoBlobs(DataFolder(folder).blobs, max_blob_bytes=0, floor_free_bytes=config.disk_floor_bytes)


def _server_config(server_id: str, folder: Path, project: ProjectSettings, **settings: Any) -> ServerConfig:
    settings["node_id"] = node_id()
    settings["retention_s"] = project.retention_days * 86_400.0
    return ServerConfig(server_id=server_id, host=host_name(), data=folder, **settings)


def new_worker_id(alias: str, coordination: str) -> int:
    """Return a number that no worker of this project ever had: above all that the database knows, also if Redis, which counts
    them with such a coordination, was emptied or set back."""
    scope = "worker ids"
    rows = ScopeEpoch.objects.using(alias)
    while True:
        known = rows.get_or_create(scope=scope, defaults={"epoch": 0, "holder": ""})[0].epoch
        number = known + 1
        if coordination:
            with closing(open_scheduler_coordination(coordination)) as shared:
                number = shared.enlist(known)
        if rows.filter(scope=scope, epoch__lt=number).update(epoch=number):
            return number


def libpq_url(alias: str) -> str:
    """Return the address of a PostgreSQL of the project, with every parameter that libpq itself knows."""
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    given = connections[alias].get_connection_params()
    return "postgresql:///?" + urlencode({name: str(given[name]) for name in given if name in known}, quote_via=quote)


def close_connections() -> None:
    """Close everything that a fork must not share: connections, and pools of them (`OPTIONS["pool"]`) with their threads."""
    connections.close_all()
    for connection in connections.all(initialized_only=True):
        if connection.vendor == "postgresql":
            connection.close_pool()  # type: ignore[attr-defined]


def writing_alias(alias: str) -> str:
    """Return an alias of the same SQLite file whose transactions begin as writers: those of the guest read before they write."""
    given = connections.databases[alias]
    options = {"timeout": 20, **given.get("OPTIONS", {}), "transaction_mode": "IMMEDIATE"}
    return standalone.register_copy(alias, {**given, "OPTIONS": options, "CONN_MAX_AGE": None})


async def _watch_file(server: Server, file: Path) -> None:
    """Have the guest look for new jobs whenever a process has written to the file."""
    with closing(FileWatch(file)) as watch:
        while True:
            await asyncio.sleep(SQLITE_LOOK_S)
            if watch.has_changed():
                server.tell(Hinted(Hint(everything=True)))
