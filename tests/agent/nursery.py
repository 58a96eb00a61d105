"""A process that forks agents: `python nursery.py`, then a line {"data", "fault"} on stdin for each; the answer is its pid.

An agent writes {"port"} to the file `port` in its data folder when it is open. Imports take longer than all that the tests do
with an agent, and here they are paid once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import signal
import sys
from pathlib import Path

from tasuki.agent.app import Agent
from tasuki.agent.settings import AgentConfig
from tasuki.config import kill_at
from tasuki.core.address import Address
from tasuki.worker.execs import parse_exec_flag
from tasuki.worker.keeper.client import Keeper


async def serve(data: Path, fault: str, keeper: Keeper, incarnation: str) -> None:
    execs = {"sh": parse_exec_flag("sh=/bin/sh {file}")}
    config = AgentConfig(data=data, node="n1", execs=execs, default_exec="sh", slots=4)
    agent = Agent(config, incarnation, keeper=keeper, fault=kill_at(fault))
    address = await agent.start(Address("http", "127.0.0.1", 0))
    (data / "port.new").write_text(json.dumps({"port": address.port}))
    (data / "port.new").rename(data / "port")
    await asyncio.Event().wait()


def agent_of(order: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    incarnation = secrets.token_hex(8)
    try:
        asyncio.run(serve(Path(order["data"]), order["fault"], Keeper.start(incarnation), incarnation))
    finally:
        os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need not be waited for
    gc.freeze()
    for line in sys.stdin:
        print(agent_of(json.loads(line)), flush=True)
