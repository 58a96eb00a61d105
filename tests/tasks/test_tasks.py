"""Typed tasks without a server: arguments and results against annotations, direct calls, eager mode, mistakes."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from pydantic import BaseModel

from tasuki import ConfigError, Conflict, JobFailed, Progress, Retry, Tasks, WrongType, as_completed, current_job, gather
from tasuki.core.job import JobSpec
from tasuki.errors import DeadlineExceeded, InvalidInput, NotFound, Unavailable
from tasuki.tasks.tasks import load_tasks
from tasuki.worker.attempt import HandlerJob, JobRefused


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Model(BaseModel):
    name: str
    size: int = 1


tasks = Tasks("tcp://127.0.0.1:1")
tries: list[int] = []


@tasks.task(retries=5, timeout_s=60)
def resize(path: str, width: int = 200) -> dict[str, int]:
    current_job().progress(0.5, "half")
    return {"width": width, "letters": len(path)}


@tasks.task
async def add(a: int, *, b: int = 1) -> int:
    return a + b


@tasks.task
def everything(
    at: datetime.datetime,
    key: uuid.UUID,
    point: Point,
    folder: Path,
    model: Model,
    number: Annotated[int, Meta(ge=1)],
    raw: bytes,
) -> tuple[Point, Path, Model]:
    return point, folder / str(key), model


@tasks.task
def untyped(anything, more=()):
    return [anything, more]


@tasks.task(retries=2, retry_on=OSError, give_up_on=(FileNotFoundError,))
def fragile(error: str) -> int:
    tries.append(current_job().attempt)
    if error == "file":
        raise FileNotFoundError("gone")
    if error == "value":
        raise ValueError("odd")
    if error == "retry" and len(tries) < 3:
        raise Retry(in_s=30)
    if error == "os":
        raise ConnectionResetError("cut")
    return len(tries)


@tasks.task
def wrong_result() -> int:
    return "seven"  # type: ignore[return-value]


@tasks.task
def odd_result() -> object:
    return object()


# ---------------------------------------------------------------------------------------------------- calls


def test_a_task_can_be_called_like_the_function_that_it_is() -> None:
    assert resize("a.png") == {"width": 200, "letters": 5}
    assert asyncio.run(add(1, b=2)) == 3
    assert (resize.__name__, resize.__wrapped__("a", 1)["width"]) == ("resize", 1)
    assert current_job().job_id == "called-directly"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: resize.submit(7), r"argument path: expected str, got int \(task 'resize'\)"),
        (lambda: resize.submit("a", width="wide"), "argument width: expected int, got str"),
        (lambda: resize.submit("a", width=None), "argument width: expected int, got None"),
        (lambda: resize.submit(), "task 'resize': missing required argument 'path'"),
        (lambda: resize.submit("a", heigth=4), "task 'resize': unexpected keyword argument 'heigth'"),
        (lambda: add.submit(1, 2), "task 'add': extra positional arguments provided"),
        (lambda: resize.submit(object()), "argument 'path' of task 'resize' cannot be sent: got object"),
        (lambda: resize.map(["a", 7]), "call 1: argument path: expected str, got int"),
        (lambda: resize.starmap([("a", 1, 2)]), "call 0: task 'resize': extra positional arguments"),
        (lambda: everything.submit(**{**GOOD, "number": 0}), "argument number: expected int >= 1"),
        (lambda: everything.submit(**{**GOOD, "point": {"x": "1"}}), r"argument point.x: expected int, got str"),
        (lambda: everything.submit(**{**GOOD, "model": {"size": 2}}), "argument model: .*name"),
    ],
)
def test_a_wrong_call_is_refused_before_it_is_sent_and_the_message_names_the_argument(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(WrongType, match=f"(?s){says}"):  # no server is asked: there is none
        call()


GOOD: dict[str, Any] = {
    "at": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "key": uuid.UUID(int=7),
    "point": Point(1),
    "folder": Path("/srv"),
    "model": Model(name="m"),
    "number": 1,
    "raw": b"\0",
}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_arguments_and_results_keep_their_types(encoding: Any) -> None:
    own = Tasks(encoding=encoding)
    task = own.task(everything.__wrapped__)
    with own.eager() as jobs:
        assert task.submit(**GOOD).result() == (Point(1), Path("/srv") / str(uuid.UUID(int=7)), Model(name="m"))
        assert jobs[0].arguments == GOOD


def test_arguments_without_annotations_are_sent_as_they_are() -> None:
    with tasks.eager():
        assert untyped.submit({"a": [1, None]}, more="x").result() == [{"a": [1, None]}, "x"]


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_a_worker_reads_both_encodings(encode: Callable[[Any], bytes]) -> None:
    assert resize.signature.decode_arguments(encode({"path": "a", "width": 3})) == {"path": "a", "width": 3}
    assert resize.signature.decode_arguments(encode({"path": "a"})) == {"path": "a", "width": 200}


# ---------------------------------------------------------------------------------------------------- mistakes in definitions


def _args(*values: int) -> None: ...


def _unknown(value: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Custom: ...


class Tree(msgspec.Struct):
    children: list[Tree] = []


def _custom(value: list[Custom]) -> None: ...


def _no_codec(value: Callable[[], None]) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (_args, r"parameter .\*values: .* of task '_args': arguments are sent by name"),
        (_unknown, "annotation of task '_unknown' is not known.*Nowhere"),
        (_custom, "task '_custom' has an annotation that cannot be sent: .*Custom.*; use types of JSON"),
        (_no_codec, "task '_no_codec' has an annotation that cannot be sent: .*Callable"),
    ],
)
def test_a_function_that_cannot_be_a_task_is_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _ = Tasks().task(function).signature


def test_a_type_may_have_itself_as_a_part() -> None:
    own = Tasks()

    @own.task
    def depth(tree: Tree) -> int:
        return 1 + max((depth(child) for child in tree.children), default=0)

    with own.eager():
        assert depth.submit(Tree([Tree()])).result() == 2


def test_two_tasks_of_a_subject_and_other_mistakes_are_refused() -> None:
    own = Tasks()
    own.task(resize.__wrapped__)
    with pytest.raises(ConfigError, match=r"subject 'tasks.resize' has a task already; .*subject="):
        own.task(resize.__wrapped__)
    with pytest.raises(WrongType, match="a task must be a function, got int"):
        own.task(7)  # type: ignore[call-overload]
    with pytest.raises(InvalidInput, match="encoding must be json or msgpack, got 'yaml'"):
        Tasks(encoding="yaml")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="there are no tasks yet"):
        Tasks("tcp://127.0.0.1:1").worker()


def test_tasks_are_found_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "its_tasks.py").write_text("import tasuki\nmine = tasuki.Tasks()\n")
    (tmp_path / "broken_tasks.py").write_text("import nothing_of_that_name\n")
    assert isinstance(load_tasks("its_tasks:mine"), Tasks)
    with pytest.raises(ConfigError, match="no Tasks named 'tasks'; it has its_tasks:mine"):
        load_tasks("its_tasks")
    with pytest.raises(ConfigError, match=f"there is no module 'nowhere' in {tmp_path}"):
        load_tasks("nowhere:tasks")
    with pytest.raises(ConfigError, match=r"'its_tasks\.py' is a file; name its module: its_tasks:tasks"):
        load_tasks("its_tasks.py")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):  # the traceback says where
        load_tasks("broken_tasks:tasks")


# ---------------------------------------------------------------------------------------------------- eager mode


def test_in_eager_mode_jobs_run_where_they_are_submitted() -> None:
    with tasks.eager() as jobs:
        job = resize.submit("a.png", width=400)
        assert (job.done, job.result(), job.status().state) == (True, {"width": 400, "letters": 5}, "SUCCEEDED")
        assert resize.job(job.job_id).result() == job.result()
        with pytest.raises(NotFound, match="in eager mode only those are known"):
            resize.job("of-another-time")
        assert gather(add.map(range(3)), timeout=30) == [1, 2, 3]
        assert sorted(one.result() for one in as_completed(add.starmap([(1,), (2,)]))) == [2, 3]
        assert list(job.progress()) == [Progress(0.5, "half")]
        jobs.assert_submitted(resize, "a.png", width=400)
        jobs.assert_submitted(resize, path="a.png", width=400)
        jobs.assert_not_submitted(untyped)
        assert [one.arguments for one in jobs.of(resize)] == [{"path": "a.png", "width": 400}]
        with pytest.raises(AssertionError, match=r"resize was not submitted with .*'b.png'.*; it was with: .*'a.png'"):
            jobs.assert_submitted(resize, "b.png")
        with pytest.raises(AssertionError, match="resize was submitted with"):
            jobs.assert_not_submitted(resize)
    assert tasks._eager is None


def test_in_eager_mode_an_event_loop_can_submit_and_await() -> None:
    async def main() -> list[int]:
        job = await add.submit_async(1)
        first = await job
        ended = [one.result() async for one in as_completed(await add.map_async([2, 3]))]
        return [first, add.submit(4).result(), *await asyncio.gather(*await add.starmap_async([(5,)])), *ended]

    with tasks.eager():
        assert asyncio.run(main()) == [2, 5, 6, 3, 4]


@pytest.mark.parametrize(
    ("error", "attempts", "says"),
    [("file", 1, "FileNotFoundError: gone"), ("value", 1, "ValueError: odd"), ("os", 3, "ConnectionResetError: cut")],
)
def test_rules_about_further_attempts_hold_in_eager_mode(error: str, attempts: int, says: str) -> None:
    tries.clear()
    with tasks.eager():
        job = fragile.submit(error)
        with pytest.raises(JobFailed, match=says) as failed:
            job.result()
    assert tries == list(range(1, attempts + 1))
    notes = "".join(failed.value.__notes__)
    assert 'test_tasks.py", line' in notes.splitlines()[2]  # the traceback begins in the user's code
    assert "fragile" in notes


def test_a_retry_runs_again_in_eager_mode_without_its_delay() -> None:
    tries.clear()
    with tasks.eager():
        assert fragile.submit("retry").result() == 3


def test_the_same_job_id_runs_once() -> None:
    with tasks.eager() as jobs:
        once = resize.options(job_id="once")
        first, second = once.submit("a"), once.submit("a")
        assert (first.existed, second.existed, second.result()) == (False, True, first.result())
        with pytest.raises(Conflict, match="'once' exists with another body"):
            once.submit("b")
        assert len(jobs) == 1


def test_jobs_can_be_recorded_without_running_them() -> None:
    with tasks.eager(run=False) as jobs:
        job = resize.submit("a")
        with pytest.raises(Unavailable, match="only recorded"):
            job.result(timeout=30)
        jobs.assert_submitted(resize, "a")
        # and the same id twice is one job, which is recorded once
        once = add.options(job_id="once")
        again = [once.submit(1), once.submit(1)]
        assert ([one.existed for one in again], len(jobs.of(add))) == ([False, True], 1)
        with pytest.raises(Unavailable, match="only recorded"):
            again[1].result(timeout=30)


def test_a_result_that_does_not_fit_the_annotation_is_an_error_that_says_so() -> None:
    with tasks.eager():
        with pytest.raises(WrongType, match="'wrong_result' returned another type than its annotation: expected int"):
            wrong_result.submit().result()
        with pytest.raises(JobFailed, match="what task 'odd_result' returned cannot be sent: it is of type object"):
            odd_result.submit().result()


def test_late_jobs_are_a_deadline() -> None:
    async def late() -> None:
        with pytest.raises(DeadlineExceeded, match="have not ended within 0s"):
            async for _ in as_completed([Stuck()], timeout=0):  # type: ignore[list-item]
                pass

    asyncio.run(late())
    with pytest.raises(DeadlineExceeded, match=r"1 of 1 jobs have not ended within 0\.01s"):
        list(as_completed([Stuck()], timeout=0.01))  # type: ignore[list-item]


def test_the_time_that_a_caller_needs_for_each_job_is_its_own() -> None:
    """The time limit is for the jobs: it must not cancel the task that works on one of them."""

    async def slow() -> list[int]:
        results = []
        async for job in as_completed(await add.map_async([1, 2]), timeout=0.01):
            await asyncio.sleep(0.02)
            results.append(job.result())
        return results

    with tasks.eager():
        assert asyncio.run(slow()) == [2, 3]


class Stuck:
    """A handle of a job that never ends."""

    def begin_outcome(self) -> Any:
        from concurrent.futures import Future

        return Future()


def test_a_call_without_arguments_and_a_result_of_none_are_empty() -> None:
    own = Tasks()

    @own.task
    def nothing() -> None: ...

    @own.task
    def no_number() -> int:
        return None  # type: ignore[return-value]

    assert (nothing.signature.encode_arguments((), {}), nothing.signature.encode_result(None)) == (b"", b"")
    with pytest.raises(JobRefused, match="unknown field a"):  # of a caller with another version of the task
        nothing.handler(HandlerJob(JobSpec(job_id="1", payload=b'{"a": 1}'), 1))
    with own.eager():
        assert nothing.submit().result() is None
        with pytest.raises(WrongType, match="expected int, got None"):
            no_number.submit().result()
