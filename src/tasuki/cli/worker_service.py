"""`tasuki worker install` and `uninstall`: the worker as a service of its user, under systemd. Writes one unit file.

The unit has the options of the command line, checked as `tasuki worker` checks them, with every path made absolute; and of the
environment what a service would miss: PATH, proxies, the CA bundle. No secret is written: a worker that is new enrols at once,
so that its credential is in the data folder; a setting with a password belongs into a file that the unit names.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tasuki.cli.command import command, flag, given_options, option, options
from tasuki.cli.connect import is_store, read_token
from tasuki.cli.output import Output
from tasuki.core.job import NAME_MAX_CHARS
from tasuki.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from tasuki.config import DataFolder

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
NOT_IN_THE_UNIT = ("name", "force", "dry_run", "json", "enroll_file", "only_check", "until_stdin_ends")

_service_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}").fullmatch
_password = re.compile(r"//[^/@]*:[^/@]+@|[?&][a-z_]*password=").search

_plain = re.compile(r"[A-Za-z0-9_@+=:,./\[\]>*~-]+").fullmatch

name_option = option("--name", metavar="NAME", help="For several workers of one user: tasuki-worker-NAME. Default: none.")


class InstallOptions(NamedTuple):
    """The options of `tasuki worker install`."""

    name: str | None
    force: bool
    dry_run: bool
    flags: Mapping[str, str]
    """The spelling of each option, by parameter."""
    given: Mapping[str, Any]
    """The worker's options that were given."""
    every: Mapping[str, Any]
    """The worker's options with their defaults."""


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
        flag("--force", help="Replace a unit that is there and says something else."),
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
        _install(InstallOptions(name, force, dry_run, flags, given, every), run_worker, output)

    return install


# ---------------------------------------------------------------------------------------------------- install


def _install(chosen: InstallOptions, run_worker: Callable[..., None], output: Output) -> None:
    """Check the options, enrol, write the unit, start it."""
    from tasuki.config import data_folder

    path = unit_path(chosen.name)
    folder = data_folder(chosen.given.get("data"))
    _check_secrets(chosen.given, env_file(chosen.name))
    text = unit_text(chosen, folder, path)
    if chosen.dry_run:
        run_worker(Output(), **{**chosen.every, "only_check": OPTIONS})
        output.show({"unit": str(path), "text": text, "written": False, "started": False}, lambda: text.splitlines())
        return
    _refuse_other(path, text, force=chosen.force)
    read_token(chosen.given.get("token_file"))
    run_worker(Output(), **{**chosen.every, "only_check": LOGIN if _is_new(chosen, folder) else OPTIONS})
    changed = _write(path, text)
    started = _start(path.name, changed=changed)
    output.show(
        {"unit": str(path), "text": text, "written": changed, "started": started},
        lambda: [f"{path} {'was written' if changed else 'was there already'}", *_next_steps(path.name, started)],
    )
    if hint := _linger_hint():
        output.hint(hint)


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
    urls = {
        "--to": given.get("to") or os.environ.get("TASUKI_URL"),
        "--blobs": given.get("blobs"),
        "--coordination": given.get("coordination"),
    }
    variables = {"--to": "TASUKI_URL", "--blobs": "TASUKI_BLOBS", "--coordination": "TASUKI_COORDINATION"}
    for name, url in urls.items():
        if url and _password(str(url)):
            raise ConfigError(
                f"the address of {name} has a password in it, which is not written into the unit: write {variables[name]}=… "
                f"into {file} (mode 0600), and leave {name} out here (and {variables[name]} unset)"
            )
    for variable in COPIED[1:]:
        if _password(os.environ.get(variable, "")):
            raise ConfigError(
                f"the proxy of {variable} has a password in it, which is not written into the unit: write {variable}=… "
                f"into {file} (mode 0600), and unset it here"
            )


def _is_new(chosen: InstallOptions, folder: DataFolder) -> bool:
    """Return whether the worker has to enrol first, which is better done now, while a person is here."""
    from tasuki.config import default_url, enrol_variable
    from tasuki.core.address import parse_url
    from tasuki.worker.credentials import FOLDER, file_name, read_credential

    url = chosen.given.get("to") or default_url() or ""
    if not url or is_store(url):
        return False
    address = parse_url(url)[0]
    if "token_file" in chosen.given or not address.http:
        return False
    known = read_credential(folder.root / FOLDER / f"{file_name(address)}.json")
    return known is None or "enroll_file" in chosen.given or bool(enrol_variable())


def _refuse_other(path: Path, text: str, *, force: bool) -> None:
    if not force and path.exists() and path.read_text("utf-8", "replace") != text:
        raise ConfigError(f"{path} is there, and says something else: say --force to replace it, or --name for another worker")


