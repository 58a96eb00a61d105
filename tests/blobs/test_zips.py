"""Archives: what is written can be read; what is hostile is refused by name and leaves nothing behind."""

from __future__ import annotations

import errno
import io
import os
import random
import resource
import stat
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasuki.blobs.folder import FolderBlobs
from tasuki.blobs.zip.reader import NAME_MAX_BYTES, PIECE_BYTES, ArchiveNames, ZipLimits
from tasuki.blobs.zip.writer import ZipMember, extract_zip, write_zip
from tasuki.errors import DiskFull, InvalidInput, TasukiError, TooLarge
from tests.blobs.forged_zips import Forged, deflate, forge
from tests.support.zips import check_zip

MIB = 1024 * 1024


def zip_bytes(*members: ZipMember) -> bytes:
    target = io.BytesIO()
    write_zip(target, members)
    return target.getvalue()


def refused(data: bytes, folder: Path, limits: ZipLimits | None = None) -> TasukiError:
    """The error by which both `check_zip` and `extract_zip` refuse the archive; nothing may remain of it."""
    limits = limits or ZipLimits()
    before = sorted(folder.iterdir())
    with pytest.raises(InvalidInput) as checked:
        check_zip(io.BytesIO(data), limits)
    with pytest.raises(InvalidInput) as extracted:
        extract_zip(io.BytesIO(data), folder / "out", limits)
    assert str(extracted.value) == str(checked.value)
    assert sorted(folder.iterdir()) == before
    return checked.value


# Writing


def test_what_is_written_can_be_checked_and_extracted(tmp_path: Path) -> None:
    big = os.urandom(MIB)
    data = zip_bytes(
        ZipMember("stdout.log", b"line\n" * 1000),
        ZipMember("empty.txt", b""),
        ZipMember("out/", None),
        ZipMember("out/deep/résumé 結果.bin", big),
    )
    entries = check_zip(io.BytesIO(data))
    assert [(entry.name, entry.is_folder, entry.size_bytes) for entry in entries] == [
        ("stdout.log", False, 5000),
        ("empty.txt", False, 0),
        ("out/", True, 0),
        ("out/deep/résumé 結果.bin", False, MIB),
    ]
    assert extract_zip(io.BytesIO(data), tmp_path / "into") == entries
    assert (tmp_path / "into/stdout.log").read_bytes() == b"line\n" * 1000
    assert (tmp_path / "into/empty.txt").read_bytes() == b""
    assert (tmp_path / "into/out/deep/résumé 結果.bin").read_bytes() == big
    assert sorted(path.name for path in tmp_path.iterdir()) == ["into"]


def test_other_programs_can_read_what_is_written() -> None:
    with zipfile.ZipFile(io.BytesIO(zip_bytes(ZipMember("a.txt", b"hello"), ZipMember("d/", None)))) as archive:
        assert archive.testzip() is None
        assert archive.read("a.txt") == b"hello"
        assert archive.getinfo("d/").is_dir()


def test_archives_of_other_programs_can_be_read() -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("stored.txt", b"hello")
        archive.writestr("packed.txt", b"hello" * 100, zipfile.ZIP_DEFLATED)
        archive.mkdir("folder")
        with archive.open("large.txt", "w", force_zip64=True) as entry:
            entry.write(b"zip64")
    names = [entry.name for entry in check_zip(target)]
    assert names == ["stored.txt", "packed.txt", "folder/", "large.txt"]


def test_an_archive_without_entries_is_fine(tmp_path: Path) -> None:
    assert extract_zip(io.BytesIO(zip_bytes()), tmp_path / "into") == []
    assert list((tmp_path / "into").iterdir()) == []


def test_equal_members_give_equal_bytes_whatever_the_target(tmp_path: Path) -> None:
    with (tmp_path / "target.zip").open("wb") as target:
        write_zip(target, [ZipMember("file.txt", b"same")])
    assert (tmp_path / "target.zip").read_bytes() == zip_bytes(ZipMember("file.txt", b"same"))


