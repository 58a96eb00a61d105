"""`tasuki dispatcher`: sends jobs to node agents that have a free slot. Stateless; several may run behind one address."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tasuki.cli import command as cli
from tasuki.cli import process
from tasuki.cli.agent import (
    HttpListener,
    RegistryOptions,
    check_installed,
    check_listen,
    configure_log,
    log_format_option,
    make_dispatcher_registry,
    registry_options,
    run_service,
    tokens_of,
    tokens_option,
)
from tasuki.cli.output import Output
from tasuki.cli.worker import check_drain_timeout
from tasuki.core.failover.events import LIMIT_S
from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.dispatcher.settings import DispatcherConfig

DEFAULT_PORT = 7091
DEFAULT_LISTEN = f"127.0.0.1:{DEFAULT_PORT}"


@cli.command(
    "dispatcher",
    examples=[
        "tasuki dispatcher --agents http://n1:7090,http://n2:7090      # on http://127.0.0.1:7091, without a token",
        "tasuki dispatcher --listen 0.0.0.0:7091 --tls-cert cert.pem --tls-key key.pem --token-file tokens "
        "--agents https://n1:7090,https://n2:7090 --inputs s3://bucket/prefix",
        "tasuki dispatcher --agents http://n1:7090,http://n2:7090 --mode redirect --log-format json",
        "tasuki dispatcher --agents http://n1:7090,http://n2:7090 --inputs s3://bucket/prefix --registry redis://db:6379/1",
    ],
)
@cli.option("--agents", metavar="URLS", required=True, help="Node agents: http://n1:7090,http://n2:7090.")
@cli.option("--listen", metavar="HOST:PORT", default=DEFAULT_LISTEN, help="Listen here; port 0: any.")
@cli.option("--mode", metavar="proxy|redirect", default="proxy", help="Pass jobs through, or tell clients where to go.")
@cli.option("--inputs", metavar="WHERE", help="Keep uploads here first: s3://bucket/prefix, or a folder that all share.")
@tokens_option
@cli.option("--agent-token-file", metavar="FILE", help="The token for the agents. Default: the first of --token-file.")
@cli.tls_options
@cli.tls_ca_option
@cli.option("--max-upload", metavar="SIZE", help="With --inputs: largest upload. Default: 64GB.")
@cli.number("--keep-inputs", metavar="DAYS", default=7.0, help="With --inputs: remove those unused for so long; 0: never.")
@registry_options
@cli.number("--timeout", metavar="SECONDS", default=LIMIT_S, help="How long an agent may take to answer.")
@cli.drain_option
@log_format_option
@cli.log_level_option
def dispatcher(
    output: Output,
    agents: str,
    listen: str,
    mode: str,
    inputs: str | None,
    token_file: str | None,
    agent_token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool,
    tls_ca: str | None,
    max_upload: str | None,
    keep_inputs: float,
    registry: str | None,
    results: str | None,
    app: str,
    lease_ttl: float,
    timeout: float,
    drain_timeout: float | None,
    log_format: str,
    log_level: str,
) -> int:
    """A dispatcher keeps no state: run two or more behind one address.

    The first SIGTERM or Ctrl-C lets what is under way end, the second cuts it off; jobs go on at their nodes in any case. SIGHUP
    makes it read --tls-cert and --tls-key again.
    """
    from tasuki.config import parse_http

    check_installed("a dispatcher")
    from tasuki.doors.listening import ServerCertificate

    configure_log(log_level, log_format, output)
    check_drain_timeout(drain_timeout)
    tokens = tokens_of(token_file)
    address = parse_http(listen, DEFAULT_PORT)
    check_listen(address, tls_cert, tls_key, tokens=bool(tokens), insecure=insecure)
    config = _config(agents, mode, inputs, tokens, agent_token_file, tls_ca, max_upload, keep_inputs, timeout)
    certificate = ServerCertificate(tls_cert, tls_key) if tls_cert and tls_key else None
    shared = RegistryOptions.of(registry, results, app, None, lease_ttl)
    return process.run_loop(_main(config, HttpListener(address, certificate, drain_timeout, output.json), shared))


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
    from tasuki.config import find_token, parse_size
    from tasuki.core.address import parse_agents
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


async def _main(config: DispatcherConfig, listener: HttpListener, shared: RegistryOptions | None) -> int:
    from tasuki.dispatcher.app import Dispatcher

    dispatcher = Dispatcher(config, make_dispatcher_registry(shared) if shared is not None else None)
    nodes = [str(agent) for agent in config.agents]
    inputs = config.inputs.partition("?")[0] if config.inputs else None
    words = f"{config.mode}, agents {', '.join(nodes)}" + (f", inputs at {inputs}" if inputs else "")
    never = asyncio.Event()
    return await run_service(dispatcher, listener, never, words, mode=str(config.mode), agents=nodes, inputs=inputs)
