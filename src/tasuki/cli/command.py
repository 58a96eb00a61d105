"""The words of the command line, the options that commands share, and the frame around every command.

A command is a function with click's options. `command` gives the function an `Output`, turns errors into one line and an exit
code, and puts the examples at the end of the help. The first line of the help of a word is in `COMMANDS`, because `tasuki
--help` lists all words and loads none of their modules; a docstring adds the rest.

Imported for `tasuki --help`, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from tasuki.cli.output import ExitCode, Output, exit_code_for
from tasuki.core.units import parse_duration, shown_duration
from tasuki.errors import ConfigError, TasukiError

if TYPE_CHECKING:
    from tasuki.core.address import Address
    from tasuki.doors.listening import ServerCertificate

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Run jobs": {
        "run": ("run.run", "Run one job: print its output, exit with its code."),
        "submit": ("submit.submit", "Submit jobs; return when they are durable."),
        "wait": ("submit.wait", "Wait until jobs have ended."),
        "cache": ("cache.cache", "Files that many jobs share, kept by the workers."),
        "demo": ("demo.demo", "Show jobs surviving the death of a worker and of the server."),
    },
    "Look at jobs": {
        "status": ("jobs.status", "Show the state of jobs, and how they ended."),
        "list": ("jobs.list_jobs", "List jobs, newest first."),
        "explain": ("jobs.explain", "Explain why a job is in its state, and what happened to it."),
        "result": ("result.result", "Wait for a job's end and save its result."),
        "logs": ("result.logs", "Print what a command writes, while it runs and afterwards."),
        "cancel": ("jobs.cancel", "Stop jobs."),
        "retry": ("jobs.retry", "Run jobs again that have ended."),
        "dead": ("jobs.dead", "List, show and retry dead letters."),
    },
    "Messages, which are not stored": {
        "pub": ("messages.pub", "Publish a message to all who are subscribed now."),
        "sub": ("messages.sub", "Print messages as they come."),
        "request": ("messages.request", "Publish a message and print the answer to it."),
    },
    "Servers and workers": {
        "up": ("up.up", "Start a server and local workers here."),
        "server": ("server.server", "Start a server; with --store, one of several."),
        "worker": ("worker.worker", "Run jobs until a signal."),
        "stats": ("cluster.stats", "Count jobs by group and state, and list the workers."),
        "top": ("top.top", "Show figures, queues and workers until a key ends it."),
        "servers": ("cluster.servers", "List the servers that are alive on this store."),
        "workers": ("cluster.workers", "List the workers that are connected to any server."),
        "detach": ("cluster.detach", "Give a worker no more work."),
        "attach": ("cluster.attach", "Give a detached worker work again."),
        "degrade-leader": ("cluster.degrade_leader", "Have the leading server step down."),
        "pause": ("cluster.pause", "Start no more jobs of some subjects."),
        "resume": ("cluster.resume", "Start jobs of paused subjects again."),
        "token": ("cluster.token", "Make, list and revoke tokens."),
        "dev-cert": ("dev_cert.dev_cert", "Make a CA and a server's certificate, for development."),
    },
    "Node agents, without a server": {
        "agent": ("agent.agent", "Run programs for clients that send files over HTTP."),
        "dispatcher": ("agent.dispatcher", "Send jobs to node agents that have a free slot."),
        "nodes": ("agents.nodes", "List node agents, the best first, and those left out."),
    },
    "Operate": {
        "doctor": ("doctor.doctor", "Check Python, SQLite, the data folder, its server and store."),
        "duties": ("store.duties", "Do a leader's duties once, for servers that scale to zero."),
        "migrate": ("store.migrate", "Bring the tables of a store up to date."),
        "backup": ("store.backup", "Save the SQLite store of a data folder."),
        "restore": ("store.restore", "Restore a backup into a data folder."),
        "compact": ("store.compact", "Give unused space of a SQLite store back to the disk."),
        "completion": ("completion.completion", "Print the completion script of a shell."),
        "sim": ("sim.sim", "Simulate systems under faults, and check the invariants."),
    },
}
"""Words of each part of `tasuki --help`: word -> (module and name below tasuki.cli, first line of its help)"""
COMMANDS = {word: entry for section in SECTIONS.values() for word, entry in section.items()}

EXTRAS = {
    "server": ("django", "fastapi", "jsonschema", "prometheus_client", "psycopg", "uvicorn"),
    "redis": ("redis", "hiredis"),
    "s3": ("boto3", "botocore"),
}
"""extra of the package -> modules that it brings"""
UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
ANYWHERE = "run, status, list, result, logs and cancel with --to agents:…, and nodes"

STDIN = "-"
HELP_NAMES = {"help_option_names": ["-h", "--help"]}

Function = TypeVar("Function", bound=Callable[..., Any])


# ---------------------------------------------------------------------------------------------------- options


class _Text(click.types.StringParamType):
    """A text that can be sent and stored: bytes in another encoding than UTF-8 are refused, and so is an empty address."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            str(value).encode()
        except UnicodeEncodeError:
            self.fail(f"{str(value)!a} is not valid UTF-8", param, ctx)
        if value == "" and param is not None and param.metavar == "URL":  # else "$UNSET" in a script would be the default
            self.fail("the address is empty; leave the option out for its default", param, ctx)
        return super().convert(value, param, ctx)


