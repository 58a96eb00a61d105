"""The bytes are the contract: encoder, decoder, the data file and the page for people say the same."""

import hashlib
import re
from typing import Any

import msgspec
import pytest

from tasuki.core.job import JobSpec, body_hash
from tasuki.core.protocol import PROTOCOL_VERSION
from tasuki.errors import BY_CODE, TasukiError
from tasuki.wire.frames import FrameDecoder
from tasuki.wire.messages import Type, encode
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
