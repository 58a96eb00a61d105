"""The virtual address of deploy/keepalived, with real VRRP between two machines that are network namespaces.

On each runs a keepalived with the example's file, a dispatcher with TLS and an agent; a third machine is the client's, which
sends with the loop of docs/operate/dispatcher.md. What that page says in its table is looked at, line by line.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Require
from tests.e2e.dispatchers import TOKEN, DispatcherProcess, documented_loop
from tests.e2e.test_proxies import program, replaced
from tests.soak.machines import Lan, missing
from tests.support.certificates import TestAuthority
from tests.support.processes import TASUKI, ChildProcess
from tests.support.waiting import until

pytestmark = pytest.mark.soak

EXAMPLE = Path(__file__).parents[2] / "deploy/keepalived/keepalived.conf"
ADDRESSES = {"east": "10.0.0.10", "west": "10.0.0.20"}
MOVED_WITHIN_S = 5.0  # the guide says 2 to 4
DEADLINE_S = 30.0


def swapped(text: str, one: str, other: str) -> str:
    return replaced(text, (one, "\0"), (other, one), ("\0", other))


class Place:
    """Two machines with all that the guide asks for, and a client's."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._starts, self._go = folder / "starts", folder / "go"
        self.lan = Lan(stack, folder, ["east", "west", "client"])
        self._ca = TestAuthority(folder / "ca")
        public = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        public.chmod(0o755)  # the folders of tests are closed to `nobody`, who asks /health and must read the CA
        shutil.copy(self._ca.ca, public / "ca.pem")
        self.agents = {name: stack.enter_context(self._agent(name)) for name in ADDRESSES}
        urls = [f"http://{self.lan.addresses[name]}:7090" for name in ADDRESSES]
        self.dispatchers = {
            name: stack.enter_context(
                DispatcherProcess(folder, f"dispatcher-{name}", urls, self._ca, "0.0.0.0:7091", self.lan[name].within)
            )
            for name in ADDRESSES
        }
        for process in (*self.agents.values(), *self.dispatchers.values()):
            process.wait_for_output("ready ")
        text = replaced(EXAMPLE.read_text(), ("/etc/tasuki", str(public)))
        second = swapped(swapped(text, "state MASTER", "state BACKUP"), "priority 150", "priority 100")
        self.keepalived = [self._keepalived("east", text), self._keepalived("west", second)]
        for keepalived in self.keepalived:
            stack.callback(keepalived.stop)  # killed, it would leave its child to end by itself

    def _agent(self, name: str) -> ChildProcess:
        (self._folder / "tokens").touch(mode=0o600)
        (self._folder / "tokens").write_text(TOKEN)
        script = self._folder / f"pricer-{name}.sh"
        script.write_text(
            f'echo "$TASUKI_JOB_ID {name}" >> {self._starts}\nwhile [ ! -e {self._go} ]; do sleep 0.02; done\ncat "$1"\n'
        )
        where = ["--listen", f"{self.lan.addresses[name]}:7090", "--insecure", "--node", name, "--data", f"{self._folder}/{name}"]
        options = ["--token-file", f"{self._folder}/tokens", "--exec", f"pricer=/bin/sh {script} {{file}}"]
        command = [*self.lan[name].within, *TASUKI, "agent", *where, *options]
        return ChildProcess(command, self._folder / f"agent-{name}.log", {"HOME": str(self._folder)})

    def _keepalived(self, name: str, text: str) -> ChildProcess:
        file = self._folder / f"keepalived-{name}.conf"
        file.write_text(text)
        own = ["-f", str(file), "-p", f"{self._folder}/{name}.pid", "-r", f"{self._folder}/{name}.vrrp.pid"]
        command = [*self.lan[name].within, str(program("keepalived")), "--dont-fork", "--log-console", "--vrrp", *own]
        return ChildProcess(command, self._folder / f"keepalived-{name}.log", {})

    def held_by(self, address: str) -> list[str]:
        return [name for name in ADDRESSES if self.lan[name].holds(address)]

    def await_holder(self, address: str, name: str, timeout_s: float = DEADLINE_S) -> float:
        """Wait until this machine holds it, and no other one; how long it took, in seconds."""
        began = time.monotonic()
        until(lambda: self.held_by(address) == [name], timeout_s, f"{name} holds {address}")
        return time.monotonic() - began

    def restore(self) -> None:
        """All live, and each machine holds its own address; jobs are held."""
        self._go.unlink(missing_ok=True)
        dead = [one for one in (*self.agents.values(), *self.dispatchers.values()) if not one.running]
        for process in dead:
            process.start_again()
        for process in dead:
            process.wait_for_output("ready ")
        for name, address in ADDRESSES.items():
            self.await_holder(address, name)

    def health(self, address: str) -> str:
        """The status with which the client is answered there, 000 if it is not."""
        curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", "5", "--cacert", self._ca.ca]
        name = ["--resolve", f"jobs.example:7091:{address}", "https://jobs.example:7091/health"]
        return self.lan["client"].run(*curl, *name, check=False)

    def loop(self, job_id: str, address: str) -> ChildProcess:
        """The guide's, on the client's machine, in a folder of its own."""
        folder = self._folder / f"loop-{job_id}"
        folder.mkdir()
        (folder / "book.csv").write_text("100,95")
        resolve = f"curl --resolve jobs.example:7091:{address}"
        script = replaced(
            documented_loop(),
            ("sleep 5", "sleep 0.2"),
            ("7f3c", job_id),
            ("--keepalive-time 10", "--keepalive-time 1"),
            ("curl", resolve),
        )
        env = {"JOBS": "https://jobs.example:7091", "TOKEN": TOKEN, "CURL_CA_BUNDLE": self._ca.ca}
        return ChildProcess([*self.lan["client"].within, "sh", "-euc", script], folder / "log", env, cwd=folder)

    def begin(self, job_id: str, through: str, address: str) -> ChildProcess:
        """A loop whose request has come to this dispatcher, by this address, and whose program runs."""
        loop = self.loop(job_id, address)
        self.await_run(job_id, through)
        return loop

    def client(self, job_id: str, address: str) -> ChildProcess:
        """Our own command, on the client's machine."""
        book = self._folder / "book.csv"
        book.write_text("100,95")
        options = ["--to", f"agents:https://{address}:7091", "--tls-ca", self._ca.ca, "--job-id", job_id, "--file", str(book)]
        env = {"TASUKI_TOKEN": TOKEN, "HOME": str(self._folder)}
        command = [*self.lan["client"].within, *TASUKI, "run", *options, "pricer"]
        return ChildProcess(command, self._folder / f"client-{job_id}.log", env)

    def await_run(self, job_id: str, through: str) -> None:
        until(lambda: self.dispatchers[through].has(job_id), DEADLINE_S, f"job {job_id} goes through {through}")
        until(lambda: self.started(job_id), DEADLINE_S, f"the program of job {job_id} runs")

    def started(self, job_id: str) -> list[str]:
        """The agents at which its program was started, in order."""
        lines = self._starts.read_text().splitlines() if self._starts.exists() else []
        return [node for job, node in map(str.split, lines) if job == job_id]

    def let_go(self) -> None:
        self._go.touch()

    def result(self, job_id: str, loop: ChildProcess) -> bytes:
        """Let all go; what its program wrote, once the loop has its result."""
        self.let_go()
        assert loop.wait(DEADLINE_S) == 0, loop.output()
        with zipfile.ZipFile(self._folder / f"loop-{job_id}" / "result.zip") as archive:
            return archive.read("stdout.log")


