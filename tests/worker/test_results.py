"""The parts of a command's result: its archive, its logs and its report. Its outputs are in test_outputs.py."""

import io
import zipfile
from pathlib import Path

import pytest

from tasuki.blobs.zip.writer import small_zip, write_zip
from tasuki.core.job import RESULT_INLINE_MAX_BYTES
from tasuki.worker.logs import DEFAULT_CAPS, LogCaps
from tasuki.worker.results import _Archive, log_members
from tests.support.zips import check_zip
from tests.worker.runs import archive_of, names_of, report_of, run, runner_in, shell, text_of


def test_a_result_is_an_archive_that_readers_accept(tmp_path: Path) -> None:
    script = "ln -s /etc/passwd out/link; mkfifo out/pipe; touch out/A out/a; head -c 100000 /dev/urandom > out/noise"

    result = run(runner_in(tmp_path), shell(script))

    assert result.result_file is not None
    with result.result_file.open("rb") as archive:
        entries = check_zip(archive)
    assert [entry.name for entry in entries] == archive_of(result).namelist()
    assert names_of(result) == ["out/A", "out/noise", "result.json", "stderr.log", "stdout.log"]
    assert {entry["name"] for entry in report_of(result)["left_out"]} == {"out/a", "out/link", "out/pipe"}


def test_a_huge_sparse_output_is_left_out_and_named(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("truncate -s 1T out/huge; echo small > out/small"))

    assert names_of(result) == ["out/small", "result.json", "stderr.log", "stdout.log"]
    assert [entry["name"] for entry in report_of(result)["left_out"]] == ["out/huge"]


def test_a_log_that_the_job_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("echo mine; rm log/stdout; ln -s /etc/passwd log/stdout"))

    assert text_of(result) == "mine\n"


LINE = b"the same line again\n"


def written(*texts: bytes) -> io.BytesIO:
    archive = io.BytesIO()
    write_zip(archive, log_members((f"{number}.log", text) for number, text in enumerate(texts)))
    return archive


@pytest.mark.parametrize("sizes", [(48 << 20,), (30 << 20, 30 << 20)], ids=["one", "both together"])
def test_logs_that_pack_too_well_are_stored_so_that_a_reader_does_not_take_them_for_a_bomb(sizes: tuple[int, ...]) -> None:
    logs = [LINE * (size // len(LINE)) for size in sizes]

    archive = written(*logs)

    assert [entry.size_bytes for entry in check_zip(archive)] == [len(log) for log in logs]


def test_a_long_log_of_a_job_can_be_read_again(tmp_path: Path) -> None:
    caps = LogCaps(head_bytes=64 << 20, tail_bytes=0)

    result = run(runner_in(tmp_path, log_caps=caps, grace_s=5.0), shell("yes | head -c 48000000"))

    assert result.result_file is not None
    with result.result_file.open("rb") as archive:
        assert max(entry.size_bytes for entry in check_zip(archive)) == 48_000_000


def test_two_whole_logs_of_the_usual_length_are_packed() -> None:
    cut_log = LINE * (DEFAULT_CAPS.cap_bytes // len(LINE) + 10)

    archive = written(cut_log, cut_log)

    assert sum(entry.size_bytes for entry in check_zip(archive)) == 2 * len(cut_log)
    assert len(archive.getvalue()) < len(cut_log) / 100


@pytest.mark.parametrize("size_bytes", [RESULT_INLINE_MAX_BYTES, RESULT_INLINE_MAX_BYTES + 1])
def test_an_archive_of_the_inline_limit_is_inline_and_one_byte_more_is_a_file(tmp_path: Path, size_bytes: int) -> None:
    archive = _Archive(tmp_path)

    archive.write(bytes(size_bytes - 10))
    archive.write(bytes(10))
    archive.close()

    if size_bytes > RESULT_INLINE_MAX_BYTES:
        assert archive.path is not None
        assert archive.path.read_bytes() == bytes(size_bytes)
    else:
        assert archive.path is None
        assert archive.inline == bytes(size_bytes)


# ---------------------------------------------------------------------------------------------------- small archives


@pytest.mark.parametrize(
    "data",
    [b"", b"x", b"hello\n" * 100, b"hello\n" * 1000, bytes(range(256))],
    ids=["empty", "one", "short", "text", "noise"],
)
def test_a_small_archive_is_one_that_every_reader_accepts(data: bytes) -> None:
    archive = small_zip([("result.json", b"{}\n"), ("stdout.log", data), ("stderr.log", b"")])

    entries = check_zip(io.BytesIO(archive))
    with zipfile.ZipFile(io.BytesIO(archive)) as read:
        assert read.testzip() is None
        assert read.read("stdout.log") == data
        assert [info.external_attr >> 16 for info in read.infolist()] == [0o100644] * 3
    assert [entry.name for entry in entries] == ["result.json", "stdout.log", "stderr.log"]


def test_an_archive_is_the_same_for_the_same_contents() -> None:
    members = [("result.json", b"{}\n"), ("stdout.log", b"again " * 99)]

    assert small_zip(members) == small_zip(members)
