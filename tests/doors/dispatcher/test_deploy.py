"""The examples for keepalived and HAProxy ask what a dispatcher answers, where it listens by default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasuki.cli.dispatcher import DEFAULT_LISTEN
from tasuki.doors.dispatcher.settings import DispatcherConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
PORT = DEFAULT_LISTEN.rpartition(":")[2]


@pytest.mark.parametrize("path", ["keepalived/keepalived.conf", "haproxy/dispatchers.cfg"])
def test_an_example_asks_for_health_at_the_default_port(path: str) -> None:
    text = (DEPLOY / path).read_text()

    assert "/health" in text
    assert set(re.findall(r"(?<=[\d]):(\d+)", re.sub(r"#.*", "", text))) == {PORT}
    assert text.count("{") == text.count("}")


def test_haproxy_waits_longer_than_a_dispatcher_waits_for_its_nodes() -> None:
    minutes = re.findall(r"timeout (?:client|server) (\d+)m", (DEPLOY / "haproxy/dispatchers.cfg").read_text())

    assert len(minutes) == 2
    assert all(int(minute) * 60 > DispatcherConfig(agents=()).limit_s for minute in minutes)
