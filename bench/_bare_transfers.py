"""The other side of bench/http_transfers.py: uvicorn and nothing else. A PUT is hashed and dropped, a GET is a file, hashed too.

python _bare_transfers.py FILE          prints `listening PORT`
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

CHUNK_BYTES = 256 * 1024


def application(file: Path) -> Callable[..., Awaitable[None]]:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        digest = hashlib.sha256()
        headers = [(b"content-type", b"application/octet-stream")]
        if scope["method"] == "PUT":
            more = True
            while more:
                event = await receive()
                digest.update(event.get("body", b""))
                more = event.get("more_body", False)
            answer = digest.hexdigest().encode()
            await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"content-length", b"64")]})
            await send({"type": "http.response.body", "body": answer})
            return
        size = (b"content-length", b"%d" % file.stat().st_size)
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, size]})
        with file.open("rb") as source:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def main() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application(Path(sys.argv[1])), lifespan="off", log_level="warning", access_log=False)
    print(f"listening {sock.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve(sockets=[sock])


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
