"""Nodes of a Django project on one PostgreSQL, with or without Redis, whose network a test can cut.

with NodeRig(tmp_path, postgres, redis_url) as rig:
    rig.settings(leader_stale_seconds=2)
    rig.start("n1"), rig.start("n2")
    rig.cut(rig.leader(), "sql")

With `tls` the nodes show certificates: "shared", one for all, or "own", one for each node id; `rotate` replaces them.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from tasuki.coords.coordination import LEADER
from tasuki.coords.sql import SqlCoordination
from tasuki.server.assembly import open_scheduler_coordination
from tests.support.certificates import TestAuthority
from tests.support.cut_network import CutNetwork
from tests.support.django_site import DjangoSite
from tests.support.ports import free_port
from tests.support.postgres_service import PostgresService
from tests.support.processes import ChildProcess
from tests.support.waiting import until

TLS_NAME = "scheduler-grpc"
TLS_FILES = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
_LED = re.compile(r"leads, under epoch (\d+)")
SLOW_S = 60.0  # on a machine with other load


class RigNode:
    """One process of `tasuki_worker --grpc`."""

    def __init__(self, name: str, node_id: str, process: ChildProcess, address: str) -> None:
        self.name, self.node_id, self.process, self.address = name, node_id, process, address

    @property
    def worker_id(self) -> str:
        """The number of the node; another one after it has come back."""
        return re.findall(r"connected to unix socket as (\d+)\n", self.process.output())[-1]

    @property
    def leads(self) -> bool:
        log = self.process.output()
        return log.count("leads, under epoch") > log.count("leads no more")

    @property
    def is_sub_leader(self) -> bool:
        log = self.process.output()
        return log.count("is the sub-leader of") > log.count("is not the sub-leader of")

    @property
    def pid(self) -> int:
        return self.process.pid


class NodeRig:
    """A project, its nodes and the network between them: places `sql`, `redis`, and the names of nodes for calls to them."""

    def __init__(
        self, folder: Path, postgres: PostgresService, redis_url: str = "", *, slots: int = 2, tls: str = "", **env: str
    ) -> None:
        self.folder, self.slots = folder, slots
        self._tls, self._issued = tls, 0
        self._postgres = postgres
        self.url = postgres.empty_database()
        self.network = CutNetwork()
        self.nodes: dict[str, RigNode] = {}
        self._redis_url = redis_url
        self._env = env
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.network)
        self.coordination = self._carried("redis", self._redis_url) if self._redis_url else ""
        tasuki = json.dumps({"coordination": self.coordination})
        self.site = DjangoSite(self.folder, postgres_url=self.url, SITE_TASUKI=tasuki, **self._env)
        self._carried_sql = self._carried("sql", self.url)
        self.site.manage("migrate", "-v0")
        if self._tls:
            self._authority = TestAuthority(self.folder / "ca")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.network.heal()
        self._stack.close()
        self._postgres.drop(self.url)

    def _carried(self, name: str, url: str) -> str:
        place = urlsplit(url)
        port = self.network.carry(name, place.hostname or "127.0.0.1", place.port or 0)
        return url.replace(f":{place.port}", f":{port}")

    # ------------------------------------------------------------------------------------------------ nodes

    def settings(self, **changes: float) -> None:
        self.site.manage("tasuki_ops", "settings", "set", *(f"{name}={value}" for name, value in changes.items()))

    def start(self, name: str, node_id: str = "", *arguments: str) -> RigNode:
        """Start a node; its gRPC address is one of the network."""
        port = free_port()
        grpc = {"advertise": f"127.0.0.1:{self.network.carry(name, '127.0.0.1', port)}"}
        if self._tls:
            tls = self._tls_folder(node_id or name)
            grpc |= {"authentication": "mtls", "tls_name": TLS_NAME if self._tls == "shared" else ""}
            grpc |= {f"tls_{kind}": str(tls / file) for kind, file in TLS_FILES.items()}
            if not tls.exists():
                self._issue(tls)
        env = {
            "DATABASE_URL": self._carried_sql,
            "SITE_TASUKI": json.dumps({"coordination": self.coordination, "grpc": grpc}),
            "TASUKI_NODE_ID": node_id or name,
        }
        given = (
            "--grpc",
            f"127.0.0.1:{port}",
            "--slots",
            str(self.slots),
            "--data",
            str(self.folder / f"data-{name}"),
            *arguments,
        )
        process = self._stack.enter_context(self.site.worker(*given, env=env, log=f"{name}.log"))
        node = self.nodes[name] = RigNode(name, node_id or name, process, f"127.0.0.1:{port}")
        return node

    def start_again(self, node: RigNode) -> RigNode:
        """Start a node that is gone."""
        del self.nodes[node.name]
        return self.start(node.name, node.node_id)

    def rotate(self) -> None:
        """Replace all certificates and keys, one file after the other."""
        self._issued += 1
        for folder in self.folder.glob("tls-*"):
            self._issue(folder)

    def _tls_folder(self, node_id: str) -> Path:
        return self.folder / ("tls-all" if self._tls == "shared" else f"tls-{node_id}")

    def _issue(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        name = TLS_NAME if self._tls == "shared" else folder.name.removeprefix("tls-")
        cert, key = self._authority.issue(name, ends_days=30 + self._issued, for_nodes=True)
        for kind, source in (("ca", self._authority.ca), ("key", key), ("cert", cert)):
            shutil.copy2(source, folder / TLS_FILES[kind])

    def cut_store(self, node: RigNode) -> None:
        """Have a node's turns of the store hang, while its heartbeats and locks go on."""
        self.network.cut(node.pid, "sql", spare=() if self.coordination else self._ports(of_coordination=True))

    def cut_heartbeats(self, node: RigNode) -> None:
        """Have a node's heartbeats and locks hang, while its turns of the store go on."""
        if self.coordination:
            self.network.cut(node.pid, "redis")
        else:
            self.network.cut(node.pid, "sql", spare=self._ports(of_coordination=False))

    def _ports(self, *, of_coordination: bool) -> set[int]:
        """Return the ports from which nodes are connected to the database, for coordination or for all else."""
        found: set[int] = set()
        seen: set[int] = set()

        def look() -> bool:
            for port, statement in self.rows(
                "SELECT client_port, query FROM pg_stat_activity WHERE datname = current_database()"
            ):
                seen.add(port)
                if "tasuki_member" in statement or "tasuki_scopelease" in statement:
                    found.add(port)
            return len(found) >= len(self.nodes)

        until(look, SLOW_S, "each node has sent a heartbeat")
        return found if of_coordination else seen - found

    def detach(self, worker_id: str) -> None:
        """Detach a worker in the name of the leader."""
        shared = open_scheduler_coordination(self.coordination) if self.coordination else SqlCoordination(self.url)
        with closing(shared):
            shared.set_detached(worker_id, True, actor=LEADER)

    def cut(self, node: RigNode, *places: str) -> None:
        """Cut a node off from places; `all`: from everything, also from calls of the others."""
        if "all" in places:
            for other in self.nodes.values():
                self.network.cut(other.pid, node.name)
            places = ("sql", "redis", *self.nodes)
        self.network.cut(node.pid, *places)

    # ------------------------------------------------------------------------------------------------ the cluster

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        return self._postgres.execute(statement, url=self.url)

    def term(self) -> tuple[int, str]:
        """Return the epoch that the database has, and its holder."""
        found = self.rows("SELECT epoch, holder FROM tasuki_scopeepoch WHERE scope = 'leader'")
        return found[0] if found else (0, "")

    def led(self) -> list[tuple[int, str]]:
        """Return the epochs under which nodes have led, in order, with their names."""
        found = [(int(epoch), node.name) for node in self.nodes.values() for epoch in _LED.findall(node.process.output())]
        return sorted(found)

    def led_at(self) -> float:
        """Return when the store took the last turn of a leader, as the leader told."""
        import redis

        if not self._redis_url:
            [(at,)] = self.rows("SELECT expires_at FROM tasuki_scopelease WHERE scope = 'led'")
            return float(at)
        with redis.Redis.from_url(self._redis_url) as client:
            return float(client.get("scheduler:leader:last_seen_ts") or 0)

    def by_id(self, worker_id: str) -> RigNode | None:
        return next((node for node in self.nodes.values() if node.worker_id == worker_id), None)

    def leader(self, *, above: int = 0, within_s: float = SLOW_S) -> RigNode:
        """Wait for a leader under an epoch above that, and return it."""

        def look() -> RigNode | None:
            epoch, holder = self.term()
            return self.by_id(holder) if epoch > above else None

        return until(look, within_s, f"a leader above epoch {above}")

    def settled(self) -> RigNode:
        """Wait for a leader, and a sub-leader of each node that has another process; return the leader."""
        leader = self.leader()
        others = [node for node in self.nodes.values() if node is not leader]

        def ready() -> bool:
            watching = {node.node_id for node in others if node.is_sub_leader}
            return watching == {node.node_id for node in others}

        until(ready, SLOW_S, "sub-leaders of all nodes")
        return leader

    def live_worker_ids(self) -> set[str]:
        status = json.loads(self.site.manage("tasuki_ops", "status", "--json").stdout)
        return {worker["worker_id"] for worker in status["workers"]}

    def run_state(self, job_id: str) -> tuple[str, int, str]:
        """Return state, attempt and worker of a run."""
        [found] = self.rows(
            f"SELECT state, attempt, coalesce(assigned_worker_id, '') FROM tasuki_jobrun WHERE idempotency_key = '{job_id}'"
        )
        return found

    def enqueue(self, *arguments: str) -> str:
        """Enqueue the command `probe`, and return its job id."""
        code = f"from tasuki.django import enqueue_command\nprint(enqueue_command('probe', *{list(arguments)!r}))"
        return self.site.run(code).strip()

    def time_of_takeover(self, above: int, within_s: float) -> tuple[RigNode, float]:
        began = time.monotonic()
        return self.leader(above=above, within_s=within_s), time.monotonic() - began
