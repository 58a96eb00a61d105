"""`tasuki worker`: takes jobs from a server, or straight from a store, and runs the programs that its operator allows."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from tasuki.cli import command as cli
from tasuki.cli import process, worker_service
from tasuki.cli.connect import StoreAddress, guest, is_store
from tasuki.cli.output import Output
from tasuki.cli.worker_login import LoginOptions, logged_in
from tasuki.config import OWN_COMMAND, check_app, data_folder, forget_tokens
from tasuki.core.address import Address, parse_url
from tasuki.core.apps import outcome_of
from tasuki.core.decoding import decodable
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.lifecycle import GRACE_MAX_S, LEASE_TTL_RANGE_S, LEASE_TTL_S
from tasuki.core.store_messages import Grant
from tasuki.core.subject import app_subject
from tasuki.core.units import parse_size
from tasuki.errors import ConfigError, TooLarge
from tasuki.tasks.tasks import Tasks, load_tasks
from tasuki.worker.attempt import MESSAGE_MAX_CHARS, Attempt, HandlerJob, RunResult
from tasuki.worker.cache import CacheConfig
from tasuki.worker.execs import Exec, load_execs, parse_exec_flag
from tasuki.worker.linux_calls import wipe_variables
from tasuki.worker.local_workers import end_with_stdin
from tasuki.worker.logs import LogCaps
from tasuki.worker.worker import Worker, what_it_offers

MEMBER_MAX_BYTES = 16 * 1024 * 1024  # of a file that is read here; larger results stay in the archive
CODE_MAX_CHARS = 64
RELOAD_LOOK_S = 0.3
RELOAD_GRACE_S = 5.0  # for running jobs, before they are stopped


def allowed_execs(config: Path | None, exec_: Sequence[str]) -> dict[str, Exec]:
    """Return the execs of the file and of --exec, which replaces an exec of the same name."""
    execs = load_execs(config) if config is not None else {}
    for text in exec_:
        parsed = parse_exec_flag(text)
        execs[parsed.name] = parsed
    return execs


def log_caps(log_head: str, log_tail: str) -> LogCaps:
    return LogCaps(head_bytes=parse_size(log_head), tail_bytes=parse_size(log_tail))


def kept_by_worker(log_head: str, log_tail: str, cache: Path | None, cache_max: str) -> dict[str, Any]:
    """Return how much of logs and of caches a worker keeps, as arguments of `Worker`."""
    config = CacheConfig(None if cache is None else cache.absolute(), parse_size(cache_max))
    return {"log_caps": log_caps(log_head, log_tail), "cache": config}


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
    cli.option(
        "--tasks",
        metavar="MODULE:NAME",
        help="Run the typed tasks of a Python program: the Tasks called NAME in MODULE, which is found from the current folder. "
        "Without a server, an embedded one is started.",
    ),
    cli.flag("--reload", help="With --tasks: start again when a .py file below the current folder has changed."),
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
    cli.duration(
        "--reconnect-grace",
        type=cli.Duration(0, GRACE_MAX_S),
        default=60.0,
        help="With keep: how long after the end of a lease others still leave the job to this worker, up to 1h.",
    ),
    cli.duration(
        "--lease-ttl",
        type=cli.Duration(*LEASE_TTL_RANGE_S),
        help="Length of a lease. Default: the server's, 15s or over HTTP 60s.",
    ),
    cli.option(
        "--cache",
        metavar="FOLDER",
        type=cli.PATH,
        help="Where files of caches are kept (tasuki cache). Default: in the data folder.",
    ),
    cli.option("--cache-max", metavar="SIZE", default="64GiB", help="How much of them is kept; what was used longest ago goes."),
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
    cli.coordination_option,
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
    cli.gather("execs", allowed_execs),
    cli.gather("kept", kept_by_worker),
)


@cli.command(
    "worker",
    cls=click.Group,
    invoke_without_command=True,
    examples=[
        "TASUKI_ENROLL=tsk_e_… tasuki worker --to https://control.example --app zpe --exec zpe='python3 zpe.py'",
        "tasuki worker --to https://control.example --app zpe --exec zpe='python3 zpe.py'      # it is enrolled, once",
        "tasuki worker --to tcp://host:7000 --token-file worker.token --exec render='/opt/render/bin/render --quiet'",
        "tasuki worker --to tcp://host:7000 --subject 'render.eu.*' --subject 'common.>' --slots 4 --config execs.toml",
        "tasuki worker --tasks app:tasks --reload       # typed tasks of app.py; starts again when the code changes",
        "tasuki worker --subject '>' --any-program      # over the data folder's unix socket, for your own jobs",
        "TASUKI_URL=redis://127.0.0.1:6379/0 tasuki worker --app zpe --exec zpe='python3 zpe.py'      # straight from Redis",
    ],
)
@worker_options
def worker(output: Output, **given: Any) -> None:
    """The first SIGTERM or Ctrl-C drains: no new jobs, running ones finish. The second stops them.

    Over https:// only outgoing connections are needed: it works behind NAT and through proxies (HTTPS_PROXY).
    """
    if given.pop("reload"):
        if not given["tasks"]:
            raise ConfigError("--reload is for --tasks MODULE:NAME")
        sys.exit(run_again_on_changes([word for word in sys.argv[1:] if word != "--reload"], Path.cwd()))
    run_worker(output, **given)


def run_worker(
    output: Output,
    *,
    to: str | None,
    app: str | None,
    tasks: str | None,
    reload: bool = False,
    subject: tuple[str, ...],
    slots: int | None,
    execs: dict[str, Exec],
    any_program: bool,
    worker_id: str | None,
    on_disconnect: str | None,
    reconnect_grace: float,
    lease_ttl: float | None,
    drain_timeout: float | None,
    kept: dict[str, Any],
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
    process.configure_log(log_level, json=output.json)
    check_choices(on_disconnect, reload)
    loaded = load_tasks(tasks) if tasks is not None else None
    folder = data_folder(data or (loaded.data if loaded is not None else None))
    url = to or (loaded or Tasks()).server(folder, start=loaded is not None and not only_check)
    addresses = [] if is_store(url) else parse_url(url)
    patterns = wanted_patterns(app, subject, execs, addresses, handlers=loaded is not None, any_program=any_program)
    chosen = LoginOptions(folder.root, token_file, enroll_file, worker_id, tls_ca, patterns)
    with logged_in([] if only_check == worker_service.OPTIONS else addresses, chosen) as login:
        made = AppWorker(
            url,
            app=app,
            tasks=loaded,
            store=StoreAddress(url, app, blobs or "", coordination or "") if is_store(url) else None,
            **login._asdict(),
            concurrency=slots,
            execs=execs,
            any_program=any_program,
            data=folder.root,  # also for its run folders: the next start there finds what a killed worker left behind
            on_disconnect=on_disconnect,
            reconnect_grace_s=reconnect_grace,
            lease_ttl_s=lease_ttl,
            tls_ca=tls_ca,
            drain_timeout_s=drain_timeout,
            **kept,
        )
        if only_check:
            return
        wipe_variables(*forget_tokens())
        if until_stdin_ends:
            end_with_stdin(lambda: made.connected)
        with login.explaining_refusal():
            made.run()


worker.add_command(worker_service.install_command(worker_options, run_worker))
worker.add_command(worker_service.uninstall)
worker.add_command(worker_service.status)


def check_choices(on_disconnect: str | None, reload: bool) -> None:
    """Raise ConfigError unless the choice is known; or for a service with --reload, which only a terminal has."""
    if reload:
        raise ConfigError("--reload is for development; a service is started again with: systemctl --user restart UNIT")
    if on_disconnect not in (None, "stop", "keep"):
        raise ConfigError(f"--on-disconnect must be stop or keep, got {on_disconnect!r}")


def wanted_patterns(
    app: str | None,
    subjects: Sequence[str],
    execs: Mapping[str, Exec],
    addresses: Sequence[Address],
    *,
    any_program: bool,
    handlers: bool,
) -> tuple[str, ...]:
    """Return the subjects that the command line names. Raise ConfigError if the worker could run nothing of them."""
    if any_program and (not addresses or any(address.scheme != "unix" for address in addresses)):
        where = ", ".join(map(str, addresses)) or "jobs straight from a store"
        raise ConfigError(
            f"--any-program is for your own jobs, over the server's unix socket, and not for {where}; "
            "allow programs by name, with --exec NAME=COMMAND"
        )
    what_it_offers(handlers=handlers, execs=execs, any_program=any_program)
    if app is None:
        return tuple(subjects)
    if check_app(app) not in execs and any(address.http for address in addresses):
        raise ConfigError(f"--app {app} needs a program of that name to run its jobs with; give it as --exec {app}=COMMAND")
    return (app_subject(app),) if app in execs and not subjects else tuple(subjects)


# ---------------------------------------------------------------------------------------------------- development


def run_again_on_changes(arguments: Sequence[str], folder: Path) -> int:
    """Run `tasuki` with these arguments, and again whenever a Python file below the folder has changed; return its exit code.

    Signals are passed on. A command that fails is started again by the next change. The command drains when this process dies.
    """
    signals: list[int] = []
    for number in process.SIGNALS:
        signal.signal(number, lambda number, _: signals.append(number))
    while True:
        seen = python_files(folder)
        command = [*OWN_COMMAND, *arguments, "--until-stdin-ends"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # Ctrl-C is passed on, once
        changed_at = stopped_at = 0.0
        while child.poll() is None or (child.returncode != 0 and not changed_at):
            time.sleep(RELOAD_LOOK_S)
            while signals:
                if child.poll() is not None:
                    return child.returncode
                child.send_signal(signals.pop())
                stopped_at = time.monotonic()
            if not changed_at and not stopped_at and python_files(folder) != seen:
                changed_at = time.monotonic()
                child.terminate()  # running jobs finish
            elif changed_at and time.monotonic() - changed_at > RELOAD_GRACE_S:
                changed_at = float("inf")
                child.terminate()  # they are stopped
            if stopped_at and child.poll() is not None:
                return child.returncode
        if stopped_at or not changed_at:
            return child.returncode


def python_files(folder: Path) -> dict[str, float]:
    """Return the Python files below a folder with their times of change, without hidden folders and virtual environments."""
    found = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [] if "pyvenv.cfg" in files else [name for name in folders if not name.startswith((".", "__"))]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(place, name)  # noqa: PTH118 - there may be thousands
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found[path] = os.stat(path).st_mtime  # noqa: PTH116
    return found


# ---------------------------------------------------------------------------------------------------- jobs of an app

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode
_encode_spec = msgspec.msgpack.Encoder().encode


@decodable
class _Failure(msgspec.Struct):
    """The contents of error.json."""

    error_code: str
    error_message: str = ""
    permanent: bool = False


class AppWorker(Worker):
    """A worker that runs the jobs of `app` with the exec of that name, and leases from `store` without any server's help.

    The program gets the payload on stdin and leaves the app's result in out/: result.json, and optionally summary.txt, freqs.csv
    and meta.json; if it fails, error.json with error_code, error_message and permanent. Without a result.json, a JSON document on
    stdout is the result; without that, the archive of the run is, as of every command.
    """

    def __init__(
        self,
        url: str | None,
        *,
        app: str | None = None,
        tasks: Tasks | None = None,
        store: StoreAddress | None = None,
        **options: Any,
    ) -> None:
        super().__init__(url, **options)
        if tasks is not None:
            tasks.add_to(self)
        self._store = store
        self._ttl_s = options.get("lease_ttl_s") or LEASE_TTL_S
        self._app = app if app is not None and app in (options.get("execs") or {}) else None
        if self._app is None:
            return
        subject = app_subject(self._app)
        if set(options.get("subjects") or ()) - {subject}:
            raise ConfigError(
                f"--app {self._app} with an exec of that name takes {subject} and nothing else; "
                "leave --subject out, and start another worker for the rest"
            )
        # With a handler the server sends jobs that name no exec; `_start` gives them the exec before a handler would be called.
        self.handler(subject)(_unreached)

    async def serve(self, *, signals: bool = False) -> None:
        """Work until drained; the guest of a store lives as long."""
        if self._store is None:
            await super().serve(signals=signals)
            return
        async with guest(self._store, lease_ttl_s=self._ttl_s) as url:
            self.url = url
            await super().serve(signals=signals)

    def _start(self, grant: Grant) -> None:
        if self._app is not None:
            spec = _decode_spec(grant.spec)
            if not spec.exec and spec.subject == app_subject(self._app):
                grant = msgspec.structs.replace(grant, spec=_encode_spec(msgspec.structs.replace(spec, exec=self._app)))
        super()._start(grant)

    async def _as_reported(self, attempt: Attempt, result: RunResult) -> RunResult:
        if self._app is None or attempt.spec.exec != self._app:
            return result
        return await asyncio.to_thread(app_result, result)


async def _unreached(job: HandlerJob) -> bytes:
    raise AssertionError(f"job {job.job_id} was to be a command")


def app_result(result: RunResult) -> RunResult:
    """Return the result in the form of the app's contract, if the program left the files for it."""
    outcome = result.outcome
    source: Any = result.result_file if result.result_file is not None else io.BytesIO(outcome.result or b"")
    if result.result_file is None and not outcome.result:
        return result
    with zipfile.ZipFile(source) as archive:
        if outcome.error_code is not None:
            return RunResult(_failed(outcome, _member(archive, "out/error.json")), result.result_file)
        documents = _documents(archive)
    if documents is None:
        return result
    try:
        recorded, document = outcome_of(*documents)
    except TooLarge as error:
        return RunResult(Outcome(error_code=error.code, message=error.message, permanent=True))
    result_bytes = recorded.result if document is None else document
    return RunResult(msgspec.structs.replace(recorded, exit_code=outcome.exit_code, result=result_bytes))


def _documents(archive: zipfile.ZipFile) -> tuple[Any, str, str, dict[str, Any]] | None:
    text = _member(archive, "out/result.json") or _member(archive, "stdout.log")
    result = _json(text, dict)
    if result is None:
        return None
    meta = _json(_member(archive, "out/meta.json"), dict) or {}
    summary, freqs = (_member(archive, f"out/{name}").decode("utf-8", "replace") for name in ("summary.txt", "freqs.csv"))
    return result, summary, freqs, meta


def _failed(outcome: Outcome, text: bytes) -> Outcome:
    failure = _json(text, _Failure)
    if failure is None:
        return outcome
    code = failure.error_code[:CODE_MAX_CHARS] or outcome.error_code
    message = failure.error_message[:MESSAGE_MAX_CHARS] or outcome.message
    return msgspec.structs.replace(outcome, error_code=code, message=message, permanent=failure.permanent)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of the archive; empty if it is missing or too large."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        return b""
    return archive.read(info) if info.file_size <= MEMBER_MAX_BYTES else b""


def _json(text: bytes, kind: Any) -> Any:
    """Decode a JSON document; None if it is not one of this type."""
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
