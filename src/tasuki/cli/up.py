"""`tasuki up`: a server and local workers on this machine, with one command.

`--until-idle` is what an embedded server is: it serves the unix socket of the data folder, works while there is a client or
a running job, and leaves a second later.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.server import DEFAULT_TCP, App, Insecure, NoTcp, Tcp, TlsCert, TlsKey
from tasuki.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from tasuki.cli.local_workers import LocalWorkers
    from tasuki.cli.server_process import Events, Listen, RunningServer, StopSignals
    from tasuki.config import DataFolder
    from tasuki.server.server import Server

DEFAULT_FOLDER = Path("tasuki-data")
DEFAULT_HTTP = "127.0.0.1:7080"
IDLE_S = 1.0
FIRST_CLIENT_S = 10.0  # whoever started an embedded server gets this long to connect
OWNER_WAIT_S = 15.0  # an embedded server that is just leaving holds the folder a moment longer
OWNER_POLL_S = 0.05


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "up",
        examples=[
            "tasuki up                                   # ./tasuki-data, 127.0.0.1:7000, one worker with a slot per core",
            "tasuki up --data /srv/tasuki --workers 2 --slots 8",
            "tasuki up --config execs.toml               # and programs that the workers run for others, with their limits",
            "tasuki up --no-tcp --workers 0              # only the unix socket; start workers yourself",
        ],
    )(up)


def up(
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FOLDER", help="Data folder, made if missing. Default: TASUKI_DATA, else ./tasuki-data."),
    ] = None,
    tcp: Tcp = None,
    no_tcp: NoTcp = False,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help=f"Serve HTTP here. Default: {DEFAULT_HTTP}, if that is free."),
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="No HTTP.")] = False,
    app: App = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: Insecure = False,
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Local worker processes.")] = 1,
    slots: Annotated[
        int | None, typer.Option("--slots", metavar="N", help="Jobs at once in each. Default: one per core.")
    ] = None,
    exec_: options.Execs = None,
    config: options.ExecsFile = None,
    drain_timeout: options.DrainTimeout = None,
    log_head: options.LogHead = options.LOG_HEAD,
    log_tail: options.LogTail = options.LOG_TAIL,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Leave a second after the last client and the last running job.")
    ] = False,
    log_level: options.LogLevel = "info",
    json: options.Json = False,
) -> int:
    """Start a server and local workers here.

    Ctrl-C or SIGTERM: running jobs finish, then all ends; a second one: at once.
    """
    from tasuki.cli import log, server_process
    from tasuki.cli.local_workers import worker_options
    from tasuki.config import data_folder, parse_http, parse_listen

    log.configure(log_level, json=json)
    if workers < 0:
        raise ConfigError(f"--workers must be 0 or more, got {workers}")
    folder = data_folder(data or os.environ.get("TASUKI_DATA") or DEFAULT_FOLDER)
    given = tuple(parse_listen(text) for text in tcp or ())
    default = () if no_tcp or until_idle else (parse_listen(DEFAULT_TCP),)
    quiet = no_http or no_tcp or until_idle
    listen = server_process.Listen(
        folder=folder,
        tcp=() if no_tcp else given or default,
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        json=json,
        http=parse_http(http) if http else None if quiet else parse_http(DEFAULT_HTTP),
        http_if_free=not http,
        apps=tuple(dict.fromkeys(app or ())),
    )
    words = worker_options(slots, exec_ or [], config, drain_timeout, log_head, log_tail)
    return server_process.run_loop(_main(listen, workers, words, until_idle))


async def _main(listen: Listen, workers: int, words: tuple[str, ...], until_idle: bool) -> int:
    from tasuki.cli.local_workers import LocalWorkers
    from tasuki.cli.server_process import Events, StopSignals, hosted

    events = Events(json=listen.json)
    socket = f"unix://{listen.folder.socket}"
    place = ("--to", socket, "--data", str(listen.folder.root), "--log-level", "warning")
    workforce = LocalWorkers(workers, (*place, "--subject", ">", "--any-program", *words), events)
    stop = StopSignals(hurry=workforce.hurry)

    async def work(opened: RunningServer) -> None:
        await _work(opened, listen.folder, workforce, stop, events, until_idle)

    deadline = asyncio.get_running_loop().time() + (OWNER_WAIT_S if until_idle else 0.0)
    while True:
        try:
            await hosted(listen, events, work)
            return stop.exit_code
        except Unavailable:
            if not await _may_try_again(listen.folder, deadline):
                raise


async def _may_try_again(folder: DataFolder, deadline: float) -> bool:
    """Wait until the folder is free. No: its time is over, or its owner serves clients and no second one is needed."""
    from tasuki.cli.connect import owner_of
    from tasuki.client.embedded import answers

    loop = asyncio.get_running_loop()
    while loop.time() < deadline:
        await asyncio.sleep(OWNER_POLL_S)  # first: an owner whose pid is not seen from here must not be tried without a pause
        if answers(folder.socket):
            return False
        if not owner_of(folder):
            return True
    return False


async def _work(
    opened: RunningServer, folder: DataFolder, workforce: LocalWorkers, stop: StopSignals, events: Events, until_idle: bool
) -> None:
    """Between the moment when all listeners are open and the moment when the server may close."""
    workforce.start()
    _greet(events, folder, opened, until_idle)
    stopped = asyncio.ensure_future(stop.wanted.wait())
    idle = asyncio.ensure_future(_idle(opened)) if until_idle else None
    try:
        await asyncio.wait({stopped, *([idle] if idle else [])}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        if idle is not None:
            idle.cancel()
    reason = "signal" if stop.wanted.is_set() else "idle"
    events.tell("stopping", "(running jobs finish; a second signal ends them)", reason=reason)
    await workforce.drain()


async def _idle(opened: RunningServer) -> None:
    """Returns when there has been neither a client nor a running job for IDLE_S, with the door shut.

    Who comes later finds no socket and starts a server of their own, which waits until we have left the folder.
    """
    loop = asyncio.get_running_loop()
    last_seen = loop.time() + FIRST_CLIENT_S - IDLE_S

    def seen() -> None:
        nonlocal last_seen
        last_seen = loop.time()

    opened.server.on_last_client = seen  # also for one that came and left between two looks
    while True:
        await asyncio.sleep(IDLE_S / 4)
        if _busy(opened.server):
            seen()
        if loop.time() - last_seen >= IDLE_S:
            await opened.shut()
            await asyncio.sleep(0)
            if not _busy(opened.server):
                return
            await opened.reopen()
            seen()


def _busy(server: Server) -> bool:
    from tasuki.core.broker.state import WorkerSession

    sessions = server.broker.sessions.values()
    return any(not isinstance(session, WorkerSession) or session.account.running for session in sessions)


def _greet(events: Events, folder: DataFolder, opened: RunningServer, until_idle: bool) -> None:
    events.tell("ready", f"data {folder.root}", data=str(folder.root), token_file=str(folder.token_file))
    if until_idle:
        return
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
