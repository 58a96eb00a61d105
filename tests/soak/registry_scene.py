"""The chaos harness for node agents that share a registry: agents are killed, frozen and stopped while clients ask for jobs.

    with RegistryScene(Plan(seed=1), folder, "redis://…") as scene:
        calls = scene.storm(scene.urls)
        print(scene.check(calls))

Several clients ask for every job, at about the same time. What must hold at the end, whatever happened: every call has the right
result; all calls of a job have the same bytes, from one run that came to its end; no two runs of a job lived at one moment, as
the programs themselves saw (exclusive_program.py), nor a run after the registry had given its job away (registry_witness.py); and
nothing is left behind: no marker of a run, no note of a claim, no lease, no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.core.failover.nodes import BreakerRules
from tasuki.core.lifecycle import LEASE_MARGIN_S
from tests.client.agent_processes import ListeningProcess, steady_port
from tests.soak.registry_witness import Witness
from tests.support.waiting import until

PROGRAM = Path(__file__).with_name("exclusive_program.py")
FAULTS = ("kill", "kill for long", "freeze", "freeze for long", "freeze for long", "freeze and kill", "stop")
NAMES = ("one", "two", "three")
SETTLED_WITHIN_S = 30.0
QUICK = BreakerRules(left_out_s=1.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything."""

    seed: int
    jobs: int = 200
    clients: int = 8
    callers: int = 3
    """How many of the clients ask for each job."""
    at_once: int = 3
    """Calls of one client."""
    slots: int = 4
    lease_ttl_s: float = 1.5
    seconds: tuple[float, float] = (0.05, 1.0)
    """How long a program runs."""
    long: int = 9
    """Of every so many jobs, one runs for much longer than a lease lasts, at its first attempt: it must be stopped where that is
    lost."""
    filling_bytes: tuple[int, ...] = (10, 10, 200_000)
    """Of a result: some do not go into the registry itself."""
    padding_bytes: int = 0
    """Of an input."""
    gap_s: tuple[float, float] = (1.0, 6.0)
    """Between two faults of one agent."""
    ends_within_s: float = 600.0

    @property
    def over_s(self) -> float:
        """After so long without a word, a lease is over."""
        return self.lease_ttl_s + LEASE_MARGIN_S

    @property
    def long_s(self) -> float:
        """For somebody else to notice that a lease is over, and to run its job."""
        return self.over_s + 4.0


class Call(NamedTuple):
    """What a client was given."""

    job_id: str
    client: int
    result: Path


