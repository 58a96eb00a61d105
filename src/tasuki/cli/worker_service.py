"""`tasuki worker install` and `uninstall`: the worker as a service of its user, under systemd. Writes one unit file.

The unit has the options of the command line, checked as `tasuki worker` checks them, with every path made absolute; and of the
environment what a service would miss: PATH, proxies, the CA bundle. No secret is written: a worker that is new enrols at once,
so that its credential is in the data folder; a setting with a password belongs into a file that the unit names.

`tasuki worker status`: the workers of a data folder, from their status files and the results that wait on disk. Asks no server:
people ask when none can be reached.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from tasuki.blobs.files import durable_write
from tasuki.cli.command import command, data_option, flag, given_options, option, options
from tasuki.cli.connect import is_store, read_token
from tasuki.cli.output import ExitCode, Output, plain, table
from tasuki.config import OWN_COMMAND, DataFolder, data_folder, default_url, enrol_variable
from tasuki.core.address import parse_url
from tasuki.core.job import NAME_MAX_CHARS
from tasuki.core.units import shown_time
from tasuki.errors import ConfigError, NotFound
from tasuki.tasks.tasks import load_tasks
from tasuki.worker.credentials import FOLDER, file_name, read_credential
from tasuki.worker.outbox import OUTBOX_FOLDER, REJECTED_FOLDER
from tasuki.worker.status import Status, read_all

OPTIONS, LOGIN = "options", "login"
"""Values of --only-check: check the options alone, or log in too; a worker that is new enrols then."""
SYSTEMCTL_TIMEOUT_S = 60.0
DRAIN_S = 540.0
STOP_GRACE_S = 60.0  # after the drain: TERM, 5 s, KILL, and the report
RESTART_FIRST_S = 5
RESTART_MAX_S = 300
RESTART_FIXED_S = 30  # where systemd cannot let the pauses grow
GROWING_PAUSES_SINCE = 254  # version of systemd
COPIED = ("PATH", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
COPIED_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
PATHS = ("config", "data", "token_file", "tls_ca")
RUNNING, DRAINING, ALONE, GONE = "running", "draining", "not connected", "not running"  # states that `status` shows
UNITS = "tasuki-worker*.service"
NOT_IN_THE_UNIT = ("name", "force", "dry_run", "json", "enroll_file", "only_check", "until_stdin_ends")

_service_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}").fullmatch
_password = re.compile(r"//[^/@]*:[^/@]+@|[?&][a-z_]*password=").search

_plain = re.compile(r"[A-Za-z0-9_@+=:,./\[\]>*~-]+").fullmatch

name_option = option("--name", metavar="NAME", help="For several workers of one user: tasuki-worker-NAME. Default: none.")


class InstallOptions(NamedTuple):
    """The options of `tasuki worker install` that are written into the unit."""

    name: str | None
    flags: Mapping[str, str]
    """The spelling of each option, by parameter."""
    given: Mapping[str, Any]
    """The worker's options that were given."""


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def install_command(worker_options: Decorator, run_worker: Callable[..., None]) -> click.Command:
    """Make `tasuki worker install`, which takes the options of `tasuki worker` and calls it to check them."""

    @command(
        "worker install",
        examples=[
            "tasuki worker install --to https://control.example --app zpe --exec zpe='python3 /opt/zpe/zpe.py'",
            "tasuki worker install --name render --data ~/render --to tls://host:7000 --token-file render.token "
            "--config execs.toml",
            "tasuki worker install --dry-run --to https://control.example --app zpe --exec zpe='python3 /opt/zpe/zpe.py'",
        ],
    )
    @options(
        name_option,
        flag("--force", help="Replace an existing unit that differs."),
        flag("--dry-run", help="Show the unit; write, enrol and start nothing."),
        worker_options,
    )
    def install(output: Output, name: str | None, force: bool, dry_run: bool, **every: Any) -> None:
        """Install the worker as a service of this user (systemd).

        Takes the options of tasuki worker, writes ~/.config/systemd/user/tasuki-worker.service, and starts it. A worker that has
        no credential yet enrols first. A password is never written: see EnvironmentFile in the unit.
        """
        context = click.get_current_context()
        flags = {str(parameter.name): parameter.opts[0] for parameter in context.command.params if parameter.opts}
        given = given_options(context, "COMMANDLINE", "ENVIRONMENT")
        path = unit_path(name)
        folder = data_folder(given.get("data") or (load_tasks(every["tasks"]).data if every["tasks"] else None))
        _check_secrets(given, env_file(name))
        text = unit_text(InstallOptions(name, flags, given), folder, path)
        if dry_run:
            run_worker(Output(), **{**every, "only_check": OPTIONS})
            output.show({"unit": str(path), "text": text, "written": False, "started": False}, lambda: text.splitlines())
            return
        there = path.read_text("utf-8", "replace") if path.exists() else None
        if there not in (None, text) and not force:
            raise ConfigError(f"{path} exists and differs: give --force to replace it, or --name for another worker")
        read_token(given.get("token_file"))
        run_worker(Output(), **{**every, "only_check": LOGIN if _is_new(given, folder) else OPTIONS})
        changed = there != text
        if changed:
            _write(path, text)
        started = _start(path.name, changed=changed)
        lines = [f"{path} {'was written' if changed else 'was there already'}"]
        if started:
            lines.append(f"{path.name} runs; look at it with: tasuki worker status, journalctl --user -u {path.name} -f")
        else:
            lines.append("there is no systemd of this user here (a container, or no session); where there is one, run:")
            lines.append(f"  systemctl --user daemon-reload && systemctl --user enable --now {path.name}")
        output.show({"unit": str(path), "text": text, "written": changed, "started": started}, lambda: lines)
        user = _user()
        if not Path("/var/lib/systemd/linger", user).exists():
            output.hint(f"it runs while you are logged in; to let it run from boot on: loginctl enable-linger {user}")

    return install


