"""`tasuki dispatcher`: sends jobs to whichever node agent has a place. Stateless; run as many as you like."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tasuki.cli import agent_registry, options
from tasuki.cli.agent import LogFormat, check_door, check_installed, tokens_of
from tasuki.cli.command import command
from tasuki.cli.server import Insecure, TlsCert, TlsKey
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.config import Address
    from tasuki.dispatcher.settings import DispatcherConfig
    from tasuki.doors.tls import ServerCertificate

DEFAULT_PORT = 7091
DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"

Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Listen here; port 0: any.")]
Agents = Annotated[str, typer.Option("--agents", metavar="URLS", help="Node agents: http://n1:7090,http://n2:7090.")]
How = Annotated[str, typer.Option("--mode", metavar="proxy|redirect", help="Pass jobs through, or tell clients where to go.")]
Inputs = Annotated[
    str | None,
    typer.Option("--inputs", metavar="WHERE", help="Keep uploads here first: s3://bucket/prefix, or a folder that all share."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--token-file", metavar="FILE", help="Tokens that may come in, one on each line. Default: TASUKI_TOKEN."),
]
AgentToken = Annotated[
    str | None,
    typer.Option("--agent-token-file", metavar="FILE", help="The token for the agents. Default: the first of --token-file."),
]
MaxUpload = Annotated[
    str | None, typer.Option("--max-upload", metavar="SIZE", help="With --inputs: largest upload. Default: 64GB.")
]
KeepInputs = Annotated[
    float, typer.Option("--keep-inputs", metavar="DAYS", help="With --inputs: remove those unused for so long; 0: never.")
]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long an agent may take to answer.")]


class _Door(NamedTuple):
    """Where and how it listens."""

    address: Address
    certificate: ServerCertificate | None
    drain_timeout_s: float | None
    registry: agent_registry.RegistryPlace | None
    json: bool


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command(
        app,
        "dispatcher",
        examples=[
            "tasuki dispatcher --agents http://n1:7090,http://n2:7090      # on http://127.0.0.1:7091, without a token",
            "tasuki dispatcher --listen 0.0.0.0:7091 --tls-cert cert.pem --tls-key key.pem --token-file tokens "
            "--agents https://n1:7090,https://n2:7090 --inputs s3://bucket/prefix",
            "tasuki dispatcher --agents http://n1:7090,http://n2:7090 --mode redirect --log-format json",
            "tasuki dispatcher --agents http://n1:7090,http://n2:7090 --inputs s3://bucket/prefix --registry redis://db:6379/1",
        ],
    )(dispatcher)


def dispatcher(
    agents: Agents,
    listen: Listen = DEFAULT_LISTEN,
    mode: How = "proxy",
    inputs: Inputs = None,
    token_file: Tokens = None,
    agent_token_file: AgentToken = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: Insecure = False,
    max_upload: MaxUpload = None,
    keep_inputs: KeepInputs = 7.0,
    registry: agent_registry.RegistryUrl = None,
    results: agent_registry.Results = None,
    app: agent_registry.App = agent_registry.APP,
    lease_ttl: agent_registry.LeaseTtl = 15.0,
    timeout: Timeout = 1260.0,
    drain_timeout: options.DrainTimeout = None,
    log_format: LogFormat = "pretty",
    log_level: options.LogLevel = "info",
    json: options.Json = False,
) -> int:
    """Send jobs to whichever node agent has a place.

    It keeps no state: run two or more behind one address. The first SIGTERM or Ctrl-C lets what is under way end, the second
    cuts it off; jobs go on at their nodes in any case. SIGHUP makes it read --tls-cert and --tls-key again.
    """
    from tasuki.cli import log
    from tasuki.cli.server_process import run_loop
    from tasuki.cli.worker import check_drain_timeout
    from tasuki.config import parse_http

    check_installed("a dispatcher")
    from tasuki.agent.refusals import WithJobId
    from tasuki.doors.tls import ServerCertificate

    if log_format not in ("pretty", "json"):
        raise ConfigError(f"--log-format must be pretty or json, got {log_format[:40]!r}")
    log.configure(log_level, json=json or log_format == "json", tag=WithJobId())
    check_drain_timeout(drain_timeout)
    tokens = tokens_of(token_file)
    address = parse_http(listen, DEFAULT_PORT)
    check_door(address, tls_cert, tls_key, tokens=bool(tokens), insecure=insecure)
    config = _config(agents, mode, inputs, tokens, agent_token_file, tls_ca, max_upload, keep_inputs, timeout)
    certificate = ServerCertificate(tls_cert, tls_key) if tls_cert and tls_key else None
    shared = agent_registry.place_of(registry, results, app, None, lease_ttl)
    return run_loop(_main(config, _Door(address, certificate, drain_timeout, shared, json)))


def _config(
    agents: str,
    mode: str,
    inputs: str | None,
    tokens: tuple[str, ...],
    agent_token_file: str | None,
    tls_ca: str | None,
    max_upload: str | None,
    keep_inputs_days: float,
    timeout_s: float,
) -> DispatcherConfig:
    from tasuki.config import find_token, parse_agents, parse_size
    from tasuki.dispatcher.settings import UPLOAD_MAX_BYTES, DispatcherConfig, Mode
    from tasuki.net.tls import client_tls

    if mode not in set(Mode):
        raise ConfigError(f"--mode must be proxy or redirect, got {mode[:40]!r}")
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
    if not 0 <= keep_inputs_days < float("inf"):
        raise ConfigError(f"--keep-inputs must be 0 (for ever) or more days, got {keep_inputs_days:g}")
    own = tokens[0] if tokens else ""
    return DispatcherConfig(
        agents=tuple(parse_agents(agents)),
        mode=Mode(mode),
        tokens=tokens,
        agent_token=find_token(agent_token_file) if agent_token_file is not None else own,
        agent_tls=client_tls(tls_ca),
        inputs=inputs,
        max_upload_bytes=parse_size(max_upload) if max_upload else UPLOAD_MAX_BYTES,
        keep_inputs_days=keep_inputs_days,
        limit_s=timeout_s,
    )


async def _main(config: DispatcherConfig, door: _Door) -> int:
    from tasuki.cli.server_process import Events, StopSignals, renew_on_hangup
    from tasuki.dispatcher.app import Dispatcher

    certificate = door.certificate
    registry = agent_registry.make_for_dispatcher(door.registry) if door.registry is not None else None
    dispatcher = Dispatcher(config, registry)
    events, stop = Events(json=door.json), StopSignals(hurry=dispatcher.hurry)
    try:
        address = await dispatcher.start(door.address, certificate.context if certificate is not None else None)
        if certificate is not None:
            renew_on_hangup(certificate)
        events.tell("listening", str(address), address=str(address), pid=os.getpid())
        nodes = [str(agent) for agent in config.agents]
        inputs = config.inputs.partition("?")[0] if config.inputs else None
        kept = f", inputs at {inputs}" if inputs else ""
        events.tell(
            "ready", f"{config.mode}, agents {', '.join(nodes)}{kept}", mode=str(config.mode), agents=nodes, inputs=inputs
        )
        await stop.wanted.wait()
        events.tell("stopping")
        await dispatcher.drain(door.drain_timeout_s)
    finally:
        await dispatcher.close()
    return stop.exit_code
