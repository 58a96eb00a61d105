"""Two dispatchers before the agents of a chaos, and before each of them a gate that counts what clients send, request by request.

A gate passes bytes on as they are; what it knows of HTTP is that a request begins with its method. It notes of every request for
a job whether the job's input was stored when the request began: whoever sends the bytes of a stored input uploads it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
import threading
from typing import Self

from tests.client.agent_processes import ListeningProcess, steady_port
from tests.soak.registry_scene import RegistryScene, passed

PIECE_BYTES = 64 * 1024
_begins = re.compile(rb"(?:POST /run/|PUT /inputs/|GET |HEAD |DELETE )([\w-]*)").match


class Sending:
    """One request, and how much of it was sent."""

    def __init__(self, job_id: str, *, was_stored: bool) -> None:
        self.job_id = job_id
        self.was_stored = was_stored
        self.sent_bytes = 0


class Inputs:
    """The folder that the dispatchers share, and the inputs of all jobs."""

    def __init__(self, scene: RegistryScene) -> None:
        self.folder = scene.folder / "inputs"
        books = {job_id: scene.book(job_id).read_bytes() for job_id in scene.job_ids}
        self.sizes = {job_id: len(book) for job_id, book in books.items()}
        self._hashes = {job_id: hashlib.sha256(book).hexdigest() for job_id, book in books.items()}
        self._jobs = {sha256: job_id for job_id, sha256 in self._hashes.items()}

    def job_of(self, name: str) -> str:
        """Of a job's id, or of the hash of its input; empty: neither."""
        return self._jobs.get(name) or (name if name in self.sizes else "")

    def is_stored(self, job_id: str) -> bool:
        sha256 = self._hashes[job_id]
        return (self.folder / sha256[:2] / sha256[2:]).exists()


class Gate:
    """Listens before one dispatcher, in a thread of its own."""

    def __init__(self, dispatcher: ListeningProcess, inputs: Inputs) -> None:
        host, _, port = dispatcher.url.removeprefix("http://").rpartition(":")
        self._behind = host, int(port)
        self._inputs = inputs
        self._port = steady_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.sendings: list[Sending] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"gate of {dispatcher.name}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        opening = asyncio.start_server(self._pass_on, "127.0.0.1", self._port)
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        async def close() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of both hangs up; the other one hears of it at once."""
        with contextlib.closing(writer):
            try:
                behind_reader, behind_writer = await asyncio.open_connection(*self._behind)
            except OSError:
                return
            with contextlib.closing(behind_writer):
                ways = [self._way_in(reader, behind_writer), _way(behind_reader, writer)]
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _way_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sending: Sending | None = None
        while piece := await reader.read(PIECE_BYTES):
            if (begun := _begins(piece)) is not None:
                job_id = self._inputs.job_of(begun[1].decode())
                sending = Sending(job_id, was_stored=self._inputs.is_stored(job_id)) if job_id else None
                if sending is not None:
                    self.sendings.append(sending)
            if sending is not None:
                sending.sent_bytes += len(piece)
            writer.write(piece)
            await writer.drain()


async def _way(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()


class Dispatchers:
    """East, which knows the agents' registry, and west, which does not; each behind its gate. One of them at a time is killed."""

    def __init__(self, scene: RegistryScene) -> None:
        self._scene = scene
        self.inputs = Inputs(scene)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            registry = {"TASUKI_REGISTRY": self._scene.registry}
            knowing = [("east", registry), ("west", {})]
            self.processes = [self._stack.enter_context(self._start(name, knows)) for name, knows in knowing]
            self.gates = [self._stack.enter_context(Gate(process, self.inputs)) for process in self.processes]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, name: str, registry: dict[str, str]) -> ListeningProcess:
        folder = self._scene.folder
        words = ["dispatcher", "--agents", ",".join(self._scene.urls), "--inputs", str(self.inputs.folder)]
        return ListeningProcess(words, folder / f"{name}.log", {"HOME": str(folder), **registry}, name=name, port=steady_port())

    @property
    def urls(self) -> list[str]:
        return [gate.url for gate in self.gates]

    async def trouble(self, over: asyncio.Event) -> None:
        chance = random.Random(f"{self._scene.plan.seed} dispatchers")
        while not await passed(chance.uniform(0.2, 3.0), over):
            dispatcher = chance.choice(self.processes)
            dispatcher.kill()
            self._scene.faults["dispatchers killed"] += 1
            await passed(chance.uniform(0.0, 2.0), over)
            await asyncio.to_thread(dispatcher.start_again)

    def check(self) -> str:
        """No input that was stored was sent again; what was sent, in a line."""
        sendings = [sending for gate in self.gates for sending in gate.sendings]
        whole = [sending for sending in sendings if sending.sent_bytes >= self.inputs.sizes[sending.job_id]]
        again = [(sending.job_id, sending.sent_bytes) for sending in whole if sending.was_stored]
        assert not again, f"sent though they were stored: {again}"
        sent_bytes, size_bytes = sum(sending.sent_bytes for sending in sendings), sum(self.inputs.sizes.values())
        return (
            f"inputs of {size_bytes} bytes; sent {sent_bytes} bytes in {len(sendings)} requests, "
            f"{len(whole) - len({sending.job_id for sending in whole})} inputs more than once, which had not been stored"
        )

    def end(self) -> None:
        """In order, so that nothing of them is left when the scene looks for processes."""
        codes = {process.name: process.stop(30.0) for process in self.processes}
        assert set(codes.values()) == {0}, codes
