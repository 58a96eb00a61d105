"""Jobs on node agents, without a server: one async client, and a thin blocking face.

    async with AsyncAgentsClient("agents:http://n1:7090,http://n2:7090", token_file="token") as client:
        ended = await client.run("pricer", ["--fast"], files=["book.csv"], output="result.zip")

All runs of a client share what is known of the nodes. Nothing here needs Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tasuki.client.agents.node import AgentNode
from tasuki.client.agents.run import AgentResult, AgentRun, RunProgress
from tasuki.client.agents.transfer import NotOurs, Refusing, read_upload
from tasuki.client.sync import LoopThread
from tasuki.clocks import now
from tasuki.config import find_token, parse_agents
from tasuki.core.failover.events import LIMIT_S, LONGER_THAN_THE_JOB_S, PATIENCE_S, SILENT_S, FailoverJob, TimePassed, not_trusted
from tasuki.core.failover.nodes import DEFAULT_RULES, BreakerNote, BreakerRules, Nodes, Ranked
from tasuki.core.ids import IdMaker, check_job_id
from tasuki.errors import InvalidInput, TasukiError, UntrustedCertificate
from tasuki.event_loop import BackgroundTasks
from tasuki.net.tls import client_tls

# ----------------------------------------------------------------------------------------------------
# Breakers between the calls of a command line: a small file in the data folder, with what each node did last.

NAME = "agents.json"
NODES_MAX = 1000
FORGET_S = 24 * 3600.0  # a node that nobody asked for so long starts anew
LOCK_S = 0.2
LOCK_STALE_S = 5.0  # whoever holds it longer has died
POLL_S = 0.01


class _Line(msgspec.Struct, omit_defaults=True):
    note: BreakerNote
    at: float
    """When it was written, in Unix time; the note's own times count from there."""


class _BreakerFile(msgspec.Struct):
    nodes: dict[str, _Line] = {}


