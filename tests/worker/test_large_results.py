"""A handler's large result on its way to the server: however that goes, the attempt has an end that can be told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from tasuki.core.job import Outcome
from tasuki.errors import Unauthorized
from tasuki.net.blobs import BlobLine
from tasuki.worker.attempt import StopReason
from tasuki.worker.transfers import Transfers

RESULT = b"x" * 100_000
LARGE = Outcome(result=RESULT, result_sha256=hashlib.sha256(RESULT).hexdigest())


def end_of(
    disturb: Callable[[asyncio.Task[Outcome], asyncio.Future[StopReason], BlobLine], None], *, stopped: StopReason | None
) -> Outcome:
    """The outcome of an upload that has no server, after `disturb` did its thing to it."""

    async def scene() -> Outcome:
        line = BlobLine()
        stop: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        upload = asyncio.ensure_future(Transfers(line).as_blob(LARGE, stop, lambda: stopped))
        await asyncio.sleep(0)  # it has begun, and waits for a connection
        disturb(upload, stop, line)
        async with asyncio.timeout(5):
            return await upload

    return asyncio.run(scene())


def test_an_async_handler_that_is_stopped_while_its_result_waits_has_ended() -> None:
    ended = end_of(lambda upload, stop, line: _ignore(upload.cancel()), stopped=StopReason.LEASE_LOST)

    assert (ended.error_code, ended.result) == (StopReason.LEASE_LOST.value, None)


def test_a_plain_function_that_is_stopped_while_its_result_waits_has_ended() -> None:
    ended = end_of(lambda upload, stop, line: stop.set_result(StopReason.CANCELED), stopped=StopReason.CANCELED)

    assert ended.error_code == StopReason.CANCELED.value


def test_a_result_that_no_server_will_ever_take_is_a_failure_that_says_so() -> None:
    ended = end_of(lambda upload, stop, line: line.close(Unauthorized("token t was revoked")), stopped=None)

    assert ended.error_code == "UNAUTHORIZED"
    assert "could not be kept" in ended.message


def _ignore(_: object) -> None:
    pass
