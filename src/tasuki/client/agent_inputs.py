"""Files that a dispatcher has already: asked for by their hashes, so that only what is missing is sent. Reads these files.

The files of a job have an order, which a form keeps among those that it brings and among those that it names. So it brings all,
or names all, and what is missing is stored before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import msgspec

from tasuki.client.agent_answers import Refusing, refusal_of
from tasuki.client.agent_upload import Telling, Upload, pieces_of
from tasuki.core.failover.agent_protocol import InputRecord
from tasuki.core.failover.events import Refusal
from tasuki.core.ranges import content_range
from tasuki.net.http.transport import HttpTransport

LARGE_BYTES = 1024 * 1024  # what is smaller is sent sooner than asked for
RESUMED_BYTES = 16 * 1024 * 1024
"""From this size on a file is stored before the job is sent: what was cut off goes on then, also through another dispatcher."""
HEAD_S = 5.0
HEADS_AT_ONCE = 8


async def found_inputs(transport: HttpTransport, upload: Upload, from_bytes: int) -> set[str]:
    """The hashes of those files, of this size or larger, that are stored. A store that cannot say has none. Unavailable."""
    turn = asyncio.Semaphore(HEADS_AT_ONCE)

    async def is_there(sha256: str) -> bool:
        async with turn, transport.answer("HEAD", f"/inputs/{sha256}", answer_s=HEAD_S) as response:
            return response.is_success

    asked = list({record.sha256 for _, record in upload.files if record.size_bytes >= from_bytes})
    there = await asyncio.gather(*(is_there(sha256) for sha256 in asked), return_exceptions=True)
    for error in there:
        if isinstance(error, BaseException):
            raise error
    return {sha256 for sha256, found in zip(asked, there, strict=True) if found}


async def put_missing(transport: HttpTransport, upload: Upload, found: set[str], telling: Telling, limit_s: float) -> None:
    """Store the other files, large ones from where an earlier try was cut off. Refusing, Unavailable."""
    stored = set(found)
    done = 0
    for path, record in upload.files:
        if record.sha256 not in stored:
            await _Putting(transport, path, record, telling, done, limit_s).put()
            stored.add(record.sha256)
        done += record.size_bytes
        telling.sent(done)


class _Putting(NamedTuple):
    """One file on its way."""

    transport: HttpTransport
    path: Path
    record: InputRecord
    telling: Telling
    before_bytes: int
    limit_s: float

    async def put(self) -> None:
        start = await self._kept() if self.record.size_bytes >= RESUMED_BYTES else 0
        if start == self.record.size_bytes:
            return
        refusal = await self._send(start)
        if refusal is not None and start:  # what is there is of no use, or somebody else goes on with it
            refusal = await self._send(0)
        if refusal is not None:
            raise Refusing(refusal)

    async def _kept(self) -> int:
        """How much of it is there. Of a store that cannot say: nothing."""
        headers = {"Content-Range": content_range(0, 0, self.record.size_bytes), "Content-Length": "0"}
        async with self.transport.answer("PUT", f"/inputs/{self.record.sha256}", headers=headers, answer_s=HEAD_S) as response:
            if not response.is_success:
                return 0
            try:
                offset = msgspec.json.decode(await response.aread(), type=_Offset).offset
            except msgspec.MsgspecError:
                return 0
        return offset if 0 <= offset <= self.record.size_bytes else 0

    async def _send(self, start: int) -> Refusal | None:
        size = self.record.size_bytes
        headers = {"Content-Length": str(size - start), "Content-Type": "application/octet-stream"}
        if start:
            headers["Content-Range"] = content_range(start, size, size)
        async with (
            aclosing(self._pieces(start)) as pieces,
            self.transport.answer(
                "PUT", f"/inputs/{self.record.sha256}", headers=headers, content=pieces, answer_s=self.limit_s
            ) as response,
        ):
            return None if response.is_success else await refusal_of(response)

    async def _pieces(self, start: int) -> AsyncGenerator[bytes, None]:
        sent = self.before_bytes + start
        async with aclosing(pieces_of(self.path, self.record.size_bytes, start)) as pieces:
            async for piece in pieces:
                yield piece
                sent += len(piece)
                self.telling.sent(sent)


class _Offset(msgspec.Struct):
    offset: int