@pytest.fixture(scope="module")
def place(require: Require, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if missing():
        pytest.skip(missing())
    for name, package in (("keepalived", "keepalived"), ("ip", "iproute2"), ("curl", "curl")):
        require(name, program(name) is not None, f"make system-deps, or apt-get install {package}")
    with contextlib.ExitStack() as stack:
        yield Place(tmp_path_factory.mktemp("lan"), stack)


def test_each_machine_holds_its_own_address_and_answers_there(place: Place) -> None:
    place.restore()

    assert [place.health(address) for address in ADDRESSES.values()] == ["200", "200"]


def kill(place: Place) -> None:
    place.dispatchers["east"].kill()


def stop(place: Place) -> None:
    place.dispatchers["east"].signal(signal.SIGTERM)


@pytest.mark.parametrize("trouble", [kill, stop])
def test_the_address_moves_and_the_same_request_finds_its_run_through_the_other(
    place: Place, trouble: Callable[[Place], None]
) -> None:
    place.restore()
    job_id = f"after-{trouble.__name__}"
    with place.begin(job_id, "east", ADDRESSES["east"]) as loop:
        trouble(place)
        took_s = place.await_holder(ADDRESSES["east"], "west", MOVED_WITHIN_S)
        answered = place.health(ADDRESSES["east"])
        priced = place.result(job_id, loop)
    place.dispatchers["east"].kill()  # one that was stopped waits for a client who cannot be reached any more

    print(f"{trouble.__name__}: {took_s:.1f} s until the address has moved")
    assert answered == "200"
    assert priced == b"100,95"
    assert len(place.started(job_id)) == 1


def test_our_own_client_with_the_virtual_address_alone_notices_by_itself(place: Place) -> None:
    place.restore()
    with place.client("ours", ADDRESSES["east"]) as client:
        place.await_run("ours", "east")
        place.dispatchers["east"].signal(signal.SIGTERM)
        place.await_holder(ADDRESSES["east"], "west", MOVED_WITHIN_S)
        place.let_go()
        code = client.wait(DEADLINE_S)
    place.dispatchers["east"].kill()

    assert code == 0, client.output()
    assert "its connection is dead" in client.output()
    assert client.output().endswith("100,95")
    assert len(place.started("ours")) == 1


def test_the_first_takes_its_address_back_and_a_request_through_the_other_is_sent_again(place: Place) -> None:
    place.restore()
    place.dispatchers["east"].kill()
    place.await_holder(ADDRESSES["east"], "west")
    with place.begin("back", "west", ADDRESSES["east"]) as loop:
        place.dispatchers["east"].start_again()
        place.dispatchers["east"].wait_for_output("ready ")
        took_s = place.await_holder(ADDRESSES["east"], "east", MOVED_WITHIN_S)
        until(lambda: "curl: " in loop.output(), DEADLINE_S, "the client hears that its connection is gone")
        priced = place.result("back", loop)

    print(f"back: {took_s:.1f} s until the first has its address again")
    assert priced == b"100,95"
    assert len(place.started("back")) == 1


def test_a_machine_that_is_cut_off_loses_the_address_and_its_requests_are_sent_again(place: Place) -> None:
    place.restore()
    with place.begin("unplugged", "east", ADDRESSES["east"]) as loop:
        began = time.monotonic()
        place.lan.pull("east")
        until(lambda: place.lan["west"].holds(ADDRESSES["east"]), MOVED_WITHIN_S, "west holds the address of east")
        took_s = time.monotonic() - began
        until(lambda: "curl: " in loop.output(), DEADLINE_S, "the client hears that its connection is gone")
        priced = place.result("unplugged", loop)
    place.lan.plug("east")

    print(f"cut off: {took_s:.1f} s until the address has moved")
    assert priced == b"100,95"
    place.await_holder(ADDRESSES["east"], "east", MOVED_WITHIN_S)


def test_while_no_agent_takes_jobs_the_addresses_stay_and_say_so(place: Place) -> None:
    place.restore()

    for agent in place.agents.values():
        agent.kill()
    for address in ADDRESSES.values():
        until(lambda: place.health(address) == "503", DEADLINE_S, f"{address} says 503")  # noqa: B023
    for keepalived in place.keepalived:
        keepalived.wait_for_output("from 150 to 90")

    assert [place.held_by(address) for address in ADDRESSES.values()] == [["east"], ["west"]]
    for agent in place.agents.values():
        agent.start_again()
    for address in ADDRESSES.values():
        until(lambda: place.health(address) == "200", DEADLINE_S, f"{address} is well")  # noqa: B023
