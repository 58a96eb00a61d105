"""`tasuki worker`: takes jobs from a server, or straight from a store, and runs the programs that its operator allows."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasuki.cli import command as cli
from tasuki.cli import worker_service, worker_status
from tasuki.cli.connect import StoreAddress, is_store
from tasuki.cli.output import Output
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.cli.worker_login import WorkerLogin
    from tasuki.config import DataFolder
    from tasuki.core.address import Address
    from tasuki.worker import Worker
    from tasuki.worker.execs import Exec
    from tasuki.worker.logs import LogCaps

ORPHAN_GRACE_S = 30.0  # without a server
ORPHAN_POLL_S = 1.0

worker_options = cli.options(
    cli.option(
        "--to",
        metavar="URL",
        help="Server, or several to choose from: https://host, tcp://a:7000,b:7000; or a store, for workers that may know its "
        "address: redis://host:6379/0, postgresql://user@host/database. Default: TASUKI_URL, else the data folder's unix socket.",
    ),
    cli.option(
        "--app",
        metavar="NAME",
        envvar="TASUKI_APP",
        help="Run this app's jobs with the exec of the same name: payload on stdin, result.json in $TASUKI_OUT. "
        "With --to redis://… also the prefix of the keys.",
    ),
    cli.several("--subject", metavar="PATTERN", help="What to take, * and > allowed. Several times. Default: job.assign.>"),
    cli.number("--slots", metavar="N", type=int, help="Jobs at once. Default: one per core."),
    cli.exec_options,
    cli.flag("--any-program", help="Run any program for jobs of this same user; only over a unix socket."),
    cli.option(
        "--worker-id",
        metavar="ID",
        help="Lasting identity, no dots: with the same --data, results that no server took are offered by its next start. "
        "Default: the enrolled one; over HTTP one that the data folder keeps; else a new one each start.",
    ),
    cli.option(
        "--on-disconnect",
        metavar="stop|keep",
        help="What happens to running jobs when no server renews their leases: stop them before others may take them, or keep "
        "them running and offer their results later. Default: keep over HTTP, else stop.",
    ),
    cli.number(
        "--reconnect-grace",
        metavar="SECONDS",
        default=60.0,
        help="With keep: how long after the end of a lease others still leave the job to this worker, 0 to 3600.",
    ),
    cli.number("--lease-ttl", metavar="SECONDS", help="Length of a lease. Default: the server's, 15 or over HTTP 60."),
    cli.drain_option,
    cli.log_size_options,
    cli.flag("--until-stdin-ends", help="For tasuki up.", hidden=True),
    cli.option("--only-check", metavar="WHAT", default="", help="For tasuki worker install.", hidden=True),
    cli.option(
        "--blobs",
        metavar="URL",
        envvar="TASUKI_BLOBS",
        help="With --to redis://… or postgresql://…: where the servers keep what is larger than 64 KiB, s3://bucket/prefix.",
    ),
    cli.option(
        "--coordination",
        metavar="URL",
        envvar="TASUKI_COORDINATION",
        help="With PostgreSQL: redis://… for beats, the leader's lock and hints. The same for all servers. Default: the store.",
    ),
    cli.log_level_option,
    cli.data_option,
    cli.token_file_option,
    cli.option(
        "--enroll-file",
        metavar="FILE",
        help="With --to https://…: file with an enrol token, - for stdin. Needed once: the worker keeps what it gets for it in "
        "the data folder, and renews it. Default: TASUKI_ENROLL, else asked for at a terminal.",
    ),
    cli.tls_ca_option,
)


@cli.command_group(
    "worker",
    examples=[
        "TASUKI_ENROLL=tsk_e_… tasuki worker --to https://control.example --app zpe --exec zpe='python3 zpe.py'",
        "tasuki worker --to https://control.example --app zpe --exec zpe='python3 zpe.py'      # it is enrolled, once",
        "tasuki worker --to tcp://host:7000 --token-file worker.token --exec render='/opt/render/bin/render --quiet'",
        "tasuki worker --to tcp://host:7000 --subject 'render.eu.*' --subject 'common.>' --slots 4 --config execs.toml",
        "tasuki worker --subject '>' --any-program      # over the data folder's unix socket, for your own jobs",
        "TASUKI_URL=redis://127.0.0.1:6379/0 tasuki worker --app zpe --exec zpe='python3 zpe.py'      # straight from Redis",
    ],
)
@worker_options
def worker(output: Output, **given: Any) -> None:
    """The first SIGTERM or Ctrl-C drains: no new jobs, running ones finish. The second stops them.

    Over https:// only outgoing connections are needed: it works behind NAT and through proxies (HTTPS_PROXY).
    """
    run_worker(output, **given)


def run_worker(
    output: Output,
    *,
    to: str | None,
    app: str | None,
    subject: tuple[str, ...],
    slots: int | None,
    exec_: tuple[str, ...],
    config: Path | None,
    any_program: bool,
    worker_id: str | None,
    on_disconnect: str | None,
    reconnect_grace: float,
    lease_ttl: float | None,
    drain_timeout: float | None,
    log_head: str,
    log_tail: str,
    until_stdin_ends: bool,
    only_check: str,
    blobs: str | None,
    coordination: str | None,
    log_level: str,
    data: Path | None,
    token_file: str | None,
    enroll_file: str | None,
    tls_ca: str | None,
) -> None:
    """Run a worker; with `only_check`, check the options, or also log in, for `tasuki worker install`."""
    from tasuki.cli import process
    from tasuki.cli.app_worker import AppWorker
    from tasuki.cli.worker_login import LoginOptions, logged_in, not_logged_in
    from tasuki.config import data_folder

    process.configure_log(log_level, json=output.json)
    check_times(on_disconnect, reconnect_grace, drain_timeout)
    folder = data_folder(data)
    url, addresses, over_http = where_to(to, folder)
    execs = allowed_execs(config, exec_)
    patterns = wanted_patterns(app, subject, execs, any_program=any_program, over_http=over_http)
    chosen = LoginOptions(folder.root, token_file, enroll_file, worker_id, tls_ca, patterns)
    with not_logged_in(chosen) if only_check == worker_service.OPTIONS else logged_in(addresses, chosen) as login:
        made = AppWorker(
            url,
            app=app,
            store=StoreAddress(url, app, blobs or "", coordination or "") if is_store(url) else None,
            **login.worker_arguments(),
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
            _run_to_end(made, login, until_stdin_ends=until_stdin_ends)


worker.add_command(worker_service.install_command(worker_options, run_worker))
worker.add_command(worker_service.uninstall)
worker.add_command(worker_status.status)


def where_to(to: str | None, folder: DataFolder) -> tuple[str, list[Address], bool]:
    """Return the address for the worker, the servers in it (none, if it is a store's), and whether it is HTTP."""
    from tasuki.config import default_url
    from tasuki.core.address import parse_url

    url = to or default_url() or f"unix://{folder.socket}"
    addresses = [] if is_store(url) else parse_url(url)
    return url, addresses, any(address.http for address in addresses)


def _run_to_end(made: Worker, login: WorkerLogin, *, until_stdin_ends: bool) -> None:
    if until_stdin_ends:
        threading.Thread(target=_end_with_stdin, args=(made,), name="tasuki-stdin", daemon=True).start()
    with login.explaining_refusal():
        made.run()


def check_times(on_disconnect: str | None, reconnect_grace: float, drain_timeout: float | None) -> None:
    """Raise ConfigError for times that cannot work."""
    from tasuki.worker.worker import RECONNECT_GRACE_MAX_S

    check_drain_timeout(drain_timeout)
    if on_disconnect not in (None, "stop", "keep"):
        raise ConfigError(f"--on-disconnect must be stop or keep, got {on_disconnect!r}")
    if not 0 <= reconnect_grace <= RECONNECT_GRACE_MAX_S:
        raise ConfigError(f"--reconnect-grace must be 0 to {RECONNECT_GRACE_MAX_S:g} seconds, got {reconnect_grace:g}")


def wanted_patterns(
    app: str | None, subjects: Sequence[str], execs: Mapping[str, Exec], *, any_program: bool, over_http: bool
) -> tuple[str, ...]:
    """Return the subjects that the command line names. Raise ConfigError if the worker could run nothing of them."""
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
    """Drain when stdin ends: its other end is held by `tasuki up`, which is gone then, however it died.

    Running jobs go on while a server answers (a new `up` on the folder, say); without one their leases end soon.
    """
    while os.read(sys.stdin.fileno(), 1):  # not sys.stdin.read: its lock, held by this thread, would break the exit
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # drain
    alone_s = 0.0
    while alone_s < ORPHAN_GRACE_S:
        time.sleep(ORPHAN_POLL_S)
        alone_s = 0.0 if worker.connected else alone_s + ORPHAN_POLL_S
    os.kill(os.getpid(), signal.SIGTERM)  # stop


def allowed_execs(config: Path | None, flags: Sequence[str]) -> dict[str, Exec]:
    """Return the execs of the file and of the flags; a flag replaces an exec of the same name."""
    from tasuki.worker.execs import load_execs, parse_exec_flag

    execs = load_execs(config) if config is not None else {}
    for text in flags:
        parsed = parse_exec_flag(text)
        execs[parsed.name] = parsed
    return execs


def log_caps(head: str, tail: str) -> LogCaps:
    """Return the sizes of --log-head and --log-tail."""
    from tasuki.config import parse_size
    from tasuki.worker.logs import LogCaps

    return LogCaps(head_bytes=parse_size(head), tail_bytes=parse_size(tail))


def check_drain_timeout(drain_timeout: float | None) -> None:
    """Raise ConfigError unless the time is finite and not negative."""
    if drain_timeout is not None and not 0 <= drain_timeout < float("inf"):
        raise ConfigError(f"--drain-timeout must be 0 or more seconds, got {drain_timeout:g}; leave it out for no limit")
