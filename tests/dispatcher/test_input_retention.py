"""Inputs that nobody has used for some days are removed from their store, and nothing else; in a folder as in a bucket."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasuki.agent.input_sources import open_store
from tasuki.blobs.blob import BlobStore
from tasuki.blobs.folder import FolderBlobs
from tasuki.blobs.s3.store import S3Blobs
from tasuki.client.agents.client import AsyncAgentsClient
from tasuki.core.units import DAY_S
from tasuki.dispatcher import inputs as input_store
from tasuki.dispatcher.inputs import InputRetention
from tasuki.dispatcher.metrics import DispatcherMetrics
from tests.agent.stage import code_of
from tests.client.agent_stand_in import Asked, Reply, StandIn, refusal
from tests.dispatcher.stage import BOOK, DispatcherStage, dispatching, sha256_of, tell, two_nodes
from tests.support.s3_service import BUCKET, S3Service
from tests.support.waiting import until

KEEP_DAYS = 7.0
SHA256 = sha256_of(BOOK)
FORM: list[Any] = [("input", (None, f"{SHA256}:book.csv")), ("exec", (None, "pricer"))]


def later(days: float) -> Callable[[], float]:
    return lambda: time.time() + days * DAY_S


def turn_clock(stage: DispatcherStage, days: float) -> InputRetention:
    """The retention of inputs of the dispatcher, so many days from now."""
    inputs = stage.dispatcher._inputs
    assert inputs is not None
    inputs.keeping._clock = later(days)
    return inputs.keeping


def open_at(where: str) -> BlobStore:
    return open_store(where, max_blob_bytes=2**30, floor_free_bytes=0)


def test_an_input_is_removed_some_days_after_its_last_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path), keep_inputs_days=KEEP_DAYS) as (_, _, stage):
            await stage.http.put(f"/inputs/{SHA256}", content=BOOK)

            assert await turn_clock(stage, 6.9).clean() == 0
            with caplog.at_level(logging.INFO, "tasuki.dispatcher"):
                assert await turn_clock(stage, 7.1).clean() == 1

            assert "removed 1 inputs, 6 bytes, unused for 7 days" in caplog.text
            assert code_of(await stage.http.post("/run/a", files=FORM)) == (404, "INPUT_NOT_FOUND")
            scraped = (await stage.http.get("/metrics")).text
            assert "tasuki_dispatcher_cleaned_inputs_total 1.0" in scraped
            assert "tasuki_dispatcher_cleaned_input_bytes_total 6.0" in scraped

    tell(story())


USES: dict[str, Callable[[DispatcherStage], Any]] = {
    "HEAD": lambda stage: stage.http.head(f"/inputs/{SHA256}"),
    "GET, as an agent that fetches it": lambda stage: stage.http.get(f"/inputs/{SHA256}"),
    "PUT once more": lambda stage: stage.http.put(f"/inputs/{SHA256}", content=BOOK),
    "a run by its hash": lambda stage: stage.http.post("/run/a", files=FORM),
    "an upload of the same": lambda stage: stage.post("a", BOOK),
}


def test_every_use_of_an_input_counts(tmp_path: Path) -> None:
    async def story() -> None:
        blobs = open_at(str(tmp_path))
        assert isinstance(blobs, FolderBlobs)
        path = blobs._path(SHA256, 0)
        for what, use in USES.items():
            async with two_nodes(inputs=str(tmp_path)) as (_, _, stage):
                blobs.put_bytes(BOOK)
                age(path, days=8)

                assert (await use(stage)).is_success, what

                assert time.time() - path.stat().st_mtime < DAY_S, what
                assert await turn_clock(stage, 0).clean() == 0, what

    tell(story())


def age(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAY_S,) * 2)


class CountedBlobs(FolderBlobs):
    """Counts notes, and can refuse them."""

    notes = 0
    broken = False

    def touch(self, sha256: str) -> None:
        self.notes += 1
        if self.broken:
            raise PermissionError(13, "Permission denied")
        super().touch(sha256)


def test_of_many_uses_one_a_day_is_noted(tmp_path: Path) -> None:
    async def story() -> None:
        blobs = CountedBlobs(tmp_path, max_blob_bytes=100, floor_free_bytes=0)
        today = InputRetention(blobs, KEEP_DAYS, DispatcherMetrics())

        await asyncio.gather(*(today.used(SHA256) for _ in range(50)))
        assert blobs.notes == 1
        for days, notes in ((0.9, 1), (1.1, 2), (1.2, 2)):
            today._clock = later(days)
            await today.used(SHA256)
            assert blobs.notes == notes, days

        hours = InputRetention(blobs, 0.04, DispatcherMetrics())  # an hour: a note a day would be too late
        await hours.used(SHA256)
        hours._clock = later(0.02)
        await hours.used(SHA256)
        assert blobs.notes == 4

    tell(story())


def test_a_use_that_cannot_be_noted_is_told_and_refuses_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        blobs = CountedBlobs(tmp_path, max_blob_bytes=100, floor_free_bytes=0)
        blobs.broken = True
        kept = InputRetention(blobs, KEEP_DAYS, DispatcherMetrics())

        await kept.used(SHA256)
        await kept.used(SHA256)

        assert blobs.notes == 2
        assert f"the use of input {SHA256} could not be noted" in caplog.text

    tell(story())


def test_how_many_uses_are_remembered_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_store, "NOTED_MAX", 10)

    async def story() -> None:
        kept = InputRetention(CountedBlobs(tmp_path, max_blob_bytes=100, floor_free_bytes=0), KEEP_DAYS, DispatcherMetrics())
        for number in range(30):
            await kept.used(sha256_of(b"%d" % number))
        assert len(kept._noted) == 10

    tell(story())


def test_what_is_in_use_is_not_removed_however_old_it_is(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn() as node, dispatching(node, inputs=str(tmp_path)) as stage:
            go = asyncio.Event()

            async def hold(asked: Asked) -> Reply:
                reply = await node.take(asked)
                await go.wait()
                return reply

            node.on_post = hold
            running = asyncio.create_task(stage.post("a"))
            await node.until(lambda: bool(node.posts))

            kept = turn_clock(stage, 100)
            assert await kept.clean() == 0
            go.set()
            assert (await running).status_code == 200
            assert await kept.clean() == 1
            assert not kept._held

    tell(story())


def test_an_input_that_vanishes_all_the_same_is_said_to_be_missing(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, two, stage):

            async def die(asked: Asked) -> Reply:
                one.posts.append(await asked.body())
                open_at(str(tmp_path)).delete(SHA256)
                return None

            one.on_post = die
            assert code_of(await stage.post("a")) == (404, "INPUT_NOT_FOUND")
            assert not two.posts

    tell(story())


def test_a_node_that_does_not_find_the_input_is_not_taken_for_broken(tmp_path: Path) -> None:
    async def story() -> None:
        async with two_nodes(inputs=str(tmp_path)) as (one, two, stage):

            async def missing(asked: Asked) -> Reply:
                one.posts.append(await asked.body())
                return refusal(404, "INPUT_NOT_FOUND", sha256=SHA256)

            one.on_post = missing
            assert code_of(await stage.post("a")) == (404, "INPUT_NOT_FOUND")
            assert not two.posts
            assert {line["breaker"] for line in (await stage.http.get("/nodes")).json()} == {"closed"}

    tell(story())


def test_our_client_sends_it_again(tmp_path: Path) -> None:
    (tmp_path / "book.csv").write_bytes(BOOK)

    async def story() -> None:
        async with StandIn() as one, StandIn(running=1) as two:  # two dispatchers

            async def missing(asked: Asked) -> Reply:
                one.posts.append(await asked.body())
                return refusal(404, "INPUT_NOT_FOUND")

            one.on_post = missing
            async with AsyncAgentsClient([one.url, two.url], token="") as client:
                await client.run("pricer", files=[tmp_path / "book.csv"], output=tmp_path / "result.zip")
            assert [BOOK in post for post in (one.posts + two.posts)] == [True, True]

    tell(story())


def test_dispatchers_that_clean_at_once_remove_everything_once(tmp_path: Path) -> None:
    async def story() -> None:
        blobs = open_at(str(tmp_path))
        for number in range(40):
            blobs.put_bytes(b"%d" % number)
        kept = [InputRetention(open_at(str(tmp_path)), KEEP_DAYS, DispatcherMetrics(), later(8)) for _ in range(2)]

        removed = await asyncio.gather(*(one.clean() for one in kept))

        assert sum(removed) == 40
        assert not list(tmp_path.glob("inputs/[0-9a-f][0-9a-f]/*"))

    tell(story())


def test_nothing_that_lies_beside_the_inputs_is_touched(tmp_path: Path) -> None:
    """A server's own blobs, in the same place, are not inputs."""

    async def story() -> None:
        others = FolderBlobs(tmp_path, max_blob_bytes=100, floor_free_bytes=0)
        ref = others.put_bytes(b"of a server")
        (tmp_path / "inputs").mkdir()
        (tmp_path / "inputs/README").write_text("by a person")

        assert await InputRetention(open_at(str(tmp_path)), KEEP_DAYS, DispatcherMetrics(), later(100)).clean() == 0

        assert others.has(ref.sha256)
        assert (tmp_path / "inputs/README").exists()

    tell(story())