# ---------------------------------------------------------------------------------------------------- install


def unit_path(name: str | None) -> Path:
    """Return the path at which the user's systemd looks for the unit."""
    if name is not None and not _service_name(name):
        raise ConfigError(f"--name {name[:80]!r} must be letters, digits, - and _, 64 at most")
    return _config_home() / "systemd" / "user" / f"tasuki-worker{f'-{name}' if name else ''}.service"


def env_file(name: str | None) -> Path:
    """Return the path of the settings with secrets, which the user writes."""
    return _config_home() / "tasuki" / f"worker{f'-{name}' if name else ''}.env"


def _config_home() -> Path:
    given = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / ".config"


def _check_secrets(given: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError for secrets that the service needs, and that must not be in a unit."""
    if given.get("token_file") == "-":
        raise ConfigError("--token-file - reads stdin, which a service does not have; give the path of a file (mode 0600)")
    if "token_file" not in given and os.environ.get("TASUKI_TOKEN"):
        raise ConfigError(
            "TASUKI_TOKEN is not written into the unit, where others might read it: save it in a file (mode 0600), and give that "
            "with --token-file"
        )
    for name, variable in (("to", "TASUKI_URL"), ("blobs", "TASUKI_BLOBS"), ("coordination", "TASUKI_COORDINATION")):
        if _password(str(given.get(name) or os.environ.get(variable, ""))):
            raise ConfigError(
                f"the address of --{name} has a password in it, which is not written into the unit: write {variable}=… "
                f"into {file} (mode 0600), and leave --{name} out here (and {variable} unset)"
            )
    for variable in COPIED[1:]:
        if _password(os.environ.get(variable, "")):
            raise ConfigError(
                f"the proxy of {variable} has a password in it, which is not written into the unit: write {variable}=… "
                f"into {file} (mode 0600), and unset it here"
            )


def _is_new(given: Mapping[str, Any], folder: DataFolder) -> bool:
    """Return whether the worker has to enrol first, which is better done now, while a person is here."""
    url = given.get("to") or default_url() or ""
    if not url or is_store(url):
        return False
    address = parse_url(url)[0]
    if "token_file" in given or not address.http:
        return False
    known = read_credential(folder.root / FOLDER / f"{file_name(address)}.json")
    return known is None or "enroll_file" in given or bool(enrol_variable())


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable_write(path, text.encode(), mode=0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None


# ---------------------------------------------------------------------------------------------------- the unit


def unit_text(chosen: InstallOptions, folder: DataFolder, path: Path) -> str:
    drain_s = float(chosen.given.get("drain_timeout", DRAIN_S))
    words = [*OWN_COMMAND, "worker", *_arguments(chosen, folder, drain_s)]
    copied = {name: os.environ[name] for name in COPIED if os.environ.get(name)}
    copied |= {name: str(Path(os.environ[name]).absolute()) for name in COPIED_FILES if os.environ.get(name)}
    environment = [f"Environment={quoted_once(f'{name}={value}')}" for name, value in copied.items()]
    pauses = [f"RestartSec={RESTART_FIRST_S}", "RestartSteps=8", f"RestartMaxDelaySec={RESTART_MAX_S}"]
    if _systemd_version() < GROWING_PAUSES_SINCE:
        pauses = [f"RestartSec={RESTART_FIXED_S}"]
    return "\n".join(
        [
            f"# Written by tasuki worker install, which may replace it. For changes: systemctl --user edit {path.name}",
            "[Unit]",
            f"Description=tasuki worker{f' {chosen.name}' if chosen.name else ''}",
            "# Never give up: what it waits for comes back.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join([quoted_once(words[0]), *map(quoted, words[1:])])}",
            f"WorkingDirectory=-{escaped(str(Path.cwd()))}",
            "# For what is secret (mode 0600): a TASUKI_URL or a proxy with a password.",
            f"EnvironmentFile=-{escaped(str(env_file(chosen.name)))}",
            *environment,
            "UMask=0077",
            "Restart=on-failure",
            *pauses,
            "# Its token is not good any more: no start would change that.",
            "RestartPreventExitStatus=4",
            "# SIGTERM to the worker alone: it drains, then stops what still runs. All that is left after that is killed.",
            "KillMode=mixed",
            f"TimeoutStopSec={drain_s + STOP_GRACE_S:.0f}",
            "# A job that takes too much memory fails alone.",
            "OOMPolicy=continue",
            "# It may make control groups for its jobs.",
            "Delegate=yes",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def _arguments(chosen: InstallOptions, folder: DataFolder, drain_s: float) -> Iterator[str]:
    """Yield the arguments of the service: paths absolute, and settings of the shell's environment as options."""
    given = {name: value for name, value in chosen.given.items() if name not in NOT_IN_THE_UNIT}
    given["data"] = folder.root
    if "to" not in given and (url := os.environ.get("TASUKI_URL")):
        given["to"] = url
    given.setdefault("drain_timeout", drain_s)
    if not str(given.get("to", "")).startswith("http"):  # over HTTP the data folder keeps one
        given.setdefault("worker_id", _lasting_id(chosen.name))
    for name, value in given.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, bool):
                yield from [chosen.flags[name]] if one else []
                continue
            text = (
                str(Path(one).expanduser().absolute()) if name in PATHS else f"{one:.12g}" if isinstance(one, float) else str(one)
            )
            if text.startswith("-"):
                yield f"{chosen.flags[name]}={text}"
            else:
                yield from (chosen.flags[name], text)


