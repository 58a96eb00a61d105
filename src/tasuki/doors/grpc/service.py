"""WorkerService of a node: who calls, may it, and the answer. The table of methods is `METHODS`.

Each call is authenticated, then judged: the caller proves its node by its certificate or token, an order carries an epoch that is
obeyed (`core.scheduler.orders`), names this worker, and comes while the worker takes orders. Refusals are counted by reason,
which GetStatus shows, and logged within the bounds of the log of refusals.

StartJob and CancelJob change nothing by themselves: the first lets the node read what the database has assigned to its worker,
the second cancels in the database. So an order that is lost, doubled or late does no harm, and none starts what is not assigned.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from tasuki.core.address import Address
from tasuki.core.broker.events import StartAssigned
from tasuki.core.job import LEASED, Job, State
from tasuki.core.scheduler.orders import OrderEpochs
from tasuki.core.store_messages import HeldLease, LeaseStatus
from tasuki.doors.grpc import worker_pb2 as pb
from tasuki.doors.grpc.listener import NodeListener, NodeTls, PeerConnection
from tasuki.doors.listening import bound
from tasuki.errors import (
    ConfigError,
    Forbidden,
    InvalidInput,
    NotFound,
    TasukiError,
    TooLarge,
    Unauthorized,
    Unavailable,
    quoted,
)
from tasuki.server.server import Server
from tasuki.version import __version__

SERVICE = "tasuki.v1.WorkerService"
REQUEST_MAX_BYTES = 64 * 1024
RECEIVED_MAX_BYTES = 256 * 1024  # more is refused by gRPC before it is in memory, and not counted here
RUNS_MAX = 256
STORE_TIMEOUT_S = 0.2  # callers wait 0.2 to 0.5 s
STORE_AWAY_S = 2.0  # without a turn of a leader, which has several a second: there is no time to wait for the next one
CALL_TIMEOUT_S = 5.0
CLOCK_SKEW_S = 1.0  # between this host and the store
STOP_GRACE_S = 0.5
CALLS_AT_ONCE = 64
TOKEN_SCHEME = "bearer "  # noqa: S105
OPTIONS = (
    ("grpc.max_receive_message_length", RECEIVED_MAX_BYTES),
    ("grpc.max_metadata_size", 8 * 1024),
    ("grpc.max_concurrent_streams", CALLS_AT_ONCE),
    ("grpc.max_connection_idle_ms", 300_000),
    ("grpc.max_connection_age_ms", 600_000),  # bounds a request that was begun and never ends
    ("grpc.max_connection_age_grace_ms", 5_000),
    ("grpc.so_reuseport", 0),
)
STATUS_OF: tuple[tuple[type[TasukiError], grpc.StatusCode], ...] = (
    (TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthorized, grpc.StatusCode.UNAUTHENTICATED),
    (Forbidden, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
)
logger = logging.getLogger("tasuki.grpc")


class NodeControl(Protocol):
    """The node behind the door."""

    node_id: str
    worker_id: str
    incarnation: str
    schema_version: int

    @property
    def max_jobs(self) -> int: ...

    @property
    def role(self) -> int:
        """The node's role, a value of the enum Role."""

    @property
    def is_draining(self) -> bool: ...

    def held_runs(self) -> dict[str, int]:
        """Return the attempts of the runs that the worker holds."""

    def drain(self, on: bool) -> None:
        """Take nothing new, or take work again."""

    async def cancel(self, job_run_id: str, reason: str) -> None:
        """Cancel a run in the database, and stop it."""

    async def holds_lead(self, renewed_ago_s: float) -> bool:
        """Return whether a lease that was renewed so long ago is safe with this leader while the database is away."""


