"""The other side of bench/agent.py: FastAPI that saves the file, runs the program, tells what it printed, and promises nothing.

python _bare_agent.py FOLDER PROGRAM          prints `listening PORT`

No limits, no token, no check of names; nothing is synced, hashed, kept or removed, and what was started lives on if this dies.
The form is taken apart by hand, which costs less than any parser would. The loop is asyncio's own: uvloop forks where Python
starts a program with vfork, and would make this endpoint two times slower.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response

FOLDER, PROGRAM = Path(sys.argv[1]), sys.argv[2]
app = FastAPI()


@app.post("/run/{job_id}")
async def run(job_id: str, request: Request) -> Response:
    boundary, _, form = (await request.body()).partition(b"\r\n")
    data = form[form.index(b"\r\n\r\n") + 4 : form.rindex(b"\r\n" + boundary)]
    file = FOLDER / job_id / "file"
    file.parent.mkdir()
    file.write_bytes(data)
    process = await asyncio.create_subprocess_exec(PROGRAM, str(file), cwd=file.parent, stdout=PIPE, stderr=PIPE)
    printed, _ = await process.communicate()
    return Response(printed, 200 if process.returncode == 0 else 500, media_type="application/octet-stream")


async def main() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False)
    print(f"listening {sock.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve(sockets=[sock])


if __name__ == "__main__":
    asyncio.run(main())
