"""The examples for keepalived and HAProxy: the programs accept them, and they ask what a dispatcher answers, where it listens.

That they do what the guide says is shown by tests/e2e/test_virtual_address.py and tests/soak/test_virtual_address.py.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tasuki.cli.agent import DEFAULT_LISTEN
from tasuki.dispatcher.settings import DispatcherConfig
from tests.conftest import Require
from tests.e2e.test_proxies import program, replaced
from tests.support.certificates import TestAuthority

DEPLOY = Path(__file__).parents[2] / "deploy"
KEEPALIVED = DEPLOY / "keepalived/keepalived.conf"
HAPROXY = DEPLOY / "haproxy/dispatchers.cfg"
PORT = DEFAULT_LISTEN.rpartition(":")[2]


def said_by(*command: str | Path) -> tuple[int, str]:
    """(exit code, all that was said)."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=20.0, check=False)
    return done.returncode, done.stdout


def test_haproxy_accepts_its_example_without_a_warning(require: Require, tmp_path: Path) -> None:
    require("haproxy", program("haproxy") is not None, "make system-deps, or apt-get install haproxy")
    authority = TestAuthority(tmp_path / "ca")
    certificate = tmp_path / "tasuki.pem"
    certificate.write_text("".join(Path(part).read_text() for part in authority.issue()))
    paths = (("/etc/haproxy/tasuki.pem", str(certificate)), ("/etc/haproxy/ca.pem", authority.ca))
    file = tmp_path / "dispatchers.cfg"
    file.write_text(replaced(HAPROXY.read_text(), *paths))

    code, said = said_by(str(program("haproxy")), "-dW", "-c", "-f", file)

    assert code == 0, said


def test_keepalived_accepts_its_example(require: Require) -> None:
    for name, package in (("keepalived", "keepalived"), ("ip", "iproute2")):
        require(name, program(name) is not None, f"make system-deps, or apt-get install {package}")
    alone = ("unshare", "--net", "--pid", "--fork")  # with an eth0 of its own, and as the first process: the guide says why
    if os.geteuid() != 0 or said_by(*alone, "true")[0] != 0:
        pytest.skip("not root, or no namespace can be made: the check of keepalived 2.2.7 kills itself")
    script = 'ip link add eth0 type veth && exec "$0" -t -f "$1"'

    assert said_by(*alone, "sh", "-c", script, str(program("keepalived")), KEEPALIVED) == (0, "")


@pytest.mark.parametrize("path", [KEEPALIVED, HAPROXY], ids=lambda path: path.stem)
def test_an_example_asks_for_health_at_the_default_port(path: Path) -> None:
    text = re.sub(r"#.*", "", path.read_text())

    assert "/health" in text
    assert set(re.findall(r"(?<=[\da-z]):(\d+)\b(?!\.)", text)) == {PORT}


def test_the_weight_of_the_check_puts_an_unwell_dispatcher_behind_a_well_one() -> None:
    text = KEEPALIVED.read_text()
    high, low = sorted(map(int, re.findall(r"priority (\d+)", text)), reverse=True)
    (weight,) = map(int, re.findall(r"weight (-\d+)", text))

    assert high + weight < low


def test_haproxy_waits_longer_than_a_dispatcher_waits_for_its_nodes() -> None:
    minutes = re.findall(r"timeout (?:client|server) (\d+)m", HAPROXY.read_text())

    assert len(minutes) == 2
    assert all(int(minute) * 60 > DispatcherConfig(agents=()).limit_s for minute in minutes)
