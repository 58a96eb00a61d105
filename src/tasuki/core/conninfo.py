"""What connections to PostgreSQL are told, and how their errors may be told on. Pure: knows no driver.

A server that waits for a dead peer is as good as dead itself. Left alone, TCP gives up after a quarter of an hour; here a peer
that answers nothing is given up in seconds, on every connection.
"""

from __future__ import annotations

from collections.abc import Mapping

KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_COUNT = 3
CONNECT_TIMEOUT_MIN_S = 2  # libpq takes no less

_SECRETS = ("password", "sslpassword")


def with_deadlines(given: Mapping[str, object], timeout_s: float) -> dict[str, object]:
    """libpq's parameters, and those that make a dead peer known within `timeout_s` (idle: a little later). What is given wins."""
    return {
        "application_name": "tasuki",
        "connect_timeout": max(CONNECT_TIMEOUT_MIN_S, int(timeout_s)),
        "keepalives": 1,
        "keepalives_idle": KEEPALIVE_IDLE_S,
        "keepalives_interval": KEEPALIVE_INTERVAL_S,
        "keepalives_count": KEEPALIVE_COUNT,
        "tcp_user_timeout": int(timeout_s * 1000),
        **given,
    }


def without_secrets(text: str, given: Mapping[str, object]) -> str:
    """An error's text as one line, with the passwords of these parameters crossed out."""
    for name in _SECRETS:
        if secret := given.get(name):
            text = text.replace(str(secret), "***")
    return " ".join(text.split())
