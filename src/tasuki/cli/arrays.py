"""Arrays of jobs on the command line: an id that names one, what has become of its elements, and the wait for their ends.

Commands take the id of a job or of an array. An id that names both is the job's: the elements are reached by `--array ID`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tasuki.cli.output import Output, plain
from tasuki.client.aio import AsyncClient, AsyncJobHandle
from tasuki.core.job import TERMINAL
from tasuki.core.protocol import JobResult
from tasuki.core.subject import only_worker
from tasuki.core.units import shown_duration
from tasuki.errors import DeadlineExceeded, NotFound, TasukiError

PAGE = 1000
ASK_MAX = 1000  # ids in one request
ENDED = tuple(str(state) for state in TERMINAL)
PROGRESS_S = 0.5
RUNNING_S = 2.0  # between two counts of the jobs that run
PENDING_S = 3.0  # a job that waits longer than this has a reason that its user should know
REASONS_SHOWN = 5
REASON_SHOWN_MAX = 100  # characters
_NUMBER = re.compile(r"[.-](\d+)$", re.ASCII)  # array.7 of `submit --array`, array-7 of a task's `map`


# ---------------------------------------------------------------------------------------------------- ids


async def look_up(client: AsyncClient, ids: Sequence[str]) -> tuple[dict[str, dict[str, Any] | None], list[NotFound]]:
    """Return the job of each id, None for an array, and an error for each id that is neither. That of a single id is raised."""
    unique = list(dict.fromkeys(ids))
    with suppress(NotFound):
        views = [view for start in range(0, len(unique), ASK_MAX) for view in await _get(client, unique[start : start + ASK_MAX])]
        return {view["job_id"]: view for view in views}, []
    found: dict[str, dict[str, Any] | None] = {}
    unknown: list[NotFound] = []
    for named in unique:
        try:
            [found[named]] = await _get(client, [named])
        except NotFound as error:
            if isinstance(client, AsyncClient) and await is_array(client, named):  # node agents have none
                found[named] = None
            elif len(unique) == 1:
                raise
            else:
                unknown.append(error)
    return found, unknown


async def is_array(client: AsyncClient, named: str) -> bool:
    """Return whether there is a job of this array."""
    return bool((await client.call("find", limit=1, array_id=named))["jobs"])


async def _get(client: AsyncClient, job_ids: list[str]) -> list[dict[str, Any]]:
    views: list[dict[str, Any]] = await client.call("get", job_ids=job_ids)
    return views


async def pages(client: AsyncClient, filter: dict[str, Any]) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the jobs page by page, newest first: a job that fails again meanwhile is not met twice."""
    cursor = None
    while True:
        page = await client.call("find", limit=PAGE, cursor=cursor, **filter)
        yield page["jobs"]
        cursor = page["cursor"]
        if cursor is None:
            return


async def elements(client: AsyncClient, array_id: str, states: Sequence[str] = ()) -> list[str]:
    """Return the ids of an array's elements, of these states, by number."""
    filter = {"array_id": array_id, **({"states": list(states)} if states else {})}
    job_ids = [view["job_id"] async for page in pages(client, filter) for view in page]
    return sorted(job_ids, key=element_number)


def element_number(job_id: str) -> tuple[int, str]:
    """Return the key by which the elements of an array are sorted."""
    number = _NUMBER.search(job_id)
    return (int(number[1]) if number else 0, job_id)


# ---------------------------------------------------------------------------------------------------- what has become of them


