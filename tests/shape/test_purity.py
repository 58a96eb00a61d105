"""Clocks, chance, the environment and I/O are touched only where they may be, and pickle never is."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from tests.shape.source import ROOT, Module, modules, touched

# The core decides from what it is given; a simulator replays it only if nothing comes in from the side.
IMPURE_MODULES = (
    "asyncio", "concurrent", "multiprocessing", "select", "selectors", "signal", "subprocess", "threading", "uvloop",
    "io", "logging", "os", "shutil", "socket", "sqlite3", "ssl", "structlog", "tempfile",
    "random", "secrets", "time",
)  # fmt: skip
IMPURE_CALLS = {
    "datetime.datetime.now", "datetime.datetime.today", "datetime.datetime.utcnow", "datetime.date.today",
    "datetime.now", "datetime.today", "datetime.utcnow", "uuid.uuid1", "uuid.uuid4",
    "open", "print", "input",
}  # fmt: skip
AWAITING = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)

ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
ENVIRONMENT_ALLOWED = ("config.py", "cli/*")
# Files that hand an environment on to a job's process: file -> why.
JOB_ENVIRONMENT: dict[str, str] = {
    "django/node.py": "management commands have the environment of the project's own worker",
    "django/warm.py": "a management command that starts again in a fresh interpreter notes that there",
    "worker/execs.py": "hands PATH, HOME, LANG, LC_ALL and TZ on to jobs",
    "worker/preforked.py": "is a program of its own, and becomes the job: its environment is then the job's",
}

# multiprocessing is here because its queues, pools and connections pickle what they carry.
PICKLING = ("pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "shelve")


def impurities(module: Module) -> Iterator[str]:
    for imported in module.imports:
        if any(imported.within(name) for name in IMPURE_MODULES):
            yield f"{module.path}:{imported.line}: imports {imported.name}"
    for name, line in touched(module):
        if name in IMPURE_CALLS:
            yield f"{module.path}:{line}: uses {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, AWAITING):
            yield f"{module.path}:{node.lineno}: {type(node).__name__}"


def environment_uses(module: Module) -> Iterator[str]:
    for name, line in touched(module):
        if any(name == use or name.startswith(use + ".") for use in ENVIRONMENT):
            yield f"{module.path}:{line}: touches {name}; take it from Config"


def pickling(module: Module) -> Iterator[str]:
    for imported in module.imports:
        if any(imported.within(name) for name in PICKLING):
            yield f"{module.path}:{imported.line}: imports {imported.name}"


def may_read_the_environment(module: Module) -> bool:
    return module.path in JOB_ENVIRONMENT or any(fnmatch(module.path, pattern) for pattern in ENVIRONMENT_ALLOWED)


def test_the_core_is_pure() -> None:
    assert not [line for module in modules() if module.part == "core" for line in impurities(module)]


def test_the_environment_is_read_only_where_the_config_is_built() -> None:
    readers = (module for module in modules() if not may_read_the_environment(module))

    assert not [line for module in readers for line in environment_uses(module)]


def test_every_exception_for_the_environment_is_needed() -> None:
    users = {module.path for module in modules() if any(environment_uses(module))}

    assert set(JOB_ENVIRONMENT) <= users, f"not needed any more: {set(JOB_ENVIRONMENT) - users}"


def test_nothing_pickles() -> None:
    folders = ("src", "tests", "examples", "bench")
    found = (module for folder in folders for module in modules(ROOT / folder, mentioning=PICKLING))

    assert not [line for module in found for line in pickling(module)]


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from os import path",
        "def f():\n    import random",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.now()",
        "import datetime as d\nd.datetime.utcnow()",
        "import uuid\nuuid.uuid4()",
        "open('a')",
        "async def f(): ...",
    ],
)
def test_an_impure_line_is_seen(text: str) -> None:
    assert list(impurities(Module("core/job.py", text)))


def test_a_pure_line_is_not_reported() -> None:
    text = "import hashlib\nfrom datetime import datetime, timedelta\ndef f(now: datetime): return now + timedelta(1)"

    assert not list(impurities(Module("core/job.py", text)))


@pytest.mark.parametrize(
    "text",
    ["import os\nos.environ['A']", "from os import getenv\ngetenv('A')", "import os\nenv = {**os.environ}"],
)
def test_reading_the_environment_is_seen(text: str) -> None:
    assert list(environment_uses(Module("server/server.py", text)))


@pytest.mark.parametrize("text", ["import pickle", "from multiprocessing import Queue", "def f():\n    import marshal"])
def test_pickling_is_seen(text: str) -> None:
    assert list(pickling(Module("worker/run.py", text)))