class BreakerNotes:
    """The file in one data folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = folder / f"{NAME}.lock"

    def read(self) -> dict[str, BreakerNote]:
        """What was written, with its times counted from now."""
        now = time.time()
        found = {}
        for node, line in self._load().nodes.items():
            age_s = max(0.0, now - line.at)
            left_out_s = None if line.note.left_out_s is None else line.note.left_out_s - age_s
            if age_s < FORGET_S:
                found[node] = msgspec.structs.replace(line.note, left_out_s=left_out_s)
        return found

    def write(self, notes: Mapping[str, BreakerNote | None]) -> bool:
        """Replace what is known of these nodes, None: forget it; whether that was possible."""
        try:
            if not any(notes.values()) and not self._path.exists():
                return True
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked() as locked:
                if locked:
                    self._replace(notes)
                return locked
        except OSError:
            return False

    def _replace(self, notes: Mapping[str, BreakerNote | None]) -> None:
        now = time.time()
        file = self._load()
        for node, note in notes.items():
            file.nodes.pop(node, None)
            if note is not None:
                file.nodes[node] = _Line(note, now)
        latest = sorted(file.nodes.items(), key=lambda item: item[1].at)[-NODES_MAX:]
        fresh = {node: line for node, line in latest if now - line.at < FORGET_S}
        temporary = self._path.with_name(f"{NAME}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(msgspec.json.encode(_BreakerFile(fresh)))
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self) -> _BreakerFile:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_BreakerFile)
        except (OSError, msgspec.DecodeError):  # none, or another version's
            return _BreakerFile()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the lock was got in time."""
        deadline = time.monotonic() + LOCK_S
        while not self._take_lock():
            if time.monotonic() >= deadline:
                yield False
                return
            time.sleep(POLL_S)
        try:
            yield True
        finally:
            self._lock.unlink(missing_ok=True)

    def _take_lock(self) -> bool:
        try:
            os.close(os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # given back just now
                if time.time() - self._lock.stat().st_mtime > LOCK_STALE_S:
                    self._lock.unlink(missing_ok=True)
            return False
        return True


__all__ = ["AgentResult", "AgentsClient", "AsyncAgentsClient", "RunProgress"]

log = logging.getLogger(__name__)
REMOVED, NOT_KNOWN, STOPPING = "removed", "not known", "stopping"


class AsyncAgentsClient:
    """Runs jobs on whichever of several node agents is well. Safe for many runs at once.

    `agents` are addresses, or one text as `--to` takes it. `notes` is a folder in which breakers are remembered; without one they
    last as long as the client.
    """

    def __init__(
        self,
        agents: str | Sequence[str],
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        tls_ca: str | None = None,
        rules: BreakerRules = DEFAULT_RULES,
        notes: Path | None = None,
    ) -> None:
        addresses = parse_agents(agents if isinstance(agents, str) else ",".join(agents))
        secret = find_token(token_file) if token is None else token
        tls = client_tls(tls_ca)
        self._agents = {str(address): AgentNode(address, secret, tls, proxies=True) for address in addresses}
        self.nodes = Nodes(list(self._agents), random.random, rules)
        self._notes = BreakerNotes(notes) if notes is not None else None
        self._make_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
        self._looks = BackgroundTasks()
        self._removals = BackgroundTasks()
        self._runs: set[AgentRun] = set()

    async def __aenter__(self) -> Self:
        if self._notes is not None:
            self.nodes.recall(await asyncio.to_thread(self._notes.read), now().monotonic)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave. Jobs go on; what was to be removed is removed first, which takes a moment where a node does not answer."""
        self._looks.cancel()
        await self._looks.wait()
        await self._removals.wait()
        if self._notes is not None:
            await asyncio.to_thread(self._notes.write, self.nodes.notes(now().monotonic))
        await asyncio.gather(*(agent.close() for agent in self._agents.values()))

    def new_id(self) -> str:
        return self._make_id()

    # ------------------------------------------------------------------------------------------------ jobs

    async def run(
        self,
        exec: str,
        args: Sequence[str] = (),
        *,
        files: Sequence[str | os.PathLike[str]],
        output: str | os.PathLike[str],
        job_id: str | None = None,
        known: bool | None = None,
        timeout_s: float | None = None,
        limit_s: float | None = None,
        hedge_s: float | None = None,
        patience_s: float = PATIENCE_S,
        silent_s: float = SILENT_S,
        on_progress: Callable[[RunProgress], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> AgentResult:
        """Run one job, wherever that works, and save its ZIP as `output`.

        With a `job_id` of your own, asking again gives the stored result or goes on with the run that is under way. `timeout_s`
        limits the program, `limit_s` all of it (21 minutes, or a minute more than `timeout_s` if that is longer). A canceled call
        leaves the job alone. `known=False` is for an id that was made just now: no node is asked for it first.
        """
        target = Path(output)
        if not target.parent.is_dir():
            raise InvalidInput(f"the folder of {str(target)!r} does not exist; make it first, or choose another file")
        if target.exists() and not target.is_file():  # it would be replaced, device or not
            raise InvalidInput(f"the output {str(target)!r} is no file; choose one that is, or one that does not exist yet")
        if limit_s is None:
            limit_s = max(LIMIT_S, (timeout_s or 0.0) + LONGER_THAN_THE_JOB_S)
        chosen = check_job_id(job_id) if job_id else self.new_id()
        upload = await asyncio.to_thread(read_upload, exec, args, files, timeout_s)
        if known is None:
            known = job_id is not None
        job = FailoverJob(chosen, upload.input, known, limit_s, hedge_s, patience_s, silent_s)
        run = AgentRun(self, job, upload, target, on_progress, on_note)
        self._runs.add(run)
        try:
            return await run.drive()
        finally:
            self._runs.discard(run)

    async def cancel(self, job_id: str) -> dict[str, str]:
        """Stop and remove a job at all nodes; what each answered: `removed`, `not known`, `stopping`, or what went wrong."""
        check_job_id(job_id)
        answers = await asyncio.gather(*(self._stop(agent, job_id) for agent in self._agents.values()))
        return dict(zip(self._agents, answers, strict=True))

    async def _stop(self, agent: AgentNode, job_id: str) -> str:
        """A node answers when the program has ended, and kills one that does not end at once. Who can be asked has heard it."""
        answer = await self._remove(agent, job_id)
        if answer in (REMOVED, NOT_KNOWN):
            return answer
        try:
            view = await agent.ask(job_id)
        except (TasukiError, Refusing):
            return answer
        return REMOVED if view is None else STOPPING if view.says.state == "running" else answer

    async def _remove(self, agent: AgentNode, job_id: str, *, only_running: bool = False) -> str:
        try:
            return REMOVED if await agent.remove(job_id, only_running=only_running) else NOT_KNOWN
        except (TasukiError, Refusing) as error:
            log.info("job %s: %s: not removed: %s", job_id, agent.name, error, extra={"job_id": job_id})
            return str(error)

    def remove_soon(self, node: str, job_id: str) -> None:
        """If it runs there; nobody waits for the answer. A result stays: through a dispatcher it may be the very one we got."""

        async def removing() -> None:
            await self._remove(self._agents[node], job_id, only_running=True)

        self._removals.spawn(removing())

    # ------------------------------------------------------------------------------------------------ nodes

    def agent(self, node: str) -> AgentNode:
        return self._agents[node]

    async def ranking(self) -> list[Ranked]:
        """Look at all nodes; the best first. A node that does not answer takes 2 s."""
        looks = [self.look(node) for node in self.nodes.to_look_at(now().monotonic, 0.0)]
        if looks:
            await asyncio.wait(looks)
        return self.nodes.ranking(now().monotonic)

    def look(self, node: str) -> asyncio.Task[None]:
        """Ask for health and capacity; all runs hear when it is known."""
        return self._looks.spawn(self._look(node))

    async def _look(self, node: str) -> None:
        try:
            capacity = await self._agents[node].look()
            self.nodes.seen(node, capacity, now().monotonic)
        except NotOurs as error:
            self.nodes.refused(node, error.refusal, now().monotonic)
        except UntrustedCertificate as error:
            self.nodes.refused(node, not_trusted(error.message), now().monotonic)
        except (TasukiError, Refusing) as error:
            self.nodes.unwell(node, str(error), now().monotonic)
        except Exception as error:  # a defect must not leave the node "being asked" for ever
            log.exception("%s could not be looked at", node)
            self.nodes.unwell(node, f"could not be looked at: {error!r}", now().monotonic)
        for run in list(self._runs):
            run.hear(TimePassed())


class AgentsClient:
    """Blocking client: takes what AsyncAgentsClient takes, and gives the same answers. Safe to share between threads."""

    def __init__(self, agents: str | Sequence[str], **options: Any) -> None:
        self._async = AsyncAgentsClient(agents, **options)
        self._thread = LoopThread("tasuki-agents-client", self._async.__aenter__())

    def run(self, exec: str, args: Sequence[str] = (), **options: Any) -> AgentResult:
        """As AsyncAgentsClient.run. Callbacks are called from the client's own thread."""
        return self._thread.wait(self._async.run(exec, args, **options))

    def cancel(self, job_id: str) -> dict[str, str]:
        return self._thread.wait(self._async.cancel(job_id))

    def ranking(self) -> list[Ranked]:
        return self._thread.wait(self._async.ranking())

    def close(self) -> None:
        """Leave. Jobs go on; whoever waits for one hears that the client was closed."""
        self._thread.close(self._async.close(), cancel=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