class ArraySummary:
    """Counts of the jobs of an array by state, and of the reasons for which some did not succeed."""

    def __init__(self, array_id: str) -> None:
        self.array_id = array_id
        self.states: Counter[str] = Counter()
        self._reasons: dict[tuple[str, str], list[str]] = {}
        self._first: dict[str, str] = {}
        self.ledger: dict[str, dict[str, Any]] = {}
        """Results of a broadcast, by worker_id."""
        self._oldest = float("inf")

    @classmethod
    async def of(cls, client: AsyncClient, array_id: str, output: Output) -> ArraySummary:
        """Read all elements."""
        summary = cls(array_id)
        async for page in pages(client, {"array_id": array_id}):
            for view in page:
                summary.add_view(view)
            output.progress(f"{summary.count} jobs of {array_id}")
        return summary

    def add_view(self, view: dict[str, Any]) -> None:
        outcome = view["outcome"] or {}
        self._oldest = min(self._oldest, view["created_at"])
        if (worker_id := only_worker(view["subject"])) is not None:
            self.ledger[worker_id] = {
                "job_id": view["job_id"],
                "state": view["state"],
                "attempt": view["attempt"],
                "finished_at": view["finished_at"],
                "exit_code": outcome.get("exit_code"),
                "error_code": outcome.get("error_code"),
                "message": outcome.get("message") or "",
            }
        self._add(view["job_id"], view["state"], outcome.get("error_code"), outcome.get("message"))

    def add_result(self, ended: JobResult) -> None:
        self._add(ended.job_id, str(ended.state), ended.outcome.error_code, ended.outcome.message)

    def _add(self, job_id: str, state: str, error_code: str | None, message: str | None) -> None:
        self.states[state] += 1
        self._first[state] = min(self._first.get(state, job_id), job_id, key=element_number)
        if state in ENDED and state != "SUCCEEDED":
            words = ": ".join(word for word in (error_code, (message or "").partition("\n")[0]) if word)
            self._reasons.setdefault((state, words[:REASON_SHOWN_MAX]), []).append(job_id)

    @property
    def count(self) -> int:
        return self.states.total()

    @property
    def ended(self) -> int:
        return sum(self.states[state] for state in ENDED)

    @property
    def unsuccessful(self) -> int:
        return self.ended - self.states["SUCCEEDED"]

    def examples(self) -> dict[str, str]:
        """Return an element of each state but SUCCEEDED."""
        return {state: job_id for state, job_id in sorted(self._first.items()) if state != "SUCCEEDED"}

    def view(self) -> dict[str, Any]:
        """Return the array for programs."""
        reasons = [
            {"state": state, "reason": words, "count": len(job_ids), "example": min(job_ids, key=element_number)}
            for (state, words), job_ids in self._by_number()
        ]
        left_s = self._left_s()
        facts = {"array_id": self.array_id, "count": self.count, "states": dict(sorted(self.states.items()))}
        ledger = {"ledger": dict(sorted(self.ledger.items()))} if self.ledger else {}
        return {**facts, "left_s": None if left_s is None else round(left_s, 1), "reasons": reasons, **ledger}

    def lines(self) -> Iterator[str]:
        """Yield the array for people: its states, the time that is left, the reasons."""
        shown = ", ".join(f"{number} {state}" for state, number in sorted(self.states.items()))
        if self.ledger:
            yield f"{self.array_id}  broadcast to {self.count} workers: {shown}"
            for worker_id, did in sorted(self.ledger.items()):
                why = ": ".join(word for word in (did["error_code"], did["message"].partition("\n")[0]) if word)
                yield f"  {worker_id}  {did['state']}{'  ' + plain(why)[:REASON_SHOWN_MAX] if why else ''}"
            return
        yield f"{self.array_id}  array of {self.count} jobs: {shown}"
        if (left_s := self._left_s()) is not None:
            yield f"  about {shown_duration(left_s)} left at the pace so far"
        yield from self.reason_lines()

    def reason_lines(self) -> Iterator[str]:
        """Yield the reasons for which jobs did not succeed, the most frequent first."""
        reasons = self._by_number()
        for (state, words), job_ids in reasons[:REASONS_SHOWN]:
            first = min(job_ids, key=element_number)
            yield f"  {len(job_ids)} {state}: {plain(words)}  (as {first}; see: tasuki logs {first})"
        if len(reasons) > REASONS_SHOWN:
            yield f"  and {len(reasons) - REASONS_SHOWN} other reasons: tasuki list --array {self.array_id} --state FAILED"

    def _by_number(self) -> list[tuple[tuple[str, str], list[str]]]:
        return sorted(self._reasons.items(), key=lambda reason: -len(reason[1]))

    def _left_s(self) -> float | None:
        left, took_s = self.count - self.ended, time.time() - self._oldest
        return took_s / self.ended * left if left and self.ended and took_s > 0 else None


