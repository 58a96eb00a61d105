"""The gRPC door of a node: who may call, by the settings of the project, and what the calls do to the worker.

Imported by a node after everything was forked: `grpc` has threads, which do not survive a fork.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from django.core import signing

from tasuki.client.aio import AsyncClient
from tasuki.config import parse_listen
from tasuki.core.cluster_messages import ServerInfo
from tasuki.django.conf import GrpcSettings, node_id, project_settings
from tasuki.django.standalone import SCHEMA_VERSION
from tasuki.doors.grpc import worker_pb2 as pb
from tasuki.doors.grpc.calls import NodeCalls
from tasuki.doors.grpc.listener import NodeTls, TlsFiles
from tasuki.doors.grpc.service import Callers, GrpcDoor, WorkerService
from tasuki.doors.guest import private_folder
from tasuki.errors import Unauthorized
from tasuki.server.cluster import Cluster
from tasuki.server.server import Server
from tasuki.worker.status import RunningJob
from tasuki.worker.worker import Worker

TOKEN_SALT = "tasuki.grpc"  # noqa: S105 - what the tokens are signed for
TOKEN_MAX_AGE_S = 60
DEFAULT_PORT = 50051
OPERATOR = "operator"  # worker_id of a process that is no worker


class NodeWorkerControl:
    """The worker of this node, as its gRPC door sees and directs it."""

    schema_version = SCHEMA_VERSION

    def __init__(self, worker: Worker, server: Server, cluster: Cluster | None) -> None:
        self._worker, self._server, self._cluster = worker, server, cluster
        self.node_id, self.worker_id, self.incarnation = node_id(), worker.worker_id, worker.incarnation
        self._is_paused = False

    @property
    def max_jobs(self) -> int:
        return self._worker.slots

    @property
    def role(self) -> int:
        broker = self._server.broker
        return pb.ROLE_LEADER if broker.epoch else pb.ROLE_SUBLEADER if broker.sub_leads else pb.ROLE_WORKER

    @property
    def is_draining(self) -> bool:
        return self._is_paused or self._worker.is_draining

    def held_runs(self) -> dict[str, int]:
        return {run.job_id: run.attempt for run in self._worker.running_jobs()}

    def drain(self, on: bool) -> None:
        if self._worker.is_draining:
            return  # it is about to end, and does not take work again
        self._is_paused = on
        if self._cluster is not None:
            self._cluster.set_willing(not on)
        self._worker.change_subjects(*(() if on else self._worker.patterns))

    async def cancel(self, job_run_id: str, reason: str) -> None:
        async with AsyncClient(self._worker.url) as client:
            await client.cancel(job_run_id, reason=reason)

    async def holds_lead(self, renewed_ago_s: float) -> bool:
        return self._cluster is not None and await self._cluster.holds_lead(renewed_ago_s)


class NodeQuestions:
    """Questions to other nodes (`server.roles.NodeCaller`)."""

    def __init__(self, calls: NodeCalls) -> None:
        self._calls = calls

    async def led_ago_s(self, node: ServerInfo, timeout_s: float) -> float | None:
        answer = await self._calls.call(node.grpc_address, node.node_id, pb.GetStatusRequest(), timeout_s)
        return float(answer.led_ago_s) if answer.who.role == pb.ROLE_LEADER else None

    async def confirms(self, node: ServerInfo, run: RunningJob, renewed_ago_s: float, timeout_s: float) -> bool | None:
        """Return whether the node says that a run may continue, and has renewed its lease; None: it cannot tell."""
        asked = pb.ConfirmContinuationRequest(
            run=pb.JobRunRef(job_run_id=run.job_id, attempt=run.attempt), renewed_ago_s=renewed_ago_s
        )
        answer = await self._calls.call(node.grpc_address, node.node_id, asked, timeout_s)
        said = {pb.CONTINUATION_CONTINUE: True, pb.CONTINUATION_STOP: False}
        return said.get(answer.continuation)

    async def ping(self, node: ServerInfo, timeout_s: float) -> None:
        await self._calls.call(node.grpc_address, node.node_id, pb.PingRequest(), timeout_s)


@asynccontextmanager
async def open_door(worker: Worker, server: Server, cluster: Cluster | None, listen: str) -> AsyncIterator[NodeCalls]:
    """Listen for the orders of leaders while the block lasts, and yield the way to call other nodes. On SQLite there is no
    cluster."""
    settings, control = project_settings().grpc, NodeWorkerControl(worker, server, cluster)
    address = parse_listen(listen, DEFAULT_PORT)
    tls = _tls_of(settings)
    callers = Callers(tls, settings.tls_name, read_token if settings.authentication == "bearer" else None)
    calls = _calls_of(pb.Caller(node_id=control.node_id, worker_id=control.worker_id), tls)
    with private_folder() as folder:
        door = GrpcDoor(WorkerService(control, server), callers, folder)
        listening = await door.listen(address)
        server.broker.grpc_address = settings.advertise or _reachable_at(listening.host, listening.port)
        if cluster is not None and cluster.roles is not None:
            cluster.roles.caller = NodeQuestions(calls)
        try:
            yield calls
        finally:
            await calls.close()
            await door.close()


def _calls_of(caller: pb.Caller, tls: NodeTls | None) -> NodeCalls:
    settings = project_settings().grpc
    return NodeCalls(
        caller, tls, settings.tls_name, (lambda: make_token(caller)) if settings.authentication == "bearer" else None
    )


async def order_drain(address: str, node: str, request: pb.DrainRequest, timeout_s: float) -> str:
    """Have a worker of a node take no new jobs, or take some again, in the name of this process; return what it said."""
    calls = _calls_of(pb.Caller(node_id=node_id(), worker_id=OPERATOR), _tls_of(project_settings().grpc))
    try:
        answer = await calls.call(address, node, request, timeout_s)
    finally:
        await calls.close()
    return str(pb.OrderStatus.Name(answer.status)).removeprefix("ORDER_STATUS_")


def _reachable_at(host: str, port: int) -> str:
    """Return the address at which others reach a listener; of one on all addresses, by the name of this host."""
    if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not listened on
        host = socket.gethostname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tls_of(settings: GrpcSettings) -> NodeTls | None:
    """Return TLS from the files of the settings; None where they are not needed and not there."""
    if settings.authentication != "mtls" and not Path(settings.tls_cert).exists():
        return None
    files = TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_revoked)
    return NodeTls(files, asks_for_certificate=settings.authentication != "bearer")


# ---------------------------------------------------------------------------------------------------- tokens


def make_token(caller: pb.Caller) -> str:
    """Return a token for one minute, signed with the project's SECRET_KEY."""
    return signing.dumps([caller.node_id, caller.worker_id], salt=TOKEN_SALT)


def read_token(token: str) -> tuple[str, str]:
    """Return node_id and worker_id of a token, or raise Unauthorized. SECRET_KEY_FALLBACKS count."""
    try:
        node, worker = signing.loads(token, salt=TOKEN_SALT, max_age=TOKEN_MAX_AGE_S)
    except signing.SignatureExpired:
        raise Unauthorized(f"the token is older than {TOKEN_MAX_AGE_S} s: make a new one for each call") from None
    except (signing.BadSignature, ValueError, TypeError):
        raise Unauthorized("the token was not signed with the SECRET_KEY of this project") from None
    return str(node), str(worker)
