"""`tasuki agent`: runs programs on this machine for whoever sends files over HTTP. No server, no store."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tasuki.cli import agent_registry, options
from tasuki.cli.command import command
from tasuki.cli.server import Insecure, TlsCert, TlsKey
from tasuki.core.address import AGENT_PORT
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.agent.settings import AgentConfig
    from tasuki.config import Address
    from tasuki.doors.tls import ServerCertificate
    from tasuki.worker.execs import Exec
    from tasuki.worker.keeper.client import Keeper

DEFAULT_LISTEN = f"127.0.0.1:{AGENT_PORT}"

Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Listen here; port 0: any.")]
Slots = Annotated[
    int | None, typer.Option("--slots", metavar="N", help="Jobs at once. Default: one per core, if each has 1 GiB of memory.")
]
DefaultExec = Annotated[
    str | None,
    typer.Option("--default-exec", metavar="NAME", help="For requests that name none. Default: the only one, if it is."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--token-file", metavar="FILE", help="Tokens that may come in, one on each line. Default: TASUKI_TOKEN."),
]
Node = Annotated[str | None, typer.Option("--node", metavar="NAME", help="How others call this agent. Default: the host's name.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Time limit of a job; a request may ask for less, not for more.")
]
MaxUpload = Annotated[
    str | None,
    typer.Option("--max-upload", metavar="SIZE", help="Largest upload, as 20GB. Default: a quarter of the space that is free."),
]
KeepDays = Annotated[float, typer.Option("--keep-days", metavar="DAYS", help="How long results are kept.")]
Inputs = Annotated[
    str | None,
    typer.Option("--inputs", metavar="WHERE", help="Fetch inputs from here: s3://bucket/prefix, a folder, or http://dispatcher."),
]
LogFormat = Annotated[str, typer.Option("--log-format", metavar="pretty|json", help="How lines look on stderr.")]


class _Door(NamedTuple):
    """Where and how it listens."""

    address: Address
    tls_cert: str | None
    tls_key: str | None
    drain_timeout_s: float | None
    inputs: str | None
    tls_ca: str | None
    json: bool
    registry: agent_registry.RegistryPlace | None = None


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "agent",
        examples=[
            "tasuki agent --exec pricer='/opt/pricer/run {file}'      # on http://127.0.0.1:7090, without a token",
            "tasuki agent --listen 0.0.0.0:7090 --tls-cert cert.pem --tls-key key.pem --token-file tokens --slots 4 "
            "--exec pricer='/opt/pricer/run {file}' --data /var/lib/tasuki",
            "tasuki agent --config execs.toml --default-exec pricer --timeout 300 --log-format json",
            "TASUKI_REGISTRY=redis://db:6379/1 tasuki agent --results s3://bucket/results --exec pricer='/opt/pricer/run {file}'",
        ],
    )(agent)


def agent(
    listen: Listen = DEFAULT_LISTEN,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: Tokens = None,
    insecure: Insecure = False,
    slots: Slots = None,
    exec_: options.Execs = None,
    config: options.ExecsFile = None,
    default_exec: DefaultExec = None,
    node: Node = None,
    timeout: Timeout = 1200.0,
    max_upload: MaxUpload = None,
    keep_days: KeepDays = 7.0,
    inputs: Inputs = None,
    registry: agent_registry.RegistryUrl = None,
    results: agent_registry.Results = None,
    app: agent_registry.App = agent_registry.APP,
    advertise: agent_registry.Advertise = None,
    lease_ttl: agent_registry.LeaseTtl = 15.0,
    tls_ca: options.TlsCa = None,
    drain_timeout: options.DrainTimeout = None,
    log_head: options.LogHead = options.LOG_HEAD,
    log_tail: options.LogTail = options.LOG_TAIL,
    log_format: LogFormat = "pretty",
    log_level: options.LogLevel = "info",
    data: options.Data = None,
    json: options.Json = False,
) -> int:
    """Run programs for whoever sends files over HTTP.

    The first SIGTERM or Ctrl-C drains: no new jobs, running ones finish. The second stops them. SIGHUP makes it read --tls-cert
    and --tls-key again.
    """
    from tasuki.cli import log
    from tasuki.cli.server_process import run_loop
    from tasuki.cli.worker import allowed_execs, check_drain_timeout, log_caps
    from tasuki.config import data_folder, parse_http, parse_size

    check_installed("an agent")
    from tasuki.agent.refusals import WithJobId
    from tasuki.agent.settings import AgentConfig, choose_default, slots_of_this_machine

    log.configure(log_level, json=json or log_format == "json", tag=WithJobId())
    check_drain_timeout(drain_timeout)
    _check_values(slots, timeout, keep_days, log_format)
    execs = _some(allowed_execs(config, exec_ or []))
    tokens = tokens_of(token_file)
    address = parse_http(listen, AGENT_PORT)
    check_door(address, tls_cert, tls_key, tokens=bool(tokens), insecure=insecure)
    agent_config = AgentConfig(
        data=data_folder(data).root,
        node=_checked(node) if node else _host(),
        execs=execs,
        default_exec=choose_default(execs, default_exec),
        slots=slots if slots is not None else slots_of_this_machine(),
        timeout_s=timeout,
        max_upload_bytes=parse_size(max_upload) if max_upload else None,
        keep_days=keep_days,
        tokens=tokens,
        log_caps=log_caps(log_head, log_tail),
    )
    shared = agent_registry.place_of(registry, results, app, advertise, lease_ttl)
    return _run(agent_config, _Door(address, tls_cert, tls_key, drain_timeout, inputs, tls_ca, json, shared), run_loop)


def _run(config: AgentConfig, door: _Door, run_loop: Callable[[Coroutine[Any, Any, int]], int]) -> int:
    from tasuki.doors.tls import ServerCertificate
    from tasuki.worker.commands import check_secrets
    from tasuki.worker.keeper.client import Keeper

    certificate = ServerCertificate(door.tls_cert, door.tls_key) if door.tls_cert and door.tls_key else None
    check_secrets(config.execs.values())
    incarnation = secrets.token_hex(8)
    keeper = Keeper.start(incarnation)  # before the loop and its threads: a child that inherits a locked lock would hang
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return run_loop(_main(config, door, certificate, keeper, incarnation))


async def _main(config: AgentConfig, door: _Door, certificate: ServerCertificate | None, keeper: Keeper, incarnation: str) -> int:
    from tasuki.agent.app import Agent
    from tasuki.agent.input_sources import open_inputs
    from tasuki.cli import exit_codes
    from tasuki.cli.server_process import Events, StopSignals, renew_on_hangup
    from tasuki.config import fault_point

    lost = asyncio.Event()
    inputs = open_inputs(door.inputs, config.tokens[0] if config.tokens else "", door.tls_ca) if door.inputs else None
    fault = _fault(fault_point())
    registry = agent_registry.make(door.registry, config, incarnation, door.tls_ca) if door.registry else None
    agent = Agent(
        config, incarnation, keeper=keeper, registry=registry, inputs=inputs, fault=fault, on_lost=lambda error: lost.set()
    )
    events, stop = Events(json=door.json), StopSignals(hurry=agent.hurry)
    try:
        address = await agent.start(door.address, certificate.context if certificate is not None else None)
        if certificate is not None:
            renew_on_hangup(certificate)
        events.tell("listening", str(address), address=str(address), pid=os.getpid())
        names, data = sorted(config.execs), str(config.data)
        words = f"{config.slots} slots, execs {', '.join(names)}, data {data}"
        events.tell("ready", words, slots=config.slots, execs=names, data=data)
        await _first_of(stop.wanted, lost)
        events.tell("stopping")
        await agent.drain(door.drain_timeout_s)
    finally:
        await agent.close()
    return exit_codes.FAILED if lost.is_set() else stop.exit_code


def _checked(node: str) -> str:
    """It goes into answers, logs and the registry, where a line is a line."""
    if not node.isprintable():
        raise ConfigError(f"--node {node[:80]!r} must be one line without control characters, as in n1.example.com")
    return node


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _fault(points: str) -> Callable[[str], None]:
    if not points:
        return lambda point: None
    from tasuki.server.assembly import kill_at

    return kill_at(points)


def _some(execs: dict[str, Exec]) -> dict[str, Exec]:
    if not execs:
        raise ConfigError("an agent needs a program to run: give --exec NAME='PROGRAM {file}', or --config FILE")
    return execs


def check_installed(who: str) -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError(f"{who} needs FastAPI and uvicorn; install them with: pip install 'tasuki[http]'") from None


def _check_values(slots: int | None, timeout_s: float, keep_days: float, log_format: str) -> None:
    if log_format not in ("pretty", "json"):
        raise ConfigError(f"--log-format must be pretty or json, got {log_format[:40]!r}")
    if slots is not None and slots < 1:
        raise ConfigError(f"--slots must be 1 or more, got {slots}")
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
    if not 0 < keep_days < float("inf"):
        raise ConfigError(f"--keep-days must be above 0, got {keep_days:g}")


def tokens_of(token_file: str | None) -> tuple[str, ...]:
    from tasuki.agent.settings import read_tokens
    from tasuki.config import find_token

    if token_file is not None:
        return read_tokens(token_file)
    token = find_token()
    return (token,) if token else ()


def check_door(address: Address, tls_cert: str | None, tls_key: str | None, *, tokens: bool, insecure: bool) -> None:
    from tasuki.doors.listening import check_listener

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both, or none")
    if not tokens and not address.loopback:
        raise ConfigError(f"{address} can be reached from other machines: give --token-file, or listen on 127.0.0.1")
    check_listener(address, tls=tls_cert is not None, tokens=tokens, insecure=insecure)


def _host() -> str:
    from tasuki.cli.server_process import host_name

    return host_name()