def test_an_archive_can_be_written_straight_into_a_blob(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path, max_blob_bytes=MIB, floor_free_bytes=0)
    with blobs.begin() as writer:
        write_zip(writer, [ZipMember("a.txt", b"hello")])
        ref = writer.commit()
    assert blobs.read_bytes(ref.sha256, MIB) == zip_bytes(ZipMember("a.txt", b"hello"))


def make_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("names", [["../up"], ["/abs"], ["a\\b"], ["a", "A"], ["a", "a/b"], ["bad\udcff"], ["d/"]])
def test_a_name_that_could_not_be_read_is_not_written(names: list[str]) -> None:
    with pytest.raises(InvalidInput) as caught:
        zip_bytes(*(ZipMember(name, b"") for name in names))
    assert repr(names[-1]) in str(caught.value)


def test_a_folder_without_a_slash_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="'folder'"):
        zip_bytes(ZipMember("folder", None))


def test_a_broken_off_archive_does_not_look_whole() -> None:
    target = io.BytesIO()
    with pytest.raises(InvalidInput):
        write_zip(target, [ZipMember("good", b"x"), ZipMember("../bad", b"x")])
    assert target.tell() > 0
    assert not zipfile.is_zipfile(target)


def test_a_full_disk_while_writing_is_disk_full() -> None:
    class FullDisk(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFull, match=os.strerror(errno.ENOSPC)):
        write_zip(FullDisk(), [ZipMember("a", b"x")])


def test_a_target_that_takes_a_part_of_each_write_gets_the_whole_archive() -> None:
    class Narrow(io.BytesIO):
        def write(self, data: Any, /) -> int:
            return super().write(data[:7])

    target = Narrow()
    write_zip(target, [ZipMember("a", b"hello" * 10)])
    assert target.getvalue() == zip_bytes(ZipMember("a", b"hello" * 10))


# Names

BAD_NAMES = [
    b"../../evil",
    b"a/../../evil",
    b"..",
    b"a/..",
    b"/etc/passwd",
    b"//host/share",
    b"C:/windows/evil",
    b"c:evil",
    b"..\\evil",
    b"a\\b",
    b"good.txt\0.exe",
    b"a\x1b[2J",
    "a\x9b2J".encode(),
    "a\u202etxt.exe".encode(),
    b"\0",
    b"",
    b"/",
    b".",
    b"./a",
    b"a//b",
    b"a/./b",
    b"a//",
    b"x" * 256,
    b"d/" * 40 + b"x",
    b"/".join([b"y" * 200] * 6),
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: bytes) -> None:
    message = str(refused(forge(Forged(name=name, data=b"", mode=0)), tmp_path))
    assert repr(name.decode()[:NAME_MAX_BYTES]) in message
    assert "only plain relative names are allowed" in message


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.txt", "a.txt"),
        ("a.txt", "A.TXT"),
        ("straße", "STRASSE"),
        ("\u00e9", "e\u0301"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("a/b/c", "A/B"),
        ("a", "A/b/c"),
        ("Dir/x", "dir/y"),
        ("d/", "d/"),
        ("d/", "D/"),
        ("d/", "d"),
        ("d", "d/"),
    ],
)
def test_names_that_clash_on_some_system_are_refused(tmp_path: Path, first: str, second: str) -> None:
    entries = [Forged(name=name.encode(), data=b"", mode=0) for name in (first, second)]
    assert f"{second!r} clashes" in str(refused(forge(*entries), tmp_path))


def test_a_folder_may_be_listed_after_what_is_in_it(tmp_path: Path) -> None:
    data = forge(Forged(name=b"d/x"), Forged(name=b"d/", data=b"", mode=0), Forged(name=b"d/y"))
    extract_zip(io.BytesIO(data), tmp_path / "into")
    assert sorted(path.name for path in (tmp_path / "into/d").iterdir()) == ["x", "y"]


def test_a_name_that_is_not_utf8_although_it_says_so_is_refused(tmp_path: Path) -> None:
    assert "not a ZIP" in str(refused(forge(Forged(name=b"\xff\xfe")), tmp_path))


