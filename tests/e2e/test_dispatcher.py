"""Two dispatchers before real agents, with real deaths: an upload is made once, whoever dies in the middle of it all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import signal
import sys
import zipfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasuki.client.agents.client import AgentsClient
from tests.agent.stage import Started, code_of
from tests.client.agent_processes import PROGRAM, Agents
from tests.support.ports import free_port
from tests.support.processes import TASUKI, ChildProcess
from tests.support.waiting import until

TOKEN = "secret-of-the-test"
BOOK = b"100,95\n" * 200_000
SHA256 = hashlib.sha256(BOOK).hexdigest()
CUT_OFF = httpx.Response(599)
FORM_MAX_BYTES = 2048  # of a form that names its files, and brings none
FORM = [("input", (None, f"{SHA256}:book.csv")), ("args", (None, '["hold"]'))]


class Listener(ChildProcess):
    """An agent or a dispatcher, on a port that it has again when it is started again."""

    def __init__(self, folder: Path, name: str, *arguments: str | Path) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self.name = name
        if not (folder / "tokens").exists():  # another listener may be reading it
            (folder / "tokens").touch(mode=0o600)
            (folder / "tokens").write_text(TOKEN)
        common = ["--listen", self.url.removeprefix("http://"), "--token-file", str(folder / "tokens"), "--log-format", "json"]
        super().__init__([*TASUKI, *arguments, *common], folder / f"{name}.log", {"HOME": str(folder)})


def usable(line: dict[str, Any]) -> bool:
    return bool(line["breaker"] == "closed" or line["good_checks"] >= 3)


class Place:
    """Two agents that fetch their inputs, and two dispatchers."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        starts = folder / "starts.txt"
        (folder / "program.py").write_text(PROGRAM)
        inputs = ["--inputs", str(folder / "inputs")]
        agents = []
        for name in ("one", "two"):
            program = f"pricer={sys.executable} {folder / 'program.py'} {{file}} {starts} {{args}} {name}"
            arguments = ["agent", "--exec", program, "--data", str(folder / name), "--slots", "4", "--node", name]
            fetching = inputs if name == "one" else []
            agents.append(stack.enter_context(Listener(folder, name, *arguments, *fetching)))
        urls = ",".join(agent.url for agent in agents)
        self.dispatchers = [
            stack.enter_context(Listener(folder, name, "dispatcher", "--agents", urls, *inputs)) for name in ("east", "west")
        ]
        for process in (*agents, *self.dispatchers):
            process.wait_for_output("ready ")
        self.agents = Agents(folder, agents, starts)  # type: ignore[arg-type]
        self.http = [
            stack.enter_context(httpx.Client(base_url=one.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20.0))
            for one in self.dispatchers
        ]

    def begin(self, which: int, job_id: str) -> Started:
        """Run the stored input; the answer comes when it has ended, or CUT_OFF."""

        def run() -> httpx.Response:
            try:
                return self.http[which].post(f"/run/{job_id}", files=FORM)
            except httpx.HTTPError:
                return CUT_OFF

        return Started(run)

    def restore(self, *dispatchers: int) -> None:
        """Both agents live, and these dispatchers, which find them well; jobs are held."""
        self.agents.hold()
        dead = [one for one in (*self.agents.nodes, *(self.dispatchers[which] for which in dispatchers)) if not one.running]
        for process in dead:
            process.start_again()
        for process in dead:
            process.wait_for_output("ready ")
        for which in dispatchers:
            until(lambda: all(map(usable, self.http[which].get("/nodes").json())), what="its agents are well")  # noqa: B023

    def running_at(self, job_id: str) -> str:
        """The name of the agent at which its program runs."""
        return until(lambda: self.agents.started(job_id), what=f"job {job_id} runs")[-1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        place = Place(tmp_path_factory.mktemp("dispatchers"), stack)
        assert place.http[0].put(f"/inputs/{SHA256}", content=BOOK).status_code == 201
        yield place


def stored_bytes(http: httpx.Client) -> float:
    return float(re.findall(r"^tasuki_dispatcher_input_bytes_total (\S+)", http.get("/metrics").text, re.MULTILINE)[0])


def stdout_of(answer: httpx.Response) -> bytes:
    assert answer.status_code == 200, answer.text
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        return archive.read("stdout.log")


def test_a_hedge_through_the_other_dispatcher_does_not_remove_the_result(place: Place, tmp_path: Path) -> None:
    place.restore(0, 1)  # a dispatcher that started before its agents may be unwell for its first second
    told: list[str] = []
    (tmp_path / "book.csv").write_bytes(BOOK)
    with AgentsClient([one.url for one in place.dispatchers], token=TOKEN) as client, futures.ThreadPoolExecutor(1) as pool:
        options = {"files": [tmp_path / "book.csv"], "output": tmp_path / "result.zip", "hedge_s": 0.5, "on_note": told.append}
        running = pool.submit(lambda: client.run("pricer", ["hold"], job_id="hedged", **options))
        try:
            until(lambda: any("runs there already" in text for text in told), what="the other one was asked too")
        finally:
            place.agents.let_go()
        assert running.result(20.0).succeeded

    # Leaving has waited for what was to be removed.
    assert {one.get("/result/hedged").content for one in place.http} == {(tmp_path / "result.zip").read_bytes()}
    assert len(place.agents.started("hedged")) == 1


def test_a_dispatcher_is_killed_and_the_job_goes_on_through_the_other_without_an_upload(place: Place, tmp_path: Path) -> None:
    place.restore(0, 1)
    (tmp_path / "book.csv").write_bytes(BOOK)
    with AgentsClient([one.url for one in place.dispatchers], token=TOKEN) as client, futures.ThreadPoolExecutor(1) as pool:
        options = {"files": [tmp_path / "book.csv"], "output": tmp_path / "result.zip", "job_id": "cut"}
        running = pool.submit(lambda: client.run("pricer", ["hold"], **options))
        node = place.running_at("cut")
        (through,) = (which for which in (0, 1) if "job cut: goes to" in place.dispatchers[which].output())
        other = place.http[1 - through]
        before = stored_bytes(other)

        place.dispatchers[through].kill()
        refused = other.post("/run/cut", files=FORM)
        place.agents.let_go()
        ended = running.result(20.0)

    assert code_of(refused) == (423, "RUNNING")
    assert refused.json()["error"]["details"]["node"] == node
    assert (ended.succeeded, ended.node) == (True, place.agents.node(node).url)
    assert place.agents.started("cut") == [node]
    assert stored_bytes(other) == before
    stored = other.post("/run/cut", files=FORM)
    assert (stored.content, stored.headers["tasuki-cache"]) == ((tmp_path / "result.zip").read_bytes(), "hit")


def test_a_node_is_killed_and_its_job_goes_on_at_the_other_without_another_upload(place: Place) -> None:
    place.restore(1)
    running = place.begin(1, "moved")
    node = place.running_at("moved")

    place.agents.node(node).kill()
    other = until(lambda: place.agents.started("moved")[1:], what="it runs at the other node")[0]
    place.agents.let_go()

    assert stdout_of(running.answer()).startswith(b"priced 100,95")
    assert other != node


def test_dispatcher_and_node_are_killed_and_the_second_try_of_the_client_sends_almost_nothing(
    place: Place, tmp_path: Path
) -> None:
    place.restore(0, 1)
    (tmp_path / "book.csv").write_bytes(BOOK + b"of this test")
    with AgentsClient([one.url for one in place.dispatchers], token=TOKEN) as client, futures.ThreadPoolExecutor(1) as pool:
        options = {"files": [tmp_path / "book.csv"], "output": tmp_path / "result.zip", "job_id": "both"}
        running = pool.submit(lambda: client.run("pricer", ["hold"], **options))
        node = place.running_at("both")
        (through,) = (which for which in (0, 1) if "job both: goes to" in place.dispatchers[which].output())
        other = place.http[1 - through]
        before = stored_bytes(other)

        place.dispatchers[through].kill()
        place.agents.node(node).kill()
        place.agents.let_go()
        ended = running.result(20.0)

    assert [one == node for one in place.agents.started("both")] == [True, False]
    assert (ended.succeeded, ended.node) == (True, place.agents.node(place.agents.started("both")[-1]).url)
    assert stored_bytes(other) - before < FORM_MAX_BYTES


def test_the_first_signal_lets_a_run_end_and_every_line_of_it_names_its_job(place: Place) -> None:
    place.agents.hold()  # one agent is enough
    alive = next(which for which in (0, 1) if place.dispatchers[which].running)
    running = place.begin(alive, "drained")
    place.running_at("drained")
    dispatcher = place.dispatchers[alive]

    dispatcher.signal(signal.SIGTERM)
    dispatcher.wait_for_output("stopping")
    refused = place.http[alive].post("/run/late", files=FORM)
    place.agents.let_go()

    assert code_of(refused) == (503, "DRAINING")
    assert stdout_of(running.answer()).startswith(b"priced 100,95")
    assert dispatcher.wait() == 0
    lines = [json.loads(line) for line in dispatcher.output().splitlines() if line.startswith("{")]
    about = [line for line in lines if re.search(r"\bjob drained\b", line["message"])]
    assert about
    assert {line.get("job_id") for line in about} == {"drained"}
    assert TOKEN not in dispatcher.output()
