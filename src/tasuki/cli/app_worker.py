"""A worker for the jobs of an app, and one that leases straight from the store (`tasuki worker --app`, `--to redis://…`).

Jobs of an app name no exec: they run with the exec of the app's own name. Its program gets the payload on stdin and leaves the
app's result in out/: result.json, and optionally summary.txt, freqs.csv and meta.json; if it fails, error.json with error_code,
error_message and permanent. Without a result.json, a JSON document on stdout is the result; without that, the archive of the
run is, as of every command.
"""

from __future__ import annotations

import asyncio
import io
import zipfile
from typing import Any

import msgspec

from tasuki.cli.connect import StoreAddress, guest
from tasuki.core.apps import outcome_of
from tasuki.core.job import JobSpec, Outcome
from tasuki.core.lifecycle import LEASE_TTL_S
from tasuki.core.store_messages import Grant
from tasuki.core.subject import app_subject
from tasuki.errors import ConfigError, TooLarge
from tasuki.worker import Worker
from tasuki.worker.attempt import MESSAGE_MAX_CHARS, Attempt, HandlerJob, RunResult

MEMBER_MAX_BYTES = 16 * 1024 * 1024  # of a file that is read here; larger results stay in the archive
CODE_MAX_CHARS = 64

_decode_spec = msgspec.msgpack.Decoder(JobSpec).decode
_encode_spec = msgspec.msgpack.Encoder().encode


class _Failure(msgspec.Struct):
    """The contents of error.json."""

    error_code: str
    error_message: str = ""
    permanent: bool = False


class AppWorker(Worker):
    """A worker that runs the jobs of `app` with the exec of that name, and leases from `store` without any server's help."""

    def __init__(self, url: str | None, *, app: str | None = None, store: StoreAddress | None = None, **options: Any) -> None:
        super().__init__(url, **options)
        self._store = store
        self._ttl_s = options.get("lease_ttl_s") or LEASE_TTL_S
        self._app = app if app is not None and app in (options.get("execs") or {}) else None
        if self._app is not None:
            self._take_app_jobs(app_subject(self._app), tuple(options.get("subjects") or ()))

    def _take_app_jobs(self, subject: str, given: tuple[str, ...]) -> None:
        if set(given) - {subject}:
            raise ConfigError(
                f"--app {self._app} with an exec of that name takes {subject} and nothing else; "
                "leave --subject out, and start another worker for the rest"
            )
        # With a handler the server sends jobs that name no exec; `_start` gives them the exec before a handler would be called.
        self.handler(subject)(_unreached)

    async def serve(self, *, signals: bool = False) -> None:
        """Work until drained; the guest of a store lives as long."""
        if self._store is None:
            await super().serve(signals=signals)
            return
        async with guest(self._store, lease_ttl_s=self._ttl_s) as url:
            self.url = url
            await super().serve(signals=signals)

    def _start(self, grant: Grant) -> None:
        if self._app is not None:
            spec = _decode_spec(grant.spec)
            if not spec.exec and spec.subject == app_subject(self._app):
                grant = msgspec.structs.replace(grant, spec=_encode_spec(msgspec.structs.replace(spec, exec=self._app)))
        super()._start(grant)

    async def _as_reported(self, attempt: Attempt, result: RunResult) -> RunResult:
        if self._app is None or attempt.spec.exec != self._app:
            return result
        return await asyncio.to_thread(app_result, result)


async def _unreached(job: HandlerJob) -> bytes:
    raise AssertionError(f"job {job.job_id} was to be a command")


def app_result(result: RunResult) -> RunResult:
    """Return the result in the form of the app's contract, if the program left the files for it."""
    outcome = result.outcome
    source: Any = result.result_file if result.result_file is not None else io.BytesIO(outcome.result or b"")
    if result.result_file is None and not outcome.result:
        return result
    with zipfile.ZipFile(source) as archive:
        if outcome.error_code is not None:
            return RunResult(_failed(outcome, _member(archive, "out/error.json")), result.result_file)
        documents = _documents(archive)
    if documents is None:
        return result
    try:
        recorded, document = outcome_of(*documents)
    except TooLarge as error:
        return RunResult(Outcome(error_code=error.code, message=error.message, permanent=True))
    result_bytes = recorded.result if document is None else document
    return RunResult(msgspec.structs.replace(recorded, exit_code=outcome.exit_code, result=result_bytes))


def _documents(archive: zipfile.ZipFile) -> tuple[Any, str, str, dict[str, Any]] | None:
    text = _member(archive, "out/result.json") or _member(archive, "stdout.log")
    result = _json(text, dict)
    if result is None:
        return None
    meta = _json(_member(archive, "out/meta.json"), dict) or {}
    summary, freqs = (_member(archive, f"out/{name}").decode("utf-8", "replace") for name in ("summary.txt", "freqs.csv"))
    return result, summary, freqs, meta


def _failed(outcome: Outcome, text: bytes) -> Outcome:
    failure = _json(text, _Failure)
    if failure is None:
        return outcome
    code = failure.error_code[:CODE_MAX_CHARS] or outcome.error_code
    message = failure.error_message[:MESSAGE_MAX_CHARS] or outcome.message
    return msgspec.structs.replace(outcome, error_code=code, message=message, permanent=failure.permanent)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of the archive; empty if it is missing or too large."""
    try:
        info = archive.getinfo(name)
    except KeyError:
        return b""
    return archive.read(info) if info.file_size <= MEMBER_MAX_BYTES else b""


def _json(text: bytes, kind: Any) -> Any:
    """Decode a JSON document; None if it is not one of this type."""
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
