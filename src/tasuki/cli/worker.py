"""`tasuki worker`: takes jobs from a server, or straight from a store, and runs the programs that its operator allows."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command_group
from tasuki.cli.server import Coordination
from tasuki.cli.store_client import StoreAddress, is_store
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.cli.worker_login import WorkerLogin
    from tasuki.config import Address, DataFolder
    from tasuki.worker import Worker
    from tasuki.worker.execs import Exec
    from tasuki.worker.logs import LogCaps

ORPHAN_GRACE_S = 30.0  # without a server
ORPHAN_LOOK_S = 1.0


def add_to(app: typer.Typer) -> None:
    """Register the command, and those below it."""
    from tasuki.cli import worker_service, worker_status

    below = command_group(
        app,
        "worker",
        examples=[
            "TASUKI_ENROLL=tsk_e_… tasuki worker --to https://control.example --app zpe --exec zpe='python3 zpe.py'",
            "tasuki worker --to https://control.example --app zpe --exec zpe='python3 zpe.py'      # it is enrolled, once",
            "tasuki worker --to tcp://host:7000 --token-file worker.token --exec render='/opt/render/bin/render --quiet'",
            "tasuki worker --to tcp://host:7000 --subject 'render.eu.*' --subject 'common.>' --slots 4 --config execs.toml",
            "tasuki worker --subject '>' --any-program      # over the data folder's unix socket, for your own jobs",
            "TASUKI_URL=redis://127.0.0.1:6379/0 tasuki worker --app zpe --exec zpe='python3 zpe.py'      # straight from Redis",
        ],
    )(worker)
    worker_service.add_to(below, worker)
    worker_status.add_to(below)


Server = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="URL",
        help="Server, or several to choose from: https://host, tcp://a:7000,b:7000; or a store, for workers that may know its "
        "address: redis://host:6379/0, postgresql://user@host/database. Default: TASUKI_URL, else the data folder's unix socket.",
    ),
]
App = Annotated[
    str | None,
    typer.Option(
        "--app",
        metavar="NAME",
        envvar="TASUKI_APP",
        help="Run this app's jobs with the exec of the same name: payload on stdin, result.json in $TASUKI_OUT. "
        "With --to redis://… also the prefix of the keys.",
    ),
]
Subjects = Annotated[
    list[str] | None,
    typer.Option("--subject", metavar="PATTERN", help="What to take, * and > allowed. Several times. Default: job.assign.>"),
]
Slots = Annotated[int | None, typer.Option("--slots", metavar="N", help="Jobs at once. Default: one per core.")]
AnyProgram = Annotated[
    bool, typer.Option("--any-program", help="Run any program for jobs of this same user; only over a unix socket.")
]
EnrollFile = Annotated[
    str | None,
    typer.Option(
        "--enroll-file",
        metavar="FILE",
        help="With --to https://…: file with an enrol token, - for stdin. Needed once: the worker keeps what it gets for it in "
        "the data folder, and renews it. Default: TASUKI_ENROLL, else asked for at a terminal.",
    ),
]
WorkerId = Annotated[
    str | None,
    typer.Option(
        "--worker-id",
        metavar="ID",
        help="Lasting identity, no dots: with the same --data, results that no server took are offered by its next start. "
        "Default: the enrolled one; over HTTP one that the data folder keeps; else a new one each start.",
    ),
]
OnDisconnect = Annotated[
    str | None,
    typer.Option(
        "--on-disconnect",
        metavar="stop|keep",
        help="What happens to running jobs when no server renews their leases: stop them before others may take them, or keep "
        "them running and offer their results later. Default: keep over HTTP, else stop.",
    ),
]
ReconnectGrace = Annotated[
    float,
    typer.Option(
        "--reconnect-grace",
        metavar="SECONDS",
        help="With keep: how long after the end of a lease others still leave the job to this worker, 0 to 3600.",
    ),
]
LeaseTtl = Annotated[
    float | None,
    typer.Option("--lease-ttl", metavar="SECONDS", help="Length of a lease. Default: the server's, 15 or over HTTP 60."),
]
BlobsUrl = Annotated[
    str | None,
    typer.Option(
        "--blobs",
        metavar="URL",
        envvar="TASUKI_BLOBS",
        help="With --to redis://… or postgresql://…: where the servers keep what is larger than 64 KiB, s3://bucket/prefix.",
    ),
]
UntilStdinEnds = Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)]
OnlyCheck = Annotated[str, typer.Option("--only-check", hidden=True)]
OPTIONS, ADMISSION = "options", "admission"
"""For `tasuki worker install`: up to where to go; with the second a worker that is new enrols."""


def worker(
    to: Server = None,
    app: App = None,
    subject: Subjects = None,
    slots: Slots = None,
    exec_: options.Execs = None,
    config: options.ExecsFile = None,
    any_program: AnyProgram = False,
    worker_id: WorkerId = None,
    on_disconnect: OnDisconnect = None,
    reconnect_grace: ReconnectGrace = 60.0,
    lease_ttl: LeaseTtl = None,
    drain_timeout: options.DrainTimeout = None,
    log_head: options.LogHead = options.LOG_HEAD,
    log_tail: options.LogTail = options.LOG_TAIL,
    until_stdin_ends: UntilStdinEnds = False,
    only_check: OnlyCheck = "",
    blobs: BlobsUrl = None,
    coordination: Coordination = None,
    log_level: options.LogLevel = "info",
    data: options.Data = None,
    token_file: options.TokenFile = None,
    enroll_file: EnrollFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Run jobs until a signal.

    The first SIGTERM or Ctrl-C drains: no new jobs, running ones finish. The second stops them.

    Over https:// only outgoing connections are needed: it works behind NAT and through proxies (HTTPS_PROXY).
    """
    from tasuki.cli import log
    from tasuki.cli.app_worker import AppWorker
    from tasuki.cli.worker_login import LoginOptions, admitted, unadmitted
    from tasuki.config import data_folder

    log.configure(log_level, json=json)
    check_times(on_disconnect, reconnect_grace, drain_timeout)
    folder = data_folder(data)
    url, addresses, over_http = where_to(to, folder)
    execs = allowed_execs(config, exec_ or [])
    patterns = wanted_patterns(app, subject or [], execs, any_program=any_program, over_http=over_http)
    wish = LoginOptions(folder.root, token_file, enroll_file, worker_id, tls_ca, patterns)
    with unadmitted(wish) if only_check == OPTIONS else admitted(addresses, wish) as admission:
        made = AppWorker(
            url,
            app=app,
            store=StoreAddress(url, app, blobs or "", coordination or "") if is_store(url) else None,
            token=admission.token,
            worker_id=admission.worker_id,
            credential_file=admission.seat,
            subjects=admission.patterns,
            concurrency=slots,
            execs=execs,
            any_program=any_program,
            data=folder.root,  # also for its run folders: the next start there finds what a killed worker left behind
            on_disconnect=on_disconnect,
            reconnect_grace_s=reconnect_grace,
            lease_ttl_s=lease_ttl,
            tls_ca=tls_ca,
            drain_timeout_s=drain_timeout,
            log_caps=log_caps(log_head, log_tail),
        )
        if not only_check:
            run_admitted(made, admission, until_stdin_ends=until_stdin_ends)