def _lasting_id(name: str | None) -> str:
    """Return an id that each start of the service has, so that results that no server took are offered again."""
    words = (socket.gethostname().split(".")[0], _user(), *([name] if name else ()))
    return re.sub(r"[^A-Za-z0-9_-]", "-", "-".join(words))[:NAME_MAX_CHARS]


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


# ---------------------------------------------------------------------------------------------------- systemd


class SystemctlResult(NamedTuple):
    """The exit code and the output of systemctl."""

    code: int
    text: str


def systemctl(*arguments: str) -> SystemctlResult:
    """Run `systemctl --user …`; the code is -1 if the program is missing or does not answer."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SYSTEMCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return SystemctlResult(-1, str(error))
    return SystemctlResult(done.returncode, (done.stdout or done.stderr).strip())


def _systemd_version() -> int:
    found = re.match(r"systemd (\d+)", systemctl("--version").text)
    return int(found.group(1)) if found else 0


def escaped(text: str) -> str:
    """Return a path for a setting; systemd replaces what begins with %."""
    if not text.isprintable():
        raise ConfigError(f"{text[:80]!r} has characters that cannot stand in a unit")
    return text.replace("%", "%%")


def quoted_once(text: str) -> str:
    """Return a program or an assignment, quoted; there systemd replaces % alone."""
    if _plain(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped(text)}"'


def quoted(text: str) -> str:
    """Return an argument, quoted; there systemd replaces % and $."""
    return quoted_once(text).replace("$", "$$")


def _start(unit: str, *, changed: bool) -> bool:
    """Start the unit, and return whether systemd runs it; False if there is no systemd of this user."""
    if systemctl("daemon-reload").code != 0:
        return False
    again = changed and systemctl("is-active", unit).code == 0
    enabled = systemctl("enable", unit)
    started = systemctl("restart", "--no-block", unit) if again else systemctl("start", unit)  # the old one may drain for long
    for answer in (enabled, started):
        if answer.code != 0:
            raise ConfigError(f"the unit is written, but systemd does not start it: {answer.text[:600]}")
    return True


# ---------------------------------------------------------------------------------------------------- uninstall


@command("worker uninstall", examples=["tasuki worker uninstall", "tasuki worker uninstall --name render"])
@name_option
def uninstall(output: Output, name: str | None) -> None:
    """Stop the service and remove its unit.

    Jobs that run may finish, as after SIGTERM. The data folder stays, with its credential and the results that wait.
    """
    path = unit_path(name)
    if not path.exists():
        raise NotFound(f"there is no {path}; tasuki worker install makes one, --name chooses which")
    stopped = systemctl("disable", "--now", "--no-block", path.name)
    path.unlink()
    systemctl("daemon-reload")
    there = stopped.code == 0
    output.show(
        {"unit": str(path), "removed": True, "stopped": there},
        lambda: [f"{path} was removed{'' if there else '; there is no systemd of this user here that could have run it'}"],
    )


# ---------------------------------------------------------------------------------------------------- status


class WorkerReport(NamedTuple):
    """One worker; without a status if only its results are left."""

    worker_id: str
    status: Status | None
    results_waiting: int

    @property
    def state(self) -> str:
        """Return one of RUNNING, DRAINING, ALONE and GONE."""
        if self.status is None or not self.status.alive:
            return GONE
        if self.status.connection.connected_since is None:
            return ALONE
        return DRAINING if self.status.draining else RUNNING

    def described(self) -> dict[str, Any]:
        reported: dict[str, Any] = {} if self.status is None else msgspec.to_builtins(self.status)
        return {**reported, "worker_id": self.worker_id, "state": self.state, "results_waiting": self.results_waiting}


@command("worker status", examples=["tasuki worker status", "tasuki worker status --data ~/render --json"])
@data_option
def status(output: Output, data: Path | None) -> int:
    """Show how the workers of this data folder are.

    Exit code 0: one runs and is connected, and none is not; 5: one is not connected; 3: none runs.
    """
    root = data_folder(data).root
    found, rejected, tokens, services = workers_of(root), count_rejected(root), list(tokens_of(root)), list(services_here())
    described = {
        "data": str(root),
        "workers": [one.described() for one in found],
        "results_kept_aside": rejected,
        "tokens": tokens,
        "services": services,
    }
    output.show(described, lambda: _lines(root, found, rejected, tokens, services))
    states = {one.state for one in found} - {GONE}
    return ExitCode.NOT_FOUND if not states else ExitCode.UNAVAILABLE if ALONE in states else ExitCode.OK


def workers_of(root: Path) -> list[WorkerReport]:
    """Return the workers that have a status, and those whose results wait."""
    outbox = root / OUTBOX_FOLDER
    folders = sorted(one for one in outbox.iterdir() if one.is_dir()) if outbox.is_dir() else []
    waiting = {one.name: sum(1 for _ in one.glob("*.ending")) for one in folders}
    found = [WorkerReport(one.worker_id, one, waiting.pop(one.worker_id, 0)) for one in read_all(root)]
    return [*found, *(WorkerReport(worker_id, None, count) for worker_id, count in waiting.items() if count)]


def count_rejected(root: Path) -> int:
    """Return how many results were refused, and are kept for people."""
    folder = root / REJECTED_FOLDER
    return sum(1 for one in folder.iterdir() if not one.name.startswith(".")) if folder.is_dir() else 0


def tokens_of(root: Path) -> Iterator[dict[str, Any]]:
    """Yield the tokens of the enrolled workers, without the secrets."""
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            credential = read_credential(path)
        except ConfigError as error:
            yield {"server": "", "worker_id": "", "token_id": "", "expires_at": None, "problem": error.message}
            continue
        if credential is not None:
            token = credential.token
            yield {
                "server": credential.server,
                "worker_id": credential.worker_id,
                "token_id": token.token_id,
                "expires_at": token.expires_at,
                "problem": "" if token.left_s(time.time()) > 0 else "it has expired: enrol this worker again",
            }


def services_here() -> Iterator[dict[str, str]]:
    """Yield the units of `tasuki worker install`, of all data folders, as systemd sees them."""
    answer = systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager", UNITS)
    for line in answer.text.splitlines() if answer.code == 0 else ():
        words = line.split(None, 4)
        if len(words) >= 4:
            yield {"unit": words[0], "active": words[2], "sub": words[3]}


def _lines(
    root: Path, found: list[WorkerReport], rejected: int, tokens: list[dict[str, Any]], services: list[dict[str, str]]
) -> Iterator[str]:
    if not found:
        yield f"no worker has run on {root}; --data names another folder"
    for one in found:
        yield from _worker_lines(one)
    if rejected:
        yield f"{rejected} result(s) that were refused are kept in {root / 'kept-aside'}"
    for token in tokens:
        named = f"token {token['token_id']} for {token['server']}: " if token["token_id"] else ""
        yield f"{named}{token['problem'] or 'valid until ' + shown_time(token['expires_at']) + ', renewed before'}"
    for service in services:
        yield f"service {service['unit']}: {service['active']} ({service['sub']})"


def _worker_lines(found: WorkerReport) -> Iterator[str]:
    reported = found.status
    wait = f"{found.results_waiting} result(s) wait on disk"
    if reported is None or found.state == GONE:
        ended = ""
        if reported is not None:
            ended = (
                f" since {shown_time(reported.ended_at)}"
                if reported.ended_at
                else f" (pid {reported.pid} is gone without a word)"
            )
        offered = "; its next start offers them" if found.results_waiting else ""
        yield f"{found.worker_id}: not running{ended}; {wait}{offered}"
        if reported is not None and reported.error:
            yield f"  it ended with: {plain(reported.error)}"
        return
    connection = reported.connection
    yield f"{found.worker_id}: {found.state}, pid {reported.pid}, since {shown_time(reported.since)}"
    if connection.connected_since is not None:
        yield f"  connected to {connection.address or connection.server} since {shown_time(connection.connected_since)}"
    elif connection.error_at is not None:
        tried = f"tried {connection.tries} time(s), last at {shown_time(connection.error_at)}"
        yield f"  no connection to {connection.server}, {tried}: {plain(connection.error)}"
    else:
        yield f"  connecting to {connection.server}"
    yield f"  {reported.running} job(s) run; {wait}"
    if reported.jobs:
        rows = ((job.job_id, job.attempt, job.subject, shown_time(job.since)) for job in reported.jobs)
        yield from (f"  {line}" for line in table(("JOB", "ATTEMPT", "SUBJECT", "SINCE"), rows))
