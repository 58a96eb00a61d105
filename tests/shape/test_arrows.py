"""The import arrows of the layout: which part may know of which. Lazy and type-only imports count as well."""

from fnmatch import fnmatch

import pytest

import tasuki
from tests.shape.source import Import, Module, modules

FOR_ALL = {"core", "errors", "config", "clocks", "event_loop", "version"}

# part -> the parts it may import besides itself
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors"},
    "version": set(),
    "clocks": {"core"},
    "event_loop": set(),
    "config": {"core", "errors"},
    "wire": FOR_ALL,
    "stores": FOR_ALL,
    "coords": FOR_ALL,
    "blobs": FOR_ALL,
    "server": FOR_ALL | {"stores", "coords", "blobs"},
    "net": FOR_ALL | {"wire"},  # asyncio connections, shared by the three below
    "doors": FOR_ALL | {"wire", "net", "server"},
    "agent": FOR_ALL | {"wire", "net", "server", "doors", "worker", "blobs"},  # the executor behind a door of its own
    "dispatcher": FOR_ALL | {"wire", "net", "server", "doors", "agent", "client", "blobs"},
    "worker": FOR_ALL | {"wire", "net", "blobs", "stores"},
    "client": FOR_ALL | {"wire", "net", "blobs", "stores"},
    "tasks": FOR_ALL | {"client", "worker"},
}
BELOW_DJANGO = set(ARROWS)
ARROWS["django"] = BELOW_DJANGO
ARROWS["testing"] = BELOW_DJANGO | {"django"}
ARROWS["cli"] = BELOW_DJANGO | {"django"}
ARROWS[""] = BELOW_DJANGO | {"cli"}  # the public names, and `python -m tasuki`

# file -> what it alone may import besides
ALSO: dict[str, set[str]] = {
    "stores/sql/*.py": {"django.models", "django.standalone"},
    "cli/sim.py": {"testing.sim"},  # a command whose whole work is there
    "django/management/commands/tasuki_worker.py": {"cli.process"},  # it logs as `tasuki worker` does
}
# file -> the only thing of ours it may import
ONLY: dict[str, set[str]] = {
    "django/__init__.py": set(),
    "django/fields.py": set(),
    "django/models.py": {"core", "django.fields"},
}

DJANGO_ALLOWED = ("stores/sql/*.py", "django/*", "cli/*")
# What pulls Django in when it is imported; the CLI must not do so before a command needs it.
PULLS_DJANGO = ("django", "tasuki.django", "tasuki.stores.sql")


def target(imported: Import) -> str | None:
    """The dotted name below `tasuki` that an import reaches; None for what is not ours and for the bare version."""
    if imported.name in {"tasuki", "tasuki.__version__"} or not imported.within("tasuki"):
        return None
    below = imported.name.removeprefix("tasuki.")
    return tasuki._HOME.get(below, "tasuki." + below).removeprefix("tasuki.")


