"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _named(exec_: str) -> str:
    """An empty name would be a handler's job, and is more likely a variable that was not set."""
    if not exec_.strip():
        raise typer.BadParameter("it is empty; name a program, or write - for a handler's job")
    return exec_


Exec = Annotated[
    str,
    typer.Argument(metavar="EXEC", help="Name of a program that the worker allows; - for a handler.", callback=_named),
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="URL",
        help="Server: tcp://host:7000[,host2:7000], tls://host:7000, http://host:7080, https://host or unix:///path; "
        "for run also node agents: agents:http://n1:7090,http://n2:7090. "
        "Default: TASUKI_URL, else the server of the data folder, else an embedded one for the time of the command.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="Data folder. Default: TASUKI_DATA, else ./tasuki-data if it exists, else $XDG_DATA_HOME/tasuki.",
    ),
]
TokenFile = Annotated[
    str | None,
    typer.Option("--token-file", metavar="FILE", help="File with the token; - for stdin. Default: TASUKI_TOKEN."),
]
TlsCa = Annotated[str | None, typer.Option("--tls-ca", metavar="FILE", help="CA for tls:// and https://. Default: the system's.")]
Json = Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only ids.")]

Subject = Annotated[str | None, typer.Option("--subject", metavar="SUBJECT", help="Routing key. Default: job.assign.default.")]
JobId = Annotated[
    str | None,
    typer.Option("--job-id", metavar="ID", help="Your own id: asking again with it gives the same job. Default: a new one."),
]
Files = Annotated[
    list[str] | None,
    typer.Option("--file", metavar="PATH", help="Input file, found by the job as in/NAME. Can be given several times."),
]
Environment = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="For the job; the exec must allow the name. Several times."),
]
Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", help="Time limit of one attempt.")]
Priority = Annotated[int, typer.Option("--priority", metavar="0-9", help="Higher first.")]
NotBefore = Annotated[
    str | None,
    typer.Option("--not-before", metavar="TIME", help="Do not start before: +SECONDS, 2026-01-31T06:00, or a Unix time."),
]
NotAfter = Annotated[
    str | None, typer.Option("--not-after", metavar="TIME", help="Do not start after: a job that still waits then is SKIPPED.")
]
PermanentExit = Annotated[
    str | None,
    typer.Option("--permanent-exit", metavar="CODES", help="Exit codes not worth a retry, as in 3,4. Default: the exec's own."),
]
RetryExit = Annotated[
    str | None,
    typer.Option("--retry-exit", metavar="CODES", help="The only exit codes worth a retry. Default: the exec's own."),
]
PayloadFile = Annotated[
    str | None,
    typer.Option("--payload-file", metavar="FILE", help="Standard input of the job, or a handler's payload; - for stdin."),
]
Lines = Annotated[int, typer.Option("--limit", metavar="N", help="How many at most.")]
LogLevel = Annotated[str, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error, on stderr.")]

Agents = Annotated[
    str | None,
    typer.Option("--to", metavar="AGENTS", help="Node agents: agents:http://n1:7090,http://n2:7090. Default: TASUKI_URL."),
]
Hedge = Annotated[
    float | None,
    typer.Option("--hedge", metavar="SECONDS", help="Agents: without a result after this time, also at a second node.", min=0.0),
]
GiveUpAfter = Annotated[
    float | None,
    typer.Option(
        "--give-up-after",
        metavar="SECONDS",
        help="Agents: how long to try in all. Default: 1260, or a minute more than --timeout if that is longer.",
        min=0.0,
    ),
]

Execs = Annotated[
    list[str] | None,
    typer.Option("--exec", metavar="NAME=TEMPLATE", help="Allow a program: {file}, {files}, {args} are filled in. Several."),
]
ExecsFile = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with [exec.NAME] tables.")]
DrainTimeout = Annotated[
    float | None,
    typer.Option("--drain-timeout", metavar="SECONDS", help="After SIGTERM, how long running jobs may take. Default: no limit."),
]
LogHead = Annotated[
    str,
    typer.Option("--log-head", metavar="SIZE", help="How much of the beginning of a long stdout or stderr is kept: 500KB, 4MiB."),
]
LogTail = Annotated[str, typer.Option("--log-tail", metavar="SIZE", help="How much of its end.")]
LOG_HEAD, LOG_TAIL = "16320KiB", "64KiB"
