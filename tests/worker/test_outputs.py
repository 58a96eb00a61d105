"""Files of out/ that go into a result, a job's tricks with them, and what is said about the rest."""

import hashlib
import io
import os
import socket
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.blobs.zip.reader import ZipLimits
from tasuki.blobs.zip.writer import ZipMember, write_zip
from tasuki.errors import ConfigError
from tasuki.worker import results as module
from tasuki.worker.execs import parse_execs
from tasuki.worker.results import DEFAULT_OUTPUTS, OutputCollector, OutputRules, glob_pattern
from tests.support.zips import check_zip
from tests.worker.runs import attempt_of, exec_of, names_of, report_of, run, runner_in, shell

MB = 1024 * 1024


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def collector_of(out: Path, *globs: str, required: tuple[str, ...] = (), **limits: int) -> OutputCollector:
    return OutputCollector(out, OutputRules(globs=globs or DEFAULT_OUTPUTS, required=required, **limits))


def written(collector: OutputCollector) -> bytes:
    target = io.BytesIO()
    write_zip(target, collector.members())
    return target.getvalue()


def collected(out: Path, *globs: str, **limits: int) -> tuple[list[str], dict[str, str]]:
    collector = collector_of(out, *globs, **limits)
    written(collector)
    return [output.name for output in collector.outputs], {left.name: left.reason for left in collector.left_out}


# ---------------------------------------------------------------------------------------------------- what is taken


def test_what_is_taken_is_named_with_its_size_and_hash(out: Path) -> None:
    (out / "d").mkdir()
    (out / "empty").touch()
    (out / "d" / "data").write_bytes(b"12345")

    collector = collector_of(out)
    archive = zipfile.ZipFile(io.BytesIO(written(collector)))

    assert {(found.name, found.size_bytes, found.sha256) for found in collector.outputs} == {
        ("out/empty", 0, hashlib.sha256(b"").hexdigest()),
        ("out/d/data", 5, hashlib.sha256(b"12345").hexdigest()),
    }
    assert (archive.read("out/empty"), archive.read("out/d/data")) == (b"", b"12345")


def test_two_names_of_one_file_are_two_outputs(out: Path) -> None:
    (out / "a").write_bytes(b"same")
    os.link(out / "a", out / "b")

    assert collected(out) == (["out/a", "out/b"], {})


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


names = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5).map("/".join)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("glob", ["out/" + "*a" * 20 + "*b", "out/" + "?*" * 20 + "b", "out/" + "**/a/" * 20 + "b"])
@pytest.mark.parametrize("ending", ["b", "c"])
def test_a_name_that_a_job_made_for_it_takes_no_time_to_match(glob: str, ending: str) -> None:
    name = f"out/{'a/' * 120}{ending}" if "**" in glob else f"out/{'a' * 250}{ending}"

    assert bool(glob_pattern(glob).fullmatch(name)) is (ending == "b")


@given(glob=st.lists(st.sampled_from(["**", "*", "a", "*a", "a*", "?b*", "*a*b*"]), min_size=1, max_size=4), name=names)
def test_a_glob_matches_as_if_every_way_was_tried(glob: list[str], name: str) -> None:
    def matches(parts: list[str], names: list[str]) -> bool:
        if not parts or not names:
            return not parts and not names
        if parts == ["**"]:
            return True
        if parts[0] == "**":
            return matches(parts[1:], names) or matches(parts, names[1:])
        return fnmatchcase(names[0], parts[0]) and matches(parts[1:], names[1:])

    assert bool(glob_pattern("/".join(glob)).fullmatch(name)) is matches(glob, name.split("/"))


def test_a_large_file_never_stands_in_memory(out: Path) -> None:
    with (out / "large").open("wb") as file:
        for _ in range(32):
            file.write(os.urandom(MB))
    collector = collector_of(out)

    tracemalloc.start()
    try:
        write_zip(Nowhere(), collector.members())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert collector.outputs[0].size_bytes == 32 * MB
    assert peak_bytes < 4 * MB


class Nowhere:
    def write(self, data: memoryview, /) -> int:
        return len(data)


# ---------------------------------------------------------------------------------------------------- what is left out


def test_links_are_named_and_not_followed(out: Path) -> None:
    (out / "passwd").symlink_to("/etc/passwd")
    (out / "etc").symlink_to("/etc")
    (out / "dangling").symlink_to("nowhere")
    (out / "real").touch()
    (out / "inside").symlink_to("real")

    assert collected(out) == (["out/real"], {f"out/{name}": "is a link" for name in ("dangling", "etc", "passwd", "inside")})