def _write(path: Path, text: str) -> bool:
    """Write the unit, whole or not at all, and return whether anything changed."""
    from tasuki.blobs.files import durable_write

    if path.exists() and path.read_text("utf-8", "replace") == text:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable_write(path, text.encode(), mode=0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return True


# ---------------------------------------------------------------------------------------------------- the unit


def unit_text(chosen: InstallOptions, folder: DataFolder, path: Path) -> str:
    """Return the text of the unit file."""
    drain_s = float(chosen.given.get("drain_timeout", DRAIN_S))
    words = [sys.executable, "-P", "-m", "tasuki", "worker", *_arguments(chosen, folder, drain_s)]
    environment = [f"Environment={quoted_once(f'{name}={value}')}" for name, value in _environment()]
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
            *_pauses(),
            "# Its token is not good any more: no start would change that.",
            "RestartPreventExitStatus=4",
            "# SIGTERM to the worker alone: it drains, then stops what still runs. Whatever is left after that is killed.",
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
            text = str(Path(one).expanduser().absolute()) if name in PATHS else f"{one:g}" if isinstance(one, float) else str(one)
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


def _environment() -> Iterator[tuple[str, str]]:
    for name in (*COPIED, *COPIED_FILES):
        if value := os.environ.get(name):
            yield name, str(Path(value).absolute()) if name in COPIED_FILES else value


def _pauses() -> list[str]:
    if _systemd_version() < GROWING_PAUSES_SINCE:
        return [f"RestartSec={RESTART_FIXED_S}"]
    return [f"RestartSec={RESTART_FIRST_S}", "RestartSteps=8", f"RestartMaxDelaySec={RESTART_MAX_S}"]


# ---------------------------------------------------------------------------------------------------- systemd


class SystemctlResult(NamedTuple):
    """The exit code and the output of systemctl."""

    code: int
    text: str


def systemctl(*arguments: str) -> SystemctlResult | None:
    """Run `systemctl --user …`; None where there is no such program."""
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--user", *arguments],
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
    """Return the version of systemd; 0 where there is none."""
    answer = systemctl("--version")
    found = re.match(r"systemd (\d+)", answer.text) if answer is not None else None
    return int(found.group(1)) if found else 0


def escaped(text: str) -> str:
    """Return a path for a setting; systemd replaces what begins with %."""
    if not text.isprintable():
        raise ConfigError(f"{text[:80]!r} has characters that cannot stand in a unit")
    return text.replace("%", "%%")


def quoted_once(text: str) -> str:
    """Return a program or an assignment, quoted; there systemd replaces % alone."""
    return text if _plain(text) else f'"{_backslashed(text)}"'


def quoted(text: str) -> str:
    """Return an argument, quoted; there systemd replaces % and $."""
    return quoted_once(text).replace("$", "$$")


def _backslashed(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return escaped(text)


def _start(unit: str, *, changed: bool) -> bool:
    """Start the unit, and return whether systemd runs it; False if there is no systemd of this user."""
    reloaded = systemctl("daemon-reload")
    if reloaded is None or reloaded.code != 0:
        return False
    active = systemctl("is-active", unit)
    again = changed and active is not None and active.code == 0
    enabled = systemctl("enable", unit)
    started = systemctl("restart", "--no-block", unit) if again else systemctl("start", unit)  # the old one may drain for long
    for answer in (enabled, started):
        if answer is None or answer.code != 0:
            raise ConfigError(f"the unit is written, but systemd does not start it: {answer.text[:600] if answer else ''}")
    return True


def _next_steps(unit: str, started: bool) -> list[str]:
    if started:
        return [f"{unit} runs; look at it with: tasuki worker status, journalctl --user -u {unit} -f"]
    return [
        "there is no systemd of this user here (a container, or no session); where there is one, run:",
        f"  systemctl --user daemon-reload && systemctl --user enable --now {unit}",
    ]


def _linger_hint() -> str:
    user = _user()
    if Path("/var/lib/systemd/linger", user).exists():
        return ""
    return f"it runs while you are logged in; to let it run from boot on: loginctl enable-linger {user}"


# ---------------------------------------------------------------------------------------------------- uninstall


@command("worker uninstall", examples=["tasuki worker uninstall", "tasuki worker uninstall --name render"])
@name_option
def uninstall(output: Output, name: str | None) -> None:
    """Stop the service and remove its unit.

    Jobs that run may finish, as after SIGTERM. The data folder stays, with its credential and the results that wait.
    """
    path = unit_path(name)
    if not path.exists():
        raise NotFound(f"there is no {path}; tasuki worker install makes one, --name says which")
    stopped = systemctl("disable", "--now", "--no-block", path.name)
    path.unlink()
    systemctl("daemon-reload")
    there = stopped is not None and stopped.code == 0
    output.show(
        {"unit": str(path), "removed": True, "stopped": there},
        lambda: [f"{path} was removed{'' if there else '; there is no systemd of this user here that could have run it'}"],
    )
