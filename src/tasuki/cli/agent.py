"""`tasuki agent`: runs programs on this machine for clients that send files over HTTP. No server, no store.

`tasuki dispatcher`: sends jobs to agents that have a free slot. Stateless; several may run behind one address.

With --registry several agents share a store of job records: one of them runs a job, all of them have its result. Dispatchers
share it too (`RegistryOptions`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasuki.agent.settings import KEEP_DAYS, AgentConfig, check_token, choose_default, read_tokens, slots_of_this_machine
from tasuki.cli import command as cli
from tasuki.cli import process
from tasuki.cli.connect import StoreAddress, guest_places, is_store
from tasuki.cli.output import ExitCode, Output
from tasuki.cli.worker import allowed_execs, log_caps
from tasuki.config import (
    check_app,
    data_folder,
    ensure_agent_token,
    fault_hook,
    find_token,
    forget_tokens,
    host_name,
    parse_http,
)
from tasuki.core.address import AGENT_PORT, Address, parse_agents, parse_url, shown_address
from tasuki.core.failover.agent_protocol import TIMEOUT_S
from tasuki.core.failover.events import LIMIT_S
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.units import DAY_S, parse_size
from tasuki.dispatcher.settings import KEEP_INPUTS_DAYS, UPLOAD_MAX_BYTES, DispatcherConfig, Mode
from tasuki.doors.listening import ServerCertificate
from tasuki.errors import ConfigError
from tasuki.net.tls import client_tls
from tasuki.worker.commands import check_secrets
from tasuki.worker.keeper.client import Keeper
from tasuki.worker.linux_calls import wipe_variables

if TYPE_CHECKING:
    from tasuki.agent.app import Agent
    from tasuki.agent.store_registry import StoreRegistry
    from tasuki.dispatcher.app import Dispatcher
    from tasuki.dispatcher.registry import DispatcherRegistry

logger = logging.getLogger("tasuki.agent")
DISPATCHER_PORT = 7091
DEFAULT_LISTEN = f"127.0.0.1:{DISPATCHER_PORT}"
REGISTRY_APP = "tasuki-agents"  # not that of servers, which may use the same Redis
LEASE_TTL_RANGE_S = (1.0, 3600.0)


# ---------------------------------------------------------------------------------------------------- options of both


class RegistryOptions(NamedTuple):
    """The registry that agents and dispatchers share."""

    url: str
    results: str
    app: str
    advertised: str
    """Address by which other agents reach this one."""
    lease_ttl_s: float
    peers: tuple[Address, ...] = ()
    """Agents that are sent the token without a proof and without TLS."""

    @classmethod
    def of(
        cls,
        registry: str | None,
        results: str | None,
        app: str,
        lease_ttl: float,
        advertise: str | None = None,
        peers: str | None = None,
    ) -> RegistryOptions | None:
        """Return the options, checked; None without --registry."""
        if registry is None:
            if results or advertise or peers:
                name = "--results" if results else "--advertise" if advertise else "--peers"
                raise ConfigError(f"{name} is for those that share a registry; give --registry URL too")
            return None
        if not is_store(registry):
            shown = shown_address(registry)
            raise ConfigError(f"--registry must be redis://host:6379/0 or postgresql://user@host/database, got {shown!r}")
        check_app(app, "--registry-app")
        if advertise is not None:
            places = parse_url(advertise)
            if len(places) != 1 or not places[0].http or places[0].path:
                shown = shown_address(advertise)
                raise ConfigError(f"--advertise {shown!r} must be one address of this agent, as in https://n1:7090")
            advertise = str(places[0])
        return cls(registry, results or "", app, advertise or "", lease_ttl, tuple(parse_agents(peers)) if peers else ())


tokens_options = cli.options(
    cli.option(
        "--token-file",
        metavar="FILE",
        help="Tokens that may come in, one on each line. Default: TASUKI_TOKEN, else (on 127.0.0.1) agent-token in --data, made.",
    ),
    cli.flag("--no-token", help="On 127.0.0.1: let every user and every program of this machine come in."),
)
log_format_option = cli.option("--log-format", metavar="pretty|json", default="pretty", help="How lines look on stderr.")
registry_options = cli.options(
    cli.option(
        "--registry",
        metavar="URL",
        envvar="TASUKI_REGISTRY",
        help="redis://host:6379/0 or postgresql://user@host/database, which several agents share: one of them runs a job, all of "
        "them have its result. An address with a password belongs into the variable.",
    ),
    cli.option(
        "--results",
        metavar="URL",
        help="With --registry: keep large results here, so that they outlive their node: s3://bucket/prefix[?endpoint=URL], "
        "or a folder that all share.",
    ),
    cli.option(
        "--registry-app",
        "app",
        metavar="NAME",
        default=REGISTRY_APP,
        help="With --registry redis://…: the prefix of its keys, as of the others.",
    ),
    cli.duration(
        "--lease-ttl",
        type=cli.Duration(*LEASE_TTL_RANGE_S),
        default=LEASE_TTL_S,
        help="With --registry: how long a node that is silent keeps its jobs.",
    ),
    cli.gather("shared", RegistryOptions.of),
)


def _tokens(token_file: str | None, no_token: bool, address: Address, data: Path | None) -> tuple[str, ...]:
    """Return the tokens of --token-file, else the one of TASUKI_TOKEN, else on loopback that of the folder, which is made."""
    if token_file is not None:
        return read_tokens(token_file)
    if no_token:
        return ()
    if token := find_token():
        return (check_token(token, "TASUKI_TOKEN"),)
    return (ensure_agent_token(data_folder(data)),) if address.loopback else ()


# ---------------------------------------------------------------------------------------------------- agent


def agent_config(
    listen: str,
    token_file: str | None,
    no_token: bool,
    slots: int | None,
    exec_: tuple[str, ...],
    config: Path | None,
    default_exec: str | None,
    node: str | None,
    timeout: float,
    max_upload: str | None,
    keep: float,
    log_head: str,
    log_tail: str,
    data: Path | None,
) -> AgentConfig:
    """Return the settings of an agent, checked."""
    if slots is not None and slots < 1:
        raise ConfigError(f"--slots must be 1 or more, got {slots}")
    execs = allowed_execs(config, exec_)
    if not execs:
        raise ConfigError("an agent needs a program to run: give --exec NAME='PROGRAM {file}', or --config FILE")
    if node and not node.isprintable():  # it goes into answers, logs and the registry
        raise ConfigError(f"--node {node[:80]!r} must be one line without control characters, as in n1.example.com")
    return AgentConfig(
        data=data_folder(data).root,
        node=node or host_name(),
        execs=execs,
        default_exec=choose_default(execs, default_exec),
        slots=slots if slots is not None else slots_of_this_machine(),
        timeout_s=timeout,
        max_upload_bytes=parse_size(max_upload) if max_upload else None,
        keep_days=keep / DAY_S,
        tokens=_tokens(token_file, no_token, parse_http(listen, AGENT_PORT), data),
        log_caps=log_caps(log_head, log_tail),
    )


@cli.command(
    "agent",
    examples=[
        "tasuki agent --exec pricer='/opt/pricer/run {file}'      # on http://127.0.0.1:7090",
        "tasuki agent --listen 0.0.0.0:7090 --tls-cert cert.pem --tls-key key.pem --token-file tokens --slots 4 "
        "--exec pricer='/opt/pricer/run {file}' --data /var/lib/tasuki",
        "tasuki agent --config execs.toml --default-exec pricer --timeout 5m --log-format json",
        "TASUKI_REGISTRY=redis://db:6379/1 tasuki agent --results s3://bucket/results --exec pricer='/opt/pricer/run {file}'",
    ],
)
@cli.option("--listen", metavar="HOST:PORT", default=f"127.0.0.1:{AGENT_PORT}", help="Listen here; port 0: any.")
@cli.tls_options
@tokens_options
@cli.number("--slots", metavar="N", type=int, help="Jobs at once. Default: one per core, if each has 1 GiB of memory.")
@cli.exec_options
@cli.option("--default-exec", metavar="NAME", help="For requests that name none. Default: the only one, if it is.")
@cli.option("--node", metavar="NAME", help="How others call this agent. Default: the host's name.")
@cli.duration(
    "--timeout",
    type=cli.Duration(above=True),
    default=TIMEOUT_S,
    help="Time limit of a job; a request may ask for less, not for more.",
)
@cli.option("--max-upload", metavar="SIZE", help="Largest upload, as 20GB. Default: a quarter of the space that is free.")
@cli.duration(
    "--keep", type=cli.Duration(above=True, with_unit=True), default=KEEP_DAYS * DAY_S, help="How long results are kept."
)
@cli.option("--inputs", metavar="WHERE", help="Fetch inputs from here: s3://bucket/prefix, a folder, or http://dispatcher.")
@registry_options
@cli.option("--advertise", metavar="URL", help="With --registry: where other agents reach this one. Default: as --listen.")
@cli.option("--peers", metavar="URLS", help="With --registry: agents that are sent the token though they have no TLS.")
@cli.tls_ca_option
@cli.drain_option
@cli.log_size_options
@log_format_option
@cli.log_level_option
@cli.data_option
@cli.gather("config", agent_config)
def agent(
    output: Output,
    listen: str,
    tls: cli.TlsOptions,
    config: AgentConfig,
    inputs: str | None,
    shared: RegistryOptions | None,
    tls_ca: str | None,
    drain_timeout: float | None,
    log_format: str,
    log_level: str,
) -> int:
    """The first SIGTERM or Ctrl-C drains: no new jobs, running ones finish. The second stops them.

    SIGHUP makes it read --tls-cert and --tls-key again.
    """
    _configure_log("an agent", log_level, log_format, output, config.node)
    listener = HttpListener.of(parse_http(listen, AGENT_PORT), tls, config.tokens, drain_timeout)
    check_secrets(config.execs.values())
    incarnation = secrets.token_hex(8)
    wipe_variables(*forget_tokens())
    keeper = Keeper.start(incarnation)  # before the loop and its threads: a child that inherits a locked lock would hang
    gc.freeze()

    async def main() -> int:
        from tasuki.agent.app import Agent

        source = None
        if inputs:
            from tasuki.agent.input_sources import open_inputs

            source = open_inputs(inputs, config.tokens[0] if config.tokens else "", tls_ca)
        lost = asyncio.Event()
        agent = Agent(
            config,
            incarnation,
            keeper=keeper,
            registry=make_agent_registry(shared, config, incarnation, tls_ca) if shared else None,
            inputs=source,
            fault=fault_hook(),
            on_lost=lambda error: lost.set(),
        )
        names, data = sorted(config.execs), str(config.data)
        words = f"{config.slots} slots, execs {', '.join(names)}, data {data}"
        events = process.Events(json=output.json)
        code = await _serve(agent, listener, events, lost, words, slots=config.slots, execs=names, data=data)
        return ExitCode.FAILED if lost.is_set() else code

    return process.run_loop(main())


# ---------------------------------------------------------------------------------------------------- dispatcher


def dispatcher_config(
    listen: str,
    agents: str,
    mode: str,
    inputs: str | None,
    token_file: str | None,
    no_token: bool,
    agent_token_file: str | None,
    tls_ca: str | None,
    max_upload: str | None,
    keep_inputs: float,
    timeout: float,
    data: Path | None,
) -> DispatcherConfig:
    """Return the settings of a dispatcher, checked."""
    if mode not in set(Mode):
        raise ConfigError(f"--mode must be proxy or redirect, got {mode[:40]!r}")
    tokens = _tokens(token_file, no_token, parse_http(listen, DISPATCHER_PORT), data)
    own = tokens[0] if tokens else ""
    return DispatcherConfig(
        agents=tuple(parse_agents(agents)),
        mode=Mode(mode),
        tokens=tokens,
        agent_token=find_token(agent_token_file) if agent_token_file is not None else own,
        agent_tls=client_tls(tls_ca),
        inputs=inputs,
        max_upload_bytes=parse_size(max_upload) if max_upload else UPLOAD_MAX_BYTES,
        keep_inputs_days=keep_inputs / DAY_S,
        limit_s=timeout,
    )


@cli.command(
    "dispatcher",
    examples=[
        "tasuki dispatcher --agents http://n1:7090,http://n2:7090      # on http://127.0.0.1:7091",
        "tasuki dispatcher --listen 0.0.0.0:7091 --tls-cert cert.pem --tls-key key.pem --token-file tokens "
        "--agents https://n1:7090,https://n2:7090 --inputs s3://bucket/prefix",
        "tasuki dispatcher --agents http://n1:7090,http://n2:7090 --mode redirect --log-format json",
        "tasuki dispatcher --agents http://n1:7090,http://n2:7090 --inputs s3://bucket/prefix --registry redis://db:6379/1",
    ],
)
@cli.option("--agents", metavar="URLS", required=True, help="Node agents: http://n1:7090,http://n2:7090.")
@cli.option("--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, help="Listen here; port 0: any.")
@cli.option("--mode", metavar="proxy|redirect", default="proxy", help="Pass jobs through, or redirect clients to the node.")
@cli.option("--inputs", metavar="WHERE", help="Keep uploads here first: s3://bucket/prefix, or a folder that all share.")
@tokens_options
@cli.option("--agent-token-file", metavar="FILE", help="The token for the agents. Default: the first of --token-file.")
@cli.tls_options
@cli.tls_ca_option
@cli.option("--max-upload", metavar="SIZE", help="With --inputs: largest upload. Default: 64GB.")
@cli.duration(
    "--keep-inputs",
    type=cli.Duration(with_unit=True),
    default=KEEP_INPUTS_DAYS * DAY_S,
    help="With --inputs: remove those unused for so long; 0: never.",
)
@registry_options
@cli.duration("--timeout", type=cli.Duration(above=True), default=LIMIT_S, help="How long an agent may take to answer.")
@cli.drain_option
@log_format_option
@cli.log_level_option
@cli.data_option
@cli.gather("config", dispatcher_config)
def dispatcher(
    output: Output,
    config: DispatcherConfig,
    listen: str,
    tls: cli.TlsOptions,
    shared: RegistryOptions | None,
    drain_timeout: float | None,
    log_format: str,
    log_level: str,
) -> int:
    """A dispatcher keeps no state: run two or more behind one address.

    The first SIGTERM or Ctrl-C lets requests under way end, the second cuts them off; jobs continue at their nodes in any case.
    SIGHUP makes it read --tls-cert and --tls-key again.
    """
    _configure_log("a dispatcher", log_level, log_format, output, host_name())
    listener = HttpListener.of(parse_http(listen, DISPATCHER_PORT), tls, config.tokens, drain_timeout)

    async def main() -> int:
        from tasuki.dispatcher.app import Dispatcher

        dispatcher = Dispatcher(config, make_dispatcher_registry(shared) if shared is not None else None)
        nodes = [str(agent) for agent in config.agents]
        inputs = config.inputs.partition("?")[0] if config.inputs else None
        words = f"{config.mode}, agents {', '.join(nodes)}" + (f", inputs at {inputs}" if inputs else "")
        facts = {"mode": str(config.mode), "agents": nodes, "inputs": inputs}
        return await _serve(dispatcher, listener, process.Events(json=output.json), asyncio.Event(), words, **facts)

    return process.run_loop(main())


# ---------------------------------------------------------------------------------------------------- the process of both


class HttpListener(NamedTuple):
    """The listener of an agent or a dispatcher, and how long its jobs may take at its end."""

    address: Address
    certificate: ServerCertificate | None
    drain_timeout_s: float | None
    host_names: tuple[str, ...] = ()

    @classmethod
    def of(cls, address: Address, tls: cli.TlsOptions, tokens: tuple[str, ...], drain_timeout_s: float | None) -> HttpListener:
        """Read the certificate. Raise ConfigError for an address that may not be listened on in this way."""
        if not tokens and not address.loopback:
            raise ConfigError(f"{address} can be reached from other machines: give --token-file, or listen on 127.0.0.1")
        if not tokens:
            logger.warning(
                "there is no token (--no-token): every user and program of this machine can run the programs of agents"
            )
        tls.check(address, tokens=bool(tokens))
        return cls(address, tls.certificate(), drain_timeout_s, tls.host_name)


def _configure_log(who: str, level: str, format: str, output: Output, node: str) -> None:
    """Log every record with the job that it is about, and the node. Raise ConfigError if FastAPI or uvicorn is missing."""
    if not process.http_installed():
        raise ConfigError(f"{who} needs FastAPI and uvicorn; install them with: pip install 'tasuki[http]'")
    from tasuki.agent.refusals import WithContext

    if format not in ("pretty", "json"):
        raise ConfigError(f"--log-format must be pretty or json, got {format[:40]!r}")
    process.configure_log(level, json=output.json or format == "json", tag=WithContext(node))


async def _serve(
    service: Agent | Dispatcher, listener: HttpListener, events: process.Events, lost: asyncio.Event, words: str, **facts: Any
) -> int:
    """Serve until a signal or until `lost` is set, drain, and return the exit code; `words` or `facts` are printed when ready."""
    stop, certificate = process.StopSignals(hurry=service.hurry), listener.certificate
    try:
        context = certificate.context if certificate is not None else None
        address = await service.start(listener.address, context, listener.host_names)
        process.renew_on_hangup(certificate)
        events.emit("listening", str(address), address=str(address), pid=os.getpid())
        events.emit("ready", words, **facts)
        waiting = [asyncio.ensure_future(event.wait()) for event in (stop.wanted, lost)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        events.emit("stopping")
        await service.drain(listener.drain_timeout_s)
    finally:
        await service.close()
    return stop.exit_code


# ---------------------------------------------------------------------------------------------------- the registry


def make_agent_registry(shared: RegistryOptions, config: AgentConfig, incarnation: str, tls_ca: str | None) -> StoreRegistry:
    """Return the registry for an agent; nothing is opened yet."""
    from tasuki.agent.results import Peers
    from tasuki.agent.store_registry import ClaimJournal, StoreRegistry
    from tasuki.server.assembly import StoreClient

    retention_s = config.keep_days * DAY_S
    server = process.server_config(config.data, lease_ttl_s=shared.lease_ttl_s, retention_s=retention_s, host=config.node)
    places = guest_places(StoreAddress(shared.url, shared.app, shared.results), config.data / "registry")
    return StoreRegistry(
        StoreClient(places, server),
        ClaimJournal(config.data),
        node=config.node,
        incarnation=incarnation,
        ttl_s=shared.lease_ttl_s,
        peers=Peers(config.tokens, client_tls(tls_ca), shared.peers),
        advertised=shared.advertised,
    )


def make_dispatcher_registry(shared: RegistryOptions) -> DispatcherRegistry:
    """Return the registry for a dispatcher; nothing is opened yet."""
    from tasuki.dispatcher.registry import DispatcherRegistry
    from tasuki.server.assembly import StoreClient

    nowhere = Path()  # a dispatcher has no folder, and without duties nothing is kept in one
    places = guest_places(StoreAddress(shared.url, shared.app, shared.results), nowhere)

    def connect() -> StoreClient:
        server = process.server_config(nowhere, lease_ttl_s=shared.lease_ttl_s)
        return StoreClient(places, server, duties=False)

    return DispatcherRegistry(connect, name=host_name(), ttl_s=shared.lease_ttl_s)
