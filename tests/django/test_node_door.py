"""`manage.py tasuki_worker --grpc` takes orders from a client that was written from the .proto file alone. Real processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.conftest import Require
from tests.support import proto_client
from tests.support.django_site import DjangoSite
from tests.support.ports import free_port
from tests.support.postgres_service import PostgresService
from tests.support.processes import SOURCE
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
PROTO = SOURCE.parent / "proto" / "tasuki" / "v1" / "worker.proto"
CALLER = {"nodeId": "n9", "workerId": "leader"}


class ProtoClient:
    """The client, in a process of its own."""

    def __init__(self, folder: Path, address: str, tls: str = "", **variables: str) -> None:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, proto_client.__file__, os.fspath(PROTO), os.fspath(folder), address, *([tls] if tls else [])]
        self._process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, method: str, **fields: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(method, json.dumps({"caller": CALLER, **fields}), file=self._process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()


@pytest.fixture
def site(require: Require, postgres: PostgresService, tmp_path: Path) -> Iterator[DjangoSite]:
    require("grpcio-tools", find_spec("grpc_tools") is not None, "`make check` installs it")
    url = postgres.empty_database()
    site = DjangoSite(tmp_path, postgres_url=url, TASUKI_NODE_ID="n1")
    site.manage("migrate", "-v0")
    yield site
    postgres.drop(url)


def with_grpc(**settings: str) -> Mapping[str, str]:
    return {"SITE_TASUKI": json.dumps({"grpc": settings})}


def test_a_node_tells_its_facts_and_obeys_a_client_written_from_the_proto_alone(site: DjangoSite, tmp_path: Path) -> None:
    site.manage("tasuki_certs", "--out", "tls")
    tls, address = os.fspath(tmp_path / "tls"), f"127.0.0.1:{free_port()}"
    env = with_grpc(tls_cert=f"{tls}/tls.crt", tls_key=f"{tls}/tls.key", tls_ca=f"{tls}/ca.crt")

    with site.worker("--grpc", address, "--slots", "3", env=env), ProtoClient(tmp_path / "made", address, tls) as client:
        status = client.call("GetStatus")
        worker_id = status["who"]["workerId"]
        assert (status["who"]["nodeId"], status["maxJobs"], status.get("load", 0)) == ("n1", 3, 0)
        epoch = int(until(lambda: client.call("Ping").get("epochSeen", 0), what="the node leads"))
        order = {"leaderEpoch": epoch, "workerId": worker_id}
        assert client.call("Ping")["role"] == "ROLE_LEADER"

        # Drained, the node takes nothing; what is assigned to it starts when it is told to, and not before.
        assert client.call("Drain", **order, on=True)["status"] == "ORDER_STATUS_ACCEPTED"
        until(lambda: client.call("GetStatus").get("draining"), what="it drains")
        [attempt, job_id] = site.ask(f"""
from tasuki.core.store_messages import Assignment
from tasuki.django import enqueue_command
from tasuki.django.enqueueing import project_store
from tasuki.django.operations import live_workers
job_id, store = enqueue_command("probe", "hold", {str(tmp_path)!r}), project_store()
until = time.monotonic() + 20
while not (known := live_workers()):  # heartbeats are told once a second
    assert time.monotonic() < until
    time.sleep(0.01)
