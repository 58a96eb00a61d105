"""The shipped units and manifests start where the platforms start them: on volumes of root and a group, with secrets of root."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Require
from tests.support.certificates import TestAuthority
from tests.support.processes import TASUKI, ChildProcess

DEPLOY = Path(__file__).parents[2] / "deploy"
IS_ROOT = os.geteuid() == 0
SECRET_MODE = 0o440 if IS_ROOT else 0o400  # as systemd and Kubernetes hand secrets over; the group's right counts only for root's
STRANGER = 12345  # of a volume, seen from a process of another user; here that process is the test's
TOKEN = "0123456789abcdef0123456789abcdef"


class Machine:
    """Folders that stand for those of a machine; `start` runs a shipped command line on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.authority = TestAuthority(root / "ca")
        cert, key = (Path(path) for path in self.authority.issue())
        self.secrets = root / "secrets"
        self.secrets.mkdir(mode=0o700)
        for name, text in (
            *((name, cert.read_text()) for name in ("cert.pem", "tls.crt")),
            *((name, key.read_text()) for name in ("key.pem", "tls.key")),
            *((name, TOKEN) for name in ("token", "tokens")),
            ("ca.crt", Path(self.authority.ca).read_text()),
            ("execs.toml", '[exec.count]\ncommand = "/usr/bin/wc -w {file}"\n'),
        ):
            self.put(name, text)

    def put(self, name: str, text: str) -> None:
        path = self.secrets / name
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text)
        path.chmod(SECRET_MODE)

    def volume(self, name: str, mode: int, owner: int | None = None) -> Path:
        path = self.root / name
        path.mkdir()
        if IS_ROOT and owner is not None:
            os.chown(path, owner, owner)
        path.chmod(mode)
        return path

    def start(self, words: list[str], data: Path, *, until: str, **env: str) -> ChildProcess:
        """Run the command line with every path in the folders of this machine, on a free port."""
        here = [re.sub(r"/etc/tasuki/(?:\w+/)?", f"{self.secrets}/", word).replace("execs-w1", "execs") for word in words]
        here = [re.sub(r"/var/lib/tasuki[^ ]*", str(data), word) for word in here]
        here = [re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", word) for word in here]
        process = ChildProcess([*TASUKI, *here], data.with_name(f"{data.name}.log"), {"HOME": str(data), **env})
        try:
            process.wait_for_output(until)
        except BaseException:
            process.kill()
            raise
        return process


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    tmp_path.chmod(0o755)
    return Machine(tmp_path)


def unit(name: str, machine: Machine, **variables: str) -> list[str]:
    """Return the words behind `tasuki` in a unit's ExecStart."""
    line = re.findall(r"^ExecStart=/opt/tasuki/bin/tasuki (.*)$", (DEPLOY / "systemd" / name).read_text(), re.MULTILINE)[0]
    for variable, value in {"CREDENTIALS_DIRECTORY": str(machine.secrets), **variables}.items():
        line = line.replace(f"${{{variable}}}", value).replace(f"${variable}", value)
    return shlex.split(line.replace("%l-%i", "w1").replace("%i", "w1"))


def container(name: str) -> list[str]:
    """Return the arguments of the container in a manifest."""
    import yaml

    found: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))
    (pod,) = (document["spec"]["template"]["spec"] for document in found if document["kind"] == "Deployment")
    return list(pod["containers"][0]["args"])


def address_in(server: ChildProcess) -> str:
    return re.findall(r"tls://127\.0\.0\.1:\d+", server.output())[0]


def worker_token(machine: Machine, data: Path) -> None:
    """Make the worker's token as the guides say: over the unix socket of the data folder that the server was given."""
    command = [*TASUKI, "token", "create", "--data", str(data), "--kind", "worker"]
    with ChildProcess(command, machine.root / "token.log", {"HOME": str(data)}) as made:
        assert made.wait() == 0, made.output()
        machine.put("token", re.findall(r"tsk_w_\S+", made.output())[0])


def test_units_of_systemd(machine: Machine) -> None:
    state = machine.volume("state", 0o700)
    server = unit("tasuki-server.service", machine, TASUKI_SERVER_OPTIONS="")
    with machine.start(server, state, until="ready ") as running:
        worker_token(machine, state)
        options = f"--to {address_in(running)} --tls-ca {machine.authority.ca}"
        worker = unit("tasuki-worker@.service", machine, TASUKI_WORKER_OPTIONS=options)
        with machine.start(worker, machine.volume("worker", 0o700), until="connected "):
            pass
    agent = unit("tasuki-agent.service", machine, TASUKI_AGENT_OPTIONS="")
    with machine.start(agent, machine.volume("agent", 0o700), until="ready "):
        pass
    dispatcher = unit("tasuki-dispatcher.service", machine, TASUKI_DISPATCHER_OPTIONS="", TASUKI_AGENTS="https://127.0.0.1:1")
    with machine.start(dispatcher, machine.volume("dispatcher", 0o700), until="ready "):
        pass


def test_manifests_of_kubernetes(machine: Machine, require: Require) -> None:
    require("PyYAML", find_spec("yaml") is not None, "pip install pyyaml")
    # Given an emptyDir with fsGroup: others own it, and everybody may write to it
    data = machine.volume("emptydir", 0o2777, STRANGER)
    with machine.start(container("server.yaml"), data, until='"event":"ready"') as running:
        own = data / f"tasuki-{os.geteuid()}"
        assert own.stat().st_mode & 0o777 == 0o700
        assert (own / "socket").is_socket()
        worker_token(machine, data)
        words = [re.sub(r"--to=.*", f"--to={address_in(running)}", word) for word in container("worker.yaml")]
        with machine.start(words, machine.volume("scratch", 0o2777, STRANGER), until="connected to"):
            pass