# ---------------------------------------------------------------------------------------------------- the wait


async def wait_all(
    client: AsyncClient,
    handles: Sequence[AsyncJobHandle[bytes]],
    output: Output,
    *,
    array_id: str | None = None,
    timeout: float | None = None,
    ended_before: int = 0,
) -> list[JobResult]:
    """Wait for all jobs, and return how they ended; DeadlineExceeded after `timeout` seconds. `array_id`: that of all of them.

    `ended_before` of them had ended before, and say nothing about the pace.
    """
    alone = timeout if len(handles) == 1 else None  # its end is explained; thousands would all ask the server
    ends = [asyncio.ensure_future(handle.outcome(alone)) for handle in handles]
    began, last_look, running, failed = time.monotonic(), 0.0, 0, 0
    ended_before = max(ended_before, sum(handle.done for handle in handles))
    notice = connection_notice(client, output)
    try:
        pending = set(ends)
        with explaining_pending(client, lambda: next((each.job_id for each in handles if not each.done), None), output):
            while pending:
                now = time.monotonic()
                left_s = began + timeout - now if timeout is not None and alone is None else PROGRESS_S
                if left_s <= 0:
                    late = f"{len(pending)} of {len(ends)} jobs have not ended within {shown_duration(timeout or 0.0)}"
                    raise DeadlineExceeded(f"{late}; they go on")
                if array_id is not None and output.shows_progress and now - last_look > RUNNING_S and client.connected:
                    last_look = now
                    page = await client.call("find", states=["RUNNING"], array_id=array_id, limit=PAGE)
                    running = len(page["jobs"])
                output.progress(_progress(len(ends) - len(pending), len(ends), failed, running, now - began, ended_before))
                look_s = min(PROGRESS_S, left_s)
                ended, pending = await asyncio.wait(pending, timeout=look_s, return_when=asyncio.FIRST_EXCEPTION)
                failed += sum(end.result().state != "SUCCEEDED" for end in ended)  # or raises what cannot be waited for
                notice()
        return [end.result() for end in ends]
    finally:
        for end in ends:
            end.cancel()


def _progress(ended: int, count: int, failed: int, running: int, took_s: float, ended_before: int = 0) -> str:
    here = ended - ended_before
    parts = [f"{ended} of {count} jobs have ended"]
    parts += [f"{failed} of them without success"] if failed else []
    parts += [f"{running}{'+' if running == PAGE else ''} running"] if running else []
    parts += [f"about {shown_duration(took_s / here * (count - ended))} left"] if here > 0 else []
    return ", ".join(parts)


@contextmanager
def explaining_pending(client: AsyncClient, waited_for: Callable[[], str | None], output: Output) -> Iterator[None]:
    """Hint once why a job still waits for a worker; `waited_for` returns the id of a job that has not ended."""

    async def explain() -> None:
        await asyncio.sleep(PENDING_S)
        job_id = waited_for()
        if job_id is None or output.json or output.quiet:
            return
        with suppress(TasukiError):  # only a hint: a user who may not ask why still gets the result
            explanation = await client.explain(job_id)
            if explanation.state == "PENDING" and explanation.because:
                output.hint(f"job {job_id} is PENDING: {explanation.because[0]}")

    task = asyncio.ensure_future(explain())
    try:
        yield
    finally:
        task.cancel()


def connection_notice(client: AsyncClient, output: Output) -> Callable[[], None]:
    """Return a function that hints, the first time that it finds the client not connected."""
    given = False

    def notice() -> None:
        nonlocal given
        if not client.connected and not given:
            given = True
            output.hint("connection lost; trying again …")

    return notice