# Kinds


@pytest.mark.parametrize(
    "kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK], ids=lambda kind: f"{kind:o}"
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: int) -> None:
    data = forge(Forged(name=b"odd", data=b"/etc/passwd", mode=(kind | 0o777) << 16))
    assert "'odd' is a link or a device" in str(refused(data, tmp_path))


@pytest.mark.parametrize(("name", "kind"), [(b"file/", stat.S_IFREG), (b"folder", stat.S_IFDIR)])
def test_a_kind_that_contradicts_the_name_is_refused(tmp_path: Path, name: bytes, kind: int) -> None:
    assert repr(name.decode()) in str(refused(forge(Forged(name=name, data=b"", mode=kind << 16)), tmp_path))


def test_a_folder_with_contents_is_refused(tmp_path: Path) -> None:
    assert "'d/' is a folder with contents" in str(refused(forge(Forged(name=b"d/", mode=0)), tmp_path))


@pytest.mark.parametrize("flag", [0x0001, 0x0040, 0x2000])
def test_encrypted_entries_are_refused(tmp_path: Path, flag: int) -> None:
    assert "'a.txt' is encrypted" in str(refused(forge(Forged(flags=flag)), tmp_path))
    assert "'a.txt'" in str(refused(forge(Forged(local_flags=flag)), tmp_path))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 9, 99])
def test_other_methods_than_stored_and_deflate_are_refused(tmp_path: Path, method: int) -> None:
    assert f"'a.txt' uses method {method}" in str(refused(forge(Forged(method=method)), tmp_path))


# Lies

# One stored block whose end is also the end of the first piece that is read: what follows is never shown to zlib.
ENDS_WITH_THE_FIRST_PIECE = struct.pack("<BHH", 1, 65531, 65531 ^ 0xFFFF) + b"x" * 65531
assert len(ENDS_WITH_THE_FIRST_PIECE) == PIECE_BYTES


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (Forged(claimed_bytes=4), "5 bytes or more; its header says 4"),
        (Forged(claimed_bytes=6), "5 bytes; its header says 6"),
        (Forged(crc32=0), "its header says 00000000"),
        (Forged(packed=deflate(b"hello"), method=8, claimed_bytes=2), "5 bytes or more; its header says 2"),
        (Forged(packed=deflate(b"hello")[:-1], method=8), "ends in the middle"),
        (Forged(packed=b"", method=8), "ends in the middle"),
        (Forged(packed=deflate(b"hello") + b"more", method=8), "behind the end"),
        (Forged(packed=deflate(b"hello") + b"x" * 100_000, method=8), "behind the end"),
        (Forged(data=b"x" * 65531, packed=ENDS_WITH_THE_FIRST_PIECE + b"more", method=8), "behind the end"),
        (Forged(packed=b"\xff" * 20, method=8), "cannot be unpacked"),
        (Forged(local_name=b"b.txt"), "another name"),
        (Forged(local_method=8), "another way"),
        (Forged(header_offset=1), "another name, or none"),
        (Forged(header_offset=2**31), "outside of the archive"),
        (Forged(claimed_packed_bytes=2**31), "overlaps the archive's list"),
    ],
)
def test_an_entry_that_is_not_what_its_headers_say_is_refused(tmp_path: Path, lie: Forged, said: str) -> None:
    message = str(refused(forge(lie), tmp_path))
    assert "'a.txt'" in message
    assert said in message


def test_two_entries_on_the_same_bytes_are_refused(tmp_path: Path) -> None:
    # Given the trick of the famous bombs: one entry's contents are the other's header and contents.
    inner = Forged(name=b"inner")
    body = inner.local()
    outer = Forged(name=b"outer", data=body)
    start = len(outer.local()) - len(body)
    data = forge(outer, Forged(name=b"inner", header_offset=start, omit_contents=True))
    assert "'outer' and 'inner' overlap" in str(refused(data, tmp_path))


