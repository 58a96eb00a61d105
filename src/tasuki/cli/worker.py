"""`tasuki worker`: takes jobs from a server and runs the programs that its operator allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tasuki.cli import options
from tasuki.cli.command import command
from tasuki.cli.connect import read_token
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.worker.execs import Exec


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "worker",
        examples=[
            "tasuki worker --to tcp://host:7000 --token-file worker.token --exec render='/opt/render/bin/render --quiet'",
            "tasuki worker --to tcp://host:7000 --subject 'render.eu.*' --subject 'common.>' --slots 4 --config execs.toml",
            "tasuki worker --subject '>' --any-program      # over the data folder's unix socket, for your own jobs",
        ],
    )(worker)


def worker(
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="URL", help="Server. Default: TASUKI_URL, else the data folder's unix socket."),
    ] = None,
    subject: Annotated[
        list[str] | None,
        typer.Option("--subject", metavar="PATTERN", help="What to take, * and > allowed. Several times. Default: job.assign.>"),
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", metavar="N", help="Jobs at once. Default: one per core.")] = None,
    exec_: Annotated[
        list[str] | None,
        typer.Option("--exec", metavar="NAME=TEMPLATE", help="Allow a program: {file}, {files}, {args} are filled in. Several."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="TOML file with [exec.NAME] tables.")] = None,
    any_program: Annotated[
        bool,
        typer.Option("--any-program", help="Run any program for jobs of this same user; only over a unix socket."),
    ] = False,
    worker_id: Annotated[
        str | None, typer.Option("--worker-id", metavar="ID", help="Lasting identity, no dots. Default: a new one each start.")
    ] = None,
    on_disconnect: Annotated[
        str, typer.Option("--on-disconnect", metavar="stop|keep", help="What happens to jobs whose lease cannot be renewed.")
    ] = "stop",
    reconnect_grace: Annotated[
        float, typer.Option("--reconnect-grace", metavar="SECONDS", help="With keep: how long others wait before they take over.")
    ] = 60.0,
    lease_ttl: Annotated[
        float | None, typer.Option("--lease-ttl", metavar="SECONDS", help="Lease length. Default: the server's.")
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            "--drain-timeout", metavar="SECONDS", help="After SIGTERM, how long running jobs may take. Default: no limit."
        ),
    ] = None,
    data: options.Data = None,
    token_file: options.TokenFile = None,
    tls_ca: options.TlsCa = None,
    json: options.Json = False,
) -> None:
    """Run jobs until a signal: the first drains (running jobs finish), the second stops them."""
    from tasuki.cli.serve import Events
    from tasuki.config import data_folder, default_url
    from tasuki.worker import Worker

    if on_disconnect not in ("stop", "keep"):
        raise ConfigError(f"--on-disconnect must be stop or keep, got {on_disconnect!r}")
    url = to or default_url() or f"unix://{data_folder(data).socket}"
    made = Worker(
        url,
        token=read_token(token_file),
        worker_id=worker_id,
        subjects=tuple(subject or ()),
        concurrency=slots,
        execs=_execs(config, exec_ or ()),
        any_program=any_program,
        data=data,
        on_disconnect=on_disconnect,
        reconnect_grace_s=reconnect_grace,
        lease_ttl_s=lease_ttl,
        tls_ca=tls_ca,
        drain_timeout_s=drain_timeout,
    )
    events = Events(json=json)

    def tell(name: str, facts: dict[str, object]) -> None:
        text = " ".join(f"{key}={value}" for key, value in facts.items())
        events.tell(name, text, worker_id=made.worker_id, **facts)

    made.on_event = tell
    made.run()


def _execs(config: Path | None, flags: list[str] | tuple[()]) -> dict[str, Exec]:
    """What the file allows, then what the flags allow; a flag replaces an exec of the same name."""
    from tasuki.worker.execs import load_execs, parse_exec_flag

    execs = load_execs(config) if config is not None else {}
    for flag in flags:
        parsed = parse_exec_flag(flag)
        execs[parsed.name] = parsed
    return execs
