"""Names of a server lead nowhere else; what a job leaves is removed, and what cannot be removed does not keep the rest."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tasuki.core.job import InputFile
from tasuki.errors import InvalidInput
from tasuki.worker.folder import JobRefused, RunFolders, remove_tree
from tests.worker.runs import attempt_of

DEEP = 1100  # deeper than Python recurses, and its path longer than the longest
"""Number of folders: as a path longer than the system allows, and deeper than Python's stack."""


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "..", "a//evil", "a\\evil", ""])
@pytest.mark.parametrize("field", ["job_id", "files"])
def test_a_name_that_a_server_sends_leads_to_no_other_folder(tmp_path: Path, field: str, name: str) -> None:
    data = tmp_path / "deep" / "data"
    folders = RunFolders(data, "incarnation", floor_free_bytes=0)
    hostile = {"job_id": name} if field == "job_id" else {"files": (InputFile(name, data=b"evil"),)}

    with pytest.raises((InvalidInput, JobRefused)):
        folders.create(attempt_of(**hostile))

    folders.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def dig(folder: Path) -> None:
    """Folders in folders, with a file at the bottom."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("bottom", os.O_CREAT, dir_fd=here))
    os.close(here)


def test_a_tree_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "same").mkdir()
    (tree / "same").mkdir()
    (tree / "a" / "b" / "file").write_text("x")
    os.mkfifo(tree / "a" / "fifo")

    remove_tree(tree)

    assert not tree.exists()


def test_a_very_deep_tree_goes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    dig(tree)

    remove_tree(tree)

    assert not tree.exists()


def test_what_may_not_be_looked_into_goes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "closed" / "inner").mkdir(parents=True)
    (tree / "closed" / "inner" / "file").write_text("x")
    for folder in (tree / "closed" / "inner", tree / "closed", tree):
        folder.chmod(0)

    remove_tree(tree)

    assert not os.path.lexists(tree)


@pytest.mark.parametrize("where", ["tree", "tree/below", "tree/below/inner"])
def test_a_link_goes_and_what_it_leads_to_stays(tmp_path: Path, where: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "kept").write_text("x")
    link = tmp_path / where
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)

    remove_tree(tmp_path / "tree")

    assert not os.path.lexists(tmp_path / "tree")
    assert (outside / "kept").read_text() == "x"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o755


def test_a_file_goes_and_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    remove_tree(tmp_path / "file")
    remove_tree(tmp_path / "file")

    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_told_and_the_rest_goes(tmp_path: Path) -> None:
    """A file system mounted there, as a container of the job may leave it."""
    place = tmp_path / "tree" / "a" / "mounted"
    place.mkdir(parents=True)
    (tmp_path / "tree" / "b").mkdir()
    (tmp_path / "tree" / "b" / "file").write_text("x")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "none", place], check=False, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("a file system cannot be mounted here")
    try:
        with pytest.raises(OSError, match="busy"):
            remove_tree(tmp_path / "tree")
        assert not (tmp_path / "tree" / "b").exists()
    finally:
        subprocess.run(["umount", "-l", place], check=False)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()
