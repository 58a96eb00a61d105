"""Following a log, against a server that the test plays answer by answer."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tasuki.client.logs import PROGRESS_WAIT_S, LogFollower, LogPart, unpack_log
from tasuki.core.job import Outcome, Progress, State
from tasuki.core.protocol import LOG_WAIT_MAX_S, JobResult, Welcome
from tasuki.errors import InvalidInput, NotFound, ProtocolError, Unavailable

DEADLINE_S = 25.0


def result_zip(stdout: bytes, cut: dict[str, int] | None = None) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("stdout.log", stdout)
        archive.writestr("stderr.log", b"")
        archive.writestr("result.json", json.dumps({"cut_logs": {"stdout": cut} if cut else {}}))
    return packed.getvalue()


class Played:
    """Stands for a client: answers questions about logs from a list, and keeps what it was asked."""

    def __init__(self, *answers: dict[str, Any], ends_with: JobResult | None = None) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.ends_with = ends_with
        self.others: dict[str, Played] = {}
        self.connected = True
        self.welcome: Welcome | None = None
        self.ended = asyncio.Event()

    async def call(self, verb: str, **params: Any) -> Any:
        assert verb == "logs"
        self.asked.append(params)
        if not self.answers:
            self.ended.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if answer.get("error"):
            raise answer["error"]
        data = answer.get("data", b"")
        return {"offset": params["offset"], "data": data, "state": "RUNNING", "attempt": 1, "complete": False, **answer}

    def job(self, job_id: str) -> Played:
        return self

    async def outcome(self) -> JobResult:
        await self.ended.wait()
        assert self.ends_with is not None
        return self.ends_with

    async def save_result(self, ended: JobResult, path: Path) -> int:
        assert ended.outcome.result is not None
        return path.write_bytes(ended.outcome.result)

    async def status(self, job_id: str, *, result: bool = False) -> dict[str, Any]:
        return {"outcome": None, "attempt": 1, "state": "PENDING"}

    def beside(self, url: str, connect_timeout_s: float) -> Played | None:
        return self.others.get(url)

    async def open(self) -> None:
        return

    async def close(self) -> None:
        self.connected = False


def ended(result: bytes | None, attempt: int = 1) -> JobResult:
    return JobResult("job", State.SUCCEEDED, attempt, Outcome(exit_code=0, result=result))


def follow(played: Played, **options: Any) -> list[LogPart]:
    async def main() -> list[LogPart]:
        async with asyncio.timeout(DEADLINE_S):
            follower = LogFollower(played, "job", **options)  # type: ignore[arg-type]
            return [part async for part in follower.parts()]

    return asyncio.run(main())


def seen(parts: list[LogPart]) -> bytes:
    return b"".join(part.text for part in parts)


def test_an_app_may_have_a_word_of_its_own_that_is_no_progress() -> None:
    outcome = Outcome(result=b"", meta={"progress": "slow but steady"})
    played = Played({"data": b'{"fraction":0.5,"text":"half"}\n'}, ends_with=JobResult("job", State.SUCCEEDED, 1, outcome))

    async def main() -> list[Progress]:
        async with asyncio.timeout(DEADLINE_S):
            return [told async for told in LogFollower(played, "job", "progress").progress()]  # type: ignore[arg-type]

    assert asyncio.run(main()) == [Progress(0.5, "half")]


def test_the_rest_comes_from_the_result_by_the_same_offset() -> None:
    played = Played({"data": b"hello "}, ends_with=ended(result_zip(b"hello world")))

    assert [(part.offset, part.data) for part in follow(played)] == [(0, b"hello "), (6, b"world")]
    assert [asked["offset"] for asked in played.asked] == [0, 6]


@pytest.mark.parametrize(
    ("read", "rest"),
    [
        (b"", b"HEAD\n[tasuki: 6 bytes were cut here]\nTAIL"),
        (b"HE", b"AD\n[tasuki: 6 bytes were cut here]\nTAIL"),
        (b"HEAD", b"\n[tasuki: 6 bytes were cut here]\nTAIL"),
        (b"HEADxx", b"\n[tasuki: 4 bytes were cut here]\nTAIL"),
        (b"HEADxxxxxx", b"TAIL"),
        (b"HEADxxxxxxTA", b"IL"),
        (b"HEADxxxxxxTAIL", b""),
    ],
)
def test_a_cut_log_goes_on_where_the_follower_was(read: bytes, rest: bytes) -> None:
    kept = b"HEAD\n[tasuki: 6 bytes were cut here]\nTAIL"
    result = result_zip(kept, {"head_bytes": 4, "cut_bytes": 6, "tail_bytes": 4})
    played = Played(*([{"data": read}] if read else []), ends_with=ended(result))

    assert seen(follow(played)) == read + rest


@pytest.mark.parametrize(("options", "wait_s"), [({}, LOG_WAIT_MAX_S), ({"on_progress": lambda *_: None}, PROGRESS_WAIT_S)])
def test_who_wants_to_hear_of_progress_does_not_wait_long_for_output(options: dict[str, Any], wait_s: float) -> None:
    played = Played(ends_with=ended(result_zip(b"")))

    follow(played, **options)

    assert played.asked[0]["wait_s"] == wait_s


def test_progress_is_told_once_each_time_it_changes() -> None:
    told: list[tuple[float, str]] = []
    quarter = {"data": b".", "progress": 0.25, "progress_text": "reading"}
    played = Played(
        quarter, {**quarter, "offset": 1}, {"data": b".", "offset": 2, "progress": 0.5}, ends_with=ended(result_zip(b"..."))
    )

    follow(played, on_progress=lambda *what: told.append(what))

    assert told == [(0.25, "reading"), (0.5, "")]


def test_a_new_attempt_begins_at_its_start() -> None:
    played = Played({"data": b"first"}, {"data": b"again", "attempt": 2, "offset": 0}, ends_with=ended(result_zip(b"again!"), 2))

    assert [(part.attempt, part.offset, part.data) for part in follow(played)] == [
        (1, 0, b"first"),
        (2, 0, b"again"),
        (2, 5, b"!"),
    ]
    assert [(asked["attempt"], asked["offset"]) for asked in played.asked] == [(0, 0), (1, 5), (2, 5)]


def test_what_comes_twice_is_an_error_and_is_not_passed_on() -> None:
    played = Played({"data": b"hello"}, {"data": b"hello", "offset": 0}, ends_with=ended(None))

    with pytest.raises(ProtocolError, match="asked for byte 5"):
        follow(played)


def test_nothing_is_asked_for_while_nobody_reads() -> None:
    played = Played({"data": b"one"}, {"data": b"two"}, ends_with=ended(None))

    async def main() -> int:
        async with asyncio.timeout(DEADLINE_S):
            parts = LogFollower(played, "job").parts()  # type: ignore[arg-type]
            await anext(parts)
            for _ in range(100):
                await asyncio.sleep(0)
            asked = len(played.asked)
            await parts.aclose()
            return asked

    assert asyncio.run(main()) == 1


def test_another_server_is_asked_where_the_worker_is_and_left_when_it_is_not() -> None:
    played = Played(
        {"elsewhere": ["tcp://other:7000"], "complete": None},
        {"data": b"here again"[4:], "offset": 4},
        ends_with=ended(result_zip(b"here again")),
    )
    played.others["tcp://other:7000"] = other = Played({"data": b"here"}, {"complete": None})

    assert seen(follow(played)) == b"here again"
    assert ([asked["offset"] for asked in other.asked], other.connected) == ([0, 4], False)


def test_another_server_that_fails_is_left() -> None:
    played = Played(
        {"elsewhere": ["tcp://other:7000"], "complete": None}, {"data": b"home"}, ends_with=ended(result_zip(b"home"))
    )
    played.others["tcp://other:7000"] = Played({"error": Unavailable("gone")})

    assert seen(follow(played)) == b"home"


def test_a_server_that_knows_nothing_of_logs_is_not_asked() -> None:
    played = Played({"error": NotFound("there is no request 'logs'")}, ends_with=ended(result_zip(b"all of it")))
    played.welcome = Welcome(corr_id=1, version=1, server_id="old", identity="me", kind="client", features=("batch",))
    played.ended.set()

    assert (seen(follow(played)), played.asked) == (b"all of it", [])


def test_a_job_without_a_result_has_no_rest() -> None:
    assert follow(Played(ends_with=ended(None))) == []


def test_the_end_of_the_job_is_not_waited_for_twice() -> None:
    """A question that is never answered, since its worker is gone, ends with the job."""
    played = Played(ends_with=ended(result_zip(b"all")))

    assert seen(follow(played)) == b"all"


def test_a_tail_is_counted_from_the_end_of_what_there_is() -> None:
    played = Played({"data": b"x", "end": 100}, {"data": b"last"}, ends_with=ended(result_zip(b"x" * 96 + b"last")))

    assert [(part.offset, part.data) for part in follow(played, tail_bytes=4)] == [(96, b"last")]
    assert [asked["offset"] for asked in played.asked] == [0, 96, 100]


@pytest.mark.parametrize("options", [{"stream": "stdlog"}, {"offset": -1}, {"tail_bytes": -1}])
def test_impossible_followers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        follow(Played(ends_with=ended(None)), **options)


@pytest.mark.parametrize(
    "cut", [{"head_bytes": -1, "cut_bytes": 1, "tail_bytes": 1}, {"head_bytes": 50, "cut_bytes": 1, "tail_bytes": 50}, {"x": 1}]
)
def test_a_report_that_cannot_be_true_is_not_believed(tmp_path: Path, cut: dict[str, int]) -> None:
    (tmp_path / "result.zip").write_bytes(result_zip(b"the log", cut))

    kept, found = unpack_log(tmp_path / "result.zip", "stdout")

    with kept:
        assert (found.cut_bytes, found.head_bytes) == (0, 7)
