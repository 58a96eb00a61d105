"""The gRPC door of a node: who is let in, which orders are obeyed, and what hostile callers cannot do. Real TLS and gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tasuki.core.address import Address
from tasuki.core.broker.broker import Broker
from tasuki.core.broker.events import BrokerConfig, ClusterView, StartAssigned
from tasuki.core.cluster_messages import ServerInfo, WorkerInfo
from tasuki.core.job import JobSpec, body_hash
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.machine import Now
from tasuki.core.scheduler.orders import OrderEpochs
from tasuki.core.store_messages import Assignment, HeldLease, LeaseStatus, Submission
from tasuki.errors import ConfigError, Unauthorized, Unavailable
from tasuki.server.refusal_log import RefusalLog
from tasuki.stores.memory.store import MemoryStore
from tasuki.testing.clocks import FakeClock
from tests.conftest import IN_CI
from tests.support.certificates import TestAuthority
from tests.support.waiting import until_async

if find_spec("grpc") is None and not IN_CI:
    pytest.skip("grpcio is missing: `make check` installs it", allow_module_level=True)

# Keepers that other tests fork from this process would be aborted by what gRPC does there for a fork.
with mock.patch.dict(os.environ, GRPC_ENABLE_FORK_SUPPORT="0"):
    import grpc
    import grpc.aio

from tasuki.doors.grpc import worker_pb2 as pb
from tasuki.doors.grpc.calls import NodeCalls
from tasuki.doors.grpc.listener import NodeTls, TlsFiles
from tasuki.doors.grpc.service import REQUEST_MAX_BYTES, SERVICE, Callers, GrpcDoor, WorkerService

TIMEOUT_S = 25.0
SHARED = "scheduler-grpc"
EPOCH = 7
NOBODY_PROVES = Callers()
LEADER = pb.Caller(node_id="n1", worker_id="1")


class Node:
    """The node behind the door, in memory: worker 2 of node n2; worker 1 of node n1 leads under epoch 7."""

    node_id, worker_id, incarnation, max_jobs, schema_version, role = "n2", "2", "2/1", 4, 9, pb.ROLE_WORKER

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.store.take_over("s1", EPOCH)
        self.broker = Broker(BrokerConfig(server_id="s2", node_id="n2"))
        self.refusals = RefusalLog(logging.getLogger("tasuki.grpc"))
        self.told: list[Any] = []
        self.is_draining = False
        self.canceled: list[tuple[str, str]] = []
        self.held: dict[str, int] = {}
        self.is_away = False
        self.led_for_s = 60.0
        self.meet()

    def meet(self, *detached: str) -> None:
        leader = ServerInfo(
            server_id="s1", node_id="n1", epoch=EPOCH, grpc_address="n1:50051", workers=(WorkerInfo("1", "1/1", ()),)
        )
        self.broker.apply(ClusterView((leader,), frozenset(detached)), Now(0.0, 0.0))

    @property
    def info(self) -> ServerInfo:
        return self.broker.info

    async def ask(self, question: Callable[[Any], Any]) -> Any:
        if self.is_away:
            raise Unavailable("the database does not answer")
        return question(self.store)

    def tell(self, event: Any) -> None:
        self.told.append(event)

    def held_runs(self) -> dict[str, int]:
        return self.held

    def drain(self, on: bool) -> None:
        self.is_draining = on

    async def cancel(self, job_run_id: str, reason: str) -> None:
        self.canceled.append((job_run_id, reason))

    def now(self) -> Now:
        return Now(self.clock.lease(), self.clock.wall())

    async def renew(self, claims: list[HeldLease]) -> list[LeaseStatus]:
        return self.store.renew(claims)

    async def holds_lead(self, renewed_ago_s: float) -> bool:
        return renewed_ago_s < self.led_for_s

    def assigned(self, job_id: str, *, incarnation: str = "2/1") -> pb.JobRunRef:
        spec = JobSpec(job_id=job_id, subject="default.report", exec="django")
        self.store.submit([Submission(spec, "me", body_hash(spec))])
        [grant] = self.store.assign([Assignment(job_id=job_id, worker_id="2", incarnation=incarnation)], epoch=EPOCH)
        assert grant is not None
        return pb.JobRunRef(job_run_id=job_id, attempt=grant.attempt)


class Door:
    """An open door with its node."""

    def __init__(self, node: Node, service: WorkerService, address: Address) -> None:
        self.node, self.service, self.address = node, service, f"{address.host}:{address.port}"

    async def call(self, request: Any, files: TlsFiles | None = None, name: str = SHARED, **options: Any) -> Any:
        """Call once, over a connection of its own; the caller is the leader unless the request says another."""
        if not request.HasField("caller"):
            request.caller.CopyFrom(LEADER)
        method = type(request).__name__.removesuffix("Request")
        async with _channel(self.address, files, name) as channel:
            send = channel.unary_unary(f"/{SERVICE}/{method}")
            answer = await send(request.SerializeToString(), timeout=TIMEOUT_S, **options)
        return getattr(pb, f"{method}Response").FromString(answer)

    async def refusal(self, request: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(request, *arguments, **options)
        return caught.value.code().name, caught.value.details() or ""

    @property
    def refused(self) -> Counter[str]:
        return self.service.refused


def _channel(address: str, files: TlsFiles | None, name: str) -> Any:
    if files is None:
        return grpc.aio.insecure_channel(address)
    ca, key, cert = (Path(path).read_bytes() if path else None for path in (files.ca, files.key, files.cert))
    options = (("grpc.ssl_target_name_override", name),)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)


@asynccontextmanager
async def opened(tmp_path: Path, callers: Callers = NOBODY_PROVES) -> AsyncIterator[Door]:
    node = Node()
    service = WorkerService(node, node)  # type: ignore[arg-type]
    folder = tmp_path / "door"
    folder.mkdir()
    door = GrpcDoor(service, callers, folder)
    address = await door.listen(Address("tcp", "127.0.0.1", 0))
    try:
        yield Door(node, service, address)
    finally:
        await door.close()


async def call_for_ever(send: Any) -> None:
    while True:
        await send(pb.PingRequest(caller=LEADER).SerializeToString(), timeout=TIMEOUT_S)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def shared(authority: TestAuthority, tmp_path: Path) -> TlsFiles:
    """The files of the certificate that all nodes share."""
    return copied(authority, tmp_path / "tls", SHARED)


def copied(authority: TestAuthority, folder: Path, *names: str, **validity: float) -> TlsFiles:
    folder.mkdir(exist_ok=True)
    cert, key = authority.issue(*names, for_nodes=True, **validity)
    for source, target in ((cert, "tls.crt"), (key, "tls.key"), (authority.ca, "ca.crt")):
        shutil.copy2(source, folder / target)
    return TlsFiles(*(str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt", "crl.pem")))


# ---------------------------------------------------------------------------------------------------- who is let in


def test_nodes_that_share_a_certificate_are_answered_with_the_facts_of_this_one(shared: TlsFiles, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path, Callers(NodeTls(shared), SHARED)) as door:
            door.node.held = {"d1-60": 1}
            status = await door.call(pb.GetStatusRequest(), shared)

            who = status.who
            assert (who.worker_id, who.node_id, who.incarnation, who.role) == ("2", "n2", "2/1", pb.ROLE_WORKER)
            assert (who.epoch_seen, status.load, status.max_jobs, list(status.current_job_run_ids)) == (7, 1, 4, ["d1-60"])
            assert not status.detached
            assert not status.draining

            door.node.meet("2")
            assert (await door.call(pb.GetStatusRequest(), shared)).detached

    run(scenario())


def test_strangers_are_refused_with_the_reason_counted_and_logged(
    authority: TestAuthority, shared: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = copied(TestAuthority(tmp_path / "foreign"), tmp_path / "stranger", SHARED)._replace(ca=shared.ca)
    expired = copied(authority, tmp_path / "expired", SHARED, ends_days=-0.1)
    revoked = copied(authority, tmp_path / "revoked", SHARED, ends_days=20)
    authority.revoke(revoked.cert, Path(shared.revoked))
    caplog.set_level(logging.INFO, "tasuki.grpc")

    async def scenario() -> None:
        async with opened(tmp_path, Callers(NodeTls(shared), SHARED)) as door:
            for files, words in (
                (shared._replace(cert="", key=""), "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
                (foreign, "unable to get local issuer certificate"),
                (expired, "certificate has expired"),
                (revoked, "certificate revoked"),
            ):
                code, _ = await door.refusal(pb.PingRequest(), files)
                assert code == "UNAVAILABLE"
                await until_async(lambda words=words: words in caplog.text, what=words)

            code, _ = await door.refusal(pb.PingRequest(), None)  # no TLS at all
            assert code == "UNAVAILABLE"
            await until_async(lambda: door.refused["TLS"] >= 2 and door.refused["CERTIFICATE"] >= 3, what=str(door.refused))
            assert (await door.call(pb.PingRequest(), shared)).worker_id == "2"

    run(scenario())


def test_a_list_of_revoked_certificates_that_has_expired_lets_nobody_in_until_it_is_replaced_and_is_warned_of(
    authority: TestAuthority, shared: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    revoked = copied(authority, tmp_path / "revoked", SHARED, ends_days=20)
    authority.revoke(revoked.cert, Path(shared.revoked), ends_days=-1)

    async def scenario() -> None:
        tls = NodeTls(shared)
        async with opened(tmp_path, Callers(tls, SHARED)) as door:
            for _ in range(2):
                assert (await door.refusal(pb.PingRequest(), shared))[0] == "UNAVAILABLE"
            await until_async(lambda: door.refused["CERTIFICATE"] >= 2, what=str(door.refused))
            warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
            assert warnings == [f"all callers are refused until the list {shared.revoked} is replaced: CRL has expired"]

            authority.revoke(revoked.cert, Path(shared.revoked))
            await until_async(lambda: tls.loaded == 2, what="the new list is loaded")
            assert (await door.call(pb.PingRequest(), shared)).worker_id == "2"

    run(scenario())


def test_a_certificate_of_its_own_lets_a_node_speak_for_itself_alone(authority: TestAuthority, tmp_path: Path) -> None:
    own, other = copied(authority, tmp_path / "n2", "n2"), copied(authority, tmp_path / "n1", "n1")
    outsider = copied(authority, tmp_path / "web", "web.lab")

    async def scenario() -> None:
        async with opened(tmp_path, Callers(NodeTls(own))) as door:
            assert (await door.call(pb.PingRequest(), other, "n2")).node_id == "n2"

            code, why = await door.refusal(pb.PingRequest(), outsider, "n2")
            assert (code, "web.lab" in why and "n1" in why) == ("PERMISSION_DENIED", True)

            stolen = pb.Caller(node_id="n3", worker_id="1")
            assert (await door.refusal(pb.PingRequest(caller=stolen), other, "n2"))[0] == "PERMISSION_DENIED"

            # The certificate is for n3, but worker 1 is known to be of n1.
            third = copied(authority, tmp_path / "n3", "n3")
            code, why = await door.refusal(pb.DrainRequest(caller=stolen, leader_epoch=EPOCH, on=True), third, "n2")
            assert (code, "worker '1' is of node 'n1'" in why) == ("PERMISSION_DENIED", True)
            assert not door.node.is_draining
            assert (await door.refusal(pb.PingRequest(caller=pb.Caller()), other, "n2"))[0] == "INVALID_ARGUMENT"
            assert door.refused["FORBIDDEN"] == 3

    run(scenario())


def test_a_rotated_certificate_is_shown_without_a_restart_and_no_call_is_lost(
    authority: TestAuthority, shared: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shown(port: int) -> str:
        context = ssl.create_default_context(cafile=shared.ca)
        context.check_hostname = False
        context.load_cert_chain(shared.cert, shared.key)
        with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw) as sock:
            return str((sock.getpeercert() or {})["serialNumber"])

    async def scenario() -> None:
        tls = NodeTls(shared)
        async with opened(tmp_path, Callers(tls, SHARED)) as door:
            port = int(door.address.rpartition(":")[2])
            calls, before = NodeCalls(LEADER, tls, SHARED), await asyncio.to_thread(shown, port)
            answered = 0

            async def load() -> None:
                nonlocal answered
                while True:
                    await calls.call(door.address, "n2", pb.PingRequest(), TIMEOUT_S)
                    answered += 1

            caller = asyncio.ensure_future(load())
            await until_async(lambda: answered > 0 or caller.done())
            Path(shared.key).write_bytes(b"half a key")  # a rotation that is under way
            await until_async(lambda: "stays in use" in caplog.text, what="the broken files are noticed")
            copied(authority, tmp_path / "tls", SHARED, ends_days=40)
            await until_async(lambda: tls.loaded == 2, what="the new files are loaded")
            await until_async(lambda done=answered: answered > done + 3 or caller.done())

            assert not caller.done()
            assert await asyncio.to_thread(shown, port) != before
            caller.cancel()
            await calls.close()

    run(scenario())


def test_files_that_are_missing_in_a_rotation_hold_no_call_up(shared: TlsFiles, tmp_path: Path) -> None:
    async def scenario() -> None:
        tls = NodeTls(shared)
        async with opened(tmp_path, Callers(tls, SHARED)) as door:
            calls = NodeCalls(LEADER, tls, SHARED)
            for path in (shared.cert, shared.key, shared.ca):
                Path(path).unlink()

            assert (await calls.call(door.address, "n2", pb.PingRequest(), TIMEOUT_S)).worker_id == "2"
            await calls.close()

    run(scenario())


def test_a_node_that_could_not_call_others_does_not_start(shared: TlsFiles) -> None:
    Path(shared.ca).unlink()

    for asks in (True, False):
        with pytest.raises(ConfigError, match=r"the CA file .*ca\.crt' cannot be read: No such file"):
            NodeTls(shared, asks_for_certificate=asks)


def test_probes_that_only_connect_are_not_refused(shared: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tasuki.server")

    async def scenario() -> None:
        async with opened(tmp_path, Callers(NodeTls(shared), SHARED)) as door:
            host, _, port = door.address.rpartition(":")
            for _ in range(3):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
            await until_async(lambda: caplog.text.count("the connection was not made") == 3, what="they are gone")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await until_async(lambda: door.refused.total(), what="no TLS is refused")
            writer.close()

            assert door.refused == {"TLS": 1}

    run(scenario())


def test_a_revocation_ends_connections_that_are_open(authority: TestAuthority, shared: TlsFiles, tmp_path: Path) -> None:
    thief = copied(authority, tmp_path / "thief", SHARED, ends_days=25)

    async def scenario() -> None:
        async with opened(tmp_path, Callers(NodeTls(shared), SHARED)) as door, _channel(door.address, thief, SHARED) as channel:
            send = channel.unary_unary(f"/{SERVICE}/Ping")
            await send(pb.PingRequest(caller=LEADER).SerializeToString(), timeout=TIMEOUT_S)
            authority.revoke(thief.cert, Path(shared.revoked))

            with pytest.raises(grpc.aio.AioRpcError):
                await call_for_ever(send)
            assert (await door.call(pb.PingRequest(), shared)).worker_id == "2"

    run(scenario())


def test_tokens_are_the_alternative(tmp_path: Path) -> None:
    def read_token(token: str) -> tuple[str, str]:
        if token != "good":
            raise Unauthorized("the token is older than 60 s")
        return "n1", "1"

    async def scenario() -> None:
        async with opened(tmp_path, Callers(read_token=read_token)) as door:
            for metadata, code in (
                ((), "UNAUTHENTICATED"),
                ((("authorization", "Basic good"),), "UNAUTHENTICATED"),
                ((("authorization", "Bearer old"),), "UNAUTHENTICATED"),
            ):
                assert (await door.refusal(pb.PingRequest(), metadata=metadata))[0] == code
            good = (("authorization", "Bearer good"),)
            assert (await door.call(pb.PingRequest(), metadata=good)).node_id == "n2"
            forged = pb.PingRequest(caller=pb.Caller(node_id="n1", worker_id="9"))
            assert (await door.refusal(forged, metadata=good))[0] == "PERMISSION_DENIED"
            assert dict(door.refused) == {"UNAUTHORIZED": 3, "FORBIDDEN": 1}

    run(scenario())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_without_a_proof_of_who_calls_nobody_listens_beyond_this_machine(host: str) -> None:
    with pytest.raises(ConfigError, match="tasuki_certs"):
        Callers().check_listener(Address("tcp", host, 50051))


# ---------------------------------------------------------------------------------------------------- which orders are obeyed


@pytest.mark.parametrize(
    ("epoch", "known", "registered", "last_obeyed", "words"),
    [
        (7, 7, 7, 0, ""),
        (7, 7, None, 0, ""),  # the database is away: what was heard before counts
        (8, 7, 8, 7, ""),
        (6, 7, 7, 0, "is old"),
        (6, 5, 7, 0, "is old"),  # the store knows better
        (7, 6, 7, 8, "is old"),  # below one that was obeyed
        (9, 7, 8, 7, "no leader is known"),
        (9, 7, None, 7, "does not answer"),
        (10**18, 7, 7, 0, "no leader is known"),
    ],
)
def test_an_order_is_obeyed_only_under_the_epoch_of_the_leader(
    epoch: int, known: int, registered: int | None, last_obeyed: int, words: str
) -> None:
    epochs = OrderEpochs()
    epochs.last_obeyed = last_obeyed

    assert (epochs.problem(epoch, known, registered) == "") == (words == "")
    assert words in epochs.problem(epoch, known, registered)
    assert epochs.last_obeyed == (last_obeyed if words else epoch)


def test_orders_are_obeyed_once_judged_and_refused_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as door:
            node = door.node
            run_ref, elsewhere = node.assigned("a"), node.assigned("b", incarnation="2/0")
            start = pb.StartJobRequest(
                leader_epoch=EPOCH, worker_id="2", runs=[run_ref, elsewhere, pb.JobRunRef(job_run_id="a", attempt=9)]
            )

            assert list((await door.call(start)).statuses) == [
                pb.ORDER_STATUS_ACCEPTED, pb.ORDER_STATUS_NOT_ASSIGNED, pb.ORDER_STATUS_NOT_ASSIGNED,
            ]  # fmt: skip
            assert node.told == [StartAssigned("2")]
            [held] = node.store.held([("2", "2/1", "")])[0]
            node.store.start([HeldLease("a", "2", "2/1", held.lease_id, held.attempt)])
            assert (await door.call(start)).statuses[0] == pb.ORDER_STATUS_ALREADY

            node.held = {"a": 1}
            cancel = pb.CancelJobRequest(leader_epoch=EPOCH, run=run_ref, reason="wrong input")
            assert (await door.call(cancel)).status == pb.ORDER_STATUS_ACCEPTED
            assert node.canceled == [("a", "wrong input; ordered by worker 1 of node n1")]
            cancel.run.attempt = 2
            assert (await door.call(cancel)).status == pb.ORDER_STATUS_NOT_RUNNING

            assert (await door.call(pb.DrainRequest(leader_epoch=EPOCH, on=True))).status == pb.ORDER_STATUS_ACCEPTED
            assert (await door.call(start)).statuses[0] == pb.ORDER_STATUS_DRAINING
            assert (await door.call(pb.DrainRequest(leader_epoch=EPOCH, on=False))).status == pb.ORDER_STATUS_ACCEPTED
            node.meet("2")
            assert (await door.call(start)).statuses[0] == pb.ORDER_STATUS_DETACHED

            for order in (start, cancel, pb.DrainRequest(on=True)):
                order.leader_epoch = EPOCH - 1
                answer = await door.call(order)
                assert pb.ORDER_STATUS_STALE_EPOCH in (getattr(answer, "status", None), *getattr(answer, "statuses", ()))
                assert answer.epoch_seen == EPOCH
                order.leader_epoch = 0
                assert (await door.refusal(order))[0] == "INVALID_ARGUMENT"
            assert (await door.refusal(pb.DrainRequest(leader_epoch=EPOCH, worker_id="3", on=True)))[0] == "NOT_FOUND"
            assert not node.is_draining
            assert door.refused == {"DRAINING": 1, "DETACHED": 1, "STALE_EPOCH": 3, "INVALID": 3, "NOT_FOUND": 1}

    run(scenario())


def test_the_leader_says_whether_a_run_goes_on_and_others_say_whom_to_ask(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as door:
            ours = pb.Caller(node_id="n2", worker_id="2")
            asked = pb.ConfirmContinuationRequest(caller=ours, run=door.node.assigned("a"))

            answer = await door.call(asked)
            assert (answer.continuation, list(answer.addresses)) == (pb.CONTINUATION_ASK_ELSEWHERE, ["n1:50051"])

            door.node.role = pb.ROLE_SUBLEADER
            door.node.clock.advance(5.0)
            assert (await door.call(asked)).continuation == pb.CONTINUATION_CONTINUE
            [job] = door.node.store.get(["a"])
            assert job is not None
            assert job.lease is not None
            assert job.lease.expires_at > door.node.clock.lease() + LEASE_TTL_S, "it has renewed the lease"
            asked.run.attempt = 2
            assert (await door.call(asked)).continuation == pb.CONTINUATION_STOP

    run(scenario())


def test_a_worker_that_asks_about_a_run_that_was_canceled_is_told_to_stop_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as door:
            ours = pb.Caller(node_id="n2", worker_id="2")
            asked = pb.ConfirmContinuationRequest(caller=ours, run=door.node.assigned("a"))
            door.node.role = pb.ROLE_LEADER
            [job] = door.node.store.get(["a"])
            assert job is not None
            assert job.lease is not None
            shown = HeldLease("a", "2", "2/1", job.lease.lease_id, job.lease.attempt)
            assert door.node.store.start([shown]) == [LeaseStatus.GO_ON]

            door.node.store.cancel(["a"], actor="me")

            assert (await door.call(asked)).continuation == pb.CONTINUATION_STOP

    run(scenario())


def test_while_the_database_is_away_the_leader_lets_runs_go_on_that_were_renewed_since_it_leads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as door:
            ours = pb.Caller(node_id="n2", worker_id="2")
            asked = pb.ConfirmContinuationRequest(caller=ours, run=door.node.assigned("a"), renewed_ago_s=12.0)
            door.node.role, door.node.is_away = pb.ROLE_LEADER, True

            assert (await door.call(asked)).continuation == pb.CONTINUATION_CONTINUE
            door.node.led_for_s = 10.0
            assert (await door.call(asked)).continuation == pb.CONTINUATION_ASK_ELSEWHERE

    run(scenario())


# ---------------------------------------------------------------------------------------------------- hostile bytes


def test_what_is_too_large_or_no_message_is_refused_and_others_are_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(tmp_path) as door, grpc.aio.insecure_channel(door.address) as channel:
            send = channel.unary_unary(f"/{SERVICE}/Ping")
            for body, code in (
                (b"\xff" * 40, "INVALID_ARGUMENT"),
                (b"\x0a\xff\xff\xff\xff\x0f", "INVALID_ARGUMENT"),  # a caller of 4 GB
                (bytes(REQUEST_MAX_BYTES + 1), "RESOURCE_EXHAUSTED"),
                (bytes(8 * REQUEST_MAX_BYTES), "RESOURCE_EXHAUSTED"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await send(body, timeout=TIMEOUT_S)
                assert caught.value.code().name == code
            many = pb.StartJobRequest(leader_epoch=EPOCH, runs=[pb.JobRunRef(job_run_id="a")] * 257)
            assert (await door.refusal(many))[0] == "INVALID_ARGUMENT"
            assert door.refused["TOO_LARGE"] == 1

            host, _, port = door.address.rpartition(":")
            half = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
            for number, (_, writer) in enumerate(half):
                preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\x40\1\4\0\0\0\1half a header"
                writer.write(preface[: 3 + 5 * number])
            assert (await door.call(pb.PingRequest())).worker_id == "2"
            for _, writer in half:
                writer.close()
            await until_async(lambda: len(list((tmp_path / "door").glob("peer-*"))) <= 1, what="their sockets are gone")

    run(scenario())


def test_a_call_to_nobody_says_where_and_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        calls = NodeCalls(LEADER)
        with pytest.raises(Unavailable, match=r"Ping to node n9 at 127\.0\.0\.1:1: UNAVAILABLE"):
            await calls.call("127.0.0.1:1", "n9", pb.PingRequest(), 1.0)
        await calls.close()

    run(scenario())
