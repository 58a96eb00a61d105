"""`tasuki worker install` and `uninstall`: the worker as a service of its user, kept by systemd. Writes one unit file.

The unit has the options of the command line, checked as `tasuki worker` checks them, with every path made absolute; and of the
environment what a service would miss: PATH, proxies, the CA bundle. No secret is written: a worker that is new enrols here and
now, so that its credential lies in the data folder; what needs a password belongs into a file that the unit names.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tasuki.blobs.files import durable_write
from tasuki.cli import options
from tasuki.cli.command import COMMAND_LINE, ENVIRONMENT, command, epilog_of, options_of, run_framed, take_parameters
from tasuki.cli.connect import read_token
from tasuki.cli.output import Output
from tasuki.cli.systemd import escaped, quoted, quoted_once, systemctl, version
from tasuki.core.ids import NAME_MAX_CHARS
from tasuki.errors import ConfigError, NotFound

if TYPE_CHECKING:
    from tasuki.config import DataFolder

DRAIN_S = 540.0
STOP_GRACE_S = 60.0  # after the drain: TERM, 5 s, KILL, and the report
RESTART_FIRST_S = 5
RESTART_MAX_S = 300
RESTART_FIXED_S = 30  # where systemd cannot let the pauses grow
GROWING_PAUSES_SINCE = 254  # version of systemd
COPIED = ("PATH", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")
COPIED_FILES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
PATHS = ("config", "data", "token_file", "tls_ca")
NOT_IN_THE_UNIT = ("context", "name", "force", "dry_run", "json", "enroll_file", "only_check", "until_stdin_ends")

_service_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}").fullmatch
_password = re.compile(r"//[^/@]*:[^/@]+@|[?&][a-z_]*password=").search

Name = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="For several workers of one user: tasuki-worker-NAME. Default: none.")
]


def add_to(below: typer.Typer, worker: Callable[..., Any]) -> None:
    """Register the commands; `worker` has the options."""
    examples = [
        "tasuki worker install --to https://control.example --app zpe --exec zpe='python3 /opt/zpe/zpe.py'",
        "tasuki worker install --name render --data ~/render --to tls://host:7000 --token-file render.token --config execs.toml",
        "tasuki worker install --dry-run --to https://control.example --app zpe --exec zpe='python3 /opt/zpe/zpe.py'",
    ]

    def install_command(
        context: typer.Context,
        name: Name = None,
        force: Annotated[bool, typer.Option("--force", help="Replace a unit that is there and says something else.")] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the unit; write, enrol and start nothing.")] = False,
        **given: Any,
    ) -> None:
        """Install the worker as a service of this user (systemd).

        Takes the options of tasuki worker, writes ~/.config/systemd/user/tasuki-worker.service, and starts it. A worker that has
        no credential yet enrols first. A password is never written: see EnvironmentFile in the unit.
        """
        told = options_of(context, COMMAND_LINE, ENVIRONMENT)
        wish = InstallOptions(name, force, dry_run, _flags(context), told, {**given, "json": False}, bool(given.get("json")))
        raise typer.Exit(run_framed(lambda: install(wish, worker), wish.json))

    take_parameters(install_command, worker)
    below.command("install", epilog=epilog_of(examples))(install_command)
    command(below, "uninstall", examples=["tasuki worker uninstall", "tasuki worker uninstall --name render"])(uninstall)


class InstallOptions(NamedTuple):
    """What the command line says."""

    name: str | None
    force: bool
    dry_run: bool
    flags: Mapping[str, str]
    """How each option is written."""
    told: Mapping[str, Any]
    """What was given of the worker's options."""
    every: Mapping[str, Any]
    """The same with the defaults."""
    json: bool


def _flags(context: typer.Context) -> dict[str, str]:
    return {str(one.name): one.opts[0] for one in context.command.params if one.opts}


# ---------------------------------------------------------------------------------------------------- install


