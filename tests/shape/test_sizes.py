"""Files and functions are not longer than their subject, and every module says what it is for."""

import ast
from collections.abc import Iterator

from tests.shape.source import ROOT, Module, length, modules, syntax_errors

FILE_MAX_LINES = 800
FILE_LONG_LINES = 500  # above this a reader wants to know why
MAP_MAX_WORDS = 1200
LINE_MAX_CHARS = 130
FUNCTION_MAX_LINES = 60  # without the docstring
NO_BEGINNINGS = {
    "What",
    "Whoever",
    "Those",
    "That",
    "Which",
    "Whether",
    "Who",
    "Where",
    "When",
    "How",
    "Whatever",
    "They",
    "These",
    "It",
    "Its",
}
"""First words of a docstring, of an attribute's too, that leave open what it is about."""

# What is long, with the reason that a reader would accept. An entry that is not needed any more fails the test.
LONG_FILES: dict[str, str] = {
    "agent/folders.py": "the folder of a job from its upload to its durable end: markers, fsync, recovery",
    "agent/jobs.py": "one job of an agent from its upload to its result: slots, repeats, stops",
    "cli/server.py": "the options of a server, their checks, and the life of its process",
    "client/aio.py": "the client: one state, shared with the machine it drives",
    "client/types.py": "all types that callers meet, with the checks of what they pass",
    "core/broker/client_messages.py": "each conversation with a client: what it asks of the store, and what the answer does",
    "core/broker/state.py": "the state that all conversations share",
    "core/broker/worker_messages.py": "each conversation with a worker: credit, leases, deliveries, heartbeats, reports",
    "core/explain.py": "one sentence for each reason why a job waits, runs where it runs, or runs again",
    "core/job.py": "the job's fields with the check of each, its ids, its hash and its mark",
    "core/protocol.py": "each message of the protocol, and the check of outcomes that come over it",
    "core/store_messages.py": "requests, answers and the table of verbs, which must agree",
    "core/worker/machine.py": "one machine, with its records of leases and slots",
    "django/ops/views.py": "each screen that both a project and a server have, with what it changes",
    "django/models.py": "all tables of the SQL store, the one source of its schema",
    "doors/http/virtual_connection.py": "connections to the server: of tokens, of transfers, and the waits on them",
    "server/server.py": "the broker's driver: its doors, turns and reads, with the settings of the process",
    "server/transfers.py": "uploads, downloads, deletions and presigned URLs, which share threads and rules",
    "stores/memory/records.py": "the data of the model that other stores are compared with, and the verbs on what is no job",
    "stores/memory/store.py": "each verb that changes jobs, in the model that other stores are compared with",
    "stores/redis/store.py": "each verb of the store: the arguments of its script and the decoder of its answer",
    "stores/sql/database.py": "the interface of a vendor, its statements, and the one transaction of all verbs",
    "stores/sql/lease.py": "the walk over the index of ready jobs, and the verbs that grant from it",
    "stores/sql/store.py": "each verb of the store, and the reads that a second connection has too",
    "testing/sim/ablations_store.py": "one entry for each safeguard of a store",
    "testing/sim/ablations.py": "one row for each safeguard of the machines",
    "testing/sim/nodes.py": "clients, workers and servers, each as its driver would be",
    "testing/sim/checker.py": "one judge for each invariant",
    "testing/sim/checker_store.py": "the findings that all judges share, and the judges of the store's events",
    "testing/sim/servers.py": "a simulated server with its store and cluster",
    "testing/store_clients.py": "one suite, a case after the other",
    "testing/store_leader.py": "one suite, a case after the other",
    "testing/store_leases.py": "one suite, a case after the other",
    "wire/messages.py": "the table of frames: each message with its reader and its writer",
    "worker/function_processes.py": "the three processes of plain functions, which speak with each other",
    "worker/attempt.py": "what all ways of running an attempt share: handlers, ends, rules of exit codes, the log",
    "worker/worker.py": "the machine's driver: its connection, its attempts and their ends",
}
LONG_FUNCTIONS: dict[str, str] = {}  # "stores/sql/store.py:submit"


def long_files(found: list[Module], limit: int) -> dict[str, int]:
    lines = {module.path: len(module.text.splitlines()) for module in found}
    return {path: count for path, count in lines.items() if count > limit}


def long_functions(found: list[Module]) -> dict[str, int]:
    return {name: lines for module in found for name, lines in _lengths(module) if lines > FUNCTION_MAX_LINES}


def _lengths(module: Module) -> Iterator[tuple[str, int]]:
    return ((f"{module.path}:{function.name}", length(function)) for function in module.functions)


def test_every_module_parses() -> None:
    assert not syntax_errors()


def test_no_file_is_too_long() -> None:
    assert long_files(modules(), FILE_MAX_LINES) == {}


def test_a_long_file_has_a_reason() -> None:
    long = long_files(modules(), FILE_LONG_LINES)

    assert {path: lines for path, lines in long.items() if path not in LONG_FILES} == {}
    assert set(LONG_FILES) <= set(long), f"not needed any more: {set(LONG_FILES) - set(long)}"


def test_no_function_is_too_long() -> None:
    too_long = long_functions(modules())

    assert not {name: lines for name, lines in too_long.items() if name not in LONG_FUNCTIONS}
    assert set(LONG_FUNCTIONS) <= set(too_long), f"not needed any more: {set(LONG_FUNCTIONS) - set(too_long)}"


def test_every_module_says_what_it_is_for() -> None:
    assert not [module.path for module in modules() if not ast.get_docstring(module.tree)]


def test_docstrings_begin_with_a_verb_or_name_the_thing() -> None:
    first_words = {
        f"{folder}/{module.path}:{node.lineno}": (node.value.value.split() or [""])[0]
        for folder in ("src", "tests", "examples")
        for module in modules(ROOT / folder)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }

    assert not {place: word for place, word in first_words.items() if word in NO_BEGINNINGS}


def test_the_limits_are_the_last_length_allowed() -> None:
    def body(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    assert not long_functions([Module("a.py", body(FUNCTION_MAX_LINES))])
    assert long_functions([Module("a.py", body(FUNCTION_MAX_LINES + 1))])
    assert not long_files([Module("a.py", "x = 1\n" * FILE_MAX_LINES)], FILE_MAX_LINES)
    assert long_files([Module("a.py", "x = 1\n" * (FILE_MAX_LINES + 1))], FILE_MAX_LINES)


def test_the_map_is_short_enough_to_be_read() -> None:
    """Prose of ARCHITECTURE.md, without its tables and its picture; lines of it and of the changelog."""
    lines = (ROOT / "ARCHITECTURE.md").read_text().splitlines()
    prose = [line for line in lines if not line.startswith(("|", " "))]

    assert len(" ".join(prose).split()) <= MAP_MAX_WORDS
    assert not [line for line in [*lines, *(ROOT / "CHANGELOG.md").read_text().splitlines()] if len(line) > LINE_MAX_CHARS]
