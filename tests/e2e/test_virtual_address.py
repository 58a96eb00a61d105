"""One address for two dispatchers, with deploy/haproxy/dispatchers.cfg: a real HAProxy, before dispatchers that die and go down.

The virtual address of deploy/keepalived needs network namespaces, and seconds: tests/soak/test_virtual_address.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent.stage import AgentStage, Started, code_of
from tests.conftest import Require
from tests.e2e.dispatchers import (
    DEADLINE_S,
    NAMES,
    TOKEN,
    DispatcherProcess,
    bearer,
    documented_loop,
    start_dispatchers,
    the_one_with,
)
from tests.e2e.test_proxies import program, replaced
from tests.support.certificates import TestAuthority
from tests.support.ports import free_port
from tests.support.processes import ChildProcess
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SMALL = b"100,95"
LARGE = os.urandom(2_500_000).hex().encode()  # 5 MB, and in an archive still half of it
ONLY_AS_ROOT = "    user haproxy\n    group haproxy\n    chroot /var/lib/haproxy\n"


class HAProxy(ChildProcess):
    """The example with other ports and paths, and a second look sooner than a second later."""

    def __init__(self, folder: Path, dispatchers: list[DispatcherProcess], authority: TestAuthority) -> None:
        self.authority = authority
        certificate = folder / "tasuki.pem"
        certificate.write_text("".join(Path(part).read_text() for part in authority.issue(*NAMES)))
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        text = replaced(
            (ROOT / "deploy/haproxy/dispatchers.cfg").read_text(),
            ("bind :7443", f"bind 127.0.0.1:{self._port}"),
            ("/etc/haproxy/tasuki.pem", str(certificate)),
            ("/etc/haproxy/ca.pem", authority.ca),
            ("10.0.0.11:7091", dispatchers[0].address),
            ("10.0.0.12:7091", dispatchers[1].address),
            ("inter 1s", "inter 1s fastinter 100ms downinter 100ms"),
            (ONLY_AS_ROOT, ONLY_AS_ROOT if os.geteuid() == 0 else ""),
        )
        config = folder / "haproxy.cfg"
        config.write_text(text)
        super().__init__([str(program("haproxy")), "-db", "-f", config], folder / "haproxy.log", {})

    def listens(self) -> bool:
        assert self.running, self.output()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


class Place:
    """Two agents, two dispatchers, and HAProxy."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        authority = TestAuthority(folder / "ca")
        self._starts, self._go = folder / "starts", folder / "go"
        agents = [stack.enter_context(self._agent(folder / name, name)) for name in ("one", "two")]
        self.dispatchers = start_dispatchers(stack, folder, [agent.url for agent in agents], authority)
        self.proxy = stack.enter_context(HAProxy(folder, self.dispatchers, authority))
        self._options: dict[str, Any] = {"base_url": self.proxy.url, "verify": authority.trusted(), "timeout": DEADLINE_S}
        until(self.proxy.listens, DEADLINE_S, "HAProxy listens")

    def _agent(self, folder: Path, name: str) -> AgentStage:
        """An agent whose program notes its start, and says what it was given; with "hold" it ends when the test lets it go."""
        folder.mkdir()
        program = folder / "pricer.sh"
        program.write_text(
            f'echo "$TASUKI_JOB_ID {name}" >> {self._starts}\ncat "$1"\n'
            f'while [ "$2" = hold ] && [ ! -e {self._go} ]; do sleep 0.02; done\n'
        )
        return AgentStage(folder, execs=[f"pricer=/bin/sh {program} {{file}} {{args}}"], default_exec="pricer", node=name)

    def started(self, job_id: str) -> list[str]:
        """The agents at which its program was started, in order."""
        lines = self._starts.read_text().splitlines() if self._starts.exists() else []
        return [node for job, node in map(str.split, lines) if job == job_id]

    def let_go(self) -> None:
        self._go.touch()

    def await_both(self) -> None:
        """Both dispatchers live, and HAProxy knows it."""
        dead = [one for one in self.dispatchers if not one.running]
        for dispatcher in dead:
            dispatcher.start_again()
        for dispatcher in dead:
            dispatcher.await_ready()
        for dispatcher in self.dispatchers:
            until(lambda: self.takes_part(dispatcher), DEADLINE_S, f"{dispatcher.name} takes part")  # noqa: B023

    def takes_part(self, dispatcher: DispatcherProcess) -> bool:
        """By HAProxy's latest word about it; one that it has said nothing about is taken to be well."""
        assert self.proxy.running, self.proxy.output()
        name = f"Server dispatchers/{dispatcher.name} is "
        said = [line.partition(name)[2] for line in self.proxy.output().splitlines() if name in line]
        return not said or said[-1].startswith("UP")

    def begin(self, job_id: str, book: bytes) -> Started:
        """A run that the test holds, on a connection of its own; its answer comes when it has ended."""
        self._go.unlink(missing_ok=True)
        return Started(lambda: self.run(job_id, "hold", book))

    def run(self, job_id: str, word: str, book: bytes, token: str = TOKEN) -> httpx.Response:
        files: list[tuple[str, Any]] = [("file", ("book.csv", book)), ("args", (None, f'["{word}"]'))]
        with httpx.Client(**self._options) as http:
            return http.post(f"/run/{job_id}", files=files, headers=bearer(token))

    def get(self, path: str) -> httpx.Response:
        with httpx.Client(**self._options) as http:
            return http.get(path, headers=bearer())