class Callers(NamedTuple):
    """The rules by which callers prove who they are."""

    tls: NodeTls | None = None
    shared_name: str = ""
    """Name in the certificate that all nodes share; whoever has it is a node, any of them."""
    read_token: Callable[[str], tuple[str, str]] | None = None
    """Returns node_id and worker_id of a token, or raises Unauthorized; None: tokens are not used."""

    @property
    def are_known(self) -> bool:
        return self.tls is not None or self.read_token is not None

    def check_listener(self, address: Address) -> None:
        """Raise ConfigError if other machines could give orders without a proof of who they are."""
        if not self.are_known and not address.loopback:
            raise ConfigError(
                f"{address.host}:{address.port} can be reached from other machines, and nothing proves who calls: "
                "put certificates in place (manage.py tasuki_certs makes some for development), "
                'set TASUKI["grpc"]["authentication"] = "bearer", or listen on 127.0.0.1'
            )

    def authenticate(self, caller: pb.Caller, peer: PeerConnection, metadata: Sequence[tuple[str, Any]]) -> None:
        """Raise Unauthorized or Forbidden unless the peer is the node that it says it is."""
        if not caller.node_id or not caller.worker_id:
            raise InvalidInput("the request has no caller: fill in node_id and worker_id of the calling worker")
        if self.read_token is not None:
            shown = next((str(value) for name, value in metadata if name == "authorization"), "")
            if not shown.lower().startswith(TOKEN_SCHEME):
                raise Unauthorized("there is no token: send the metadata `authorization: Bearer …`")
            if self.read_token(shown[len(TOKEN_SCHEME) :].strip()) != (caller.node_id, caller.worker_id):
                raise Forbidden(f"the token is not for worker {quoted(caller.worker_id)} of node {quoted(caller.node_id)}")
        elif self.tls is not None:
            if time.time() >= peer.expires_at:
                raise Unauthorized("the certificate of this connection has expired; connect again with a new one")
            is_member = bool(self.shared_name) and self.shared_name in peer.names
            if not is_member and caller.node_id.lower() not in peer.names:
                names = ", ".join(sorted(peer.names)) or "no name"
                raise Forbidden(f"the certificate is for {names}, not for node {quoted(caller.node_id)}")
        peer.trust(caller.node_id)


