"""The environment that a job's process starts with: a short list of names of the worker's own, and nothing else.

The only file of the worker that reads `os.environ`. A worker's environment holds tokens and addresses; a job sees none.
"""

from __future__ import annotations

import os

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"


def base_environment() -> dict[str, str]:
    """What every job may know of the machine: where programs and the home folder are, language and time zone."""
    found = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", **found}