class Duration(click.ParamType):
    """A duration in seconds, from `least` to `most`: 90s, 5m, 1h, 1d, or a number of seconds.

    `above`: `least` itself is refused. `with_unit`: so is a plain number, of an option whose usual unit is the day.
    """

    name = "duration"

    def __init__(self, least: float = 0.0, most: float = math.inf, *, above: bool = False, with_unit: bool = False) -> None:
        self.least, self.most, self.above, self.with_unit = least, most, above, with_unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not isinstance(value, str):
            return float(value)
        try:
            seconds = parse_duration(value)
        except ConfigError as error:
            self.fail(error.message, param, ctx)
        if self.with_unit and seconds and value.strip()[-1].isdigit():
            self.fail(f"{value[:40]!r} has no unit; write {value[:40]}d for days, or s, m or h", param, ctx)
        if not self.least <= seconds <= self.most or (self.above and seconds == self.least):
            limits = f"{'more than' if self.above else 'at least'} {shown_duration(self.least)}"
            limits += f" and at most {shown_duration(self.most)}" if self.most < math.inf else ""
            self.fail(f"{value[:40]} must be {limits}", param, ctx)
        return seconds


TEXT = _Text()
PATH = click.Path(path_type=Path)


def option(*names: str, **settings: Any) -> Callable[[Function], Function]:
    """Declare an option whose help shows its default and its environment variable; its type is text by default."""
    if not {"type", "is_flag"} & settings.keys() and isinstance(settings.get("default"), str | None):
        settings["type"] = TEXT
    return click.option(*names, **{"show_default": True, "show_envvar": True, **settings})


def argument(name: str, *, metavar: str, help: str, **settings: Any) -> Callable[[Function], Function]:
    """Declare an argument; its type is text by default."""
    return click.argument(name, metavar=metavar, help=help, type=settings.pop("type", TEXT), **settings)


def flag(*names: str, help: str, **settings: Any) -> Callable[[Function], Function]:
    """Declare an option without a value."""
    return option(*names, is_flag=True, help=help, **settings)


def number(name: str, *, metavar: str, help: str, type: Any = float, **settings: Any) -> Callable[[Function], Function]:
    """Declare an option whose value is a number."""
    return option(name, metavar=metavar, help=help, type=type, **settings)


def duration(name: str, *, help: str, type: Duration | None = None, **settings: Any) -> Callable[[Function], Function]:
    """Declare an option whose value is a duration."""
    if isinstance(settings.get("default"), int | float):
        settings["show_default"] = shown_duration(settings["default"])
    return option(name, metavar="DURATION", help=help, type=type or Duration(), **settings)


def several(*names: str, help: str, **settings: Any) -> Callable[[Function], Function]:
    """Declare an option that may be given several times."""
    return option(*names, help=help, type=TEXT, multiple=True, **settings)


