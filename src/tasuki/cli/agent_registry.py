"""What `tasuki agent` and `tasuki dispatcher` are told of a registry that they share, and what that makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tasuki.errors import ConfigError

if TYPE_CHECKING:
    from tasuki.agent.settings import AgentConfig
    from tasuki.agent.store_registry import StoreRegistry
    from tasuki.dispatcher.registry import DispatcherRegistry

APP = "tasuki-agents"  # not that of servers, whose Redis it may be
LEASE_TTL_RANGE_S = (1.0, 3600.0)

RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        envvar="TASUKI_REGISTRY",
        show_envvar=True,
        help="redis://host:6379/0 or postgresql://user@host/database, which several agents share: one of them runs a job, all of "
        "them have its result. An address with a password belongs into the variable.",
    ),
]
Results = Annotated[
    str | None,
    typer.Option(
        "--results",
        metavar="URL",
        help="With --registry: keep large results here, so that they outlive their node: s3://bucket/prefix[?endpoint=URL], "
        "or a folder that all share.",
    ),
]
App = Annotated[
    str,
    typer.Option("--registry-app", metavar="NAME", help="With --registry redis://…: the prefix of its keys, as of the others."),
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="URL",
        help="With --registry: where other agents reach this one. Default: as --listen.",
    ),
]

LeaseTtl = Annotated[
    float,
    typer.Option("--lease-ttl", metavar="SECONDS", help="With --registry: how long a node that is silent keeps its jobs."),
]


class RegistryPlace(NamedTuple):
    """A registry, and how others reach this agent."""

    url: str
    results: str
    app: str
    advertised: str
    lease_ttl_s: float


def place_of(url: str | None, results: str | None, app: str, advertise: str | None, lease_ttl_s: float) -> RegistryPlace | None:
    """What the options say, checked; None without --registry."""
    from tasuki.cli.store_client import is_store
    from tasuki.config import check_app, parse_url

    if url is None:
        if results or advertise:
            option = "--results" if results else "--advertise"
            raise ConfigError(f"{option} is for those that share a registry; give --registry URL too")
        return None
    if not is_store(url):
        scheme = url.partition("://")[0][:40]
        raise ConfigError(f"--registry {scheme}://… is none; use redis://host:6379/0 or postgresql://user@host/database")
    check_app(app, "--registry-app")
    least, most = LEASE_TTL_RANGE_S
    if not least <= lease_ttl_s <= most:
        raise ConfigError(f"--lease-ttl must be {least:g} to {most:g} seconds, got {lease_ttl_s:g}")
    if advertise is not None:
        places = parse_url(advertise)
        if len(places) != 1 or not places[0].http:
            raise ConfigError(f"--advertise {advertise[:80]!r} must be one address of this agent, as in https://n1:7090")
        advertise = str(places[0])
    return RegistryPlace(url, results or "", app, advertise or "", lease_ttl_s)


def make(place: RegistryPlace, config: AgentConfig, incarnation: str, tls_ca: str | None) -> StoreRegistry:
    """One agent's part in the registry; nothing is opened yet."""
    from tasuki.agent.results import Peers
    from tasuki.agent.store_registry import ClaimJournal, StoreRegistry
    from tasuki.cli.server_process import new_server_id
    from tasuki.cli.store_client import StoreAddress, guest_places
    from tasuki.net.tls import client_tls
    from tasuki.server.server import ServerConfig
    from tasuki.server.store_client import StoreClient

    server = ServerConfig(
        server_id=new_server_id(),
        data=config.data,
        lease_ttl_s=place.lease_ttl_s,
        retention_s=config.keep_days * 86_400.0,
        host=config.node,
    )
    places = guest_places(StoreAddress(place.url, place.app, place.results), config.data / "registry")
    return StoreRegistry(
        StoreClient(places, server),
        ClaimJournal(config.data),
        node=config.node,
        incarnation=incarnation,
        ttl_s=place.lease_ttl_s,
        peers=Peers(config.tokens[0] if config.tokens else "", client_tls(tls_ca)),
        advertised=place.advertised,
    )


def make_for_dispatcher(place: RegistryPlace) -> DispatcherRegistry:
    """One dispatcher's part in it; nothing is opened yet."""
    from tasuki.cli.server_process import host_name, new_server_id
    from tasuki.cli.store_client import StoreAddress, guest_places
    from tasuki.dispatcher.registry import DispatcherRegistry
    from tasuki.server.server import ServerConfig
    from tasuki.server.store_client import StoreClient

    nowhere = Path()  # a dispatcher has no folder, and without duties nothing is kept in one
    places = guest_places(StoreAddress(place.url, place.app, place.results), nowhere)

    def share() -> StoreClient:
        server = ServerConfig(server_id=new_server_id(), data=nowhere, lease_ttl_s=place.lease_ttl_s, host=host_name())
        return StoreClient(places, server, duties=False)

    return DispatcherRegistry(share, name=host_name(), ttl_s=place.lease_ttl_s)
