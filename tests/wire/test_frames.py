"""Frames come out as they went in, however the bytes are cut, and what is not a frame is refused before it costs anything."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.errors import ProtocolError, TooLarge
from tasuki.wire.compression import GZIP, ZSTD
from tasuki.wire.messages import BATCH, HEADER_MAX_BYTES, KNOWN_FLAGS, PREFIX_BYTES, Frame, FrameDecoder, encode_frame

LIMIT = 4096
prefix = struct.Struct("<IBBH").pack
frames = st.builds(
    Frame,
    type=st.integers(0, 255),
    flags=st.integers(0, KNOWN_FLAGS),
    header=st.binary(max_size=40),
    payload=st.binary(max_size=200),
)


def written(frame: Frame) -> bytes:
    return encode_frame(frame.type, frame.header, frame.payload, frame.flags)


# --- whole frames


def test_a_frame_is_length_type_flags_header_length_header_payload() -> None:
    assert encode_frame(13, b"HEAD", b"BODY", BATCH | ZSTD) == bytes.fromhex("0c000000 0d 03 0400") + b"HEADBODY"


@given(frames)
def test_a_frame_in_one_piece_comes_out_as_it_went_in(frame: Frame) -> None:
    decoder = FrameDecoder(LIMIT)

    assert decoder.feed(written(frame)) == [frame]
    assert not decoder.partial


@given(st.lists(frames, max_size=4))
def test_byte_by_byte_each_frame_comes_out_with_its_last_byte(sent: list[Frame]) -> None:
    decoder = FrameDecoder(LIMIT)

    for frame in sent:
        *first, last = (bytes([byte]) for byte in written(frame))
        assert all(decoder.feed(byte) == [] and decoder.partial for byte in first)
        assert decoder.feed(last) == [frame]
        assert not decoder.partial


@given(st.lists(frames, max_size=6), st.data())
def test_random_cuts_change_nothing(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(map(written, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder = FrameDecoder(LIMIT)

    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert [frame for piece in pieces for frame in decoder.feed(piece)] == sent
    assert not decoder.partial


def test_several_frames_and_the_beginning_of_the_next_in_one_piece() -> None:
    decoder = FrameDecoder(LIMIT)
    one, two, three = Frame(1, 0, b"a", b"x"), Frame(2, BATCH, b"", b""), Frame(3, GZIP, b"abc", b"y" * 100)
    stream = written(one) + written(two) + written(three)

    assert decoder.feed(stream[:-50]) == [one, two]
    assert decoder.partial
    assert decoder.feed(stream[-50:]) == [three]


def test_no_bytes_are_no_frame() -> None:
    decoder = FrameDecoder(LIMIT)

    assert decoder.feed(b"") == []
    assert not decoder.partial


# --- limits


def test_a_frame_of_exactly_the_limit_is_taken() -> None:
    frame = Frame(13, 0, b"h", b"p" * (LIMIT - 5))

    assert FrameDecoder(LIMIT).feed(written(frame)) == [frame]


@pytest.mark.parametrize("length", [LIMIT + 1, 2**31, 2**32 - 1])
def test_a_length_over_the_limit_is_refused_with_the_eighth_byte(length: int) -> None:
    decoder = FrameDecoder(LIMIT)
    bomb = prefix(length, 9, 0, 0)

    assert decoder.feed(bomb[: PREFIX_BYTES - 1]) == []
    with pytest.raises(TooLarge, match=f"announces {length} bytes, the limit on this connection is {LIMIT}"):
        decoder.feed(bomb[PREFIX_BYTES - 1 :])


def test_the_limit_can_grow_when_the_peer_is_known() -> None:
    decoder = FrameDecoder(64)
    frame = Frame(13, 0, b"", b"p" * 100)
    decoder.max_bytes = LIMIT

    assert decoder.feed(written(frame)) == [frame]


def test_a_header_of_exactly_the_limit_can_be_written() -> None:
    frame = Frame(17, 0, b"h" * HEADER_MAX_BYTES, b"")

    assert FrameDecoder(2 * HEADER_MAX_BYTES).feed(written(frame)) == [frame]


def test_a_header_over_the_limit_cannot_be_written() -> None:
    with pytest.raises(TooLarge, match="put large things in the payload"):
        encode_frame(17, b"h" * (HEADER_MAX_BYTES + 1))


# --- what is not a frame


@pytest.mark.parametrize(("length", "header_bytes"), [(0, 0), (3, 0), (4, 1), (10, 7), (LIMIT, 0xFFFF)])
def test_a_header_longer_than_the_frame_is_refused(length: int, header_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"a header of {header_bytes}"):
        FrameDecoder(LIMIT).feed(prefix(length, 9, 0, header_bytes))


@pytest.mark.parametrize("flags", [8, 16, 32, 64, 128, 255, BATCH | 8])
def test_unknown_flags_are_refused(flags: int) -> None:
    with pytest.raises(ProtocolError, match="unknown flags"):
        FrameDecoder(LIMIT).feed(prefix(4, 9, flags, 0))


def test_a_bad_frame_behind_a_good_one_is_refused() -> None:
    with pytest.raises(TooLarge):
        FrameDecoder(LIMIT).feed(written(Frame(1, 0, b"a", b"x")) + prefix(LIMIT + 1, 9, 0, 0))


@given(st.lists(st.binary(max_size=300), max_size=5))
def test_random_bytes_are_frames_or_an_error_of_ours(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(LIMIT)

    try:
        found = [frame for piece in pieces for frame in decoder.feed(piece)]
    except (ProtocolError, TooLarge):
        return
    assert b"".join(map(written, found)) == b"".join(pieces)[: sum(len(written(frame)) for frame in found)]