class WorkerService:
    """Answers the calls for one node."""

    def __init__(self, node: NodeControl, server: Server) -> None:
        self._node, self._server = node, server
        self._epochs = OrderEpochs()
        self.refused: Counter[str] = Counter()

    def note_refusal(self, address: str, code: str, reason: str, job_id: str = "") -> None:
        """Count and log a refusal."""
        self.refused[code] += 1
        self._server.refusals.write(address, code, reason, job_id)

    @property
    def epoch_seen(self) -> int:
        """The highest epoch that the node knows."""
        broker = self._server.broker
        others = (info.epoch for info in broker.cluster.servers.values())
        return max(broker.epoch, self._epochs.last_obeyed, *others, 0)

    async def _registered_epoch(self) -> int | None:
        """Return the epoch that the store has; None if it does not answer in time."""
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                epoch, _ = await self._server.ask(lambda reader: reader.epoch())
                return epoch
        except (TimeoutError, TasukiError):
            return None

    async def _judge(self, request: Any, address: str, *, takes_work: bool = False) -> pb.OrderStatus | None:
        """Return why an order is not obeyed; None: it is."""
        if request.leader_epoch <= 0:
            raise InvalidInput("leader_epoch is missing: an order carries the epoch under which its sender leads")
        node = self._node
        beside = self._server.broker.workers if takes_work else ()  # processes that the node started beside its own
        if request.worker_id and request.worker_id != node.worker_id and request.worker_id not in beside:
            raise NotFound(f"this is worker {node.worker_id}, not {quoted(request.worker_id)}")
        self._check_worker(request.caller)
        if problem := self._epochs.problem(request.leader_epoch, self.epoch_seen, await self._registered_epoch()):
            self.note_refusal(address, "STALE_EPOCH", problem)
            return pb.ORDER_STATUS_STALE_EPOCH
        worker_id = request.worker_id or node.worker_id
        if takes_work and worker_id in self._server.broker.cluster.detached:
            self.note_refusal(address, "DETACHED", f"worker {worker_id} is detached")
            return pb.ORDER_STATUS_DETACHED
        if takes_work and node.is_draining:
            self.note_refusal(address, "DRAINING", f"worker {node.worker_id} drains")
            return pb.ORDER_STATUS_DRAINING
        return None

    def _check_worker(self, caller: pb.Caller) -> None:
        """Raise Forbidden if the worker that calls is known to be of another node."""
        for info in (self._server.info, *self._server.broker.cluster.servers.values()):
            if info.node_id and any(worker.worker_id == caller.worker_id for worker in info.workers):
                if info.node_id != caller.node_id:
                    raise Forbidden(
                        f"worker {quoted(caller.worker_id)} is of node {quoted(info.node_id)}, not of {quoted(caller.node_id)}"
                    )
                return

    # ------------------------------------------------------------------------------------------------ questions

    async def ping(self, request: pb.PingRequest, address: str) -> pb.PingResponse:
        node = self._node
        return pb.PingResponse(
            worker_id=node.worker_id,
            node_id=node.node_id,
            incarnation=node.incarnation,
            role=node.role,  # type: ignore[arg-type]
            epoch_seen=self.epoch_seen,
        )

    async def get_status(self, request: pb.GetStatusRequest, address: str) -> pb.GetStatusResponse:
        node, runs = self._node, self._node.held_runs()
        return pb.GetStatusResponse(
            who=await self.ping(pb.PingRequest(), address),
            load=len(runs),
            max_jobs=node.max_jobs,
            current_job_run_ids=list(runs),
            detached=node.worker_id in self._server.broker.cluster.detached,
            draining=node.is_draining,
            last_seen_ts=time.time(),
            version=__version__,
            schema_version=node.schema_version,
            refused=self.refused,
            led_ago_s=self._server.broker.upkeep.led_ago_s(self._server.now()) or 0.0,
        )

    # ------------------------------------------------------------------------------------------------ orders

    async def start_job(self, request: pb.StartJobRequest, address: str) -> pb.StartJobResponse:
        if not 0 < len(request.runs) <= RUNS_MAX:
            raise InvalidInput(f"{len(request.runs)} runs: give 1 to {RUNS_MAX}")
        refusal = await self._judge(request, address, takes_work=True)
        if refusal is not None:
            return pb.StartJobResponse(statuses=[refusal] * len(request.runs), epoch_seen=self.epoch_seen)
        wanted = [run.job_run_id for run in request.runs]
        jobs = await self._server.ask(lambda reader: reader.get(wanted))
        wall = time.time() + CLOCK_SKEW_S
        worker_id, incarnation = self._node.worker_id, self._node.incarnation
        if (beside := self._server.broker.workers.get(request.worker_id)) is not None:
            worker_id, incarnation = beside.worker_id, beside.incarnation
        shown = zip(jobs, request.runs, strict=True)
        statuses = [self._startable(job, (worker_id, incarnation, run.attempt), wall) for job, run in shown]
        if not {pb.ORDER_STATUS_ACCEPTED, pb.ORDER_STATUS_NOT_DUE}.isdisjoint(statuses):  # the store's clock decides
            self._server.tell(StartAssigned(worker_id))
        return pb.StartJobResponse(statuses=statuses, epoch_seen=self.epoch_seen)

    def _startable(self, job: Job | None, ours: tuple[str, str, int], wall: float) -> pb.OrderStatus:
        lease = job.lease if job is not None else None
        if job is None or lease is None or (lease.worker_id, lease.incarnation, lease.attempt) != ours:
            return pb.ORDER_STATUS_NOT_ASSIGNED
        if job.state is State.ASSIGNED:
            return pb.ORDER_STATUS_NOT_DUE if (job.not_before or 0.0) > wall else pb.ORDER_STATUS_ACCEPTED
        return pb.ORDER_STATUS_ALREADY if job.state is State.RUNNING else pb.ORDER_STATUS_NOT_ASSIGNED

    async def cancel_job(self, request: pb.CancelJobRequest, address: str) -> pb.CancelJobResponse:
        refusal, run = await self._judge(request, address), request.run
        if refusal is None and self._node.held_runs().get(run.job_run_id) != run.attempt:
            refusal = pb.ORDER_STATUS_NOT_RUNNING
        if refusal is None:
            by = f"ordered by worker {request.caller.worker_id} of node {request.caller.node_id}"
            await self._node.cancel(run.job_run_id, f"{request.reason[:200]}; {by}" if request.reason else by)
        return pb.CancelJobResponse(status=refusal or pb.ORDER_STATUS_ACCEPTED, epoch_seen=self.epoch_seen)

    async def drain(self, request: pb.DrainRequest, address: str) -> pb.DrainResponse:
        refusal = await self._judge(request, address)
        if refusal is None and self._node.is_draining != request.on:
            what = "takes nothing new" if request.on else "takes work again"
            logger.info(
                "worker %s %s, as %s ordered: %s", self._node.worker_id, what, address, request.reason[:200] or "no reason"
            )
            self._node.drain(request.on)
        return pb.DrainResponse(status=refusal or pb.ORDER_STATUS_ACCEPTED, epoch_seen=self.epoch_seen)

    # ------------------------------------------------------------------------------------------------ continuation

    async def confirm_continuation(self, request: pb.ConfirmContinuationRequest, address: str) -> pb.ConfirmContinuationResponse:
        """Renew the lease of the run for the caller, if the database still has it as the caller's, and say so. A run that is to
        be canceled must stop."""
        self._check_worker(request.caller)
        others = self._server.broker.cluster.servers.values()
        leaders = [info.grpc_address for info in others if (info.epoch or info.sub_leads) and info.grpc_address]
        answer = pb.ConfirmContinuationResponse(
            continuation=pb.CONTINUATION_ASK_ELSEWHERE, addresses=leaders, epoch_seen=self.epoch_seen
        )
        if self._node.role != pb.ROLE_WORKER:
            goes_on: bool | None
            try:
                goes_on = await self._renew_for(request)
            except (TimeoutError, Unavailable):
                goes_on = await self._node.holds_lead(request.renewed_ago_s) or None
            if goes_on is not None:
                answer.continuation = pb.CONTINUATION_CONTINUE if goes_on else pb.CONTINUATION_STOP
        return answer

    async def _renew_for(self, request: pb.ConfirmContinuationRequest) -> bool:
        run = request.run
        if (self._server.broker.upkeep.led_ago_s(self._server.now()) or 0.0) > STORE_AWAY_S:
            raise Unavailable("the database did not take the last turns of this leader")
        async with asyncio.timeout(STORE_TIMEOUT_S):
            [job] = await self._server.ask(lambda reader: reader.get([run.job_run_id]))
            lease = job.lease if job is not None and job.state in LEASED else None
            if lease is None or (lease.worker_id, lease.attempt) != (request.caller.worker_id, run.attempt):
                return False
            shown = (run.job_run_id, lease.worker_id, lease.incarnation, lease.lease_id, lease.attempt)
            [status] = await self._server.renew([HeldLease(*shown, owner=lease.owner, confirm_s=0.0)])
            return status is LeaseStatus.GO_ON


