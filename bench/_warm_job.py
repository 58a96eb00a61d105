"""The function of bench/warm.py: a module with the imports of an ordinary service, which says when its first line runs."""

from __future__ import annotations

import asyncio  # noqa: F401
import decimal  # noqa: F401
import email.message  # noqa: F401
import http.client  # noqa: F401
import json  # noqa: F401
import sqlite3  # noqa: F401
import ssl  # noqa: F401
import time

import django.db.models  # noqa: F401


def main(arguments: list[str]) -> None:
    """On the clock that all processes of a machine share."""
    print(time.monotonic_ns())
