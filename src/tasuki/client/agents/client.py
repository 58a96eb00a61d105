"""Clients that run jobs on node agents, without a server: one asynchronous, and a thin blocking one.

    async with AsyncAgentsClient("agents:http://n1:7090,http://n2:7090", token_file="token") as client:
        ended = await client.run("pricer", ["--fast"], files=["book.csv"], output="result.zip")

All runs of a client share the health and the breakers of the nodes. A command lives for seconds and would try a dead node again
each time; so the breakers are also kept in a file of the data folder. Nothing here needs Linux.
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
from tasuki.client.agents.run import AgentResult, AgentRun
from tasuki.client.agents.transfer import NodeRefused, RunProgress, read_upload
from tasuki.client.sync import LoopThread
from tasuki.clocks import now
from tasuki.config import find_token, own_agent_token
from tasuki.core.address import parse_agents
from tasuki.core.decoding import decodable
from tasuki.core.failover.events import LIMIT_S, LONGER_THAN_THE_JOB_S, PATIENCE_S, SILENT_S, FailoverJob, TimePassed
from tasuki.core.failover.nodes import DEFAULT_RULES, BreakerNote, BreakerRules, Nodes, Ranked
from tasuki.core.job import IdMaker, check_job_id
from tasuki.errors import InvalidInput, TasukiError
from tasuki.event_loop import BackgroundTasks
from tasuki.net.tls import client_tls

__all__ = ["AgentResult", "AgentsClient", "AsyncAgentsClient", "RunProgress"]

log = logging.getLogger(__name__)
REMOVED, NOT_KNOWN, STOPPING = "removed", "not known", "stopping"

# ------------------------------------------------------------------------------------------------ the file of breakers

NAME = "agents.json"
NODES_MAX = 1000
FORGET_S = 24 * 3600.0  # a node that was not used for so long starts anew
LOCK_S = 0.2
LOCK_STALE_S = 5.0  # a process that holds the lock longer has died
POLL_S = 0.01


class _Entry(msgspec.Struct, omit_defaults=True):
    note: BreakerNote
    at: float
    """Unix time at which the note was written; the times in the note count from there."""


@decodable
class _BreakerNotes(msgspec.Struct):
    nodes: dict[str, _Entry] = {}


class BreakerFile:
    """File with the breakers of one data folder. Best effort: a file that cannot be read, written or locked is treated as absent.

    Writers take turns by a lock file, which works on every system, and each changes only the nodes that it uses.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = folder / f"{NAME}.lock"

    def read(self) -> dict[str, BreakerNote]:
        """Return the notes, with their times counted from now."""
        wall = time.time()
        found = {}
        for node, entry in self._load().nodes.items():
            age_s = max(0.0, wall - entry.at)
            left_out_s = None if entry.note.left_out_s is None else entry.note.left_out_s - age_s
            if age_s < FORGET_S:
                found[node] = msgspec.structs.replace(entry.note, left_out_s=left_out_s)
        return found

    def write(self, notes: Mapping[str, BreakerNote | None]) -> bool:
        """Replace the notes of these nodes, None: remove the note; return whether that was possible."""
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
        wall = time.time()
        file = self._load()
        for node, note in notes.items():
            file.nodes.pop(node, None)
            if note is not None:
                file.nodes[node] = _Entry(note, wall)
        latest = sorted(file.nodes.items(), key=lambda item: item[1].at)[-NODES_MAX:]
        fresh = {node: entry for node, entry in latest if wall - entry.at < FORGET_S}
        temporary = self._path.with_name(f"{NAME}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(msgspec.json.encode(_BreakerNotes(fresh)))
            temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _load(self) -> _BreakerNotes:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_BreakerNotes)
        except (OSError, msgspec.DecodeError):  # none, or of another version
            return _BreakerNotes()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Take the lock; yield whether that was possible in time."""
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
            with contextlib.suppress(FileNotFoundError):  # it was released just now
                if time.time() - self._lock.stat().st_mtime > LOCK_STALE_S:
                    self._lock.unlink(missing_ok=True)
            return False
        return True


# ------------------------------------------------------------------------------------------------ the clients


class AsyncAgentsClient:
    """Client that runs each job on a healthy one of several node agents. Safe for many runs at once.

    `agents` are addresses, or one text as `--to` takes it. `notes` is a folder in which breakers are kept; without one they end
    with the client.
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
        if token is None:
            token = find_token(token_file) or own_agent_token(addresses)
        tls = client_tls(tls_ca)
        self.agents = {str(address): AgentNode(address, token, tls, proxies=True) for address in addresses}
        self.nodes = Nodes(list(self.agents), random.random, rules)
        self._notes = BreakerFile(notes) if notes is not None else None
        self._make_id = IdMaker(lambda: time.time_ns() // 1_000_000, os.urandom)
        self._checks = BackgroundTasks()
        self._removals = BackgroundTasks()
        self._runs: set[AgentRun] = set()

    async def __aenter__(self) -> Self:
        if self._notes is not None:
            self.nodes.recall(await asyncio.to_thread(self._notes.read), now().monotonic)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client. Jobs continue; removals that are under way are finished first."""
        self._checks.cancel()
        await self._checks.wait()
        await self._removals.wait()
        if self._notes is not None:
            await asyncio.to_thread(self._notes.write, self.nodes.notes(now().monotonic))
        await asyncio.gather(*(agent.close() for agent in self.agents.values()))

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
        """Run one job on any node, and save its ZIP as `output`.

        A repeated call with the same `job_id` returns the stored result, or waits for the run that is under way. `timeout_s`
        limits the program, `limit_s` the whole call (21 minutes, or a minute more than `timeout_s` if that is longer). Canceling
        the call does not cancel the job. `known=False`: the id was made just now, and no node is asked for it first.
        """
        target = Path(output)
        if not target.parent.is_dir():
            raise InvalidInput(f"the folder of {str(target)!r} does not exist; make it first, or choose another file")
        if target.exists() and not target.is_file():  # a device would be replaced
            raise InvalidInput(f"the output {str(target)!r} is not a file; choose a file, or a path that does not exist yet")
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
        """Stop and remove a job at all nodes; return by node `removed`, `not known`, `stopping`, or the problem."""
        check_job_id(job_id)
        answers = await asyncio.gather(*(self._stop(agent, job_id) for agent in self.agents.values()))
        return dict(zip(self.agents, answers, strict=True))

    async def _stop(self, agent: AgentNode, job_id: str) -> str:
        """Remove a job. A node answers when the program has ended, which may take longer than the wait for its answer."""
        answer = await self._remove(agent, job_id)
        if answer in (REMOVED, NOT_KNOWN):
            return answer
        try:
            view = await agent.ask(job_id)
        except (TasukiError, NodeRefused):
            return answer
        return REMOVED if view is None else STOPPING if view.status.state == "running" else answer

    async def _remove(self, agent: AgentNode, job_id: str, *, only_running: bool = False) -> str:
        try:
            return REMOVED if await agent.remove(job_id, only_running=only_running) else NOT_KNOWN
        except (TasukiError, NodeRefused) as error:
            log.info("job %s: %s: not removed: %s", job_id, agent.name, error, extra={"job_id": job_id})
            return str(error)

    def remove_soon(self, node: str, job_id: str) -> None:
        """Cancel a job that still runs at a node, in the background. A result stays: it may be the one that was returned."""

        async def removing() -> None:
            await self._remove(self.agents[node], job_id, only_running=True)

        self._removals.spawn(removing())

    # ------------------------------------------------------------------------------------------------ nodes

    async def ranking(self) -> list[Ranked]:
        """Check all nodes, and return them with the best first. A node that does not answer takes 2 s."""
        checks = [self.check(node) for node in self.nodes.to_look_at(now().monotonic, 0.0)]
        if checks:
            await asyncio.wait(checks)
        return self.nodes.ranking(now().monotonic)

    def check(self, node: str) -> asyncio.Task[None]:
        """Ask a node for health and capacity, and notify all runs of the answer."""
        return self._checks.spawn(self._check(node))

    async def _check(self, node: str) -> None:
        await self.agents[node].check(self.nodes, token_matters=True)
        for run in list(self._runs):
            run.notify(TimePassed())


class AgentsClient:
    """Blocking client with the arguments and results of AsyncAgentsClient. Safe to share between threads."""

    def __init__(self, agents: str | Sequence[str], **options: Any) -> None:
        self._async = AsyncAgentsClient(agents, **options)
        self._thread = LoopThread("tasuki-agents-client", self._async.__aenter__(), self._async.close)

    def run(self, exec: str, args: Sequence[str] = (), **options: Any) -> AgentResult:
        """Run one job; see AsyncAgentsClient.run. Callbacks are called in the client's own thread."""
        return self._thread.wait(self._async.run(exec, args, **options))

    def cancel(self, job_id: str) -> dict[str, str]:
        return self._thread.wait(self._async.cancel(job_id))

    def ranking(self) -> list[Ranked]:
        return self._thread.wait(self._async.ranking())

    def close(self) -> None:
        """Close the client. Jobs continue; a call that waits for one raises."""
        self._thread.close(cancel=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