@pytest.mark.parametrize(
    "data", [b"", b"PK", b"no archive at all" * 100, b"PK\x05\x06" + b"\xff" * 18, zip_bytes(ZipMember("a", b"x"))[:-1]]
)
def test_what_is_no_archive_is_refused(tmp_path: Path, data: bytes) -> None:
    assert "not a ZIP archive" in str(refused(data, tmp_path))


def test_an_end_record_that_points_in_front_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forged.zip").write_bytes(forge(Forged(), directory_bytes=10_000))
    with (tmp_path / "forged.zip").open("rb") as source, pytest.raises(InvalidInput, match="not a ZIP archive"):
        check_zip(source)


def test_no_damage_to_an_archive_does_more_than_refuse_it(tmp_path: Path) -> None:
    whole = zip_bytes(ZipMember("a.txt", b"hello" * 50), ZipMember("d/", None), ZipMember("d/b.bin", bytes(range(256))))
    chance = random.Random(20)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        (tmp_path / "damaged.zip").write_bytes(data)
        with (tmp_path / "damaged.zip").open("rb") as source:
            try:
                entries = check_zip(source)
            except InvalidInput:
                continue
        assert all(entry.name and ".." not in entry.name for entry in entries)


@given(st.binary(max_size=300))
def test_no_bytes_do_more_than_be_refused(tail: bytes) -> None:
    with pytest.raises(InvalidInput):
        check_zip(io.BytesIO(tail + b"PK\x05\x06" + b"\x01" * 18))


# Limits


def test_more_entries_than_allowed_are_too_large_and_the_first_too_many_is_named(tmp_path: Path) -> None:
    data = forge(*(Forged(name=b"f%d" % index) for index in range(4)))
    assert len(check_zip(io.BytesIO(data), ZipLimits(max_entries=4))) == 4
    error = refused(data, tmp_path, ZipLimits(max_entries=3))
    assert isinstance(error, TooLarge)
    assert "'f3'" in str(error)


def test_the_number_of_entries_in_the_end_record_is_not_believed(tmp_path: Path) -> None:
    data = forge(*(Forged(name=b"f%d" % index) for index in range(4)), count=1)
    assert isinstance(refused(data, tmp_path, ZipLimits(max_entries=3)), TooLarge)


def test_a_directory_of_many_megabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.zip"
    with path.open("wb") as file:
        file.truncate(200 * MIB)
        file.seek(0, os.SEEK_END)
        file.write(forge(directory_bytes=200 * MIB))
    tracemalloc.start()
    try:
        with path.open("rb") as source, pytest.raises(TooLarge, match="max_directory_bytes"):
            check_zip(source)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < MIB


@pytest.mark.parametrize("method", [0, 8])
def test_an_entry_past_its_limit_is_too_large_whatever_its_header_says(tmp_path: Path, method: int) -> None:
    content = os.urandom(200_000)
    packed = deflate(content) if method else content
    data = forge(Forged(data=content, packed=packed, method=method, claimed_bytes=10))
    check_zip(io.BytesIO(forge(Forged(data=content))), ZipLimits(max_entry_bytes=200_000))
    error = refused(data, tmp_path, ZipLimits(max_entry_bytes=9))
    assert isinstance(error, TooLarge)
    assert "'a.txt'" in str(error)


def test_all_entries_together_past_the_limit_are_too_large(tmp_path: Path) -> None:
    data = forge(*(Forged(name=b"f%d" % index, data=b"x" * 100) for index in range(5)))
    assert len(check_zip(io.BytesIO(data), ZipLimits(max_total_bytes=500))) == 5
    error = refused(data, tmp_path, ZipLimits(max_total_bytes=499))
    assert isinstance(error, TooLarge)
    assert "'f4' passes max_total_bytes" in str(error)


