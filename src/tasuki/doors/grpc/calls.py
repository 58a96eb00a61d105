"""Calls to other nodes: one channel for each address, a deadline for each call, and the proof of who calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tasuki.core.broker.events import StartRuns
from tasuki.doors.grpc import worker_pb2 as pb
from tasuki.doors.grpc.listener import NodeTls
from tasuki.doors.grpc.service import METHODS, RUNS_MAX, SERVICE
from tasuki.errors import Unavailable
from tasuki.event_loop import BackgroundTasks

CLOSE_GRACE_S = 1.0
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a node that is back is reached within a second
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
CHANNELS_MAX = 256  # to nodes that are gone, too: the one that was opened first is closed
logger = logging.getLogger("tasuki.grpc")
_METHOD_OF = {call.request: (name, call.response) for name, call in METHODS.items()}


class NodeCalls:
    """Calls from this node. `make_token` returns a fresh token; None: the certificate proves who calls."""

    def __init__(
        self,
        caller: pb.Caller,
        tls: NodeTls | None = None,
        shared_name: str = "",
        make_token: Callable[[], str] | None = None,
    ) -> None:
        self.caller = caller
        self._tls, self._shared_name, self._make_token = tls, shared_name, make_token
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._loaded = tls.loaded if tls is not None else 0
        self._tasks = BackgroundTasks()

    async def call(self, address: str, node_id: str, request: Any, timeout_s: float) -> Any:
        """Send a request to the node at this address, and return its response; Unavailable says why there is none."""
        method, response = _METHOD_OF[type(request)]
        request.caller.CopyFrom(self.caller)
        metadata = (("authorization", f"Bearer {self._make_token()}"),) if self._make_token is not None else None
        send = self._channel(address, node_id).unary_unary(
            f"/{SERVICE}/{method}", request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
        )
        try:
            return await send(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{method} to node {node_id} at {address}: {error.code().name}: {error.details()}") from None

    def order_start(self, order: StartRuns, timeout_s: float) -> None:
        """Order a worker to start runs, without waiting for its answer: what it has not fetched is ordered again."""
        for start in range(0, len(order.runs), RUNS_MAX):
            self._tasks.spawn(self._order_start(order, order.runs[start : start + RUNS_MAX], timeout_s))

    async def _order_start(self, order: StartRuns, runs: Sequence[tuple[str, int]], timeout_s: float) -> None:
        request = pb.StartJobRequest(leader_epoch=order.epoch, worker_id=order.worker_id)
        for job_id, attempt in runs:
            request.runs.add(job_run_id=job_id, attempt=attempt)
        try:
            answer = await self.call(order.address, order.node_id, request, timeout_s)
        except Unavailable as error:
            logger.warning("worker %s did not get the order to start %d runs: %s", order.worker_id, len(runs), error.message)
            return
        for (job_id, _), status in zip(runs, answer.statuses, strict=False):
            if status not in (pb.ORDER_STATUS_ACCEPTED, pb.ORDER_STATUS_ALREADY):
                logger.info("worker %s does not start %s: %s", order.worker_id, job_id, pb.OrderStatus.Name(status))

    def _channel(self, address: str, node_id: str) -> grpc.aio.Channel:
        if self._tls is not None and self._tls.loaded != self._loaded:  # a channel keeps the certificate that it began with
            self._loaded = self._tls.loaded
            self._drop(len(self._channels))
        key = (address, node_id)
        if key not in self._channels:
            self._channels[key] = self._open(address, node_id)
            self._drop(len(self._channels) - CHANNELS_MAX)
        return self._channels[key]

    def _drop(self, count: int) -> None:
        """Close the channels that were opened first, when the calls under way have ended."""
        for key in list(self._channels)[: max(0, count)]:
            self._tasks.spawn(self._channels.pop(key).close(grace=CLOSE_GRACE_S))

    def _open(self, address: str, node_id: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        name = (("grpc.ssl_target_name_override", self._shared_name or node_id),)
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*self._tls.pem), options=(*CHANNEL_OPTIONS, *name))

    async def close(self) -> None:
        self._drop(len(self._channels))
        await self._tasks.wait()
