"""`tasuki up`: a server and local workers on this machine, with one command.

With `--until-idle` this is an embedded server: it serves the unix socket of the data folder while there is a client or a running
job, and leaves a second later. The workers are child processes, restarted with growing pauses if they die, drained at the end.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasuki.cli import command as cli
from tasuki.cli import process
from tasuki.cli.connect import owner_of
from tasuki.cli.output import Output
from tasuki.cli.server import (
    DEFAULT_TCP,
    AppOptions,
    ListenOptions,
    RunningServer,
    ServerOptions,
    app_options,
    no_tcp_option,
    serve,
    tcp_option,
)
from tasuki.cli.worker import allowed_execs, log_caps
from tasuki.client.embedded import answers
from tasuki.config import OWN_COMMAND, DataFolder, data_folder, parse_http, parse_listen, user_key
from tasuki.core.broker.state import WorkerSession
from tasuki.core.store_messages import Takes
from tasuki.core.units import shown_duration
from tasuki.errors import ConfigError, Unavailable
from tasuki.server.assembly import StorageLocations
from tasuki.server.server import Server
from tasuki.worker.commands import check_secrets
from tasuki.worker.local_workers import LocalWorkers
from tasuki.worker.worker import check_slots

DEFAULT_FOLDER = Path("tasuki-data")
DEFAULT_HTTP = "127.0.0.1:7080"
IDLE_S = 1.0
FIRST_CLIENT_S = 10.0  # how long the process that started an embedded server has to connect
FIRST_WORKER_S = 30.0  # its interpreter may start slowly; a worker that never connects does not keep the server for ever
OWNER_WAIT_S = 15.0  # an embedded server that is just leaving holds the folder a moment longer
OWNER_POLL_S = 0.05


def worker_arguments(
    slots: int | None, exec_: Sequence[str], config: Path | None, drain_timeout: float | None, log_head: str, log_tail: str
) -> tuple[str, ...]:
    """Return the arguments of each worker. Raise ConfigError for what a worker would refuse: it would be restarted for ever."""
    check_slots(slots)
    log_caps(log_head, log_tail)
    check_secrets(allowed_execs(config, exec_).values())
    return (
        *("--slots", str(slots or os.cpu_count() or 1)),
        *("--log-head", log_head, "--log-tail", log_tail),
        *(() if drain_timeout is None else ("--drain-timeout", str(drain_timeout))),
        *(() if config is None else ("--config", str(config))),
        *(word for each in exec_ for word in ("--exec", each)),
    )


@cli.command(
    "up",
    examples=[
        "tasuki up                                   # ./tasuki-data, 127.0.0.1:7000, one worker with a slot per core",
        "tasuki up --data /srv/tasuki --workers 2 --slots 8",
        "tasuki up --config execs.toml               # and programs that the workers run for others, with their limits",
        "tasuki up --no-tcp --workers 0              # only the unix socket; start workers yourself",
    ],
)
@cli.option(
    "--data", metavar="FOLDER", type=cli.PATH, help="Data folder, made if missing. Default: TASUKI_DATA, else ./tasuki-data."
)
@tcp_option
@no_tcp_option
@cli.option("--http", metavar="HOST:PORT", help=f"Serve HTTP here. Default: {DEFAULT_HTTP}, if that is free.")
@cli.flag("--no-http", help="No HTTP.")
@app_options
@cli.tls_options
@cli.number("--workers", metavar="N", type=int, default=1, help="Local worker processes.")
@cli.number("--slots", metavar="N", type=int, help="Jobs at once in each. Default: one per core.")
@cli.exec_options
@cli.drain_option
@cli.log_size_options
@cli.flag("--until-idle", help="Leave a second after the last client and the last running job.")
@cli.log_level_option
@cli.gather("arguments", worker_arguments)
def up(
    output: Output,
    data: Path | None,
    tcp: tuple[str, ...],
    no_tcp: bool,
    http: str | None,
    no_http: bool,
    apps: AppOptions,
    tls: cli.TlsOptions,
    workers: int,
    arguments: tuple[str, ...],
    until_idle: bool,
    log_level: str,
) -> int:
    """Ctrl-C or SIGTERM: running jobs finish, then all ends; a second one: at once."""
    process.configure_log(log_level, json=output.json)
    if workers < 0:
        raise ConfigError(f"--workers must be 0 or more, got {workers}")
    folder = data_folder(data, DEFAULT_FOLDER)
    given = tuple(parse_listen(text) for text in tcp)
    default = () if no_tcp or until_idle else (parse_listen(DEFAULT_TCP),)
    without_http = no_http or no_tcp or until_idle
    listen = ListenOptions(
        tcp=() if no_tcp else given or default,
        tls=tls,
        http=parse_http(http) if http else None if without_http else parse_http(DEFAULT_HTTP),
        http_if_free=not http,
        apps=apps,
    )
    options = ServerOptions(
        listen,
        StorageLocations(folder, app=apps.of_keys),
        process.server_config(folder.root, key=user_key(), apps=apps.names),
    )
    return process.run_loop(_main(options, process.Events(json=output.json), workers, arguments, until_idle))


async def _main(
    options: ServerOptions, events: process.Events, workers: int, arguments: tuple[str, ...], until_idle: bool
) -> int:
    folder = options.places.folder
    place = ("--to", f"unix://{folder.socket}", "--data", str(folder.root), "--log-level", "warning")
    command = (*OWN_COMMAND, "worker", "--until-stdin-ends", *place, "--subject", ">", "--any-program", *arguments)

    def ended(number: int, code: int, wait_s: float) -> None:
        shown = f"{number} (exit {code}); started again in {shown_duration(wait_s)}"
        events.emit("worker-ended", shown, number=number, exit_code=code, restart_in_s=wait_s)

    local = LocalWorkers(workers, command, ended)
    stop = process.StopSignals(hurry=local.hurry)

    async def work(opened: RunningServer) -> None:
        """Run the workers from the moment when all listeners are open until the server may close."""
        local.start()
        _announce(events, folder, opened, until_idle)
        waited_for: list[asyncio.Future[Any]] = [asyncio.ensure_future(stop.wanted.wait())]
        if until_idle:
            waited_for.append(asyncio.ensure_future(_idle(opened)))
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waited_for:
                one.cancel()
        reason = "signal" if stop.wanted.is_set() else "idle"
        events.emit("stopping", "(running jobs finish; a second signal ends them)", reason=reason)
        await local.drain()

    deadline = asyncio.get_running_loop().time() + (OWNER_WAIT_S if until_idle else 0.0)
    while True:
        try:
            await serve(options, events, work)
            return stop.exit_code
        except Unavailable:
            if not await _may_try_again(folder, deadline):
                raise


async def _may_try_again(folder: DataFolder, deadline: float) -> bool:
    """Wait until the folder is free. Return False at the deadline, or if its owner serves clients and no second one is needed."""
    loop = asyncio.get_running_loop()
    while loop.time() < deadline:
        await asyncio.sleep(OWNER_POLL_S)  # first: an owner whose pid is not seen from here must not be tried without a pause
        if answers(folder.socket):
            return False
        if not owner_of(folder):
            return True
    return False


async def _idle(opened: RunningServer) -> None:
    """Return when there has been neither a client nor a running job for IDLE_S, with all listeners closed.

    The first worker is waited for as well: it runs the jobs of a client that has left already.
    A later client finds no socket and starts a server of its own, which waits until this one has left the folder.
    """
    loop = asyncio.get_running_loop()
    last_seen = loop.time() + FIRST_CLIENT_S - IDLE_S
    first_worker_by = loop.time() + FIRST_WORKER_S

    def seen() -> None:
        nonlocal last_seen
        last_seen = loop.time()

    opened.server.on_last_client = seen  # also for one that came and left between two looks
    while True:
        await asyncio.sleep(IDLE_S / 4)
        workers = opened.server.broker.workers.values()
        takes_jobs = any(worker.account.available or worker.account.running for worker in workers)
        awaits_worker = loop.time() < first_worker_by and not takes_jobs
        if _busy(opened.server) or awaits_worker:
            seen()
        if loop.time() - last_seen >= IDLE_S:
            await opened.shut()
            await asyncio.sleep(0)
            if not _busy(opened.server):
                return
            await opened.reopen()
            seen()


def _busy(server: Server) -> bool:
    sessions = server.broker.sessions.values()
    return any(
        not isinstance(session, WorkerSession) or session.account.running or session.offer.takes is Takes.HANDLERS
        for session in sessions  # a worker of handlers is somebody's own: tasks that are about to be submitted
    )


def _announce(events: process.Events, folder: DataFolder, opened: RunningServer, until_idle: bool) -> None:
    events.emit("ready", f"data {folder.root}", data=str(folder.root), token_file=str(folder.token_file))
    if until_idle:
        return
    if (link := opened.new_login_link()) is not None:
        events.say("")
        events.say("See and steer it in a browser of this machine (the link works once):")
        events.say(f"  {link}")
    url = next((str(address) for address in opened.addresses if address.scheme != "unix"), None)
    found_by_itself = folder.root == DEFAULT_FOLDER.absolute()
    events.say("")
    events.say("Try in another terminal, in this folder:" if found_by_itself else "Try in another terminal:")
    where = "" if found_by_itself else f" --data {shlex.quote(str(folder.root))}"
    events.say(f"  tasuki run{where} echo hello")
    events.say(f"  tasuki stats{where} --watch")
    if url is not None:
        events.say("As another user (make a token first: tasuki token create --kind client):")
        events.say(f"  tasuki list --to {url} --token-file FILE")
    if opened.http_address is not None:
        token = shlex.quote(str(folder.token_file))
        events.say("Over HTTP:")
        events.say(f'  curl -H "Authorization: Bearer $(cat {token})" {opened.http_address}/v1/jobs')
    events.say("")