def options(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Combine options into one decorator; the help shows them in this order."""
    return lambda function: functools.reduce(lambda made, decorate: decorate(made), reversed(decorators), function)


TO_HELP = (
    "Server: tcp://host:7000[,host2:7000], tls://host:7000, http://host:7080, https://host, unix:///path or unix://user@/path; "
    "for run, status, list, result, logs, cancel and doctor also node agents: agents:http://n1:7090,http://n2:7090. "
    "Default: TASUKI_URL, else the server of the data folder, else an embedded one for the time of the command."
)
data_option = option(
    "--data",
    metavar="FOLDER",
    type=PATH,
    help="Data folder. Default: TASUKI_DATA, else ./tasuki-data if it exists, else $XDG_DATA_HOME/tasuki.",
)
token_file_option = option("--token-file", metavar="FILE", help="File with the token; - for stdin. Default: TASUKI_TOKEN.")
tls_ca_option = option("--tls-ca", metavar="FILE", help="CA for tls:// and https://. Default: the system's.")
json_option = click.Option(["--json"], is_flag=True, help="Answer in JSON, for programs.")
quiet_option = flag("--quiet", "-q", help="Only ids.")
limit_option = number("--limit", metavar="N", type=int, default=50, help="How many at most.")
cursor_option = option("--cursor", metavar="CURSOR", help="Continue where the last list ended.")
reason_option = option("--reason", metavar="TEXT", default="", help="Kept in the job's story.")
log_level_option = option("--log-level", metavar="LEVEL", default="info", help="debug, info, warning or error, on stderr.")
coordination_option = option(
    "--coordination",
    metavar="URL",
    envvar="TASUKI_COORDINATION",
    help="With PostgreSQL: redis://… for beats, the leader's lock and hints. The same for all servers. Default: the store.",
)
exec_options = options(
    several("--exec", "exec_", metavar="NAME=TEMPLATE", help="Allow a program: {file}, {files}, {args} are filled in. Several."),
    option("--config", metavar="FILE", type=PATH, help="TOML file with [exec.NAME] tables."),
)
drain_option = duration("--drain-timeout", help="After SIGTERM, how long running jobs may take. Default: no limit.")
log_size_options = options(
    option(
        "--log-head",
        metavar="SIZE",
        default="16320KiB",
        help="How much of the beginning of a long stdout or stderr is kept: 500KB, 4MiB.",
    ),
    option("--log-tail", metavar="SIZE", default="64KiB", help="How much of its end."),
)


def gather(name: str, make: Callable[..., Any]) -> Callable[[Function], Callable[..., Any]]:
    """Call `make` with the options that it takes; the command gets its result as the argument `name`, and of them only those
    that it takes itself."""
    taken = inspect.signature(make).parameters

    def decorate(function: Function) -> Callable[..., Any]:
        kept = inspect.signature(function).parameters.keys() - {name}

        @functools.wraps(function)
        def gathered(*args: Any, **given: Any) -> Any:
            made = make(**{option: given[option] for option in taken if option in given})
            left = {option: value for option, value in given.items() if option not in taken or option in kept}
            return function(*args, **{name: made}, **left)

        return gathered

    return decorate


class Destination(NamedTuple):
    """The server that a command goes to, as its options name it; `tasuki.cli.connect` makes a client of it."""

    to: str | None = None
    data: Path | None = None
    token_file: str | None = None
    tls_ca: str | None = None


def connection_options(to_help: str = TO_HELP, to_metavar: str = "URL") -> Callable[[Function], Callable[..., Any]]:
    """Declare --to, --data, --token-file and --tls-ca; the command gets them as `place`, a Destination."""
    to_option = option("--to", metavar=to_metavar, help=to_help)
    return options(to_option, data_option, token_file_option, tls_ca_option, gather("place", Destination))


class TlsOptions(NamedTuple):
    """The certificate and the names of a process that listens."""

    tls_cert: str | None = None
    tls_key: str | None = None
    insecure: bool = False
    host_name: tuple[str, ...] = ()

    def check(self, *addresses: Address, tokens: bool = True) -> None:
        """Raise ConfigError for a certificate without its key, and for addresses that need a certificate or tokens."""
        from tasuki.core.address import Address
        from tasuki.doors.listening import check_listener

        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together; give both, or none")
        for name in self.host_name:
            if not Address("http", name, 1).reachable:
                raise ConfigError(f"--host-name {name[:80]!r} must be a name without scheme and port, as in control.example")
        for address in addresses:
            check_listener(address, tls=self.tls_cert is not None, tokens=tokens, insecure=self.insecure)

    def certificate(self) -> ServerCertificate | None:
        """Read the certificate, if there is one."""
        from tasuki.doors.listening import ServerCertificate

        return ServerCertificate(self.tls_cert, self.tls_key) if self.tls_cert and self.tls_key else None


tls_options = options(
    option("--tls-cert", metavar="FILE", help="Certificate chain, PEM."),
    option("--tls-key", metavar="FILE", help="Its private key, PEM."),
    flag("--insecure", help="Listen beyond this machine without TLS: the network is trusted."),
    several("--host-name", metavar="NAME", help="A name by which HTTP clients call it, as that of a proxy before it. Several."),
    gather("tls", TlsOptions),
)


# ---------------------------------------------------------------------------------------------------- the frame


def command(
    words: str,
    *,
    examples: Sequence[str],
    parent: click.Group | None = None,
    exit_code: Callable[[TasukiError], int] = exit_code_for,
    settings: dict[str, Any] | None = None,
    **kind: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a command of a function. `words` are all its words ("token create"), `parent` is the group it is added to.

    --json is added; an integer that the function returns becomes the exit code. `kind` are arguments of click.command.
    """

    def register(function: Callable[..., Any]) -> click.Command:
        @functools.wraps(function)
        def framed(**given: Any) -> None:
            context = click.get_current_context()
            word = context.invoked_subcommand
            if word is None:
                raise click.exceptions.Exit(_run_framed(function, given, exit_code))
            if given_options(context, "COMMANDLINE"):
                context.fail(f"options stand behind the word they are for: {context.command_path} {word} …")

        summary = COMMANDS.get(words, ("", ""))[1]
        made = click.command(
            words.rpartition(" ")[2],
            help=f"{summary}\n\n{inspect.getdoc(function) or ''}".strip(),
            epilog="\b\nExamples:\n" + "\n".join(f"  {example}" for example in examples),  # \b: lines are not wrapped
            context_settings={**HELP_NAMES, **(settings or {})},
            **kind,
        )(framed)
        made.params.append(json_option)
        if parent is not None:
            parent.add_command(made)
        return made

    return register


def group(name: str, details: str) -> click.Group:
    """Make a word that does nothing without a second one."""
    return click.Group(name, help=f"{COMMANDS[name][1]}\n\n{details}", no_args_is_help=True, context_settings=HELP_NAMES)


def given_options(context: click.Context, *sources: str) -> dict[str, Any]:
    """Return the parameters whose values come from these sources (COMMANDLINE, ENVIRONMENT), without the defaults."""
    found = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in found.items() if source is not None and source.name in sources}


