"""The messages between worker and keeper, and how they are cut out of a stream."""

from __future__ import annotations

import itertools
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.errors import ProtocolError
from tasuki.worker.keeper.protocol import (
    FRAME_MAX_BYTES,
    EndReason,
    Frames,
    Limits,
    NotSpawned,
    Order,
    Ready,
    RenewDeadlines,
    Report,
    Spawn,
    Spawned,
    StopAttempt,
    TreeEnded,
    frame,
)

SPAWN = Spawn(
    number=7,
    program=b"/bin/\xff",
    argv=(b"x", b"\xfe y"),
    env={b"NAME": b"\xfdvalue"},
    cwd=b"/",
    folder=b"/f",
    mark=b"i/l",
    stdin=b"/dev/null",
    stdout=b"/o",
    stderr=b"/e",
    lease_deadline=12.5,
    timeout_s=None,
    grace_s=0.5,
    limits=Limits(memory_mb=10, nice=3),
)
ORDERS: list[Order] = [SPAWN, RenewDeadlines([(7, 20.25), (8, 21.0)]), StopAttempt(7, EndReason.CANCELED, 5.0)]
REPORTS: list[Report] = [
    Ready("cgroup", "d", "watched"),
    Spawned(7, 123),
    NotSpawned(8, 2),
    TreeEnded(7, -9, EndReason.OOM, "why"),
]


@given(cuts=st.lists(st.integers(0, 400), max_size=6))
def test_orders_arrive_as_they_were_sent_however_the_stream_is_cut(cuts: list[int]) -> None:
    data = frame(ORDERS) + frame([SPAWN])
    frames: Frames[Order] = Frames(list[Order])
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]

    arrived = [order for begin, end in itertools.pairwise(marks) for order in frames.feed(data[begin:end])]

    assert arrived == [*ORDERS, SPAWN]
    assert len(frames._pending) == 0


def test_reports_arrive_as_they_were_sent() -> None:
    frames: Frames[Report] = Frames(list[Report])

    assert frames.feed(frame(REPORTS)) == REPORTS


def test_a_frame_that_is_not_complete_is_waited_for() -> None:
    frames: Frames[Order] = Frames(list[Order])
    data = frame(ORDERS)

    assert frames.feed(data[:-1]) == []
    assert len(frames._pending) == len(data) - 1


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", FRAME_MAX_BYTES + 1),
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 1) + b"\x07",
        frame(REPORTS),
        struct.pack("<I", 600) + b"\x91" * 600,
        (lambda body: struct.pack("<I", len(body)) + body)(msgspec.msgpack.encode([["spawn", 1]])),
    ],
    ids=["too long", "no msgpack", "no list", "reports", "deep", "half a message"],
)
def test_what_is_no_frame_of_orders_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="worker and keeper"):
        Frames(list[Order]).feed(data)