def fits(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


def allowed_for(module: Module) -> set[str]:
    if module.path in ONLY:
        return ONLY[module.path]
    extra = (names for pattern, names in ALSO.items() if fnmatch(module.path, pattern))
    own = {module.part} if module.part else set()
    return ARROWS.get(module.part, set()).union(own, *extra)


def against_the_arrows(module: Module) -> list[str]:
    allowed = allowed_for(module)
    reached = ((imported, target(imported)) for imported in module.imports)
    return [
        f"{module.path}:{imported.line}: may not import {imported.name}"
        for imported, name in reached
        if name is not None and not fits(name, allowed)
    ]


def against_django(module: Module) -> list[str]:
    if any(fnmatch(module.path, pattern) for pattern in DJANGO_ALLOWED):
        return []
    return [
        f"{module.path}:{imported.line}: may not import {imported.name}"
        for imported in module.imports
        if imported.within("django")
    ]


def eager_django(module: Module) -> list[str]:
    return [
        f"{module.path}:{imported.line}: import {imported.name} inside the function that needs it"
        for imported in module.imports
        if not imported.lazy and any(imported.name.startswith(prefix) for prefix in PULLS_DJANGO)
    ]


def test_every_part_of_the_package_has_its_arrows() -> None:
    unknown = sorted({module.part for module in modules()} - set(ARROWS))

    assert not unknown, f"parts without a line in ARROWS: {unknown}"


def test_imports_follow_the_arrows() -> None:
    assert not [line for module in modules() for line in against_the_arrows(module)]


def test_django_is_imported_only_where_the_store_is_sql() -> None:
    assert not [line for module in modules() for line in against_django(module)]


def test_the_cli_imports_django_only_inside_functions() -> None:
    assert not [line for module in modules() if module.part == "cli" for line in eager_django(module)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/job.py", "from tasuki.config import Config"),
        ("core/job.py", "def f():\n    import tasuki.stores.store"),
        ("core/job.py", "from tasuki import Client"),
        ("errors.py", "import tasuki.core.job"),
        ("wire/messages.py", "from tasuki import stores"),
        ("stores/memory/store.py", "from tasuki.django.models import JobRun"),
        ("stores/sql/store.py", "from tasuki.django.views import page"),
        ("coords/sql.py", "from tasuki.stores.sql.database import load_statements"),
        ("coords/sql.py", "def f():\n    from tasuki.django.models import Member"),
        ("core/election.py", "from tasuki.coords.coordination import Busy"),
        ("django/models.py", "from tasuki.errors import TasukiError"),
        ("django/__init__.py", "from tasuki.core import job"),
        ("django/apps.py", "from tasuki.cli import main"),
        ("server/server.py", "if TYPE_CHECKING:\n    from tasuki.wire.messages import Frame"),
        ("doors/tcp.py", "from tasuki.stores.store import Store"),
        ("doors/tcp.py", "from tasuki.worker import Worker"),
        ("doors/tcp.py", "from ..client import Client"),
        ("agent/jobs.py", "from tasuki.stores.store import Store"),
        ("agent/jobs.py", "from tasuki.client import Client"),
        ("doors/http/door.py", "from tasuki.worker import Worker"),
        ("worker/run.py", "from tasuki.server import Server"),
        ("cli/main.py", "from tasuki.testing import clock"),
        ("cli/main.py", "from tasuki.testing.sim import run"),
        ("cli/sim.py", "from tasuki.testing import clock"),
        ("testing/clock.py", "from tasuki.cli import main"),
    ],
)
def test_an_import_against_an_arrow_is_seen(path: str, text: str) -> None:
    assert against_the_arrows(Module(path, text))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/job.py", "from tasuki.core.subject import Subject\nfrom tasuki.errors import TasukiError"),
        ("wire/messages.py", "from tasuki import __version__, core, errors, config"),
        ("stores/sql/lease.py", "from tasuki.django.models import JobRun"),
        ("stores/sql/store.py", "from tasuki.django import models"),
        ("coords/coordination.py", "from tasuki.core.election import Busy, Locked"),
        ("server/leading.py", "from tasuki.coords.coordination import Coordination"),
        ("agent/jobs.py", "from tasuki.worker import Worker"),
        ("agent/upload.py", "from tasuki.blobs.zip.reader import ArchiveNames"),
        ("dispatcher/node_pool.py", "from tasuki.client.agents.node import AgentNode"),
        ("worker/run.py", "from tasuki.stores.store import Store"),
        ("django/models.py", "from tasuki.core.job import State"),
        ("cli/up.py", "def up():\n    from tasuki.django import standalone"),
        ("cli/sim.py", "def sim():\n    from tasuki.testing.sim.run import check_seed"),
        ("__main__.py", "from tasuki.cli.main import main"),
    ],
)
def test_an_import_along_an_arrow_is_not_reported(path: str, text: str) -> None:
    assert not against_the_arrows(Module(path, text))


def test_django_in_the_wrong_place_is_seen() -> None:
    lazy = "def f():\n    from django.db import connection"

    assert against_django(Module("server/server.py", lazy))
    assert against_django(Module("stores/memory/store.py", lazy))
    assert not against_django(Module("stores/sql/store.py", lazy))


@pytest.mark.parametrize("name", ["django.db", "tasuki.django.standalone", "tasuki.stores.sql.sqlite"])
def test_django_at_the_top_of_a_cli_module_is_seen(name: str) -> None:
    assert eager_django(Module("cli/up.py", f"import {name}"))
    assert not eager_django(Module("cli/up.py", f"def up():\n    import {name}"))
