"""Agents that share a registry, for the tests: each in a thread of its own, over a real store."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tasuki.agent.app import Agent
from tasuki.agent.store_registry import StoreRegistry
from tasuki.cli.agent import REGISTRY_APP as APP
from tasuki.cli.agent import RegistryOptions, make_agent_registry
from tasuki.core.address import Address
from tasuki.core.store_messages import Answers, Turn
from tests.agent.stage import AgentStage


class SharingStage(AgentStage):
    """An agent with a registry."""

    registry: StoreRegistry

    def __init__(self, folder: Path, url: str, *, ttl_s: float = 15.0, **options: Any) -> None:
        super().__init__(folder, **options)
        self.registry_url = url
        self._place = RegistryOptions(url, "", APP, "", ttl_s)

    async def _start(self) -> None:
        incarnation = secrets.token_hex(8)
        self.registry = make_agent_registry(self._place, self._config, incarnation, None)
        self.agent = Agent(self._config, incarnation, registry=self.registry)
        address = await self.agent.start(Address("http", "127.0.0.1", 0), self._tls)
        self.url, self.port = str(address), address.port

    def execute(self, turn: Turn) -> Answers:
        """The store's verbs, beside the agent."""
        return self.await_(self.registry._share.execute(turn))

    def renew_now(self) -> None:
        """The next renewal of its leases is due."""

        def due() -> None:
            self.registry._leases._renew_at = 0.0
            self.registry._leases._wake.set()

        self.call(due)

    def result(self, job_id: str, **headers: str) -> httpx.Response:
        return self.http.get(f"/result/{job_id}", headers=headers)


@contextmanager
def two_nodes(folder: Path, url: str, **options: Any) -> Iterator[tuple[SharingStage, SharingStage]]:
    """n1 and n2."""
    with (
        SharingStage(folder / "n1", url, node="n1", **options) as one,
        SharingStage(folder / "n2", url, node="n2", **options) as two,
    ):
        yield one, two