def test_nothing_is_removed_any_more_once_a_dispatcher_closes(tmp_path: Path) -> None:
    async def story() -> None:
        kept = InputRetention(open_at(str(tmp_path)), KEEP_DAYS, DispatcherMetrics(), later(8))
        open_at(str(tmp_path)).put_bytes(BOOK)
        kept.close()
        assert await kept.clean() == 0

    tell(story())


def test_with_0_days_inputs_are_kept_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        await InputRetention(open_at(str(tmp_path)), 0.0, DispatcherMetrics()).daily()  # it returns: there is nothing to do, ever

    tell(story())


def test_cleaning_goes_on_after_a_failure_and_begins_soon_after_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(input_store, "SOON_S", 0.001)
    monkeypatch.setattr(input_store, "AGAIN_S", 0.001)

    async def story() -> None:
        ended = asyncio.Event()
        kept = InputRetention(open_at(str(tmp_path)), KEEP_DAYS, DispatcherMetrics(), later(8))
        failures = [OSError(5, "Input/output error"), OSError(5, "Input/output error")]

        async def clean() -> int:
            if failures:
                raise failures.pop()
            ended.set()
            return 0

        monkeypatch.setattr(kept, "clean", clean)
        task = asyncio.create_task(kept.daily())
        await ended.wait()
        task.cancel()

        assert caplog.text.count("another try in an hour: [Errno 5]") == 2

    tell(story())


