"""A spec is checked limit by limit; the body hash covers exactly the body; differences are named, never told."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.job import (
    ARGS_MAX,
    BODY_INLINE_MAX_BYTES,
    BUDGET_MAX,
    ENV_MAX,
    EXEC_MAX_BYTES,
    EXIT_CODES_MAX,
    FILES_MAX,
    HEADERS_MAX,
    LEASED,
    PRIORITY_MAX,
    TEXT_MAX_BYTES,
    TIMEOUT_MAX_S,
    InputFile,
    Job,
    JobSpec,
    Lease,
    State,
    body_hash,
    check_file_name,
    check_spec,
    differing_fields,
)
from tasuki.errors import InvalidInput, TooLarge

SHA = "ab" * 32


def spec(**fields: Any) -> JobSpec:
    return JobSpec(**{"job_id": "a", **fields})


# ---------------------------------------------------------------------------------------------------- check_spec

AT_THE_LIMIT: list[dict[str, Any]] = [
    {},
    {"job_id": "a" * 128},
    {"job_id": "e12-7.1"},
    {"subject": "render.eu.1"},
    {"exec": "render"},
    {"exec": "x" * EXEC_MAX_BYTES},
    {"exec": "make", "cwd": "/"},
    {"priority": 0},
    {"priority": PRIORITY_MAX},
    {"max_retries": 0, "max_losses": 0},
    {"max_retries": BUDGET_MAX, "max_losses": BUDGET_MAX},
    {"backoff_s": 0.0},
    {"backoff_s": TIMEOUT_MAX_S},
    {"timeout_s": 0.001},
    {"timeout_s": TIMEOUT_MAX_S},
    {"not_before": 0.0},
    {"not_after": 0.0},
    {"not_before": 5.0, "not_after": 5.5},
    {"permanent_exit_codes": (1, 255), "retry_exit_codes": tuple(range(2, 2 + EXIT_CODES_MAX))},
    {"array_id": "array-1"},
    {"args": ("",) * ARGS_MAX},
    {"args": ("x" * TEXT_MAX_BYTES,)},
    {"env": {f"E{number}": "" for number in range(ENV_MAX)}},
    {"env": {"_A9": "x" * TEXT_MAX_BYTES}},
    {"headers": {str(number): "" for number in range(HEADERS_MAX)}},
    {"files": tuple(InputFile(f"f{number}", data=b"") for number in range(FILES_MAX))},
    {"files": (InputFile("a", sha256=SHA, size_bytes=0), InputFile("b", data=b""))},
    {"payload": b"x" * BODY_INLINE_MAX_BYTES},
    {"payload": b"x", "files": (InputFile("a", data=b"x" * (BODY_INLINE_MAX_BYTES - 1)),)},
]

PAST_THE_LIMIT: list[tuple[type[InvalidInput], str, dict[str, Any]]] = [
    (InvalidInput, "job_id", {"job_id": ""}),
    (InvalidInput, "job_id", {"job_id": "a" * 129}),
    (InvalidInput, "job_id", {"job_id": "../x"}),
    (InvalidInput, "has the form of the id of a scheduled run", {"job_id": "d7-1767225600"}),
    (InvalidInput, "has the form of the id of a scheduled run", {"job_id": "e12-7"}),
    (InvalidInput, "subject", {"subject": "render.*"}),
    (InvalidInput, "subject", {"subject": ""}),
    (InvalidInput, "exec", {"exec": "x" * (EXEC_MAX_BYTES + 1)}),
    (InvalidInput, "exec", {"exec": "rm\n-rf"}),
    (InvalidInput, "exec", {"exec": "rm\0"}),
    (InvalidInput, "cwd", {"exec": "make", "cwd": "study"}),
    (InvalidInput, "cwd", {"exec": "make", "cwd": "/a\0b"}),
    (InvalidInput, "cwd", {"cwd": "/srv"}),
    (InvalidInput, "priority", {"priority": -1}),
    (InvalidInput, "priority", {"priority": PRIORITY_MAX + 1}),
    (InvalidInput, "max_retries", {"max_retries": -1}),
    (InvalidInput, "max_retries", {"max_retries": BUDGET_MAX + 1}),
    (InvalidInput, "max_losses", {"max_losses": -1}),
    (InvalidInput, "max_losses", {"max_losses": BUDGET_MAX + 1}),
    (InvalidInput, "backoff_s", {"backoff_s": -0.1}),
    (InvalidInput, "backoff_s", {"backoff_s": TIMEOUT_MAX_S + 1}),
    (InvalidInput, "backoff_s", {"backoff_s": float("nan")}),
    (InvalidInput, "timeout_s", {"timeout_s": 0.0}),
    (InvalidInput, "timeout_s", {"timeout_s": float("inf")}),
    (InvalidInput, "timeout_s", {"timeout_s": float("nan")}),
    (InvalidInput, "not_before", {"not_before": -1.0}),
    (InvalidInput, "not_before", {"not_before": 1.7e12}),
    (InvalidInput, "not_before", {"not_before": float("nan")}),
    (InvalidInput, "not_after", {"not_after": -1.0}),
    (InvalidInput, "not_after", {"not_after": 1.7e12}),
    (InvalidInput, "not_after", {"not_after": float("nan")}),
    (InvalidInput, "later than not_before", {"not_before": 5.0, "not_after": 5.0}),
    (InvalidInput, "permanent_exit_codes has 0", {"permanent_exit_codes": (0,)}),
    (InvalidInput, "permanent_exit_codes has 256", {"permanent_exit_codes": (3, 256)}),
    (InvalidInput, "retry_exit_codes has -9", {"retry_exit_codes": (-9,)}),
    (InvalidInput, "retry_exit_codes has 65", {"retry_exit_codes": tuple(range(1, 2 + EXIT_CODES_MAX))}),
    (InvalidInput, "both have 4", {"permanent_exit_codes": (3, 4), "retry_exit_codes": (4, 5)}),
    (InvalidInput, "array_id", {"array_id": ".hidden"}),
    (TooLarge, "args", {"args": ("",) * (ARGS_MAX + 1)}),
    (TooLarge, "argument", {"args": ("x" * (TEXT_MAX_BYTES + 1),)}),
    (InvalidInput, "NUL", {"args": ("a\0b",)}),
    (TooLarge, "env", {"env": {f"E{number}": "" for number in range(ENV_MAX + 1)}}),
    (InvalidInput, "environment name", {"env": {"9A": ""}}),
    (InvalidInput, "environment name", {"env": {"A=B": ""}}),
    (InvalidInput, "environment name", {"env": {"A\n": ""}}),
    (InvalidInput, "environment name", {"env": {"": ""}}),
    (InvalidInput, "NUL", {"env": {"A": "\0"}}),
    (TooLarge, "A", {"env": {"A": "x" * (TEXT_MAX_BYTES + 1)}}),
    (TooLarge, "headers", {"headers": {str(number): "" for number in range(HEADERS_MAX + 1)}}),
    (TooLarge, "files", {"files": tuple(InputFile(f"f{number}", data=b"") for number in range(FILES_MAX + 1))}),
    (InvalidInput, "two input files", {"files": (InputFile("a", data=b""), InputFile("A", data=b""))}),
    (InvalidInput, "folder of 'a/b/c'", {"files": tuple(InputFile(name, data=b"") for name in ("a/b/c", "x", "A", "a-b"))}),
    (InvalidInput, "exactly one", {"files": (InputFile("a"),)}),
    (InvalidInput, "exactly one", {"files": (InputFile("a", data=b"", cache_id="c"),)}),
    (InvalidInput, "sha256", {"files": (InputFile("a", sha256=SHA.upper(), size_bytes=1),)}),
    (InvalidInput, "sha256", {"files": (InputFile("a", sha256=SHA + "\n", size_bytes=1),)}),
    (InvalidInput, "size_bytes", {"files": (InputFile("a", sha256=SHA),)}),
    (InvalidInput, "size_bytes", {"files": (InputFile("a", sha256=SHA, size_bytes=-1),)}),
    (InvalidInput, "exactly one", {"files": (InputFile("a", cache_id="c", cache=("c", "a")),)}),
    (InvalidInput, "cache_id", {"files": (InputFile("a", cache=("../c", "a")),)}),
    (InvalidInput, "file name", {"files": (InputFile("a", cache=("c", "../a")),)}),
    (InvalidInput, "file name", {"files": (InputFile("../a", data=b""),)}),
    (TooLarge, "65537", {"payload": b"x" * (BODY_INLINE_MAX_BYTES + 1)}),
    (TooLarge, "blobs", {"payload": b"x", "files": (InputFile("a", data=b"x" * BODY_INLINE_MAX_BYTES),)}),
]


def _title(fields: object) -> str:
    return repr(fields)[:50] if isinstance(fields, dict) else ""


@pytest.mark.parametrize("fields", AT_THE_LIMIT, ids=_title)
def test_a_spec_at_the_limit_is_accepted(fields: dict[str, Any]) -> None:
    given = spec(**fields)

    assert check_spec(given) is given


@pytest.mark.parametrize(("error", "names", "fields"), PAST_THE_LIMIT, ids=_title)
def test_a_spec_past_the_limit_is_refused_by_name(error: type[InvalidInput], names: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=names) as raised:
        check_spec(spec(**fields))

    assert type(raised.value) is error


def test_a_refusal_never_tells_the_value_of_an_environment_name() -> None:
    with pytest.raises(InvalidInput) as raised:
        check_spec(spec(env={"PASSWORD": "hunter2\0"}))

    assert "PASSWORD" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("name", ["a", "in/a.txt", "日本/ü", ".hidden", "a b", "x" * 200])
def test_a_plain_relative_path_is_a_file_name(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "./a",
        "a\\b",
        "a\0b",
        "a\nb",
        "a\x7f",
        "a\x9b",
        "a\u202eb",
        "x" * 201,
        "/".join(["x" * 199] * 6),
        "\ud800",
    ],
    ids=ascii,
)
def test_anything_else_is_not(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_file_name(name)


@pytest.mark.parametrize("name", ["x" * 201, "/".join(["x" * 199] * 6)], ids=["part", "whole"])
def test_a_name_that_is_too_long_is_called_that(name: str) -> None:
    with pytest.raises(InvalidInput, match="too long"):
        check_file_name(name)


# ---------------------------------------------------------------------------------------------------- body_hash

BODY: dict[str, Any] = {
    "subject": "render.eu",
    "exec": "render",
    "args": ("1",),
    "env": {"A": "1"},
    "payload": b"x",
    "files": (InputFile("a", data=b"1"),),
    "cwd": "/srv/study",
}


def test_the_hash_of_a_bare_job_is_the_sha256_of_its_msgpack_array() -> None:
    # Written out byte by byte, so that another language can check itself: array of 7, strings, empty arrays.
    empty = hashlib.sha256(b"").hexdigest().encode()
    packed = b"\x97\xb2job.assign.default\xa0\x90\x90\xd9\x40" + empty + b"\x90\xa0"

    assert body_hash(spec()) == hashlib.sha256(packed).digest()


def test_the_hash_of_a_full_job_is_known() -> None:
    assert body_hash(spec(**BODY)).hex() == "5721605429b462ac51c536393e8c0d0a6bf4e7c21922b7df3a289c669a2deb0b"


def test_defaults_count_as_if_they_were_written() -> None:
    written = spec(subject="job.assign.default", exec="", args=(), env={}, payload=b"", files=(), cwd="")

    assert body_hash(written) == body_hash(spec())


@pytest.mark.parametrize("name", sorted(BODY))
def test_every_field_of_the_body_counts(name: str) -> None:
    changed = {**BODY, name: getattr(spec(), name)}

    assert body_hash(spec(**changed)) != body_hash(spec(**BODY))
    assert differing_fields(spec(**changed), spec(**BODY)) == [name]


@pytest.mark.parametrize(
    "fields",
    [
        {"job_id": "b"},
        {"timeout_s": 5.0},
        {"max_retries": 1},
        {"max_losses": 1},
        {"backoff_s": 1.0},
        {"priority": 9},
        {"not_before": 5.0},
        {"not_after": 5.0},
        {"permanent_exit_codes": (3,)},
        {"retry_exit_codes": (75,)},
        {"headers": {"a": "b"}},
        {"array_id": "array"},
        {"route_key": "customer-7"},
        {"delay_first_loss": True},
    ],
    ids=str,
)
def test_nothing_else_counts(fields: dict[str, Any]) -> None:
    assert body_hash(spec(**{**BODY, **fields})) == body_hash(spec(**BODY))
    assert differing_fields(spec(**{**BODY, **fields}), spec(**BODY)) == []


def test_the_body_and_the_rest_are_all_fields() -> None:
    times, codes = {"not_before", "not_after", "timeout_s"}, {"permanent_exit_codes", "retry_exit_codes"}
    budgets = {"max_retries", "max_losses", "backoff_s", "delay_first_loss"}
    rest = {"job_id", "priority", "headers", "array_id", "route_key", "mac"} | times | codes | budgets

    assert set(BODY) | rest == set(JobSpec.__struct_fields__)


def test_the_order_of_environment_and_files_does_not_count() -> None:
    one = spec(env={"A": "1", "B": "2"}, files=(InputFile("a", data=b"1"), InputFile("b", data=b"2")))
    other = spec(env={"B": "2", "A": "1"}, files=(InputFile("b", data=b"2"), InputFile("a", data=b"1")))

    assert body_hash(one) == body_hash(other)
    assert differing_fields(one, other) == []


def test_the_order_of_arguments_counts() -> None:
    assert body_hash(spec(args=("1", "2"))) != body_hash(spec(args=("2", "1")))


def test_an_inline_file_is_the_same_as_its_blob() -> None:
    inline = spec(files=(InputFile("a", data=b"abc"),))
    blob = spec(files=(InputFile("a", sha256=hashlib.sha256(b"abc").hexdigest(), size_bytes=3),))

    assert body_hash(inline) == body_hash(blob)
    assert differing_fields(inline, blob) == []


def test_a_cached_file_is_known_by_its_cache_and_its_name_there() -> None:
    named = [InputFile("a", cache_id="c1"), InputFile("a", cache=("c1", "a")), InputFile("a", cache=("c2", "a"))]

    assert len({body_hash(spec(files=(file,))) for file in (*named, InputFile("a", cache=("c1", "b")))}) == 4


def test_the_hash_that_the_server_adds_to_a_cached_file_makes_no_other_job() -> None:
    asked = InputFile("a", cache=("c", "b"))

    assert asked.identity() == InputFile("a", cache=("c", "b"), sha256=SHA, size_bytes=1).identity()


texts = st.text(max_size=5)
specs = st.builds(
    JobSpec,
    job_id=st.just("a"),
    subject=st.sampled_from(["a", "b"]),
    args=st.lists(texts, max_size=3).map(tuple),
    env=st.dictionaries(texts, texts, max_size=3),
    payload=st.binary(max_size=3),
    timeout_s=st.sampled_from([None, 1.0, 2.0]),
    max_retries=st.integers(0, 2),
    priority=st.integers(0, 9),
)


@given(one=specs, other=specs)
def test_hashes_are_equal_exactly_if_no_field_differs(one: JobSpec, other: JobSpec) -> None:
    assert (body_hash(one) == body_hash(other)) == (differing_fields(one, other) == [])


@given(one=specs)
def test_the_hash_survives_the_wire(one: JobSpec) -> None:
    packed = msgspec.msgpack.encode(one)

    assert body_hash(msgspec.msgpack.decode(packed, type=JobSpec)) == body_hash(one)


# ---------------------------------------------------------------------------------------------------- Job


@pytest.mark.parametrize("state", sorted(LEASED))
def test_a_leased_job_without_a_lease_cannot_be_built(state: State) -> None:
    with pytest.raises(ValueError, match="without a lease"):
        Job(spec=spec(), state=state, submitter="alice", created_at=0.0)


@pytest.mark.parametrize("state", sorted(LEASED))
def test_a_leased_job_carries_its_lease(state: State) -> None:
    lease = Lease("lease", "w1", "1", 1, 17.0)

    job = Job(spec=spec(), state=state, submitter="alice", created_at=0.0, lease=lease)

    assert (job.job_id, job.lease) == ("a", lease)


def test_retries_of_a_handler_wait_a_second_at_first_and_those_of_a_command_ten() -> None:
    assert [spec(exec=exec).retry_backoff_s for exec in ("", "tool")] == [1.0, 10.0]
    assert spec(backoff_s=3.0).retry_backoff_s == 3.0
