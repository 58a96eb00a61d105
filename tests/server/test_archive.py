"""The archive of a backup is believed in nothing: what tasuki did not write is refused, with a word that helps."""

import io
import tarfile
from collections.abc import Callable

import pytest

from tasuki.errors import Corrupt, InvalidInput, TasukiError
from tasuki.server.archive import DATABASE_NAME, FORMAT, ArchiveReader, ArchiveWriter, Manifest, blob_name, read_manifest

SHA256 = "ab" * 32
MANIFEST = Manifest(
    tasuki="1",
    made_at=0.0,
    schema_version=1,
    migrations=(),
    epoch=1,
    holder="server",
    jobs={},
    database_bytes=5,
    database_sha256="",
    with_blobs=True,
)


def written() -> bytes:
    target = io.BytesIO()
    writer = ArchiveWriter(target)
    writer.add(blob_name(SHA256, 3), 1000, [b"x" * 600, b"y" * 400])
    writer.add(DATABASE_NAME, 5, [b"pages"])
    writer.close(MANIFEST)
    return target.getvalue()


def read(archive: bytes) -> list[tuple[str, bytes]]:
    reader = ArchiveReader(io.BytesIO(archive))
    return [(member.name, b"".join(reader.pieces())) for member in reader]


def forged(name: str = DATABASE_NAME, **fields: object) -> bytes:
    """An archive whose one member has this head."""
    head = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(head, field, value)
    return head.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def test_what_was_written_is_read() -> None:
    members = read(written())

    assert [name for name, _ in members] == [f"blobs/{SHA256}.3", "tasuki.sqlite3", "manifest.json"]
    assert members[0][1] == b"x" * 600 + b"y" * 400
    assert read_manifest(members[2][1]) == MANIFEST


def test_every_tar_can_read_it() -> None:
    with tarfile.open(fileobj=io.BytesIO(written())) as archive:
        assert archive.getnames() == [f"blobs/{SHA256}.3", "tasuki.sqlite3", "manifest.json"]


def test_a_member_that_fails_leaves_the_archive_as_it_was() -> None:
    target = io.BytesIO()
    writer = ArchiveWriter(target)
    writer.add(DATABASE_NAME, 5, [b"pages"])
    before = target.getvalue()

    with pytest.raises(Corrupt):
        writer.add(blob_name(SHA256, 0), 1000, [b"too little"])

    assert target.getvalue() == before


@pytest.mark.parametrize("kept", [513, 1000, 2000, 4000, -1, -1024, -1025])
def test_a_torn_archive_is_refused_wherever_it_ends(kept: int) -> None:
    with pytest.raises(Corrupt):
        read(written()[:kept])


def test_what_follows_the_manifest_is_refused() -> None:
    with pytest.raises(Corrupt, match="does not end"):
        read(written() + b"more")


@pytest.mark.parametrize("archive", [b"", b"hello", b"PK\x03\x04" + bytes(600), bytes(10_240), b"\xff" * 2048])
def test_a_file_of_another_kind_is_refused(archive: bytes) -> None:
    with pytest.raises(InvalidInput, match="not a file that tasuki backup made"):
        read(archive)


@pytest.mark.parametrize(
    "name",
    [
        "../tasuki.sqlite3",
        "/etc/passwd",
        "blobs/../../evil",
        f"blobs/{SHA256.upper()}",
        f"blobs/{SHA256}.0",
        f"blobs/{SHA256}.01",
        f"blobs/{SHA256}\\evil",
        f"blobs/{SHA256[:-1]}",
        "blobs/tmp/x",
        "token",
        "tasuki.sqlite3-wal",
        "./tasuki.sqlite3",
    ],
)
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="the unknown name"):
        read(forged(name))


@pytest.mark.parametrize(
    "kind",
    [
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.DIRTYPE,
        tarfile.CHRTYPE,
        tarfile.FIFOTYPE,
        tarfile.XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_SPARSE,
    ],
)
def test_only_plain_files_are_taken(kind: bytes) -> None:
    with pytest.raises(InvalidInput, match="no plain file"):
        read(forged(type=kind, linkname="/etc/passwd"))


def test_a_length_without_end_is_refused() -> None:
    with pytest.raises(InvalidInput, match="manifest has"):
        read(forged("manifest.json", size=2**62))
    with pytest.raises(InvalidInput, match="no plain file"):
        read(forged(size=-1))
    with pytest.raises(Corrupt, match="cut off"):
        read(forged(size=2**62))


def test_nothing_comes_twice() -> None:
    once = written()[: 512 + 1024]

    with pytest.raises(InvalidInput, match="twice"):
        read(once + written())


@pytest.mark.parametrize(
    ("encoded", "kind"),
    [
        (b"", Corrupt),
        (b"[" * 100_000, Corrupt),
        (b'{"format": "1"}', Corrupt),
        (b'{"format": 1}', Corrupt),
        (b"\xff\xfe", Corrupt),
        (b'{"format": %d, "later": true}' % (FORMAT + 1), InvalidInput),
    ],
)
def test_a_manifest_that_is_none_is_refused(encoded: bytes, kind: Callable[..., TasukiError]) -> None:
    with pytest.raises(kind):  # type: ignore[call-overload]
        read_manifest(encoded)