def where_to(to: str | None, folder: DataFolder) -> tuple[str, list[Address], bool]:
    """The address as it is given to the worker, the servers in it (none, if it is a store's), and whether it is HTTP."""
    from tasuki.config import default_url, parse_url

    url = to or default_url() or f"unix://{folder.socket}"
    addresses = [] if is_store(url) else parse_url(url)
    return url, addresses, any(address.http for address in addresses)


def run_admitted(made: Worker, admission: WorkerLogin, *, until_stdin_ends: bool) -> None:
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, args=(made,), name="tasuki-stdin", daemon=True).start()
    with admission.way_back():
        made.run()


def check_times(on_disconnect: str | None, reconnect_grace: float, drain_timeout: float | None) -> None:
    """ConfigError unless the worker can be patient as it is told to."""
    from tasuki.worker.worker import RECONNECT_GRACE_MAX_S

    check_drain_timeout(drain_timeout)
    if on_disconnect not in (None, "stop", "keep"):
        raise ConfigError(f"--on-disconnect must be stop or keep, got {on_disconnect!r}")
    if not 0 <= reconnect_grace <= RECONNECT_GRACE_MAX_S:
        raise ConfigError(f"--reconnect-grace must be 0 to {RECONNECT_GRACE_MAX_S:g} seconds, got {reconnect_grace:g}")


def wanted_patterns(
    app: str | None, subjects: Sequence[str], execs: Mapping[str, Exec], *, any_program: bool, over_http: bool
) -> tuple[str, ...]:
    """What the worker is to take, as far as the command line says it; ConfigError if it could run nothing of it."""
    from tasuki.config import check_app
    from tasuki.core.subject import app_subject
    from tasuki.worker.worker import what_it_takes

    what_it_takes(handlers=False, execs=bool(execs), any_program=any_program)
    if app is None:
        return tuple(subjects)
    if check_app(app) not in execs and over_http:
        raise ConfigError(f"--app {app} needs a program of that name to run its jobs with; give it as --exec {app}=COMMAND")
    return (app_subject(app),) if app in execs and not subjects else tuple(subjects)


def _end_with_stdin(worker: Worker) -> None:
    """The other end of our stdin is held by `tasuki up`: when it is gone, however it died, there is no more to take here.

    What runs goes on while a server answers (a new `up` on the folder, say); without one its leases end soon.
    """
    while os.read(sys.stdin.fileno(), 1):  # not sys.stdin.read: its lock, held by this thread, would break the exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # drain
    alone_s = 0.0
    while alone_s < ORPHAN_GRACE_S:
        time.sleep(ORPHAN_LOOK_S)
        alone_s = 0.0 if worker.connected else alone_s + ORPHAN_LOOK_S
    os.kill(os.getpid(), signal.SIGTERM)  # stop


def allowed_execs(config: Path | None, flags: list[str]) -> dict[str, Exec]:
    """What the file allows, then what the flags allow; a flag replaces an exec of the same name."""
    from tasuki.worker.execs import load_execs, parse_exec_flag

    execs = load_execs(config) if config is not None else {}
    for flag in flags:
        parsed = parse_exec_flag(flag)
        execs[parsed.name] = parsed
    return execs


def log_caps(head: str, tail: str) -> LogCaps:
    """What `--log-head` and `--log-tail` mean."""
    from tasuki.config import parse_size
    from tasuki.worker.logs import LogCaps

    return LogCaps(head_bytes=parse_size(head), tail_bytes=parse_size(tail))


def check_drain_timeout(drain_timeout: float | None) -> None:
    """ConfigError unless it is a time that can pass."""
    if drain_timeout is not None and not 0 <= drain_timeout < float("inf"):
        raise ConfigError(f"--drain-timeout must be 0 or more seconds, got {drain_timeout:g}; leave it out for no limit")