Answer = Callable[[WorkerService, Any, str], Awaitable[Message]]


class ServiceCall(NamedTuple):
    """One method of the service."""

    request: type[Message]
    response: type[Message]
    answer: Answer


METHODS: dict[str, ServiceCall] = {
    "Ping": ServiceCall(pb.PingRequest, pb.PingResponse, WorkerService.ping),
    "GetStatus": ServiceCall(pb.GetStatusRequest, pb.GetStatusResponse, WorkerService.get_status),
    "StartJob": ServiceCall(pb.StartJobRequest, pb.StartJobResponse, WorkerService.start_job),
    "CancelJob": ServiceCall(pb.CancelJobRequest, pb.CancelJobResponse, WorkerService.cancel_job),
    "Drain": ServiceCall(pb.DrainRequest, pb.DrainResponse, WorkerService.drain),
    "ConfirmContinuation": ServiceCall(
        pb.ConfirmContinuationRequest, pb.ConfirmContinuationResponse, WorkerService.confirm_continuation
    ),
}


class GrpcDoor:
    """The listening end: a gRPC server on a socket in `folder`, which is this user's alone, behind the listener."""

    def __init__(self, service: WorkerService, callers: Callers, folder: Path) -> None:
        self._service, self._callers = service, callers
        self._socket = folder / "grpc"

    async def listen(self, address: Address) -> Address:
        """Listen, and return the address with the port that was chosen. ConfigError if that is not safe, or not possible."""
        self._callers.check_listener(address)
        if self._callers.tls is None and not address.loopback:
            logger.warning("tokens go over %s in clear text, each for a minute: TLS is better", address.host)
        sock = bound(address)
        self._server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=CALLS_AT_ONCE)
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._handler(call)) for name, call in METHODS.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._server.add_insecure_port(f"unix:{os.fspath(self._socket)}")
        await self._server.start()
        self._listener = NodeListener(sock, self._socket, self._callers.tls, self._service.note_refusal)
        return Address("tcp", address.host, sock.getsockname()[1])

    async def close(self) -> None:
        await self._listener.close()
        await self._server.stop(STOP_GRACE_S)

    def _handler(self, call: ServiceCall) -> Callable[[bytes, Any], Awaitable[bytes]]:
        async def handle(body: bytes, context: Any) -> bytes:
            peer = self._listener.peers.get(context.peer().removeprefix("unix:"))
            address = peer.address if peer is not None else "a closed connection"
            try:
                if peer is None:
                    raise Unavailable("the connection has ended")
                request = _read(call.request, body)
                self._callers.authenticate(request.caller, peer, context.invocation_metadata() or ())
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    return (await call.answer(self._service, request, address)).SerializeToString()
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {CALL_TIMEOUT_S:g} s")
            except TasukiError as error:
                if not isinstance(error, Unavailable):
                    self._service.note_refusal(address, error.code, error.message)
                status = next((code for kind, code in STATUS_OF if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
                await context.abort(status, error.message)
            raise AssertionError("abort raises")

        return handle


def _read(kind: type[Message], body: bytes) -> Any:
    if len(body) > REQUEST_MAX_BYTES:
        raise TooLarge(f"a request of {len(body)} bytes; the limit is {REQUEST_MAX_BYTES}")
    try:
        return kind.FromString(body)
    except DecodeError:
        raise InvalidInput(f"these {len(body)} bytes are no {kind.DESCRIPTOR.name}") from None