# ---------------------------------------------------------------------------------------------------- in a bucket


@pytest.fixture
def bucket(s3: S3Service, s3_url: str) -> Any:
    """A plain client."""
    return s3.client()


def keys_under(bucket: Any, blobs: S3Blobs) -> dict[str, float]:
    found = bucket.list_objects_v2(Bucket=BUCKET, Prefix=blobs.address.prefix).get("Contents", ())
    return {entry["Key"].removeprefix(blobs.address.prefix): entry["LastModified"].timestamp() for entry in found}


def test_in_a_bucket_a_mark_beside_the_input_tells_of_its_last_use(bucket: Any, s3_url: str) -> None:
    async def story() -> None:
        blobs = open_at(s3_url)
        assert isinstance(blobs, S3Blobs)
        unused = blobs.put_bytes(b"unused")
        used = blobs.put_bytes(BOOK)
        put_at = max(keys_under(bucket, blobs).values())
        mark = f"{SHA256[:2]}/{SHA256}.used"

        def is_marked_later() -> bool:  # the times of a bucket are in whole seconds
            blobs.touch(SHA256)
            return keys_under(bucket, blobs)[mark] > put_at

        async with two_nodes(inputs=s3_url) as (_, _, stage):
            assert (await stage.http.post("/run/a", files=FORM)).status_code == 200
            assert mark in keys_under(bucket, blobs)
            bucket.delete_object(Bucket=BUCKET, Key=blobs.address.prefix + mark)
            turn_clock(stage, 1.1)
            assert (await stage.post("b", BOOK)).status_code == 200  # the same as an upload, which is not stored again
            assert mark in keys_under(bucket, blobs)
            await asyncio.to_thread(until, is_marked_later)
            kept = turn_clock(stage, 0)

            assert await asyncio.to_thread(kept._clean, put_at + 0.5) == 1
            assert (blobs.has(unused.sha256), blobs.has(used.sha256)) == (False, True)
            assert await turn_clock(stage, 7.1).clean() == 1
            assert keys_under(bucket, blobs) == {}

    tell(story())


def test_in_a_bucket_old_half_uploads_and_marks_without_an_input_go_too(bucket: Any, s3_url: str) -> None:
    blobs = open_at(s3_url)
    assert isinstance(blobs, S3Blobs)
    blobs.touch(SHA256)
    key = blobs.address.key(SHA256, 0)
    bucket.create_multipart_upload(Bucket=BUCKET, Key=key)  # of a dispatcher that was killed

    def uploads() -> int:
        return len(bucket.list_multipart_uploads(Bucket=BUCKET, Prefix=blobs.address.prefix).get("Uploads", ()))

    assert list(blobs.remove_untouched(time.time() - 60, lambda sha256: False)) == []
    assert (len(keys_under(bucket, blobs)), uploads()) == (1, 1)
    assert list(blobs.remove_untouched(time.time() + 60, lambda sha256: False)) == []
    assert (len(keys_under(bucket, blobs)), uploads()) == (0, 0)


def test_a_bucket_that_is_used_while_it_is_listed(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = open_at(s3_url)
    assert isinstance(blobs, S3Blobs)
    ref = blobs.put_bytes(BOOK)
    listed = list(blobs._listed())
    old = [one._replace(changed_at=one.changed_at - 100) for one in listed]
    monkeypatch.setattr(blobs, "_listed", lambda: iter(old))  # as it was before the last use

    assert list(blobs.remove_untouched(listed[0].changed_at - 50, lambda sha256: False)) == []
    assert blobs.has(ref.sha256)
