"""Requests of peers who mean no good, or break off: 4xx, at once, and nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasuki.agent import jobs, upload
from tasuki.blobs import files
from tasuki.doors import listening
from tasuki.errors import DiskFull
from tasuki.server.refusal_log import LINES_MAX
from tests.agent.stage import (
    BOUNDARY,
    DOTNET_KIND,
    AgentStage,
    Started,
    answer_to,
    code_of,
    dotnet_form,
    form,
    head,
    members,
    part,
    report,
)
from tests.support.foreign_sites import FOREIGN, OWN
from tests.support.waiting import until


def nothing_is_left(stage: AgentStage, job_id: str) -> bool:
    """Neither of the job nor of an upload, and its slot is free."""
    free = stage.http.get("/capacity").json()["running"] == 0
    return free and not [name for name in stage.files() if job_id in name or name.startswith(("incoming", "trash"))]


# ---------------------------------------------------------------------------------------------------- other sites


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_web_page_of_another_site_starts_no_job_and_reads_no_result(
    stage: AgentStage, job_id: str, headers: dict[str, str]
) -> None:
    posted = stage.http.post(f"/run/{job_id}", files=[("file", ("job.sh", b"echo no"))], headers=headers)
    fetched = stage.http.get(f"/result/{job_id}", headers=headers)

    assert code_of(posted) == code_of(fetched) == (403, "FORBIDDEN")
    assert stage.state(job_id) is None
    assert stage.http.get("/health", headers=headers).status_code == 200  # balancers have no name for it


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_a_listener_on_loopback_has_the_names_of_loopback(stage: AgentStage, headers: dict[str, str]) -> None:
    assert stage.http.get("/capacity", headers=headers).status_code == 200


# ---------------------------------------------------------------------------------------------------- refusals in the log


def test_each_refusal_is_one_line_with_its_peer_and_without_a_secret(
    make_stage: Callable[..., AgentStage], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tasuki.agent")
    with make_stage(tokens=("the-right-token",), max_upload_bytes=1000) as stage:
        bearer = "Authorization: Bearer the-right-token\r\n"
        stage.http.post("/run/a", headers={"Authorization": "Bearer a-wrong-token"})
        stage.http.get("/jobs/b", headers={"Host": "evil.example"})
        stage.http.get("/jobs/unknown")  # an answer, and no refusal
        stage.run("c", "x" * 2000)
        stage.run("d", "true", exec="nothing")
        with stage.raw() as sock:
            sock.sendall(head("e", 500, more=bearer) + part("file", b"cut", "job.sh"))
        until(lambda: any(getattr(line, "job_id", "") == "e" for line in caplog.records), what="the cut upload is logged")

    lines = [line for line in caplog.records if line.message.startswith("refused ")]
    assert [(line.code, line.job_id) for line in lines] == [
        ("UNAUTHORIZED", "a"),
        ("FORBIDDEN", "b"),
        ("TOO_LARGE", "c"),
        ("EXEC_NOT_ALLOWED", "d"),
        ("INVALID", "e"),
    ]
    assert all(line.levelname == "INFO" and line.peer.startswith("127.0.0.1:") for line in lines)
    assert "token" not in "".join(line.message for line in lines if line.code != "UNAUTHORIZED")
    assert "a-wrong-token" not in caplog.text


def test_a_run_of_a_job_that_is_there_is_one_line(
    make_stage: Callable[..., AgentStage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tasuki.agent")
    gate = tmp_path / "gate"
    with make_stage() as stage:
        running = stage.begin("a", f"while [ ! -e {gate} ]; do sleep 0.01; done")
        until(lambda: stage.state("a") == "running")
        assert stage.run("a").status_code == 423
        assert stage.http.get("/result/a").status_code == 423  # an answer, and no refusal
        gate.touch()
        running.answer()
        assert stage.run("a", "echo other").status_code == 409

    lines = [line for line in caplog.records if line.message.startswith("refused ")]
    assert [(line.code, line.job_id) for line in lines] == [("RUNNING", "a"), ("CONFLICT", "a")]


def test_connections_for_which_there_is_no_room_are_logged(
    make_stage: Callable[..., AgentStage], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tasuki.agent")
    monkeypatch.setattr(listening, "CONNECTIONS_MAX", 8)  # of them 4 strangers
    with make_stage() as stage, contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(stage.raw())
        until(lambda: any(getattr(line, "code", "") == "OVERLOADED" for line in caplog.records))

    line = next(line for line in caplog.records if line.message.startswith("refused "))
    assert (line.code, line.peer) == ("OVERLOADED", "127.0.0.1")


def test_each_host_has_a_share_of_the_connections(make_stage: Callable[..., AgentStage]) -> None:
    """All peers of an agent may have one token."""
    with make_stage(tokens=("the-right-token",)) as stage, contextlib.ExitStack() as stack:
        request = b"GET /capacity HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-right-token\r\n\r\n"
        for host in ("127.0.0.1", "127.0.0.2", "127.0.0.2"):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", stage.port), source_address=(host, 0)))
            sock.sendall(request)
            assert sock.recv(12) == b"HTTP/1.1 200"
        shares = stage.agent.http.serving._connections._shares

        assert (shares.taken("127.0.0.2"), len(shares)) == (2, 2)


def test_refusals_of_one_peer_fill_no_log(make_stage: Callable[..., AgentStage], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tasuki.agent")
    with make_stage(tokens=("the-right-token",)) as stage:
        for _ in range(50):
            assert stage.http.get("/jobs/a", headers={"Authorization": "Bearer wrong"}).status_code == 401

    assert len([line for line in caplog.records if line.message.startswith("refused ")]) == LINES_MAX


# ---------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "a/../../evil", "/etc/evil", "..", ".", "", "a//b", "a/", "a\\b", "C:evil", "a\x01b", "a\x7f/../b",
        "x" * 201, "/".join("abcdefghijklmnopqrstuvwxyz" * 2), "NUL", "com1.txt", "sub/aux",
    ],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(stage: AgentStage, job_id: str, name: str) -> None:
    answer = stage.http.post(
        f"/run/{job_id}",
        content=form(part("file", b"true", "job.sh"), part("file", b"evil", name)),
        headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"},
    )

    assert code_of(answer) == (400, "INVALID_PAYLOAD")
    assert nothing_is_left(stage, job_id)
    assert not list(stage.data.parent.rglob("*evil*"))


@pytest.mark.parametrize("name", ["..%2Fevil", "%2Fetc%2Fevil", "a%5Cb", "a%00b", "%EF%BC%8E.%0Aevil"])
def test_an_encoded_name_that_leads_elsewhere_is_refused(stage: AgentStage, job_id: str, name: str) -> None:
    body = dotnet_form(b"evil", f"filename=good.txt; filename*=utf-8''{name}")

    answer = stage.http.post(f"/run/{job_id}", content=body, headers={"Content-Type": DOTNET_KIND})

    assert code_of(answer) == (400, "INVALID_PAYLOAD")
    assert nothing_is_left(stage, job_id)


@pytest.mark.parametrize("second", ["a.txt", "A.TXT", "a.txt/b"])
def test_two_names_for_one_file_are_refused(stage: AgentStage, job_id: str, second: str) -> None:
    body = form(part("file", b"1", "a.txt"), part("file", b"2", second))

    answer = stage.http.post(
        f"/run/{job_id}", content=body, headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    )

    assert code_of(answer) == (400, "INVALID_PAYLOAD")
    assert nothing_is_left(stage, job_id)


@pytest.mark.parametrize("job_id", ["..", ".hidden", "a b", "ä", "x" * 129, "a%00b", "a;b"])
def test_an_id_that_is_none_is_refused(stage: AgentStage, job_id: str) -> None:
    # given a path that httpx does not tidy up
    with stage.raw() as sock:
        encoded = job_id.encode().replace(b" ", b"%20").replace("ä".encode(), b"%C3%A4")
        sock.sendall(b"GET /jobs/" + encoded + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")

        status, error = answer_to(sock)

    assert (status, error["code"]) == (400, "INVALID_PAYLOAD")


def test_a_path_that_climbs_is_refused(stage: AgentStage) -> None:
    with stage.raw() as sock:
        sock.sendall(b"GET /result/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n")

        assert answer_to(sock)[0] == 400


# ---------------------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (form(part("exec", b"sh")), "no file"),
        (form(part("file", b"true")), "no filename"),
        (form(part("file", b"true", "a"), part("exec", b"sh"), part("exec", b"sh")), "once"),
        (form(part("file", b"true", "a"), part("exec", b"\xff")), "UTF-8"),
        (form(part("file", b"true", "a")).replace(BOUNDARY.encode(), b"other"), "does not begin"),
        (form(part("file", b"true", "a"))[:-10], "closing boundary"),
        (b"", "does not begin"),
    ],
)
def test_what_is_no_form_is_400(stage: AgentStage, job_id: str, body: bytes, words: str) -> None:
    answer = stage.http.post(
        f"/run/{job_id}", content=body, headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    )

    assert code_of(answer) == (400, "INVALID_PAYLOAD")
    assert words in answer.json()["error"]["message"]
    assert nothing_is_left(stage, job_id)


def test_what_is_not_multipart_is_400(stage: AgentStage, job_id: str) -> None:
    assert code_of(stage.http.post(f"/run/{job_id}", json={"file": "x"})) == (400, "INVALID_PAYLOAD")
    assert code_of(stage.http.post(f"/run/{job_id}")) == (400, "INVALID_PAYLOAD")


def test_an_input_hash_that_is_none_is_400(stage: AgentStage, job_id: str) -> None:
    assert code_of(stage.run(job_id, query="?input=x")) == (400, "INVALID_PAYLOAD")


def test_unknown_paths_and_methods_have_the_shape_of_every_error(stage: AgentStage, job_id: str) -> None:
    assert code_of(stage.http.get("/nothing")) == (404, "NOT_FOUND")
    assert code_of(stage.http.put(f"/run/{job_id}")) == (405, "METHOD_NOT_ALLOWED")


def test_what_is_no_http_is_answered_and_hung_up_on(stage: AgentStage) -> None:
    with stage.raw() as sock:
        sock.sendall(b"\x16\x03\x01 this is not HTTP\r\n\r\n")

        assert answer_to(sock)[0] == 400
        assert sock.recv(1) == b""


# ---------------------------------------------------------------------------------------------------- sizes, time


def test_a_body_with_two_lengths_is_refused_and_hides_no_other_request(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, "true")
    hidden = f"DELETE /jobs/{job_id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    with stage.raw() as sock:
        sock.sendall(b"POST /run/other HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n" % (5 + len(hidden)))
        sock.sendall(b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + hidden)
        answer = sock.makefile("rb").read()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert stage.state(job_id) == "done"


def test_100_gb_are_refused_before_a_byte_is_read(make_stage: Callable[..., AgentStage], job_id: str) -> None:
    with make_stage(max_upload_bytes=1_000_000) as stage, stage.raw() as sock:
        sock.sendall(head(job_id, 100 * 1000**3))

        status, error = answer_to(sock)

        assert (status, error["code"]) == (413, "TOO_LARGE")
        assert nothing_is_left(stage, job_id)


def test_a_small_upload_that_is_refused_before_it_comes_may_still_come(
    make_stage: Callable[..., AgentStage], job_id: str
) -> None:
    """A connection that is closed at once is reset by what comes, and the refusal with it."""
    with make_stage(max_upload_bytes=1_000) as stage, stage.raw() as sock:
        sock.sendall(head(job_id, 5_000))
        assert answer_to(sock)[0] == 413

        sock.sendall(bytes(5_000))

        assert sock.recv(1) == b""


def test_the_limit_holds_for_what_comes_in_chunks(make_stage: Callable[..., AgentStage], job_id: str) -> None:
    with make_stage(max_upload_bytes=3_000_000) as stage, stage.raw() as sock:
        sock.sendall(head(job_id, None))
        start = part("file", b"", "big.bin")[:-2]
        sock.sendall(b"%x\r\n%s\r\n" % (len(start), start))
        for _ in range(5):
            sock.sendall(b"%x\r\n%s\r\n" % (1_000_000, b"x" * 1_000_000))

        status, error = answer_to(sock)

        assert (status, error["code"]) == (413, "TOO_LARGE")
        until(lambda: nothing_is_left(stage, job_id))


def test_a_refusal_reaches_a_peer_that_is_still_sending(make_stage: Callable[..., AgentStage], job_id: str) -> None:
    with make_stage(max_upload_bytes=1_000_000) as stage:
        answer = stage.post(job_id, {"big.bin": b"x" * 30_000_000})

        assert code_of(answer) == (413, "TOO_LARGE")


def test_without_a_limit_of_its_own_no_upload_takes_more_than_a_quarter_of_the_disk(stage: AgentStage, job_id: str) -> None:
    with stage.raw() as sock:
        sock.sendall(head(job_id, stage.agent.folders.free_bytes()))

        assert answer_to(sock)[0] == 413


def test_a_full_disk_is_503_before_the_upload_is_read(stage: AgentStage, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(jobs, "DISK_FLOOR_BYTES", stage.agent.folders.free_bytes() * 2)

    answer = stage.run(job_id)

    assert code_of(answer) == (503, "DISK_FULL")
    assert "retry-after" in answer.headers
    assert nothing_is_left(stage, job_id)


def test_a_disk_without_a_byte_is_full_and_no_upload_too_large_for_it(
    stage: AgentStage, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.agent.folders, "free_bytes", lambda: 0)
    monkeypatch.setattr(files.os, "statvfs", lambda folder: os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255)))

    answer = stage.run(job_id)

    assert code_of(answer) == (503, "DISK_FULL")
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("is_named", [True, False], ids=["with ?input=", "without"])
def test_a_done_job_is_answered_however_full_the_disk_is(
    stage: AgentStage, job_id: str, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    done = stage.run(job_id, "echo done")
    query = f"?input={report(done.content)['input_hash']}" if is_named else ""
    monkeypatch.setattr(stage.agent.folders, "free_bytes", lambda: 0)
    monkeypatch.setattr(jobs, "check_free", lambda folder, needed, *floors: check_space(1, 0))

    again = stage.run(job_id, "echo done", query=query)

    assert (again.status_code, again.content) == (200, done.content)


@pytest.mark.parametrize("sent", [0, 10, 200, 2_000_000])
def test_an_upload_that_breaks_off_leaves_nothing(stage: AgentStage, job_id: str, sent: int) -> None:
    body = form(part("file", b"x" * 4_000_000, "big.bin"))
    with stage.raw() as sock:
        sock.sendall(head(job_id, len(body)) + body[:sent])
        until(lambda: stage.state(job_id) == "running")
        assert code_of(stage.run(job_id)) == (423, "RUNNING")

    until(lambda: nothing_is_left(stage, job_id))
    assert stage.run(job_id).status_code == 200


def test_an_upload_that_creeps_is_given_up(stage: AgentStage, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE_S", 0.2)
    with stage.raw() as sock:
        sock.sendall(head(job_id, 5_000_000) + form(part("file", b"true", "a"))[:50])

        status, error = answer_to(sock)

        assert (status, error["code"]) == (400, "INVALID_PAYLOAD")
        assert "too slow" in error["message"]
        assert nothing_is_left(stage, job_id)


def test_a_broken_upload_leaves_the_failed_job_of_the_same_id_alone(stage: AgentStage, job_id: str) -> None:
    stage.run(job_id, "exit 4")
    before = stage.http.get(f"/result/{job_id}").content

    with stage.raw() as sock:
        sock.sendall(head(job_id, 1000) + form(part("file", b"true", "a"))[:50])
        until(lambda: stage.state(job_id) == "running")

    until(lambda: stage.state(job_id) == "failed")
    assert stage.http.get(f"/result/{job_id}").content == before


def test_delete_ends_an_upload(stage: AgentStage, job_id: str) -> None:
    with stage.raw() as sock:
        sock.sendall(head(job_id, 5_000_000) + form(part("file", b"x" * 2_000_000, "a"))[:1_500_000])
        until(lambda: stage.state(job_id) == "running")

        assert stage.http.delete(f"/jobs/{job_id}").status_code == 200
        assert answer_to(sock)[1]["code"] == "CANCELED"
    assert nothing_is_left(stage, job_id)


def test_expect_100_is_answered_with_a_refusal_not_with_go_on(make_stage: Callable[..., AgentStage], job_id: str) -> None:
    with make_stage(max_upload_bytes=1_000_000) as stage, stage.raw() as sock:
        sock.sendall(head(job_id, 5_000_000, more="Expect: 100-continue\r\n"))

        assert answer_to(sock)[0] == 413


# ---------------------------------------------------------------------------------------------------- slots


def test_a_full_agent_refuses_before_the_upload_is_read(make_stage: Callable[..., AgentStage], tmp_path: Path) -> None:
    with make_stage(slots=1) as stage:
        first = stage.begin("one", f'while [ ! -e "{tmp_path}/gate" ]; do sleep 0.02; done')
        until(lambda: stage.state("one") == "running")

        with stage.raw() as sock:
            sock.sendall(head("two", 5_000_000))
            status, error = answer_to(sock)

        assert (status, error["code"]) == (503, "FULL")
        assert error["details"] == {"running": 1, "limit": 1}
        assert stage.http.get("/capacity").json() == {"running": 1, "limit": 1}
        (tmp_path / "gate").touch()
        assert first.answer().status_code == 200
        assert stage.run("two").status_code == 200


# ---------------------------------------------------------------------------------------------------- tokens


def test_without_the_right_token_nothing_but_health_is_answered(make_stage: Callable[..., AgentStage]) -> None:
    with make_stage(tokens=("first-secret", "second-secret")) as stage:
        for path in ("/capacity", "/metrics", "/jobs/x", "/result/x"):
            for header in ("", "Bearer", "Bearer wrong", "Bearer first-secre", "Basic first-secret", "Bearer é"):
                answer = stage.http.get(path, headers={"Authorization": header.encode()})
                assert code_of(answer) == (401, "UNAUTHORIZED"), (path, header)
        refused = stage.http.post("/run/x", files={"file": b"true"}, headers={"Authorization": "Bearer wrong"})
        assert code_of(refused) == (401, "UNAUTHORIZED")
        assert stage.http.get("/health", headers={"Authorization": ""}).status_code == 200
        for token in ("first-secret", "second-secret"):
            assert stage.http.get("/capacity", headers={"Authorization": f"Bearer {token}"}).status_code == 200
        assert stage.run("x").status_code == 200


def test_an_unauthorised_upload_is_not_read(make_stage: Callable[..., AgentStage]) -> None:
    with make_stage(tokens=("secret",)) as stage, stage.raw() as sock:
        sock.sendall(head("x", 10_000_000))

        assert answer_to(sock)[0] == 401
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


@pytest.mark.parametrize("script", ["exit 0", "exit 3"])
def test_a_program_that_makes_a_link_of_its_folder_harms_nothing_elsewhere(
    stage: AgentStage, job_id: str, tmp_path: Path, script: str
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    (victim / "kept").write_text("x")
    here = stage.data / "jobs" / job_id

    answer = stage.run(job_id, f"mv {here} {tmp_path}/moved; ln -s {victim} {here}; {script}")

    assert answer.status_code in (200, 500)
    assert [path.name for path in victim.iterdir()] == ["kept"]
    assert victim.stat().st_mode & 0o777 == 0o755
    assert not here.is_symlink()
    assert stage.http.delete(f"/jobs/{job_id}").status_code == 200


def test_what_cannot_be_removed_costs_neither_the_result_nor_the_next_start(stage: AgentStage, job_id: str) -> None:
    """A file system that is mounted in its folder, as a container may leave it."""
    answer = stage.run(job_id, "echo kept; mkdir tmp/m && mount -t tmpfs none tmp/m 2>/dev/null")
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines() if str(stage.data) in line]
    if not mounted:
        pytest.skip("a file system cannot be mounted here")
    try:
        again = stage.agent.folders.recover()
    finally:
        for place in mounted:
            subprocess.run(["umount", "-l", place], check=True)
        stage.agent.folders.recover()

    assert members(answer.content)["stdout.log"] == b"kept\n"
    assert again == []
    assert stage.http.get(f"/result/{job_id}").content == answer.content


def test_uploads_at_the_same_time_are_promised_the_same_space_once(
    stage: AgentStage, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1_000_000
    monkeypatch.setattr(jobs, "check_free", lambda folder, needed, *floors: check_space(needed, free))
    with stage.raw() as first:
        first.sendall(head(f"{job_id}-1", 600_000))
        until(lambda: stage.state(f"{job_id}-1") == "running")
        second = code_of(stage.post(f"{job_id}-2", {"file": bytes(600_000)}))
    until(lambda: nothing_is_left(stage, job_id))

    assert second == (503, "DISK_FULL")
    assert stage.post(f"{job_id}-2", {"job.sh": b"#" * 600_000}).status_code == 200


def check_space(needed: int, free: int) -> None:
    if needed > free:
        raise DiskFull(f"{needed} of {free}")


def test_an_agent_whose_folder_is_gone_says_so(make_stage: Callable[..., AgentStage]) -> None:
    with make_stage() as stage:
        shutil.rmtree(stage.data)

        health = stage.http.get("/health")

    assert code_of(health) == (503, "UNAVAILABLE")
    assert "data folder" in health.json()["error"]["message"]


def test_a_long_job_that_removes_its_own_folder_has_its_result(stage: AgentStage, job_id: str) -> None:
    here = stage.data / "jobs" / job_id

    answer = stage.run(job_id, f"echo kept; rm -r {here}; sleep {2 * jobs.MARK_S}")

    assert answer.status_code == 200
    assert members(answer.content)["stdout.log"] == b"kept\n"
    assert stage.state(job_id) == "done"


def test_a_job_that_lasts_has_a_durable_marker_while_it_runs(
    stage: AgentStage, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def fsync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        real(descriptor)
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fsync", fsync)
    gate, folder = tmp_path / "gate", stage.data / "jobs"
    running = stage.begin(job_id, f"while [ ! -e {gate} ]; do sleep 0.01; done")
    try:
        until(lambda: str(folder) in synced, what="the list of jobs is synced")
        assert synced[:2] == [f"{folder}/{job_id}/.running", f"{folder}/{job_id}"]
    finally:
        gate.touch()
    assert running.answer().status_code == 200


def test_a_program_that_makes_a_pipe_of_its_marker_holds_nobody_up(stage: AgentStage, job_id: str) -> None:
    here = stage.data / "jobs" / job_id
    script = f"rm {here}/.running; mkfifo {here}/.running {here}/.done; sleep {2 * jobs.MARK_S}"

    answer = stage.run(job_id, script)

    assert answer.status_code == 200
    assert stage.state(job_id) == "done"
    assert stage.call(lambda: stage.agent.folders.recover()) == []


def test_all_fields_of_a_form_together_are_limited(stage: AgentStage, job_id: str) -> None:
    body = form(*(part("input", b"x" * (upload.FIELD_MAX_BYTES // 4)) for _ in range(5)))

    with stage.raw() as sock:
        sock.sendall(head(job_id, len(body)) + body)
        status, error = answer_to(sock)

    assert (status, error["code"]) == (413, "TOO_LARGE")
    until(lambda: nothing_is_left(stage, job_id))


def test_a_delete_while_a_refused_upload_is_being_given_up_is_answered_as_always(
    stage: AgentStage, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()

    async def discard(self: upload.Upload, real: Any = upload.Upload.discard) -> None:
        entered.set()
        await asyncio.to_thread(gate.wait, 20.0)
        await real(self)

    monkeypatch.setattr(upload.Upload, "discard", discard)
    refused = Started(lambda: stage.run(job_id, exec="other"))
    assert entered.wait(20.0)
    deleting = Started(lambda: stage.http.delete(f"/jobs/{job_id}"))
    until(lambda: stage.call(lambda: stage.agent.jobs.held(job_id).stop.done()), what="it is to be stopped")
    gate.set()

    assert code_of(refused.answer()) == (400, "EXEC_NOT_ALLOWED")
    assert deleting.answer().status_code in (200, 404)


def test_a_reader_of_a_log_that_has_left_is_not_waited_for(stage: AgentStage, job_id: str) -> None:
    running = stage.begin(job_id, "sleep 60")
    until(lambda: stage.state(job_id) == "running")
    with stage.raw() as sock:
        sock.sendall(f"GET /jobs/{job_id}/logs/stdout?wait_s=25 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until(lambda: stage.agent.jobs._log_reads, what="the log is read")

    until(lambda: not stage.agent.jobs._log_reads, 30.0, "nobody reads the log")
    stage.http.delete(f"/jobs/{job_id}")
    assert running.answer().status_code == 409
