"""Machines on one LAN that are network namespaces: each with an eth0, an address of its own, and a cable that can be pulled.

    with contextlib.ExitStack() as stack:
        lan = Lan(stack, tmp_path, ["east", "west"])
        lan["east"].run("ip", "address")

Nothing of it is seen outside, and nothing has to be taken down: a namespace ends with the last process in it. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from tests.support.processes import ChildProcess
from tests.support.waiting import until

NETWORK = "10.0.0."
FIRST = 11


def missing() -> str:
    """Return what such machines need and this one lacks; empty if it has all."""
    if os.geteuid() != 0:
        return "not root: network namespaces and VRRP need it"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"no network namespace can be made: {made.stderr.strip()}"


class Machine:
    """One namespace, which a sleeping process holds."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, name: str) -> None:
        self.name = name
        holder = stack.enter_context(ChildProcess(["unshare", "--net", "sleep", "infinity"], folder / f"{name}.machine.log", {}))
        self.pid = holder.pid
        space, ours = Path(f"/proc/{holder.pid}/ns/net"), Path("/proc/self/ns/net").readlink()
        until(lambda: space.readlink() != ours, what=f"{name} has a network of its own")
        self.within = ("nsenter", f"--net={space}")
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command: str, check: bool = True) -> str:
        """Run it there, to its end, which must be a good one if it is checked; its output."""
        done = subprocess.run([*self.within, *command], capture_output=True, text=True, timeout=20.0, check=False)
        assert not check or done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr}"
        return done.stdout

    def holds(self, address: str) -> bool:
        return f" {address}/" in self.run("ip", "-oneline", "address", "show", "dev", "eth0")


class Lan:
    """A bridge in a namespace of its own, and machines with the addresses 10.0.0.11, 10.0.0.12, …"""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, names: list[str]) -> None:
        self._switch = Machine(stack, folder, "switch")
        self._switch.run("ip", "link", "add", "lan", "type", "bridge")
        self._switch.run("ip", "link", "set", "lan", "up")
        self._machines = {name: Machine(stack, folder, name) for name in names}
        self.addresses = {name: f"{NETWORK}{number}" for number, name in enumerate(names, FIRST)}
        for name, machine in self._machines.items():
            cable = ("type", "veth", "peer", "name", "eth0", "netns", str(machine.pid))
            self._switch.run("ip", "link", "add", self._port(name), *cable)
            self._switch.run("ip", "link", "set", self._port(name), "master", "lan", "up")
            machine.run("ip", "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            machine.run("ip", "link", "set", "eth0", "up")

    def __getitem__(self, name: str) -> Machine:
        return self._machines[name]

    def pull(self, name: str) -> None:
        """The machine lives on, and nobody hears of it any more."""
        self._switch.run("ip", "link", "set", self._port(name), "nomaster")

    def plug(self, name: str) -> None:
        self._switch.run("ip", "link", "set", self._port(name), "master", "lan")

    def _port(self, name: str) -> str:
        return f"to-{name}"