[(_, worker)] = known
to = Assignment(job_id=str(job_id), worker_id=worker.worker_id, incarnation=worker.incarnation, owner=worker.owner, ttl_s=60)
[grant] = store.assign([to], epoch=store.epoch()[0])
print(json.dumps([grant.attempt, str(job_id)]))
""")
        run = {"jobRunId": job_id, "attempt": attempt}
        assert client.call("StartJob", **order, runs=[run])["statuses"] == ["ORDER_STATUS_DRAINING"]
        drained = site.manage("tasuki_ops", "drain", worker_id, "--off", "--json", env=env)
        assert json.loads(drained.stdout) == {"worker_id": worker_id, "draining": False}
        assert not client.call("GetStatus").get("draining")
        # A node that drains does not lead, and leads again under another epoch.
        until(lambda: client.call("Ping")["role"] == "ROLE_LEADER", what="the node leads again")
        assert client.call("StartJob", **order, runs=[run])["statuses"] == ["ORDER_STATUS_STALE_EPOCH"]
        order["leaderEpoch"] = int(client.call("Ping")["epochSeen"])
        assert client.call("StartJob", workerId=worker_id, runs=[run])["code"] == "INVALID_ARGUMENT"
        assert not (tmp_path / "running").exists()
        assert client.call("StartJob", **order, runs=[run])["statuses"] == ["ORDER_STATUS_ACCEPTED"]
        until((tmp_path / "running").exists, 20.0, "the run is started")
        assert client.call("GetStatus")["currentJobRunIds"] == [job_id]
        until(lambda: client.call("StartJob", **order, runs=[run])["statuses"] == ["ORDER_STATUS_ALREADY"], what="RUNNING")

        assert client.call("CancelJob", **order, run=run, reason="enough")["status"] == "ORDER_STATUS_ACCEPTED"
        until(lambda: not client.call("GetStatus").get("load"), 20.0, "the run is gone")
        assert client.call("CancelJob", **order, run=run)["status"] == "ORDER_STATUS_NOT_RUNNING"
        shown = json.loads(site.manage("tasuki_runs", "show", job_id, "--json").stdout)
        assert shown["state"] == "CANCELED"


def test_tokens_of_a_minute_are_signed_with_the_secret_key(site: DjangoSite, tmp_path: Path) -> None:
    address, env = f"127.0.0.1:{free_port()}", with_grpc(authentication="bearer")
    good, old, foreign = site.ask("""
from unittest.mock import patch
from django.test import override_settings
from tasuki.django.node_door import make_token, pb
caller = pb.Caller(node_id="n9", worker_id="leader")
with patch("time.time", lambda then=time.time() - 61: then):
    old = make_token(caller)
with override_settings(SECRET_KEY="of somebody else"):
    foreign = make_token(caller)
print(json.dumps([make_token(caller), old, foreign]))
""")

    with site.worker("--grpc", address, env=env) as worker:
        for token, found in ((good, "n1"), (old, "UNAUTHENTICATED"), (foreign, "UNAUTHENTICATED")):
            with ProtoClient(tmp_path / "made", address, TOKEN=token) as client:
                answer = client.call("Ping")
                assert found in (answer.get("nodeId"), answer.get("code")), answer
        until(lambda: worker.output().count("refused UNAUTHORIZED") >= 2, what="both are logged")


def test_a_node_does_not_listen_beyond_this_machine_without_a_proof_of_who_calls(site: DjangoSite) -> None:
    refused = site.manage("tasuki_worker", "--grpc", "0.0.0.0:0", check=False)

    assert refused.returncode == 1
    assert "manage.py tasuki_certs" in refused.stderr


def test_certificates_for_development_are_private_and_never_replaced_silently(tmp_path: Path) -> None:
    site = DjangoSite(tmp_path)
    site.manage("tasuki_certs", "--out", "tls", "--node", "n1", "--node", "n2", "--name", "n1.lab")
    files = {path.relative_to(tmp_path / "tls").as_posix(): path.read_bytes() for path in (tmp_path / "tls").rglob("*.*")}

    assert set(files) == {"ca.crt", "ca.key", "n1/tls.crt", "n1/tls.key", "n2/tls.crt", "n2/tls.key"}
    assert {stat.S_IMODE((tmp_path / "tls" / name).stat().st_mode) for name in files} == {0o600}
    shown = ("-noout", "-ext", "subjectAltName,extendedKeyUsage", "-checkend", str(3 * 365 * 86_400))
    command = ["openssl", "x509", "-in", tmp_path / "tls/n1/tls.crt", *shown]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "DNS:n1," in text
    assert "DNS:n1.lab" in text
    assert "Client Authentication" in text
    refused = site.manage("tasuki_certs", "--out", "tls", "--node", "n2", check=False)
    assert (refused.returncode, "--force" in refused.stderr) == (1, True)
    assert (tmp_path / "tls/n2/tls.crt").read_bytes() == files["n2/tls.crt"]
    site.manage("tasuki_certs", "--out", "tls", "--node", "n2", "--force")
    assert (tmp_path / "tls/n2/tls.crt").read_bytes() != files["n2/tls.crt"]
    assert (tmp_path / "tls/ca.crt").read_bytes() == files["ca.crt"]
    assert "examples:" in site.manage("tasuki_certs", "--help").stdout
