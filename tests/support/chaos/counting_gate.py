"""A gate before a dispatcher that counts what clients send, request by request.

A gate passes bytes on as they are; what it knows of HTTP is that a request begins with its method. It notes of every request for
a job whether the job's input was stored when the request began: whoever sends the bytes of a stored input uploads it twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.client.agent_processes import ListeningProcess, steady_port

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

    def __init__(self, folder: Path, books: Mapping[str, bytes]) -> None:
        self.folder = folder
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