def test_an_out_folder_that_became_a_link_is_not_followed(out: Path) -> None:
    out.rmdir()
    out.symlink_to("/etc")

    assert collected(out, "out/**", "out/*") == ([], {"out": "is a link"})


def test_an_out_folder_that_is_gone_is_named(out: Path) -> None:
    out.rmdir()

    assert collected(out) == ([], {"out": "cannot be listed: vanished"})


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
    (out / "new\nline").touch()
    (out / "escape\x1b[2J").touch()
    Path(os.fsdecode(os.fsencode(out) + b"/\xff")).touch()

    outputs, left_out = collected(out)

    assert outputs == ["out/A"]
    assert set(left_out) == {"out/a", "out/back\\slash", "out/\\xff", "out/new\nline", "out/escape\x1b[2J"}
    assert "control character" in left_out["out/new\nline"]


def test_a_name_that_is_too_long_is_left_out_and_shown_in_part(out: Path) -> None:
    folder = out
    for _ in range(5):
        folder /= "x" * 250
        folder.mkdir()
    (folder / "file").touch()

    outputs, left_out = collected(out)

    assert outputs == []
    ((name, reason),) = left_out.items()
    assert "limit 1024" in reason
    assert len(name) == 1024


def test_a_tree_that_is_too_deep_is_not_descended_into(out: Path) -> None:
    folder = out
    for _ in range(29):
        folder /= "d"
        folder.mkdir()
    (folder / "just").touch()  # out, 29 folders, and itself: 31 parts
    (folder / "e").mkdir()
    (folder / "e" / "last").touch()
    (folder / "e" / "f").mkdir()
    (folder / "e" / "f" / "lost").touch()

    outputs, left_out = collected(out)

    assert [name.rpartition("/")[2] for name in outputs] == ["last", "just"]
    ((name, reason),) = left_out.items()
    assert name.endswith("/e/f")
    assert "levels deep" in reason


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

    outputs, left_out = collected(out, **limits)

    assert outputs == taken
    (reason,) = left_out.values()
    assert says in reason