class RegistryScene:
    """Three agents with a registry, in one folder."""

    def __init__(self, plan: Plan, folder: Path, registry: str, *arguments: str) -> None:
        self.plan, self.folder, self.registry = plan, folder, registry
        self._arguments = arguments
        self.faults: Counter[str] = Counter()
        self.job_ids = [f"job-{number}" for number in range(plan.jobs)]
        self.agents: list[ListeningProcess] = []
        self._stack = contextlib.ExitStack()

    # ------------------------------------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        for name in ("journal", "locks", "books", "results"):
            (self.folder / name).mkdir()
        chance = random.Random(self.plan.seed)
        for number, job_id in enumerate(self.job_ids):
            seconds = chance.uniform(*self.plan.seconds)
            is_long = number % self.plan.long == 0
            order = {
                "row": number,
                "seconds": seconds,
                "first_seconds": self.plan.long_s + seconds if is_long else seconds,
                "filling_bytes": chance.choice(self.plan.filling_bytes),
                "padding": "x" * self.plan.padding_bytes,
            }
            self.book(job_id).write_text(json.dumps(order))
        try:
            with futures.ThreadPoolExecutor(len(NAMES)) as pool:
                for agent in [pool.submit(self._start_agent, name) for name in NAMES]:
                    self.agents.append(self._stack.enter_context(agent.result()))
            self.witness = self._stack.enter_context(Witness(self.registry, self.job_ids))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start_agent(self, name: str) -> ListeningProcess:
        program = f"pricer={sys.executable} {PROGRAM} {{file}} {self.folder} {name}"
        words = ["agent", "--data", str(self.folder / name), "--slots", str(self.plan.slots), "--exec", program]
        words += ["--node", name, "--lease-ttl", str(self.plan.lease_ttl_s), *self._arguments]
        env = {"HOME": str(self.folder), "TASUKI_REGISTRY": self.registry}
        return ListeningProcess(words, self.folder / f"{name}.log", env, name=name, port=steady_port())

    @property
    def urls(self) -> list[str]:
        return [agent.url for agent in self.agents]

    def book(self, job_id: str) -> Path:
        return self.folder / "books" / f"{job_id}.json"

    # ------------------------------------------------------------------------------------------------ the storm

    def storm(self, urls: Sequence[str], also: Sequence[Callable[[asyncio.Event], Coroutine[Any, Any, None]]] = ()) -> list[Call]:
        """All calls, under faults of the agents and of whatever `also` brings, until the last call has its result."""

        async def main() -> list[Call]:
            over = asyncio.Event()
            chances = [random.Random(f"{self.plan.seed} {agent.name}") for agent in self.agents]
            troubles = [self._trouble(agent, chance, over) for agent, chance in zip(self.agents, chances, strict=True)]
            tasks = [asyncio.create_task(work) for work in (*troubles, *(bring(over) for bring in also))]
            try:
                async with asyncio.timeout(self.plan.ends_within_s):
                    told = await asyncio.gather(*(self._client(number, urls) for number in range(self.plan.clients)))
            finally:
                over.set()
                await asyncio.gather(*tasks)
            return [call for calls in told for call in calls]

        return asyncio.run(main())

    async def _client(self, number: int, urls: Sequence[str]) -> list[Call]:
        """Its share of the jobs, a few at a time, in the order in which the others ask for them too."""
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
        async with AsyncAgentsClient(urls, token="", rules=QUICK) as client:
            return await asyncio.gather(*(call(client, job_id) for job_id in wanted))

    async def _trouble(self, agent: ListeningProcess, chance: random.Random, over: asyncio.Event) -> None:
        """One fault after the other, until it is over; the agent is well then."""
        deck: list[str] = []
        while not await passed(chance.uniform(*self.plan.gap_s), over):
            deck = deck or chance.sample(FAULTS, len(FAULTS))
            match deck.pop():
                case "kill":
                    agent.kill()
                    self.faults["agents killed"] += 1
                case "kill for long":
                    agent.kill()
                    self.faults["agents killed for longer than their lease"] += 1
                    await passed(chance.uniform(self.plan.over_s, self.plan.long_s), over)
                case "freeze":
                    await frozen(agent, chance.uniform(0.1, self.plan.lease_ttl_s), over)
                    self.faults["agents frozen"] += 1
                case "freeze for long":
                    await frozen(agent, chance.uniform(self.plan.over_s, self.plan.long_s), over)
                    self.faults["agents frozen for longer than their lease"] += 1
                case "freeze and kill":
                    await frozen(agent, chance.uniform(0.1, self.plan.long_s), over, then=agent.kill)
                    self.faults["agents killed while frozen"] += 1
                case "stop":
                    await asyncio.to_thread(agent.stop, 30.0)
                    self.faults["agents stopped in order"] += 1
            if not agent.running:
                await asyncio.to_thread(agent.start_again)

    # ------------------------------------------------------------------------------------------------ the check

    def check(self, calls: Sequence[Call]) -> str:
        """AssertionError with all that does not hold; else what happened, in a line."""
        problems = [] if self.witness.leave() else ["the witness did not look to the end"]
        problems += [*self._wrong_results(calls), *self._runs_at_once()]
        self._settle(problems)
        self.witness.look()
        for job_id, story in self.witness.stories.items():
            problems += [f"{job_id}: {problem}" for problem in story.problems()]
            if not story.done:
                problems.append(f"{job_id}: in the registry it is not done; {self.tale(job_id)}")
        problems += self._other_bytes(calls)
        self._end(problems)
        assert not problems, "\n".join(problems)
        return self._summary(calls)

    def journal(self, job_id: str) -> list[dict[str, Any]]:
        path = self.folder / "journal" / job_id
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _wrong_results(self, calls: Sequence[Call]) -> Iterator[str]:
        """Each result is whole, of its own job, and of one run that came to its end; all of a job are the same."""
        if len(calls) != self.plan.jobs * self.plan.callers:
            yield f"{len(calls)} calls were answered of {self.plan.jobs * self.plan.callers}"
        bytes_of: dict[str, set[bytes]] = {}
        for call in calls:
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

    def _runs_at_once(self) -> Iterator[str]:
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
                if said := self.witness.stories[job_id].speaks_against(line["at"], line["attempt"], line["node"]):
                    yield f"{job_id}: a run without its lease: {line}, {said}; {self.tale(job_id)}"

    def _other_bytes(self, calls: Sequence[Call]) -> Iterator[str]:
        """What clients were given is what every node gives now."""
        given = {call.job_id: call.result for call in calls}
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
        """What is still under way, or was left behind, at agents that run."""
        found = [str(path) for name in NAMES for path in (self.folder / name / "jobs").glob("*/.running")]
        for name in NAMES:
            for part in ("claims", "incoming", "trash"):
                found += map(str, (self.folder / name / part).iterdir())
        return found + [f"process {pid}: {words}" for pid, words in self._processes() if words[1:2] == [str(PROGRAM)]]

    def _end(self, problems: list[str]) -> None:
        """Stopped in order, agents leave no process."""
        problems += [f"{agent.name} ended with {code}" for agent in self.agents if (code := agent.stop(30.0)) != 0]
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
        sights = [f"{at:.3f} {tuple(sight)}" for at, sight in self.witness.stories[job_id].sights]
        return f"runs {runs}, registry {sights}"

    def _summary(self, calls: Sequence[Call]) -> str:
        attempts = sum(line["event"] == "begin" for job_id in self.job_ids for line in self.journal(job_id))
        told = ", ".join(f"{count} {what}" for what, count in sorted(self.faults.items()))
        return (
            f"seed {self.plan.seed}: {self.plan.jobs} jobs, {len(calls)} calls of {self.plan.clients} clients, {attempts} runs, "
            f"{self.witness.looks} looks into the registry; {told}"
        )


async def passed(seconds: float, over: asyncio.Event) -> bool:
    """Wait; whether it is over meanwhile."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await over.wait()
    return over.is_set()


async def frozen(agent: ListeningProcess, seconds: float, over: asyncio.Event, then: Callable[[], None] = lambda: None) -> None:
    agent.signal(signal.SIGSTOP)
    try:
        await passed(seconds, over)
        then()
    finally:
        with contextlib.suppress(ProcessLookupError):
            agent.signal(signal.SIGCONT)