def install(wish: InstallOptions, worker: Callable[..., Any]) -> None:
    """Check, enrol, write, start."""
    from tasuki.config import data_folder

    path = unit_path(wish.name)
    folder = data_folder(wish.told.get("data"))
    _check_secrets(wish.told, env_file(wish.name))
    text = unit_text(wish, folder, path)
    output = Output(json=wish.json)
    if wish.dry_run:
        worker(**{**wish.every, "only_check": "options"})
        output.show({"unit": str(path), "text": text, "written": False, "started": False}, lambda: text.splitlines())
        return
    _refuse_other(path, text, force=wish.force)
    read_token(wish.told.get("token_file"))
    worker(**{**wish.every, "only_check": "admission" if _is_new(wish, folder) else "options"})
    changed = _write(path, text)
    started = _start(path.name, changed=changed)
    output.show(
        {"unit": str(path), "text": text, "written": changed, "started": started},
        lambda: [f"{path} {'was written' if changed else 'was there already'}", *_what_next(path.name, started)],
    )
    if hint := _linger_hint():
        output.hint(hint)


def unit_path(name: str | None) -> Path:
    """Where the user's systemd looks for it."""
    if name is not None and not _service_name(name):
        raise ConfigError(f"--name {name[:80]!r} must be letters, digits, - and _, 64 at most")
    return _config_home() / "systemd" / "user" / f"tasuki-worker{f'-{name}' if name else ''}.service"


def env_file(name: str | None) -> Path:
    """Settings with secrets in them, for the user to write."""
    return _config_home() / "tasuki" / f"worker{f'-{name}' if name else ''}.env"


