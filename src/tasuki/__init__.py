"""tasuki runs commands on many machines, and keeps its promise when machines die.

The public names below are loaded when they are first used (PEP 562): `import tasuki` reads this file and `version.py`,
so `tasuki --help` and a user's Django start-up do not pay for the client, and a client never pays for the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tasuki.version import __version__

if TYPE_CHECKING:
    from tasuki.client import AsyncClient, Client
    from tasuki.core.job import InputFile, Job, JobSpec, State
    from tasuki.errors import TasukiError
    from tasuki.worker import Worker

__all__ = [
    "AgentsClient",
    "AsyncAgentsClient",
    "AsyncClient",
    "Client",
    "InputFile",
    "Job",
    "JobSpec",
    "State",
    "TasukiError",
    "Worker",
    "__version__",
]

_HOME = {
    "AgentsClient": "tasuki.client.agents.client",
    "AsyncAgentsClient": "tasuki.client.agents.client",
    "AsyncClient": "tasuki.client",
    "Client": "tasuki.client",
    "InputFile": "tasuki.core.job",
    "Job": "tasuki.core.job",
    "JobSpec": "tasuki.core.job",
    "State": "tasuki.core.job",
    "TasukiError": "tasuki.errors",
    "Worker": "tasuki.worker",
}


def __getattr__(name: str) -> object:
    """Load a public name from its home, and keep it here so that the next use is a plain attribute."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tasuki' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
