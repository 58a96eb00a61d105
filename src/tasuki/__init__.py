"""tasuki runs commands on many machines, and keeps its promise when machines die.

The public names below are loaded when they are first used (PEP 562): `import tasuki` reads this file and `version.py`,
so `tasuki --help` and a user's Django start-up do not pay for the client, and a client never pays for the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from tasuki.version import __version__

if TYPE_CHECKING:
    from tasuki.client.agents.client import AgentsClient, AsyncAgentsClient
    from tasuki.client.aio import AsyncClient
    from tasuki.client.sync import Client, CompletedJobs, JobHandle, as_completed, gather
    from tasuki.client.types import AsyncJobHandle, CommandResult, Explanation, JobPage, JobStatus, WorkerStatus
    from tasuki.core.job import InputFile, Job, JobSpec, Progress, State
    from tasuki.core.protocol import JobResult
    from tasuki.errors import (
        ConfigError,
        Conflict,
        DeadlineExceeded,
        Forbidden,
        InvalidInput,
        JobFailed,
        NotFound,
        Overloaded,
        Retry,
        TasukiError,
        TooLarge,
        Unauthorized,
        Unavailable,
        WrongType,
    )
    from tasuki.tasks.eager import EagerJobs
    from tasuki.tasks.task import Task, current_job
    from tasuki.tasks.tasks import Tasks
    from tasuki.worker.attempt import HandlerJob, HandlerResult
    from tasuki.worker.worker import Worker

_HOME = {
    "AgentsClient": "tasuki.client.agents.client",
    "AsyncAgentsClient": "tasuki.client.agents.client",
    "AsyncClient": "tasuki.client.aio",
    "AsyncJobHandle": "tasuki.client.types",
    "Client": "tasuki.client.sync",
    "CommandResult": "tasuki.client.types",
    "CompletedJobs": "tasuki.client.sync",
    "ConfigError": "tasuki.errors",
    "Conflict": "tasuki.errors",
    "DeadlineExceeded": "tasuki.errors",
    "EagerJobs": "tasuki.tasks.eager",
    "Explanation": "tasuki.client.types",
    "Forbidden": "tasuki.errors",
    "HandlerJob": "tasuki.worker.attempt",
    "HandlerResult": "tasuki.worker.attempt",
    "InputFile": "tasuki.core.job",
    "InvalidInput": "tasuki.errors",
    "Job": "tasuki.core.job",
    "JobFailed": "tasuki.errors",
    "JobHandle": "tasuki.client.sync",
    "JobPage": "tasuki.client.types",
    "JobResult": "tasuki.core.protocol",
    "JobSpec": "tasuki.core.job",
    "JobStatus": "tasuki.client.types",
    "NotFound": "tasuki.errors",
    "Overloaded": "tasuki.errors",
    "Progress": "tasuki.core.job",
    "Retry": "tasuki.errors",
    "State": "tasuki.core.job",
    "Task": "tasuki.tasks.task",
    "Tasks": "tasuki.tasks.tasks",
    "TasukiError": "tasuki.errors",
    "TooLarge": "tasuki.errors",
    "Unauthorized": "tasuki.errors",
    "Unavailable": "tasuki.errors",
    "Worker": "tasuki.worker.worker",
    "WorkerStatus": "tasuki.client.types",
    "WrongType": "tasuki.errors",
    "as_completed": "tasuki.client.sync",
    "current_job": "tasuki.tasks.task",
    "gather": "tasuki.client.sync",
}

__all__ = [  # a type checker reads this list as it stands
    "AgentsClient",
    "AsyncAgentsClient",
    "AsyncClient",
    "AsyncJobHandle",
    "Client",
    "CommandResult",
    "CompletedJobs",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "EagerJobs",
    "Explanation",
    "Forbidden",
    "HandlerJob",
    "HandlerResult",
    "InputFile",
    "InvalidInput",
    "Job",
    "JobFailed",
    "JobHandle",
    "JobPage",
    "JobResult",
    "JobSpec",
    "JobStatus",
    "NotFound",
    "Overloaded",
    "Progress",
    "Retry",
    "State",
    "Task",
    "Tasks",
    "TasukiError",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Worker",
    "WorkerStatus",
    "WrongType",
    "__version__",
    "as_completed",
    "current_job",
    "gather",
]


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
