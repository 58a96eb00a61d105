"""Real node agents as processes, which can be killed, frozen and started again on the port they had."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path

from tests.support.processes import TASUKI, ChildProcess

# Notes each start in a file beside the agents; "hold" waits until the test lets it go.
PROGRAM = """
import pathlib, sys, time
file, starts, word = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
with starts.open("a") as notes:
    notes.write(f"{sys.argv[4]} {file.parents[1].name}\\n")
print("priced", file.read_text().strip(), flush=True)
while word == "hold" and not starts.with_name("go").exists():
    time.sleep(0.01)
sys.exit(int(word) if word.isdigit() else 0)
"""
STEADY_PORTS = (20_000, 32_000)


def steady_port() -> int:
    """Free, and not of those that the system gives to connections: it is still free when its owner was dead for a while."""
    for port in random.sample(range(*STEADY_PORTS), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port of {STEADY_PORTS} is free")


class ListeningProcess(ChildProcess):
    """`tasuki WORDS… --listen`, an agent or a dispatcher; it has its port again when it is started again."""

    def __init__(
        self, words: Iterable[str], log: Path, env: Mapping[str, str], *, name: str, port: int = 0, fresh: bool = False
    ) -> None:
        self.name = name
        self.kind, *_ = words = list(words)
        super().__init__([*TASUKI, *words, "--no-token", "--listen", f"127.0.0.1:{port}"], log, env, fresh=fresh)
        self.url = re.findall(r"listening (http://\S+)", self.wait_for_output("ready"))[0]
        self.command[-1] = self.url.removeprefix("http://")

    def start_again(self) -> None:
        super().start_again()
        self.wait_for_output("ready")


class AgentProcess(ListeningProcess):
    """`tasuki agent` with one exec, `pricer WORD`; see PROGRAM."""

    def __init__(self, folder: Path, name: str, starts: Path, slots: int) -> None:
        program = folder / "program.py"
        program.write_text(PROGRAM)
        template = f"{sys.executable} {program} {{file}} {starts} {{args}} {name}"
        words = ["agent", "--data", str(folder / name), "--slots", str(slots), "--exec", f"pricer={template}"]
        super().__init__(words, folder / f"{name}.log", {"HOME": str(folder)}, name=name)


class Agents:
    """Several, and where their program notes its starts."""

    def __init__(self, folder: Path, nodes: list[AgentProcess], starts: Path) -> None:
        self.folder = folder
        self.nodes = nodes
        self.starts = starts
        self.book = folder / "book.csv"
        self.book.write_text("100,95")

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    def started(self, job_id: str) -> list[str]:
        """The names of the agents at which the program of this job was started, in order."""
        if not self.starts.exists():
            return []
        lines = (line.split() for line in self.starts.read_text().splitlines())
        return [name for name, job in lines if job == job_id]

    def let_go(self) -> None:
        self.starts.with_name("go").touch()

    def hold(self) -> None:
        self.starts.with_name("go").unlink(missing_ok=True)

    def node(self, name: str) -> AgentProcess:
        return next(node for node in self.nodes if node.name == name)


@contextlib.contextmanager
def start_agents(folder: Path, count: int, slots: int = 4, names: Sequence[str] = ("one", "two", "three")) -> Iterator[Agents]:
    """Leaving the block kills them."""
    starts = folder / "starts.txt"
    with contextlib.ExitStack() as stack, futures.ThreadPoolExecutor(count) as pool:
        starting = [pool.submit(AgentProcess, folder, name, starts, slots) for name in names[:count]]
        nodes = [stack.enter_context(started.result()) for started in starting]
        yield Agents(folder, nodes, starts)
