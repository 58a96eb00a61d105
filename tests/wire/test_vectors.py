"""The bytes are the contract: encoder, decoder, the data file and the page for people say the same."""

import hashlib
import re
from typing import Any

import msgspec
import pytest

from tasuki.core import job
from tasuki.core.broker import authentication, client_messages, state
from tasuki.core.job import JOB_ID_MAX_CHARS, NAME_MAX_CHARS, JobSpec, body_hash
from tasuki.core.lifecycle import LEASE_MARGIN_S, LEASE_TTL_S
from tasuki.core.protocol import (
    BATCH_MAX,
    FRAME_MAX_BYTES,
    HANDSHAKE_TIMEOUT_S,
    PROTOCOL_VERSION,
    UNAUTHENTICATED_FRAME_MAX_BYTES,
)
from tasuki.errors import BY_CODE, TasukiError
from tasuki.net import tcp_link
from tasuki.server import queries
from tasuki.wire.messages import HEADER_MAX_BYTES, FrameDecoder, Type, encode
from tests.wire.vectors import MESSAGE_TYPES, PAGE, VECTORS, decode_all, hex_blocks, message_of, values

Vector = dict[str, Any]


def each(section: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", VECTORS[section], ids=lambda vector: vector["name"])


@each("messages")
def test_a_message_is_encoded_to_exactly_these_bytes(vector: Vector) -> None:
    assert encode(message_of(vector)).hex() == vector["hex"]


@each("messages")
def test_these_bytes_are_decoded_to_the_message(vector: Vector) -> None:
    assert decode_all(bytes.fromhex(vector["hex"])) == [message_of(vector)]


@each("messages")
def test_the_frame_type_and_flags_are_the_ones_in_the_file(vector: Vector) -> None:
    (frame,) = FrameDecoder().feed(bytes.fromhex(vector["hex"]))

    assert (frame.type, frame.flags) == (vector["frame_type"], vector["flags"])


@each("accepted")
def test_other_encoders_bytes_are_decoded_to_the_message(vector: Vector) -> None:
    assert decode_all(bytes.fromhex(vector["hex"])) == [message_of(vector)]


@each("accepted")
def test_what_is_only_accepted_is_not_what_we_write(vector: Vector) -> None:
    assert encode(message_of(vector)).hex() != vector["hex"]


@each("bad_frames")
def test_a_bad_frame_is_refused_with_its_code(vector: Vector) -> None:
    with pytest.raises(TasukiError) as refused:
        decode_all(bytes.fromhex(vector["hex"]), vector["limit"])

    assert refused.value.code == vector["code"]


@each("body_hash")
def test_the_body_hash_is_the_sha256_of_the_bytes_in_the_file(vector: Vector) -> None:
    spec = msgspec.convert(values(vector["spec"]), JobSpec)

    assert body_hash(spec).hex() == vector["sha256"]
    assert hashlib.sha256(bytes.fromhex(vector["body_hex"])).hexdigest() == vector["sha256"]
    assert msgspec.msgpack.decode(bytes.fromhex(vector["body_hex"])) == vector["body"]


def test_notes_priority_and_times_do_not_change_the_body_hash() -> None:
    hashes = {vector["name"]: vector["sha256"] for vector in VECTORS["body_hash"]}

    assert hashes["square"] == hashes["square_with_notes"]


# --- nothing is missing


def test_every_message_has_a_vector() -> None:
    assert {vector["type"] for vector in VECTORS["messages"]} == {kind.__name__ for kind in MESSAGE_TYPES}


def test_every_vector_has_a_name_of_its_own() -> None:
    for section in ("messages", "accepted", "bad_frames", "body_hash"):
        names = [vector["name"] for vector in VECTORS[section]]
        assert len(names) == len(set(names)), section


def test_the_file_is_of_this_protocol_version() -> None:
    assert VECTORS["protocol_version"] == PROTOCOL_VERSION


# --- the page for people


def test_every_block_of_hex_on_the_page_is_a_vector() -> None:
    known = {vector[key] for section in VECTORS.values() if isinstance(section, list) for vector in section
             if isinstance(vector, dict) for key in ("hex", "body_hex", "sha256") if key in vector}  # fmt: skip
    shown = hex_blocks(PAGE)

    assert shown
    assert [block for block in shown if block not in known] == []


def test_a_block_that_drifted_would_be_seen() -> None:
    assert hex_blocks("text\n```hex\n0a 0b   # a comment with abc\n0c\n```\n```\nff\n```\n") == ["0a0b0c"]


@pytest.mark.parametrize("kind", Type, ids=lambda kind: kind.name)
def test_the_page_lists_every_frame_type_with_its_number(kind: Type) -> None:
    assert re.search(rf"^\| {kind.value} \| {kind.name} \|", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_the_page_lists_every_error_code_and_whether_to_try_again(code: str) -> None:
    again = "yes" if BY_CODE[code].retryable else "no"

    assert re.search(rf"^\| `{code}` \| {again} \|", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_the_page_names_every_field_of_every_message(kind: type[msgspec.Struct]) -> None:
    section = PAGE.partition(f"\n#### {kind.__name__}\n")[2].partition("\n#### ")[0]

    assert section, f"docs/wire.md has no section {kind.__name__}"
    assert [name for name in kind.__struct_fields__ if f"`{name}`" not in section] == []


@pytest.mark.parametrize("name", JobSpec.__struct_fields__)
def test_the_page_names_every_field_of_a_job(name: str) -> None:
    assert re.search(rf"^\| `{name}` \|", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("verb", sorted(client_messages.REQUEST_VERBS | {"worker.rotate"}))
def test_the_page_explains_every_request_by_name(verb: str) -> None:
    table = PAGE.partition("\n| verb | params")[2].partition("\n\n")[0]

    assert any(f"`{verb}`" in line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))


LIMITS = [
    ("`length`, peer → server, until Welcome", f"{UNAUTHENTICATED_FRAME_MAX_BYTES:,}"),
    ("`length`, both ways, after Welcome", f"{FRAME_MAX_BYTES:,}"),
    ("header", f"{HEADER_MAX_BYTES:,} bytes"),
    ("Hello after the connection was made", f"{HANDSHAKE_TIMEOUT_S:g} s"),
    ("first to last byte of a frame", f"{tcp_link.FRAME_TIMEOUT_S:g} s"),
    ("a client's silence", f"{authentication.IDLE_TIMEOUT_S:g} s"),
    ("a worker's silence", f"{LEASE_MARGIN_S:g} s"),
    ("a peer that does not read while", f"more than {tcp_link.WRITE_SOFT_BYTES >> 20} MiB wait"),
    ("a peer that does not read while", f"after {tcp_link.STALL_TIMEOUT_S:g} s, or at {tcp_link.WRITE_HARD_BYTES >> 20} MiB"),
    ("lease ttl, margin", f"{LEASE_TTL_S:g} s, {LEASE_MARGIN_S:g} s"),
    ("`patterns`", f"at most {authentication.PATTERNS_MAX}"),
    ("workers of one token", f"| {state.WORKERS_MAX:,};"),
    ("different patterns with `*`", f"| {state.MIXED_PATTERNS_MAX} together;"),
    ("subscriptions to messages of one token", f"| {state.SUBSCRIBERS_MAX:,} |"),
    ("`credit`", f"{state.CREDIT_MAX:,}"),
    ("`job_id`", f"1–{JOB_ID_MAX_CHARS} characters"),
    ("`client_id`", f"1–{NAME_MAX_CHARS} characters"),
    ("`exec`", f"printable, at most {job.EXEC_MAX_BYTES:,} bytes"),
    ("`args`", f"at most {job.ARGS_MAX:,}, each at most {job.TEXT_MAX_BYTES:,}"),
    ("`env`", f"at most {job.ENV_MAX}"),
    ("`payload`", f"{job.BODY_INLINE_MAX_BYTES:,} bytes"),
    ("`files`", f"at most {job.FILES_MAX:,}"),
    ("`timeout_s`", f"at most {job.TIMEOUT_MAX_S:,.0f}"),
    ("`max_retries`", f"0–{job.BUDGET_MAX:,}"),
    ("`priority`", f"0–{job.PRIORITY_MAX}"),
    (
        "`headers`",
        f"at most {job.HEADERS_MAX}; your notes. `args`, `env` and `headers` together: at most {job.TEXTS_MAX_BYTES:,}",
    ),
    ("`result`", f"at most {job.RESULT_INLINE_MAX_BYTES:,} bytes"),
    ("`get`", f"at most {queries.GET_MAX:,}, with `result` {queries.GET_RESULTS_MAX}"),
    ("`find`", f"1–{queries.PAGE_MAX:,}"),
    ("`watch`", f"at most {BATCH_MAX:,}; more in further requests"),
    ("`requeue`", f"`job_ids`: at most {BATCH_MAX:,}"),
    ("`specs`", f"at most {client_messages.SPECS_MAX:,}"),
    ("`job_ids`", f"at most {BATCH_MAX:,}"),
    ("items of one frame", f"{BATCH_MAX:,}"),
]


ANSWERS = {
    "what is under way when a request cannot be read": "fail those requests. Dial with growing pauses",
    "who keeps a time limit": "Keep the job's `timeout_s`: nobody else does.",
    "who judges exit codes": "The server does not compare them.",
    "what a command's result is": "is a ZIP archive with `stdout.log` and `stderr.log`",
    "a job that a worker cannot read": "is reported as failed with `BAD_INPUT` and `permanent`",
    "endings of one frame": "Send at most 1,024 endings and about 1 MiB in one frame.",
    "the token of a worker that enrols": "dial again with HelloWorker, the `worker_id` of the Reply and the new secret",
    "a claim is an array": "A **claim** names a lease: the array",
    "a fenced ending is an array": "with `fenced`: `[lease_id, reason]`",
    "header or payload": "In the tables of messages, fields are those of the header",
    "a chunk at another offset": "another one ends the connection (`PROTOCOL`, `corr_id` 0)",
    "a chunk of no upload": "is skipped.",
    "a blob of another size": "at once if the server has the blob with another size",
    "the order of codecs": "Without a zstd library offer `gzip` alone.",
    "a clock that goes on": "os.uptime() of Node.js",
    "the margin": "the smaller of lease_margin_s and a quarter of the ttl",
    "duties of the server only": "use a msgpack library that does not check UTF-8 or depth",
    "an outcome past the limits": "is recorded as a failure with `BAD_OUTCOME` that is not tried again; one whose",
    "an unknown frame": "After it, such a frame is a newer peer's and is skipped",
    "an input that was not uploaded": "`NOT_FOUND` (an input blob that was not uploaded)",
}
"""Sentences that answer what people asked who wrote a client or a worker from the page."""


@pytest.mark.parametrize("question", ANSWERS)
def test_the_page_answers_what_was_asked_of_it(question: str) -> None:
    assert ANSWERS[question] in PAGE


@pytest.mark.parametrize(("row", "value"), LIMITS, ids=str)
def test_the_page_has_the_limits_of_the_code(row: str, value: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]

    assert any(value in line for line in rows), rows
