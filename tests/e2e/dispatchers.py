"""`tasuki dispatcher` as a process with TLS and a token, and what its log and its metrics say of it.

It makes files in the folder it is given, and nothing else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.certificates import TestAuthority
from tests.support.processes import TASUKI, ChildProcess
from tests.support.waiting import until

TOKEN = "secret-of-the-test"
DEADLINE_S = 20.0
NAMES = ("jobs.example", "127.0.0.1", "10.0.0.10", "10.0.0.20")  # the virtual addresses of deploy/keepalived among them
GUIDE = Path(__file__).parents[2] / "docs/operate/dispatcher.md"


class DispatcherProcess(ChildProcess):
    """A dispatcher on a port that it has again when it is started again; it keeps uploads in `folder / "inputs"`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        agents: list[str],
        authority: TestAuthority,
        listen: str = "127.0.0.1:0",
        within: Sequence[str] = (),
    ) -> None:
        """Start the dispatcher; `within` are words before the command that take it to where it is to run."""
        self.name, self._authority, self._within = name, authority, within
        tokens = folder / "tokens"
        if not tokens.exists():  # another dispatcher may be reading it
            tokens.touch(mode=0o600)
            tokens.write_text(TOKEN)
        cert, key = authority.issue(*NAMES)
        self._arguments = ["--agents", ",".join(agents), "--token-file", str(tokens), "--inputs", str(folder / "inputs")]
        self._arguments += ["--tls-cert", cert, "--tls-key", key]
        super().__init__(self._command_for(listen), folder / f"{name}.log", {"HOME": str(folder)})

    def _command_for(self, listen: str) -> list[str]:
        return [*self._within, *TASUKI, "dispatcher", "--listen", listen, *self._arguments]

    def await_ready(self) -> None:
        self.address = re.findall(r"listening https://(\S+)", self.wait_for_output("ready "))[0]
        self.command = self._command_for(self.address)

    def has(self, job_id: str) -> bool:
        """Return whether the dispatcher sent this job to a node."""
        return f"job {job_id}: goes to" in self.output()

    def input_bytes(self) -> float:
        """Return the number of bytes that it received for runs, forms included, and for the store of inputs."""
        text = httpx.get(
            f"https://{self.address}/metrics", headers=bearer(), verify=self._authority.trusted(), timeout=DEADLINE_S
        ).text
        return float(re.findall(r"^tasuki_dispatcher_input_bytes_total (\S+)", text, re.MULTILINE)[0])


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def start_dispatchers(
    stack: contextlib.ExitStack, folder: Path, agents: list[str], authority: TestAuthority
) -> list[DispatcherProcess]:
    """Start the dispatchers east and west, and wait until both are ready."""
    made = [stack.enter_context(DispatcherProcess(folder, name, agents, authority)) for name in ("east", "west")]
    for dispatcher in made:
        dispatcher.await_ready()
    return made


def the_one_with(job_id: str, dispatchers: list[DispatcherProcess]) -> tuple[DispatcherProcess, DispatcherProcess]:
    """Return the dispatcher through which this job runs, and the other one."""
    until(lambda: any(one.has(job_id) for one in dispatchers), DEADLINE_S, f"job {job_id} is at a node")
    east, west = dispatchers
    return (east, west) if east.has(job_id) else (west, east)


def documented_loop() -> str:
    """Return the loop of the guide, which sends a request until it has an outcome."""
    (_, _, section) = GUIDE.read_text().partition("## Two of them, one address")
    return next(block for block in section.split("```")[1::2] if "until" in block)
