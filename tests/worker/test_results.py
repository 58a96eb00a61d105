"""What of out/ goes into a result, and what a job's tricks with it lead to."""

import io
import os
import socket
import zipfile
from pathlib import Path

import pytest

from tasuki.blobs.zips import check_zip
from tasuki.core.job import RESULT_INLINE_MAX_BYTES
from tasuki.worker.logs import CappedLog
from tasuki.worker.results import OutputLimits, _Archive, collect_outputs, small_zip
from tests.worker.runs import archive_of, names_of, report_of, run, runner_in, shell, text_of


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def collected(out: Path, *globs: str, **limits: int) -> tuple[list[str], dict[str, str]]:
    outputs, skipped = collect_outputs(out, globs or ("out/**",), OutputLimits(**limits))
    return [output.name for output in outputs], {skip.name: skip.reason for skip in skipped}


def test_links_are_named_and_not_followed(out: Path) -> None:
    (out / "passwd").symlink_to("/etc/passwd")
    (out / "etc").symlink_to("/etc")
    (out / "dangling").symlink_to("nowhere")

    assert collected(out) == ([], {f"out/{name}": "is a link" for name in ("dangling", "etc", "passwd")})


def test_an_out_folder_that_became_a_link_is_not_followed(out: Path) -> None:
    out.rmdir()
    out.symlink_to("/etc")

    assert collected(out, "out/**", "out/*")[0] == []


def test_pipes_and_sockets_are_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(out / "pipe")
    monkeypatch.chdir(out)  # a socket's path may be too long
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        found = collected(out)

    assert found == ([], {"out/pipe": "is not a regular file", "out/socket": "is not a regular file"})


def test_names_that_no_archive_may_have_are_named(out: Path) -> None:
    (out / "a").touch()
    (out / "A").touch()
    (out / "back\\slash").touch()
    Path(os.fsdecode(os.fsencode(out) + b"/\xff")).touch()

    outputs, skipped = collected(out)

    assert outputs == ["out/A"]
    assert set(skipped) == {"out/a", "out/back\\slash", "out/\\xff"}


@pytest.mark.parametrize(
    ("limits", "taken", "says"),
    [
        ({"max_file_bytes": 9}, ["out/a", "out/c"], "limit for one file is 9"),
        ({"max_total_bytes": 12}, ["out/a", "out/b"], "12 bytes for all outputs"),
        ({"max_files": 2}, ["out/a", "out/b"], "more than 2 files"),
    ],
)
def test_what_passes_a_limit_is_named(out: Path, limits: dict[str, int], taken: list[str], says: str) -> None:
    for name, size_bytes in (("a", 1), ("b", 10), ("c", 2)):
        (out / name).write_bytes(b"x" * size_bytes)

    outputs, skipped = collected(out, **limits)

    assert outputs == taken
    (reason,) = skipped.values()
    assert says in reason


@pytest.mark.parametrize(
    ("glob", "taken"),
    [
        ("out/**", ["out/a.csv", "out/b.txt", "out/d/e/f.csv"]),
        ("out/*", ["out/a.csv", "out/b.txt"]),
        ("out/*.csv", ["out/a.csv"]),
        ("out/**/*.csv", ["out/a.csv", "out/d/e/f.csv"]),
        ("out/d/**", ["out/d/e/f.csv"]),
        ("out/?.txt", ["out/b.txt"]),
        ("out/a+csv", []),
    ],
)
def test_globs(out: Path, glob: str, taken: list[str]) -> None:
    (out / "d" / "e").mkdir(parents=True)
    for name in ("a.csv", "b.txt", "d/e/f.csv"):
        (out / name).touch()

    assert sorted(collected(out, glob)[0]) == taken


def test_a_result_is_an_archive_that_readers_accept(tmp_path: Path) -> None:
    script = "ln -s /etc/passwd out/link; mkfifo out/pipe; touch out/A out/a; head -c 100000 /dev/urandom > out/noise"

    result = run(runner_in(tmp_path), shell(script))

    assert result.result_file is not None
    with result.result_file.open("rb") as archive:
        entries = check_zip(archive)
    assert [entry.name for entry in entries] == archive_of(result).namelist()
    assert names_of(result) == ["out/A", "out/noise", "result.json", "stderr.log", "stdout.log"]
    assert {entry["name"] for entry in report_of(result)["skipped"]} == {"out/a", "out/link", "out/pipe"}


def test_a_huge_sparse_output_is_left_out_and_named(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("truncate -s 1T out/huge; echo small > out/small"))

    assert names_of(result) == ["out/small", "result.json", "stderr.log", "stdout.log"]
    assert [entry["name"] for entry in report_of(result)["skipped"]] == ["out/huge"]


def test_a_log_that_the_job_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("echo mine; rm log/stdout; ln -s /etc/passwd log/stdout"))

    assert text_of(result) == "mine\n"


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


@pytest.mark.parametrize("looks_after", [(100,), (150,), (99, 1000), (500, 500, 500)])
def test_a_log_keeps_its_head_and_its_tail_whenever_it_is_looked_at(tmp_path: Path, looks_after: tuple[int, ...]) -> None:
    log = CappedLog(tmp_path / "log", cap_bytes=100)
    written = b""
    for count in looks_after:
        piece = bytes(33 + (len(written) + n) % 90 for n in range(count))
        os.write(log.descriptor, piece)
        written += piece
        log.trim()

    contents = log.contents()
    log.close()

    if len(written) <= 100:
        assert (contents, log.cut_bytes) == (written, 0)
    else:
        mark = b"\n[tasuki: %d bytes were cut here]\n" % (len(written) - 100)
        assert contents == written[:50] + mark + written[-50:]
        assert log.cut_bytes == len(written) - 100


# ---------------------------------------------------------------------------------------------------- small archives


@pytest.mark.parametrize("data", [b"", b"x", b"hello\n" * 1000, bytes(range(256))], ids=["empty", "one", "text", "noise"])
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
