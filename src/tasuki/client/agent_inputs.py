"""Files that a dispatcher has already: asked for by their hashes, so that only what is missing is sent. Reads these files.

The files of a job have an order, which a form keeps among those that it brings and among those that it names. So it brings all,
or names all, and what is missing is stored before.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from tasuki.client.agent_answers import Refusing, refusal_of
from tasuki.client.agent_upload import Telling, Upload, pieces_of
from tasuki.net.http_transport import HttpTransport

LARGE_BYTES = 1024 * 1024  # what is smaller is sent sooner than asked for
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
    """Store the other files. Refusing, Unavailable."""
    stored = set(found)
    done = 0
    for path, record in upload.files:
        if record.sha256 not in stored:
            headers = {"Content-Length": str(record.size_bytes), "Content-Type": "application/octet-stream"}
            async with (
                aclosing(pieces_of(path, record.size_bytes)) as pieces,
                transport.answer(
                    "PUT", f"/inputs/{record.sha256}", headers=headers, content=pieces, answer_s=limit_s
                ) as response,
            ):
                if not response.is_success:
                    raise Refusing(await refusal_of(response))
            stored.add(record.sha256)
        done += record.size_bytes
        telling.sent(done)
