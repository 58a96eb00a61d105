"""Node agents that are killed, frozen and stopped while clients ask them for jobs; with or without a registry and dispatchers.

Several clients ask for a job at about the same time. At the end every call has the right result, and nothing is left behind: no
marker of a run, no note of a claim, no process. With a registry also: all calls of a job have the same bytes, from one run that
came to its end; no two runs of a job lived at one moment, as the programs themselves saw (exclusive_program.py), nor a run after
the registry had given its job away (registry_witness.py). With dispatchers: no input that was stored is sent again
(counting_gate.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.core.failover.nodes import BreakerRules
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tests.client.agent_processes import ListeningProcess, steady_port
from tests.support.chaos.counting_gate import Gate, Inputs
from tests.support.chaos.registry_witness import Witness
from tests.support.chaos.rig import STOPPED_WITHIN_S, Fault, Rig
from tests.support.waiting import until

PROGRAM = Path(__file__).with_name("exclusive_program.py")
NAMES = ("one", "two", "three")
SETTLED_WITHIN_S = 30.0
QUICK = BreakerRules(left_out_s=1.0)
AWAY_S = (0.1, 1.5)


@dataclass(frozen=True, kw_only=True)
class AgentsPlan:
    """Amounts of everything."""

    seed: int = 0
    jobs: int = 200
    clients: int = 8
    callers: int = 3
    """Clients that ask for each job."""
    at_once: int = 3
    """Calls of one client."""
    slots: int = 4
    lease_ttl_s: float = 1.5
    seconds: tuple[float, float] = (0.05, 1.0)
    """Time that a program runs."""
    long: int = 9
    """One of so many jobs runs for much longer than a lease at its first attempt: the run must be stopped where the lease is
    lost."""
    filling_bytes: tuple[int, ...] = (10, 10, 200_000)
    """Of a result: some do not go into the registry itself."""
    padding_bytes: int = 0
    """Of an input."""
    dispatchers: bool = False
    faults: tuple[Fault, ...] = (*Fault, Fault.FROZEN_FOR_LONG)
    faulty_at_once: int = len(NAMES)
    gap_s: tuple[float, float] = (1.0, 4.0)
    """Between two faults."""
    ends_within_s: float = 600.0

    @property
    def long_s(self) -> float:
        """Time in which others notice that a lease is over, and run its job."""
        return self.lease_ttl_s + LEASE_MARGIN_S + 4.0


class Call(NamedTuple):
    """One answered call of a client."""

    job_id: str
    client: int
    result: Path


class AgentsRig(Rig):
    """Three agents in one folder, with a registry if `env` names one, and two dispatchers if the plan wants them: east, which
    knows the registry, and west, which does not."""

    def __init__(self, plan: AgentsPlan, folder: Path, env: Mapping[str, str], *arguments: str) -> None:
        super().__init__(plan, folder)
        self.plan = plan
        self._env, self._arguments = env, arguments
        self.job_ids = [f"job-{number}" for number in range(plan.jobs)]
        self.agents: list[ListeningProcess] = []
        self.dispatchers: list[ListeningProcess] = []
        self.witness: Witness | None = None
        self.calls: list[Call] = []

    # ------------------------------------------------------------------------------------------------ life

    def start(self, stack: contextlib.ExitStack) -> None:
        for name in ("journal", "locks", "books", "results"):
            (self.folder / name).mkdir()
        for number, job_id in enumerate(self.job_ids):
            seconds = self.chance.uniform(*self.plan.seconds)
            is_long = number % self.plan.long == 0
            order = {
                "row": number,
                "seconds": seconds,
                "first_seconds": self.plan.long_s + seconds if is_long else seconds,
                "filling_bytes": self.chance.choice(self.plan.filling_bytes),
                "padding": "x" * self.plan.padding_bytes,
            }
            self.book(job_id).write_text(json.dumps(order))
        self.agents = [stack.enter_context(agent) for agent in self.pool.map(self._start_agent, NAMES)]
        self.workers = [*self.agents]
        self._urls = [agent.url for agent in self.agents]
        if self._env:
            self.witness = stack.enter_context(Witness(self._env["TASUKI_REGISTRY"], self.job_ids))
        if self.plan.dispatchers:
            self._inputs = Inputs(self.folder / "inputs", {job_id: self.book(job_id).read_bytes() for job_id in self.job_ids})
            for name, env in (("east", self._env), ("west", {})):
                self.dispatchers.append(stack.enter_context(self._start_dispatcher(name, env)))
            self._gates = [stack.enter_context(Gate(process, self._inputs)) for process in self.dispatchers]
            self._urls = [gate.url for gate in self._gates]
            self.workers += self.dispatchers

    def _start_agent(self, name: str) -> ListeningProcess:
        program = f"pricer={sys.executable} {PROGRAM} {{file}} {self.folder} {name}"
        words = ["agent", "--data", str(self.folder / name), "--slots", str(self.plan.slots), "--exec", program, "--node", name]
        if self._env:
            words += ["--lease-ttl", str(self.plan.lease_ttl_s), *self._arguments]
        return self._listening(words, name, self._env)

    def _start_dispatcher(self, name: str, env: Mapping[str, str]) -> ListeningProcess:
        agents = ",".join(agent.url for agent in self.agents)
        return self._listening(["dispatcher", "--agents", agents, "--inputs", str(self._inputs.folder)], name, env)

    def _listening(self, words: list[str], name: str, env: Mapping[str, str]) -> ListeningProcess:
        env = {"HOME": str(self.folder), **env}
        # Fresh: they are looked for by their command lines.
        return ListeningProcess(words, self.folder / f"{name}.log", env, name=name, port=steady_port(), fresh=True)

    def book(self, job_id: str) -> Path:
        return self.folder / "books" / f"{job_id}.json"

    # ------------------------------------------------------------------------------------------------ the storm

    def storm(self) -> None:
        """Let faults happen until the last call has its result."""
        calls = self.pool.submit(asyncio.run, self._all_calls())
        while not calls.done():
            self.wait(self.plan.gap_s)
            self.raise_failures()
            if len(self.busy.keys() & set(self.agents)) < self.plan.faulty_at_once:
                self.hit(self.agents, self.plan.faults, AWAY_S)
            if not self.busy.keys() & set(self.dispatchers):
                self.hit(self.dispatchers, [Fault.KILLED], AWAY_S)
        self.calls = calls.result()

    def calm(self) -> None:
        self.heal()

    async def _all_calls(self) -> list[Call]:
        async with asyncio.timeout(self.plan.ends_within_s):
            told = await asyncio.gather(*(self._client(number) for number in range(self.plan.clients)))
        return [call for calls in told for call in calls]

    async def _client(self, number: int) -> list[Call]:
        """Ask for the client's share of the jobs, a few at a time, in the order in which the others ask for them too."""
        places = asyncio.Semaphore(self.plan.at_once)

        async def call(client: AsyncAgentsClient, job_id: str) -> Call:
            async with places:
                result = self.folder / "results" / f"{job_id}-{number}.zip"
                ended = await client.run(
                    "pricer", files=[self.book(job_id)], output=result, job_id=job_id, patience_s=60.0, silent_s=3.0
                )
                assert ended.succeeded, ended
                return Call(job_id, number, result)

        wanted = [
            job_id
            for place, job_id in enumerate(self.job_ids)
            if (number - place * self.plan.callers) % self.plan.clients < self.plan.callers
        ]
        async with AsyncAgentsClient(self._urls, token="", rules=QUICK) as client:
            return await asyncio.gather(*(call(client, job_id) for job_id in wanted))

    # ------------------------------------------------------------------------------------------------ the check

    def check(self) -> str:
        """Check every promise; AssertionError with all that do not hold."""
        problems = [*self._wrong_results(), *self._sent_again()]
        if self.witness is not None:
            problems += [] if self.witness.leave() else ["the witness did not look to the end"]
            problems += self._runs_at_once(self.witness)
        self._settle(problems)
        if self.witness is not None:
            self.witness.look()
            for job_id, story in self.witness.stories.items():
                problems += [f"{job_id}: {problem}" for problem in story.problems()]
                if not story.done:
                    problems.append(f"{job_id}: in the registry it is not done; {self.tale(job_id)}")
            problems += self._other_bytes()
        self._end(problems)
        assert not problems, "\n".join(problems)
        return self._summary()

    def _sent_again(self) -> Iterator[str]:
        """Yield the inputs that were sent though they were stored."""
        for gate in self._gates if self.dispatchers else ():
            for sending in gate.sendings:
                if sending.was_stored and sending.sent_bytes >= self._inputs.sizes[sending.job_id]:
                    yield f"{sending.job_id}: {sending.sent_bytes} bytes were sent though the input was stored"

    def journal(self, job_id: str) -> list[dict[str, Any]]:
        path = self.folder / "journal" / job_id
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _wrong_results(self) -> Iterator[str]:
        """Each result is whole, of its own job, and of one run that came to its end; all of a job are the same."""
        if len(self.calls) != self.plan.jobs * self.plan.callers:
            yield f"{len(self.calls)} calls were answered of {self.plan.jobs * self.plan.callers}"
        bytes_of: dict[str, set[bytes]] = {}
        for call in self.calls:
            bytes_of.setdefault(call.job_id, set()).add(call.result.read_bytes())
            with zipfile.ZipFile(call.result) as archive:
                torn = archive.testzip()
                stdout, run = archive.read("stdout.log"), archive.read("out/run").decode()
                attempt = json.loads(archive.read("result.json"))["attempt"]
            ends = [(line["run"], line["attempt"]) for line in self.journal(call.job_id) if line["event"] == "end"]
            priced = f"priced {json.loads(self.book(call.job_id).read_bytes())['row']}\n".encode()
            if torn is not None or stdout != priced or (run, attempt) not in ends:
                yield f"{call}: not the right result: {torn}, {stdout!r}, {run}, {attempt}, {ends}"
        for job_id, found in bytes_of.items():
            if len(found) > 1:
                yield f"{job_id}: there are {len(found)} different results; {self.tale(job_id)}"

    def _runs_at_once(self, witness: Witness) -> Iterator[str]:
        """By the lock, by what the programs wrote down (attempts begin in order, each once, when the one before is over), and by
        what the witness saw meanwhile."""
        for job_id in self.job_ids:
            lines = self.journal(job_id)
            if any(line["event"] == "violation" for line in lines):
                yield f"{job_id}: two runs lived at once; {self.tale(job_id)}"
            begun = [line for line in lines if line["event"] == "begin"]
            attempts = [line["attempt"] for line in begun]
            if attempts != sorted(set(attempts)):
                yield f"{job_id}: attempts did not begin in order, each once: {attempts}; {self.tale(job_id)}"
            ends = {line["run"]: line["at"] for line in lines if line["event"] == "end"}
            for before, after in itertools.pairwise(begun):
                if ends.get(before["run"], 0.0) > after["at"]:
                    yield f"{job_id}: a run ended after the next had begun; {self.tale(job_id)}"
            for line in lines:
                if said := witness.stories[job_id].speaks_against(line["at"], line["attempt"], line["node"]):
                    yield f"{job_id}: a run without its lease: {line}, {said}; {self.tale(job_id)}"

    def _other_bytes(self) -> Iterator[str]:
        """Yield the results that a node gives now and that differ from what clients were given."""
        given = {call.job_id: call.result for call in self.calls}
        with httpx.Client(timeout=20.0) as http:
            for job_id, result in given.items():
                for agent in self.agents:
                    answer = http.get(f"{agent.url}/result/{job_id}")
                    if answer.content != result.read_bytes():
                        told = answer.text[:200] if answer.status_code != 200 else "other bytes"
                        yield f"{job_id}: {agent.name} answers {answer.status_code}, {told}; {self.tale(job_id)}"

    def _settle(self, problems: list[str]) -> None:
        try:
            until(lambda: not self._unsettled(), SETTLED_WITHIN_S, "all is settled")
        except AssertionError as error:
            problems.append(f"{error}: {self._unsettled()}")

    def _unsettled(self) -> list[str]:
        """Return what is still under way, or was left behind, at agents that run."""
        found = [str(path) for name in NAMES for path in (self.folder / name / "jobs").glob("*/.running")]
        for name in NAMES:
            for part in ("claims", "incoming", "trash"):
                found += map(str, (self.folder / name / part).glob("*"))
        return found + [f"process {pid}: {words}" for pid, words in self._processes() if words[1:2] == [str(PROGRAM)]]

    def _end(self, problems: list[str]) -> None:
        """Stop all in order: no process is left."""
        stopped = [(process, process.stop(STOPPED_WITHIN_S)) for process in (*self.dispatchers, *self.agents)]
        problems += [f"{process.name} ended with {code}" for process, code in stopped if code != 0]
        try:
            until(lambda: not self._processes(), SETTLED_WITHIN_S, "no process is left")
        except AssertionError as error:
            problems.append(f"{error}: {self._processes()}")

    def _processes(self) -> list[tuple[int, list[str]]]:
        """All that have to do with this scene, this test aside."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    words = (path / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
                    if any(str(self.folder) in word for word in words):
                        found.append((int(path.name), words))
        return found

    def tale(self, job_id: str) -> str:
        """All that is known of a job, for whoever looks for the cause."""
        runs = [f"{line['at']:.3f} {line['event']} {line['attempt']} at {line['node']}" for line in self.journal(job_id)]
        stories = self.witness.stories if self.witness is not None else {}
        sights = [f"{at:.3f} {tuple(sight)}" for at, sight in stories[job_id].sights] if job_id in stories else []
        return f"runs {runs}, registry {sights}"

    def _summary(self) -> str:
        attempts = sum(line["event"] == "begin" for job_id in self.job_ids for line in self.journal(job_id))
        looks = f", {self.witness.looks} looks into the registry" if self.witness is not None else ""
        return (
            f"seed {self.plan.seed}: {self.plan.jobs} jobs, {len(self.calls)} calls of {self.plan.clients} clients, "
            f"{attempts} runs{looks}{self._sent()}; {self.faults_text()}"
        )

    def _sent(self) -> str:
        if not self.dispatchers:
            return ""
        sent = sum(sending.sent_bytes for gate in self._gates for sending in gate.sendings)
        return f", {sent} bytes sent for inputs of {sum(self._inputs.sizes.values())}"