@pytest.fixture(scope="module")
def place(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    require("haproxy", program("haproxy") is not None, "make system-deps, or apt-get install haproxy")
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path_factory.mktemp("haproxy"), stack)


def stdout_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read("stdout.log")


def test_an_answer_before_the_end_of_an_upload_comes_through(place: Place) -> None:
    answer = place.run("refused", "0", LARGE, token="another")

    assert code_of(answer) == (401, "UNAUTHORIZED")


def test_after_the_death_of_a_dispatcher_the_documented_loop_has_the_result_without_another_upload(
    place: Place, tmp_path: Path
) -> None:
    cut = place.begin("7f3c", LARGE)
    through, other = the_one_with("7f3c", place.dispatchers)
    (node,) = until(lambda: place.started("7f3c"), DEADLINE_S, "its program runs")
    before = other.input_bytes()

    through.kill()
    hung_up = cut.answer()
    (tmp_path / "book.csv").write_bytes(LARGE)
    script = replaced(documented_loop(), ("sleep 5", "sleep 0.1"), ("-F exec=pricer", "-F exec=pricer -F 'args=[\"hold\"]'"))
    env = {"JOBS": place.proxy.url, "TOKEN": TOKEN, "CURL_CA_BUNDLE": place.proxy.authority.ca}
    with ChildProcess(["sh", "-euc", script], tmp_path / "loop.log", env, cwd=tmp_path) as loop:
        place.proxy.wait_for_output(" 423 ")
        place.let_go()
        code = loop.wait(DEADLINE_S)

    assert (*code_of(hung_up), hung_up.headers["retry-after"]) == (502, "UNAVAILABLE", "1")
    assert code == 0, loop.output()
    assert stdout_of((tmp_path / "result.zip").read_bytes()) == LARGE
    assert place.started("7f3c") == [node]
    assert other.input_bytes() - before < 1000  # forms that name the input


def test_a_dispatcher_that_goes_down_gets_no_new_requests_and_ends_what_it_has(place: Place) -> None:
    place.await_both()
    running = place.begin("drained", SMALL)
    through, other = the_one_with("drained", place.dispatchers)

    through.signal(signal.SIGTERM)
    until(lambda: not place.takes_part(through), DEADLINE_S, "HAProxy takes it out")
    while_it_ends = [place.run(f"new-{n}", "0", SMALL).status_code for n in range(2)]
    place.let_go()

    assert while_it_ends == [200, 200]
    assert all(other.has(f"new-{n}") for n in range(2))
    assert stdout_of(running.answer().content) == SMALL
    assert through.wait() == 0


def test_without_a_dispatcher_the_answer_has_the_form_of_theirs(place: Place) -> None:
    for dispatcher in place.dispatchers:
        dispatcher.kill()
    place.proxy.wait_for_output("has no server available")

    answer = place.get("/capacity")

    assert (*code_of(answer), answer.headers["retry-after"]) == (503, "UNAVAILABLE", "2")