def test_a_bomb_is_stopped_by_its_ratio_in_bounded_memory(tmp_path: Path) -> None:
    content = bytes(64 * MIB)
    data = forge(Forged(name=b"bomb", data=content, packed=deflate(content), method=8))
    del content
    tracemalloc.start()
    try:
        error = refused(data, tmp_path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(error, TooLarge)
    assert "'bomb'" in str(error)
    assert "max_ratio = 200" in str(error)
    assert peak_bytes < 2 * MIB


def test_many_small_bombs_are_stopped_by_the_ratio_of_the_whole(tmp_path: Path) -> None:
    content = bytes(100_000)
    entries = (Forged(name=b"f%d" % index, data=content, packed=deflate(content), method=8) for index in range(5))
    error = refused(forge(*entries), tmp_path, ZipLimits(ratio_free_bytes=300_000))
    assert isinstance(error, TooLarge)
    assert "'f3'" in str(error)


def test_a_bomb_does_not_hide_behind_a_large_entry(tmp_path: Path) -> None:
    content = bytes(400_000)
    padding = Forged(name=b"padding", data=os.urandom(MIB))
    bomb = Forged(name=b"bomb", data=content, packed=deflate(content), method=8)
    error = refused(forge(padding, bomb), tmp_path, ZipLimits(ratio_free_bytes=300_000))
    assert "'bomb'" in str(error)


def test_a_short_log_of_equal_lines_is_no_bomb() -> None:
    data = zip_bytes(ZipMember("stdout.log", bytes(4 * MIB)))
    assert len(data) < 4 * MIB / 200
    assert check_zip(io.BytesIO(data))[0].size_bytes == 4 * MIB


# Extracting


def test_extraction_ignores_modes_and_gives_the_callers_own(tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    data = forge(Forged(name=b"d/run", mode=(stat.S_IFREG | stat.S_ISUID | 0o777) << 16))
    extract_zip(io.BytesIO(data), tmp_path / "into")
    assert stat.S_IMODE((tmp_path / "into/d/run").stat().st_mode) & 0o7111 == 0
    assert (tmp_path / "into").stat().st_mode == (tmp_path / "probe").stat().st_mode


@pytest.mark.parametrize("make", [os.mkdir, Path.touch, make_dangling_link])
def test_what_is_at_the_target_already_is_never_touched(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "into")
    before = (tmp_path / "into").lstat()
    with pytest.raises(InvalidInput, match="into' exists"):
        extract_zip(io.BytesIO(zip_bytes(ZipMember("a", b"x"))), tmp_path / "into")
    after = (tmp_path / "into").lstat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in tmp_path.iterdir()] == ["into"]


def test_the_target_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Watched(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            seen.append((tmp_path / "into").exists())
            return super().read(size)

    extract_zip(Watched(zip_bytes(ZipMember("a", b"x"), ZipMember("b", b"y"))), tmp_path / "into")
    assert seen
    assert not any(seen)
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["a", "b"]


def test_somebody_elses_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    class Racing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            (tmp_path / "into").mkdir(exist_ok=True)
            (tmp_path / "into/theirs").touch()
            return super().read(size)

    with pytest.raises(InvalidInput, match="into' exists"):
        extract_zip(Racing(zip_bytes(ZipMember("mine", b"x"))), tmp_path / "into")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["into"]


def test_a_full_disk_while_extracting_is_disk_full_and_nothing_remains(tmp_path: Path) -> None:
    data = zip_bytes(ZipMember("small", b"x"), ZipMember("large", os.urandom(MIB)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # the kernel then refuses as a full disk does: a part first
    try:
        with pytest.raises(DiskFull, match="into"):
            extract_zip(io.BytesIO(data), tmp_path / "into")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_entry_information_is_measured_not_quoted() -> None:
    packed = deflate(b"hello" * 100)
    [entry] = check_zip(io.BytesIO(forge(Forged(data=b"hello" * 100, packed=packed, method=8))))
    assert (entry.name, entry.is_folder, entry.size_bytes, entry.packed_bytes) == ("a.txt", False, 500, len(packed))
    assert entry.crc32 == Forged(data=b"hello" * 100).sizes()[0]


def test_a_name_that_begins_like_a_drive_is_called_that() -> None:
    with pytest.raises(InvalidInput, match="begins like a drive"):
        ArchiveNames().add("x:y", is_folder=False)
