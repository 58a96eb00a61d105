"""Hints: nothing is lost in the pieces, none is too large, and too much becomes "look at everything"."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.core.cluster_messages import (
    DECODE_MAX_BYTES,
    PIECE_MAX_BYTES,
    PIECES_MAX,
    RELAY_SENDERS_MAX,
    Hint,
    RelayedMessage,
    RelayedPieces,
    RelayPiece,
    decode,
    everything,
    relay,
    split,
)
from tasuki.core.protocol import PublishedMessage
from tasuki.errors import InvalidInput, TooLarge

LISTS = ("tokens", "canceled", "moved", "ended", "ready")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=128)
pairs = st.tuples(texts, texts)


def lists_of(item: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(item, max_size=30).map(tuple)


hints = st.builds(
    Hint,
    server_id=texts,
    everything=st.booleans(),
    tokens=lists_of(texts),
    canceled=lists_of(pairs),
    moved=lists_of(st.tuples(texts, texts, texts)),
    ended=lists_of(texts),
    ready=lists_of(texts),
)


def joined(pieces: list[bytes]) -> dict[str, tuple[object, ...]]:
    """All that the pieces list, in their order."""
    found = [decode(piece) for piece in pieces]
    return {name: tuple(item for hint in found for item in getattr(hint, name)) for name in LISTS}


@given(hints)
def test_what_is_sent_in_one_piece_comes_out_the_same(hint: Hint) -> None:
    pieces = split(hint, max_bytes=10**9)

    assert [decode(piece) for piece in pieces] == ([] if hint.empty else [hint])


@given(hints, st.integers(60, 9_000))
def test_pieces_are_few_small_and_whole_or_say_to_look_at_everything(hint: Hint, max_bytes: int) -> None:
    pieces = split(hint, max_bytes)
    found = joined(pieces)

    assert len(pieces) <= PIECES_MAX
    assert all(len(piece) <= max_bytes for piece in pieces) or pieces == [everything(hint.server_id)]
    assert all(decode(piece).server_id == hint.server_id for piece in pieces)
    says_everything = any(decode(piece).everything for piece in pieces)
    assert says_everything >= hint.everything
    assert says_everything or found == {name: getattr(hint, name) for name in LISTS}


def test_a_hint_that_tells_nothing_is_not_sent() -> None:
    assert Hint(server_id="a").empty
    assert split(Hint(server_id="a")) == []


@pytest.mark.parametrize("name", LISTS)
def test_a_hint_that_tells_anything_is_sent(name: str) -> None:
    item = {"canceled": ("w1", "l1"), "moved": ("w1", "i1", "token:t")}.get(name, "x1")
    hint = Hint(server_id="a", **{name: (item,)})

    assert not hint.empty
    assert [decode(piece) for piece in split(hint)] == [hint]


def test_a_batch_of_ended_jobs_takes_two_pieces() -> None:
    hint = Hint(server_id="a", ended=tuple(f"0197-{number:031d}" for number in range(256)))

    pieces = split(hint)

    assert len(pieces) == 2
    assert joined(pieces)["ended"] == hint.ended
    assert all(len(piece) <= PIECE_MAX_BYTES for piece in pieces)


def test_past_the_cap_the_others_look_for_jobs_themselves_but_hear_of_cancels_moves_and_tokens() -> None:
    many = tuple(f"{number:0128d}" for number in range(1_000))
    hint = Hint(server_id="a", tokens=("t1",), canceled=(("w1", "l1"),), moved=(("w2", "i2", "token:t"),), ended=many, ready=many)

    pieces = split(hint)

    assert [decode(piece) for piece in pieces] == [
        Hint(server_id="a", everything=True, tokens=("t1",), canceled=(("w1", "l1"),), moved=(("w2", "i2", "token:t"),))
    ]


def test_far_past_the_cap_only_everything_is_said() -> None:
    many = tuple((f"{number:0128d}", "l") for number in range(1_000))

    assert split(Hint(server_id="a", canceled=many)) == [everything("a")]


def test_everything_is_said_once_not_in_each_piece() -> None:
    tokens = tuple(f"{number:0128d}" for number in range(100))

    found = [decode(piece) for piece in split(Hint(server_id="a", everything=True, tokens=tokens))]

    assert [hint.everything for hint in found] == [True, False]


def test_what_fits_no_piece_becomes_everything() -> None:
    assert split(Hint(server_id="a", ready=("\x01" * 255,)), max_bytes=1_000) == [everything("a")]


def test_everything_is_nobody_s_own() -> None:
    assert decode(everything()) == Hint(server_id="", everything=True)


def test_a_field_of_a_newer_server_is_skipped() -> None:
    assert decode(b'{"server_id":"a","later":[1,{"x":2}],"ended":["j"]}') == Hint(server_id="a", ended=("j",))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'{"ended":[1]}',
        b'{"ended":"j"}',
        b'{"canceled":[["w"]]}',
        b'{"everything":"yes"}',
        b'{"server_id":"\xff"}',
        b'{"ended":["' + b"x" * 129 + b'"]}',
        b'{"later":' + b"[" * 50_000,
        msgspec.msgpack.encode({"server_id": "a"}),
    ],
)
def test_what_is_no_hint_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode(data)


def test_what_is_too_large_is_refused_unread() -> None:
    with pytest.raises(TooLarge):
        decode(b" " * (DECODE_MAX_BYTES + 1))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    try:
        decode(data)
    except InvalidInput:
        pass


# --- relayed messages

payloads = st.lists(st.binary(max_size=3000), min_size=1, max_size=8)


@given(payloads, st.sampled_from([600, PIECE_MAX_BYTES]), texts)
def test_relayed_messages_are_whole_again_after_any_number_of_pieces(sent: list[bytes], max_bytes: int, server_id: str) -> None:
    server_id = server_id[:20]
    messages = [RelayedMessage(PublishedMessage("a.ü", payload, "r", {"h": "i"}), {"q": "s-2"}) for payload in sent]
    collected = RelayedPieces()

    pieces = relay(server_id, 7, messages, max_bytes)

    assert all(len(piece) <= max_bytes + 6 * len(server_id.encode()) for piece in pieces)
    got = [collected.take(hint.server_id, hint.relay) for hint in map(decode, pieces) if hint.relay is not None]
    assert got == [[]] * (len(pieces) - 1) + [messages]


def test_a_lost_piece_takes_its_own_messages_with_it_and_no_others() -> None:
    def cut(server_id: str, number: int) -> list[RelayPiece]:
        large = RelayedMessage(PublishedMessage("a", b"%d" % number * 5000))
        return [hint.relay for hint in map(decode, relay(server_id, number, [large], 1000)) if hint.relay is not None]

    collected = RelayedPieces()
    first, second, other = cut("s-1", 1), cut("s-1", 2), cut("s-2", 1)
    pieces = [("s-1", piece) for piece in first[:3] + first[4:] + second] + [("s-2", piece) for piece in other[:1]]
    pieces += [("s-1", second[-1])] + [("s-2", piece) for piece in other[1:]]

    got = [message for server_id, piece in pieces for message in collected.take(server_id, piece)]

    assert [relayed.message.payload[:1] for relayed in got] == [b"2", b"1"]
    with pytest.raises(InvalidInput, match="relayed messages of server 's-9'"):
        collected.take("s-9", RelayPiece(1, 0, 1, b"\xc1"))
    for number in range(1000):  # senders that never end what they begin
        collected.take(f"s-{number}", RelayPiece(1, 0, 2, b"x"))
    assert len(collected._begun) <= RELAY_SENDERS_MAX


def test_an_older_server_takes_a_piece_of_messages_for_a_hint_of_nothing() -> None:
    class OlderHint(msgspec.Struct):
        server_id: str = ""
        everything: bool = False

    [piece] = relay("s-1", 1, [RelayedMessage(PublishedMessage("a", b"1"))])

    assert msgspec.json.decode(piece, type=OlderHint) == OlderHint("s-1", False)
