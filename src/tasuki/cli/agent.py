"""`tasuki agent`: runs programs on this machine for clients that send files over HTTP. No server, no store.

With --registry several agents share a store of job records: one of them runs a job, all of them have its result. Dispatchers
share it too (`RegistryOptions`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasuki.cli import command as cli
from tasuki.cli import process
from tasuki.cli.connect import StoreAddress, guest_places, is_store
from tasuki.cli.output import ExitCode, Output
from tasuki.cli.worker import allowed_execs, check_drain_timeout, log_caps
from tasuki.core.address import AGENT_PORT
from tasuki.core.failover.agent_protocol import TIMEOUT_S
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.agent.app import Agent
    from tasuki.agent.settings import AgentConfig
    from tasuki.agent.store_registry import StoreRegistry
    from tasuki.core.address import Address
    from tasuki.dispatcher.app import Dispatcher
    from tasuki.dispatcher.registry import DispatcherRegistry
    from tasuki.doors.listening import ServerCertificate
    from tasuki.worker.execs import Exec
    from tasuki.worker.keeper.client import Keeper

DEFAULT_LISTEN = f"127.0.0.1:{AGENT_PORT}"
REGISTRY_APP = "tasuki-agents"  # not that of servers, which may use the same Redis
LEASE_TTL_RANGE_S = (1.0, 3600.0)

tokens_option = cli.option(
    "--token-file", metavar="FILE", help="Tokens that may come in, one on each line. Default: TASUKI_TOKEN."
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
    cli.number(
        "--lease-ttl",
        metavar="SECONDS",
        default=15.0,
        help="With --registry: how long a node that is silent keeps its jobs.",
    ),
)


class HttpListener(NamedTuple):
    """The listener of an agent or a dispatcher, and how its process ends."""

    address: Address
    certificate: ServerCertificate | None
    drain_timeout_s: float | None
    json: bool


@cli.command(
    "agent",
    examples=[
        "tasuki agent --exec pricer='/opt/pricer/run {file}'      # on http://127.0.0.1:7090, without a token",
        "tasuki agent --listen 0.0.0.0:7090 --tls-cert cert.pem --tls-key key.pem --token-file tokens --slots 4 "
        "--exec pricer='/opt/pricer/run {file}' --data /var/lib/tasuki",
        "tasuki agent --config execs.toml --default-exec pricer --timeout 300 --log-format json",
        "TASUKI_REGISTRY=redis://db:6379/1 tasuki agent --results s3://bucket/results --exec pricer='/opt/pricer/run {file}'",
    ],
)
@cli.option("--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, help="Listen here; port 0: any.")
@cli.tls_options
@tokens_option
@cli.number("--slots", metavar="N", type=int, help="Jobs at once. Default: one per core, if each has 1 GiB of memory.")
@cli.exec_options
@cli.option("--default-exec", metavar="NAME", help="For requests that name none. Default: the only one, if it is.")
@cli.option("--node", metavar="NAME", help="How others call this agent. Default: the host's name.")
@cli.number(
    "--timeout", metavar="SECONDS", default=TIMEOUT_S, help="Time limit of a job; a request may ask for less, not for more."
)
@cli.option("--max-upload", metavar="SIZE", help="Largest upload, as 20GB. Default: a quarter of the space that is free.")
@cli.number("--keep-days", metavar="DAYS", default=7.0, help="How long results are kept.")
@cli.option("--inputs", metavar="WHERE", help="Fetch inputs from here: s3://bucket/prefix, a folder, or http://dispatcher.")
@registry_options
@cli.option("--advertise", metavar="URL", help="With --registry: where other agents reach this one. Default: as --listen.")
@cli.tls_ca_option
@cli.drain_option
@cli.log_size_options
@log_format_option
@cli.log_level_option
@cli.data_option
def agent(
    output: Output,
    listen: str,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool,
    token_file: str | None,
    slots: int | None,
    exec_: tuple[str, ...],
    config: Path | None,
    default_exec: str | None,
    node: str | None,
    timeout: float,
    max_upload: str | None,
    keep_days: float,
    inputs: str | None,
    registry: str | None,
    results: str | None,
    app: str,
    lease_ttl: float,
    advertise: str | None,
    tls_ca: str | None,
    drain_timeout: float | None,
    log_head: str,
    log_tail: str,
    log_format: str,
    log_level: str,
    data: Path | None,
) -> int:
    """The first SIGTERM or Ctrl-C drains: no new jobs, running ones finish. The second stops them.

    SIGHUP makes it read --tls-cert and --tls-key again.
    """
    from tasuki.config import data_folder, parse_http, parse_size

    check_installed("an agent")
    from tasuki.agent.settings import AgentConfig, choose_default, slots_of_this_machine
    from tasuki.doors.listening import ServerCertificate

    configure_log(log_level, log_format, output)
    check_drain_timeout(drain_timeout)
    _check_values(slots, timeout, keep_days)
    execs = _some(allowed_execs(config, exec_))
    tokens = tokens_of(token_file)
    address = parse_http(listen, AGENT_PORT)
    check_listen(address, tls_cert, tls_key, tokens=bool(tokens), insecure=insecure)
    agent_config = AgentConfig(
        data=data_folder(data).root,
        node=_checked_node(node) if node else process.host_name(),
        execs=execs,
        default_exec=choose_default(execs, default_exec),
        slots=slots if slots is not None else slots_of_this_machine(),
        timeout_s=timeout,
        max_upload_bytes=parse_size(max_upload) if max_upload else None,
        keep_days=keep_days,
        tokens=tokens,
        log_caps=log_caps(log_head, log_tail),
    )
    shared = RegistryOptions.of(registry, results, app, advertise, lease_ttl)
    certificate = ServerCertificate(tls_cert, tls_key) if tls_cert and tls_key else None
    return _run(agent_config, HttpListener(address, certificate, drain_timeout, output.json), shared, inputs, tls_ca)


def _run(
    config: AgentConfig, listener: HttpListener, shared: RegistryOptions | None, inputs: str | None, tls_ca: str | None
) -> int:
    from tasuki.worker.commands import check_secrets
    from tasuki.worker.keeper.client import Keeper

    check_secrets(config.execs.values())
    incarnation = secrets.token_hex(8)
    keeper = Keeper.start(incarnation)  # before the loop and its threads: a child that inherits a locked lock would hang
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    return process.run_loop(_main(config, listener, keeper, incarnation, shared, inputs, tls_ca))


async def _main(
    config: AgentConfig,
    listener: HttpListener,
    keeper: Keeper,
    incarnation: str,
    shared: RegistryOptions | None,
    inputs: str | None,
    tls_ca: str | None,
) -> int:
    from tasuki.agent.app import Agent
    from tasuki.agent.input_sources import open_inputs
    from tasuki.config import fault_point
    from tasuki.server.assembly import kill_at

    lost = asyncio.Event()
    points = fault_point()
    agent = Agent(
        config,
        incarnation,
        keeper=keeper,
        registry=make_agent_registry(shared, config, incarnation, tls_ca) if shared else None,
        inputs=open_inputs(inputs, config.tokens[0] if config.tokens else "", tls_ca) if inputs else None,
        fault=kill_at(points) if points else lambda point: None,
        on_lost=lambda error: lost.set(),
    )
    names, data = sorted(config.execs), str(config.data)
    words = f"{config.slots} slots, execs {', '.join(names)}, data {data}"
    code = await run_service(agent, listener, lost, words, slots=config.slots, execs=names, data=data)
    return ExitCode.FAILED if lost.is_set() else code


async def run_service(service: Agent | Dispatcher, listener: HttpListener, lost: asyncio.Event, words: str, **facts: Any) -> int:
    """Serve until a signal or until `lost` is set, drain, and return the exit code; `words` or `facts` are printed when ready."""
    events, stop = process.Events(json=listener.json), process.StopSignals(hurry=service.hurry)
    certificate = listener.certificate
    try:
        address = await service.start(listener.address, certificate.context if certificate is not None else None)
        if certificate is not None:
            process.renew_on_hangup(certificate)
        events.emit("listening", str(address), address=str(address), pid=os.getpid())
        events.emit("ready", words, **facts)
        await _first_of(stop.wanted, lost)
        events.emit("stopping")
        await service.drain(listener.drain_timeout_s)
    finally:
        await service.close()
    return stop.exit_code


def _checked_node(node: str) -> str:
    """Return the name if it is one line: it goes into answers, logs and the registry."""
    if not node.isprintable():
        raise ConfigError(f"--node {node[:80]!r} must be one line without control characters, as in n1.example.com")
    return node


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _some(execs: dict[str, Exec]) -> dict[str, Exec]:
    if not execs:
        raise ConfigError("an agent needs a program to run: give --exec NAME='PROGRAM {file}', or --config FILE")
    return execs


def check_installed(who: str) -> None:
    """Raise ConfigError if FastAPI or uvicorn is missing."""
    if not process.http_installed():
        raise ConfigError(f"{who} needs FastAPI and uvicorn; install them with: pip install 'tasuki[http]'")


def configure_log(level: str, format: str, output: Output) -> None:
    """Log as agents and dispatchers do: every record with the job that it is about."""
    from tasuki.agent.refusals import WithJobId

    if format not in ("pretty", "json"):
        raise ConfigError(f"--log-format must be pretty or json, got {format[:40]!r}")
    process.configure_log(level, json=output.json or format == "json", tag=WithJobId())


def _check_values(slots: int | None, timeout_s: float, keep_days: float) -> None:
    if slots is not None and slots < 1:
        raise ConfigError(f"--slots must be 1 or more, got {slots}")
    if not 0 < timeout_s < float("inf"):
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout_s:g}")
    if not 0 < keep_days < float("inf"):
        raise ConfigError(f"--keep-days must be above 0, got {keep_days:g}")


def tokens_of(token_file: str | None) -> tuple[str, ...]:
    """Return the tokens of --token-file, else the one of TASUKI_TOKEN, else none."""
    from tasuki.agent.settings import read_tokens
    from tasuki.config import find_token

    if token_file is not None:
        return read_tokens(token_file)
    token = find_token()
    return (token,) if token else ()


def check_listen(address: Address, tls_cert: str | None, tls_key: str | None, *, tokens: bool, insecure: bool) -> None:
    """Raise ConfigError for an address that may not be listened on in this way."""
    from tasuki.doors.listening import check_listener

    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together; give both, or none")
    if not tokens and not address.loopback:
        raise ConfigError(f"{address} can be reached from other machines: give --token-file, or listen on 127.0.0.1")
    check_listener(address, tls=tls_cert is not None, tokens=tokens, insecure=insecure)


# ---------------------------------------------------------------------------------------------------- the registry


class RegistryOptions(NamedTuple):
    """The registry that agents and dispatchers share."""

    url: str
    results: str
    app: str
    advertised: str
    """Address by which other agents reach this one."""
    lease_ttl_s: float

    @classmethod
    def of(
        cls, url: str | None, results: str | None, app: str, advertise: str | None, lease_ttl_s: float
    ) -> RegistryOptions | None:
        """Return the options, checked; None without --registry."""
        from tasuki.config import check_app
        from tasuki.core.address import parse_url

        if url is None:
            if results or advertise:
                name = "--results" if results else "--advertise"
                raise ConfigError(f"{name} is for those that share a registry; give --registry URL too")
            return None
        if not is_store(url):
            scheme = url.partition("://")[0][:40]
            raise ConfigError(
                f"--registry {scheme}://… is not a registry; use redis://host:6379/0 or postgresql://user@host/database"
            )
        check_app(app, "--registry-app")
        least, most = LEASE_TTL_RANGE_S
        if not least <= lease_ttl_s <= most:
            raise ConfigError(f"--lease-ttl must be {least:g} to {most:g} seconds, got {lease_ttl_s:g}")
        if advertise is not None:
            places = parse_url(advertise)
            if len(places) != 1 or not places[0].http:
                raise ConfigError(f"--advertise {advertise[:80]!r} must be one address of this agent, as in https://n1:7090")
            advertise = str(places[0])
        return cls(url, results or "", app, advertise or "", lease_ttl_s)


def make_agent_registry(shared: RegistryOptions, config: AgentConfig, incarnation: str, tls_ca: str | None) -> StoreRegistry:
    """Return the registry for an agent; nothing is opened yet."""
    from tasuki.agent.results import Peers
    from tasuki.agent.store_registry import ClaimJournal, StoreRegistry
    from tasuki.net.tls import client_tls
    from tasuki.server.assembly import StoreClient

    retention_s = config.keep_days * 86_400.0
    server = process.server_config(config.data, lease_ttl_s=shared.lease_ttl_s, retention_s=retention_s, host=config.node)
    places = guest_places(StoreAddress(shared.url, shared.app, shared.results), config.data / "registry")
    return StoreRegistry(
        StoreClient(places, server),
        ClaimJournal(config.data),
        node=config.node,
        incarnation=incarnation,
        ttl_s=shared.lease_ttl_s,
        peers=Peers(config.tokens[0] if config.tokens else "", client_tls(tls_ca)),
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

    return DispatcherRegistry(connect, name=process.host_name(), ttl_s=shared.lease_ttl_s)