def _run_framed(function: Callable[..., int | None], given: dict[str, Any], exit_code: Callable[[TasukiError], int]) -> int:
    """Call a command and return its exit code. An expected error is shown as one line; any other is a bug and is raised."""
    output = Output(json=given.pop("json"), quiet=given.pop("quiet", False))
    try:
        return function(output, **given) or ExitCode.OK
    except TasukiError as error:
        output.error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        drop_output()
        return ExitCode.OK
    except ModuleNotFoundError as error:
        missing = missing_module(error)
        if missing is None:
            raise
        output.error(missing)
        return exit_code(missing)
    except OSError as error:
        from tasuki.blobs.files import disk_full_or

        where = error.filename or "the output"
        found = disk_full_or(error, where)
        shown = TasukiError(f"{where} cannot be used: {error.strerror or error}") if isinstance(found, OSError) else found
        drop_output()
        output.error(shown)
        return exit_code(shown)


def drop_output() -> None:
    """Send what is left of the output to nobody: Python would complain once more when it flushes at the end."""
    with suppress(OSError, ValueError):  # stdout is not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def missing_module(error: ModuleNotFoundError) -> ConfigError | None:
    """Return an error for a package that is not part of the bare install, or a module that only Unix has; None for any other."""
    package = (error.name or "").partition(".")[0]
    if package in UNIX_MODULES:
        return ConfigError(f"this needs Linux; what runs here too: tasuki {ANYWHERE}")
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    if extra is None:
        return None
    return ConfigError(f"this needs {package}, which is not installed; install it with: pip install 'tasuki[{extra}]'")