def _config_home() -> Path:
    given = os.environ.get("XDG_CONFIG_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / ".config"


def _check_secrets(told: Mapping[str, Any], file: Path) -> None:
    """ConfigError for what the service could not do without, and must not stand in a unit."""
    if told.get("token_file") == "-":
        raise ConfigError("--token-file - reads stdin, which a service does not have; give the path of a file (mode 0600)")
    if "token_file" not in told and os.environ.get("TASUKI_TOKEN"):
        raise ConfigError(
            "TASUKI_TOKEN is not written into the unit, where others might read it: save it in a file (mode 0600), and give that "
            "with --token-file"
        )
    urls = {
        "--to": told.get("to") or os.environ.get("TASUKI_URL"),
        "--blobs": told.get("blobs"),
        "--coordination": told.get("coordination"),
    }
    variables = {"--to": "TASUKI_URL", "--blobs": "TASUKI_BLOBS", "--coordination": "TASUKI_COORDINATION"}
    for option, url in urls.items():
        if url and _password(str(url)):
            raise ConfigError(
                f"the address of {option} has a password in it, which is not written into the unit: write {variables[option]}=… "
                f"into {file} (mode 0600), and leave {option} out here (and {variables[option]} unset)"
            )
    for variable in COPIED[1:]:
        if _password(os.environ.get(variable, "")):
            raise ConfigError(
                f"the proxy of {variable} has a password in it, which is not written into the unit: write {variable}=… "
                f"into {file} (mode 0600), and unset it here"
            )


def _is_new(wish: InstallOptions, folder: DataFolder) -> bool:
    """Whether it has to be let in first: then it is better to ask now, while a person is here."""
    from tasuki.cli.store_client import is_store
    from tasuki.config import default_url, enrol_variable, parse_url
    from tasuki.worker.credentials import FOLDER, file_name, read_credential

    url = wish.told.get("to") or default_url() or ""
    if not url or is_store(url):
        return False
    address = parse_url(url)[0]
    if "token_file" in wish.told or not address.http:
        return False
    known = read_credential(folder.root / FOLDER / f"{file_name(address)}.json")
    return known is None or "enroll_file" in wish.told or bool(enrol_variable())


def _refuse_other(path: Path, text: str, *, force: bool) -> None:
    if not force and path.exists() and path.read_text("utf-8", "replace") != text:
        raise ConfigError(f"{path} is there, and says something else: say --force to replace it, or --name for another worker")


def _write(path: Path, text: str) -> bool:
    """Whether anything changed. It is whole or not there."""
    if path.exists() and path.read_text("utf-8", "replace") == text:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable_write(path, text.encode(), mode=0o666)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    return True


# ---------------------------------------------------------------------------------------------------- the unit


def unit_text(wish: InstallOptions, folder: DataFolder, path: Path) -> str:
    """The unit file."""
    drain_s = float(wish.told.get("drain_timeout", DRAIN_S))
    words = [sys.executable, "-P", "-m", "tasuki", "worker", *_arguments(wish, folder, drain_s)]
    environment = [f"Environment={quoted_once(f'{name}={value}')}" for name, value in _environment()]
    return "\n".join(
        [
            f"# Written by tasuki worker install, which may replace it. For changes: systemctl --user edit {path.name}",
            "[Unit]",
            f"Description=tasuki worker{f' {wish.name}' if wish.name else ''}",
            "# Never give up: what it waits for comes back.",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"ExecStart={' '.join([quoted_once(words[0]), *map(quoted, words[1:])])}",
            f"WorkingDirectory=-{escaped(str(Path.cwd()))}",
            "# For what is secret (mode 0600): a TASUKI_URL or a proxy with a password.",
            f"EnvironmentFile=-{escaped(str(env_file(wish.name)))}",
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


def _arguments(wish: InstallOptions, folder: DataFolder, drain_s: float) -> Iterator[str]:
    """The options as the service gives them: paths absolute, and named what a shell's environment said."""
    told = {name: value for name, value in wish.told.items() if name not in NOT_IN_THE_UNIT}
    told["data"] = folder.root
    if "to" not in told and (url := os.environ.get("TASUKI_URL")):
        told["to"] = url
    told.setdefault("drain_timeout", drain_s)
    if not str(told.get("to", "")).startswith("http"):  # over HTTP the data folder keeps one
        told.setdefault("worker_id", _lasting_id(wish.name))
    for name, value in told.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, bool):
                yield from [wish.flags[name]] if one else []
                continue
            text = str(Path(one).expanduser().absolute()) if name in PATHS else f"{one:g}" if isinstance(one, float) else str(one)
            if text.startswith("-"):
                yield f"{wish.flags[name]}={text}"
            else:
                yield from (wish.flags[name], text)


def _lasting_id(name: str | None) -> str:
    """Its next start is the same worker: what no server took is offered again."""
    words = (socket.gethostname().split(".")[0], _user(), *([name] if name else ()))
    return re.sub(r"[^A-Za-z0-9_-]", "-", "-".join(words))[:NAME_MAX_CHARS]


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name


def _environment() -> Iterator[tuple[str, str]]:
    for name in (*COPIED, *COPIED_FILES):
        if value := os.environ.get(name):
            yield name, str(Path(value).absolute()) if name in COPIED_FILES else value


def _pauses() -> list[str]:
    if version() < GROWING_PAUSES_SINCE:
        return [f"RestartSec={RESTART_FIXED_S}"]
    return [f"RestartSec={RESTART_FIRST_S}", "RestartSteps=8", f"RestartMaxDelaySec={RESTART_MAX_S}"]


# ---------------------------------------------------------------------------------------------------- systemd


def _start(unit: str, *, changed: bool) -> bool:
    """Whether systemd has it running now. Without a systemd of this user's nothing happens."""
    reloaded = systemctl("daemon-reload")
    if reloaded is None or reloaded.code != 0:
        return False
    active = systemctl("is-active", unit)
    again = changed and active is not None and active.code == 0
    enabled = systemctl("enable", unit)
    started = systemctl("restart", "--no-block", unit) if again else systemctl("start", unit)  # the old one may drain for long
    for said in (enabled, started):
        if said is None or said.code != 0:
            raise ConfigError(f"the unit is written, but systemd does not start it: {said.text[:600] if said else ''}")
    return True


def _what_next(unit: str, started: bool) -> list[str]:
    if started:
        return [f"{unit} runs; look at it with: tasuki worker status, journalctl --user -u {unit} -f"]
    return [
        "there is no systemd of this user's here (a container, or no session); where there is one, run:",
        f"  systemctl --user daemon-reload && systemctl --user enable --now {unit}",
    ]


def _linger_hint() -> str:
    user = _user()
    if Path("/var/lib/systemd/linger", user).exists():
        return ""
    return f"it runs while you are logged in; to let it run from boot on: loginctl enable-linger {user}"


# ---------------------------------------------------------------------------------------------------- uninstall


def uninstall(name: Name = None, json: options.Json = False) -> None:
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
    Output(json=json).show(
        {"unit": str(path), "removed": True, "stopped": there},
        lambda: [f"{path} was removed{'' if there else '; there is no systemd of this user here that could have run it'}"],
    )