def test_of_a_folder_with_too_many_files_only_some_are_looked_at(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKED_AT_MAX", 10)
    (out / "d").mkdir()
    for number in range(20):
        (out / "d" / f"{number}").touch()

    outputs, left_out = collected(out)

    assert len(outputs) == 9  # and the folder
    assert list(left_out) == ["out/d"]


def test_of_many_that_are_left_out_the_first_are_listed_and_all_are_counted(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEFT_OUT_LISTED_MAX", 3)
    for number in range(5):
        (out / f"{number}").symlink_to("nowhere")
    collector = collector_of(out)

    written(collector)

    assert [left.name for left in collector.left_out] == ["out/0", "out/1", "out/2"]
    assert collector.left_out_count == 5


# ---------------------------------------------------------------------------------------------------- while it is read


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Name of a file → what is done when it was looked at and is about to be opened."""
    tricks: dict[str, Any] = {}
    real = os.open

    def tricky(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if path in tricks:
            tricks[path]()
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", tricky)
    return tricks


def test_a_file_that_vanishes_is_named(out: Path, opening: dict[str, Any]) -> None:
    (out / "a").touch()
    (out / "b").touch()
    opening["a"] = (out / "a").unlink

    assert collected(out) == (["out/b"], {"out/a": "vanished"})


def test_a_file_that_may_not_be_read_is_named(out: Path, opening: dict[str, Any]) -> None:
    (out / "a").touch()
    (out / "b").touch()

    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    opening["a"] = refuse

    assert collected(out) == (["out/b"], {"out/a": "Permission denied"})


def test_a_pipe_or_link_put_in_a_files_place_is_neither_waited_for_nor_followed(out: Path, opening: dict[str, Any]) -> None:
    for name in ("link", "pipe"):
        (out / name).touch()

    def swap_for_a_pipe() -> None:
        (out / "pipe").unlink()
        os.mkfifo(out / "pipe")

    def swap_for_a_link() -> None:
        (out / "link").unlink()
        (out / "link").symlink_to("/etc/passwd")

    opening.update(pipe=swap_for_a_pipe, link=swap_for_a_link)
    found: list[Any] = []
    reading = threading.Thread(target=lambda: found.append(collected(out)), daemon=True)
    reading.start()
    reading.join(10.0)

    assert found
    outputs, left_out = found[0]
    assert outputs == []
    assert left_out == {"out/link": "Too many levels of symbolic links", "out/pipe": "is not a regular file"}


def test_a_folder_swapped_for_a_link_is_not_followed(out: Path, opening: dict[str, Any], tmp_path: Path) -> None:
    (out / "d").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()

    def swap() -> None:
        (out / "d").rmdir()
        (out / "d").symlink_to(tmp_path / "elsewhere")

    opening["d"] = swap

    assert collected(out) == ([], {"out/d": "is a link"})


def test_a_file_that_shrinks_while_it_is_read_is_there_as_far_as_it_went(out: Path) -> None:
    (out / "a").write_bytes(b"x" * 1000)
    (out / "b").write_bytes(b"whole")
    collector = collector_of(out)

    archive = zipfile.ZipFile(io.BytesIO(written_with(collector, "out/a", lambda: os.truncate(out / "a", 10))))

    assert archive.testzip() is None
    assert archive.read("out/a") == b"x" * 10
    assert [(found.name, found.size_bytes) for found in collector.outputs] == [("out/a", 10), ("out/b", 5)]
    assert collector.outputs[0].sha256 == hashlib.sha256(b"x" * 10).hexdigest()
    assert [(left.name, left.reason) for left in collector.left_out] == [
        ("out/a", "became shorter while it was read: 10 of 1000 bytes are here")
    ]


def test_a_file_that_grows_while_it_is_read_is_there_as_it_was_and_is_named(out: Path) -> None:
    (out / "a").write_bytes(b"x" * 10)
    collector = collector_of(out)

    archive = zipfile.ZipFile(io.BytesIO(written_with(collector, "out/a", lambda: (out / "a").write_bytes(b"x" * 20))))

    assert archive.read("out/a") == b"x" * 10
    assert [left.reason for left in collector.left_out] == ["changed while it was read"]


def written_with(collector: OutputCollector, name: str, meanwhile: Any) -> bytes:
    """The archive, when this happens after a file was opened and before it is read."""

    def members() -> Iterator[ZipMember]:
        for member in collector.members():
            if member.name == name:
                meanwhile()
            yield member

    target = io.BytesIO()
    write_zip(target, members())
    return target.getvalue()


def open_descriptors() -> list[str]:
    return sorted(f"{path.name} {path.readlink()}" for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def test_no_descriptor_is_left_open_whether_the_archive_is_written_or_not(out: Path) -> None:
    (out / "d" / "e").mkdir(parents=True)
    (out / "d" / "e" / "file").write_bytes(b"x")
    before = open_descriptors()

    written(collector_of(out))
    abandoned = collector_of(out).members()
    next(abandoned)
    abandoned.close()

    assert open_descriptors() == before


# ---------------------------------------------------------------------------------------------------- readers


def test_outputs_that_pack_too_well_are_stored_so_that_a_reader_does_not_take_them_for_a_bomb(out: Path) -> None:
    with (out / "sparse").open("wb") as file:
        file.truncate(60 * MB)
    (out / "text").write_bytes(b"".join(b"%d\n" % number for number in range(100_000)))

    archive = written(collector_of(out))

    assert [entry.size_bytes for entry in check_zip(io.BytesIO(archive)) if entry.name == "out/sparse"] == [60 * MB]
    text = zipfile.ZipFile(io.BytesIO(archive)).getinfo("out/text")
    assert text.compress_size < text.file_size / 2


def test_the_list_of_names_stays_within_what_a_reader_takes(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NAMES_MAX_BYTES", 1000)
    for number in range(50):
        (out / f"{number:0100}").touch()

    outputs, left_out = collected(out)

    assert len(outputs) + len(left_out) == 50
    assert sum(46 + len(name) for name in outputs) < 1000 + 200
    assert "names of all outputs" in next(iter(left_out.values()))


def test_the_limits_are_not_wider_than_those_of_a_reader() -> None:
    widest, reader = OutputRules(), ZipLimits()

    assert widest.max_files + 3 <= reader.max_entries
    assert widest.max_file_bytes <= reader.max_entry_bytes
    assert widest.max_total_bytes < reader.max_total_bytes
    assert reader.max_directory_bytes > module.NAMES_MAX_BYTES


# ---------------------------------------------------------------------------------------------------- through a worker


def test_the_report_names_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    result = run(runner_in(tmp_path), shell("printf abc > out/a; ln -s a out/link"))

    report = report_of(result)
    assert report["outputs"] == [{"name": "out/a", "size_bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}]
    assert (report["left_out"], report["left_out_count"]) == ([{"name": "out/link", "reason": "is a link"}], 1)
    assert (result.outcome.error_code, result.outcome.meta["left_out"]) == (None, 1)


def test_an_execs_own_limits_hold_for_its_jobs(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "printf abc > out/a; printf abcd > out/b", outputs=OutputRules(max_file_bytes=3))

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    assert names_of(result) == ["out/a", "result.json", "stderr.log", "stdout.log"]
    assert [left["name"] for left in report_of(result)["left_out"]] == ["out/b"]


def test_a_success_without_a_required_output_is_a_failure_that_may_be_tried_again(tmp_path: Path) -> None:
    tool = exec_of("/bin/true", outputs=OutputRules(required=("out/*.csv",)))

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    outcome, report = result.outcome, report_of(result)
    assert (outcome.error_code, outcome.exit_code, outcome.permanent) == ("OUTPUT_MISSING", 0, False)
    assert "'out/*.csv'" in outcome.message
    assert (report["error_code"], report["message"]) == (outcome.error_code, outcome.message)


def test_a_required_output_is_collected_even_if_outputs_does_not_name_it(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "touch out/a.csv out/b", outputs=OutputRules(globs=("out/c",), required=("out/*.csv",)))

    result = run(runner_in(tmp_path, tool), attempt_of(exec="tool"))

    assert result.outcome.error_code is None
    assert names_of(result) == ["out/a.csv", "result.json", "stderr.log", "stdout.log"]


def test_a_required_output_that_had_to_be_left_out_is_missing_and_the_message_says_why(tmp_path: Path) -> None:
    tool = exec_of("/bin/sh", "-c", "ln -s /etc/passwd out/a.csv", outputs=OutputRules(required=("out/*.csv",)))

    outcome = run(runner_in(tmp_path, tool), attempt_of(exec="tool")).outcome

    assert outcome.error_code == "OUTPUT_MISSING"
    assert "'out/a.csv': is a link" in outcome.message


def test_a_failure_stays_what_it_is_when_outputs_are_missing_too(tmp_path: Path) -> None:
    tool = exec_of("/bin/false", outputs=OutputRules(required=("out/*.csv",)))

    outcome = run(runner_in(tmp_path, tool), attempt_of(exec="tool")).outcome

    assert outcome.error_code == "EXIT_CODE"


# ---------------------------------------------------------------------------------------------------- settings


def test_an_exec_names_its_outputs_and_their_limits() -> None:
    table = {
        "command": "tool",
        "outputs": ["out/*.png"],
        "outputs_required": ["out/index.html"],
        "outputs_max_files": 10,
        "outputs_max_file_mb": 2,
        "outputs_max_total_mb": 5,
    }

    (tool,) = parse_execs({"tool": table}).values()

    assert tool.outputs == OutputRules(
        globs=("out/*.png",),
        required=("out/index.html",),
        max_files=10,
        max_file_bytes=2 * MB,
        max_total_bytes=5 * MB,
    )


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"outputs_required": ["../x"]}, "outputs_required has '../x'"),
        ({"outputs_max_files": 10_000}, "outputs_max_files must be 0 to 9000"),
        ({"outputs_max_file_mb": 65_537}, "outputs_max_file_mb must be 0 to 65536"),
        ({"outputs_max_total_mb": -1}, "outputs_max_total_mb must be 0 to 65536"),
    ],
)
def test_settings_that_cannot_work(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_execs({"tool": {"command": "tool", **setting}})


def test_a_large_output_that_does_not_pack_is_stored(out: Path) -> None:
    (out / "noise.bin").write_bytes(os.urandom(module.PACKED_FREE_BYTES + 1))
    (out / "text.txt").write_bytes(b"".join(b"line %d\n" % number for number in range(100_000)))

    archive = zipfile.ZipFile(io.BytesIO(written(collector_of(out))))

    assert archive.getinfo("out/noise.bin").compress_type == zipfile.ZIP_STORED
    assert archive.getinfo("out/text.txt").compress_type == zipfile.ZIP_DEFLATED
