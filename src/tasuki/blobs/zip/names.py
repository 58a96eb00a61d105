"""Which names an archive may contain: the ones that mean the same file on every system, inside the folder they go to.

Pure: names in, InvalidInput out. Writing and reading archives use the same rules, so what was written can be read.
"""

from __future__ import annotations

import re
import unicodedata

from tasuki.errors import InvalidInput

__all__ = ["NAME_MAX_BYTES", "NAME_MAX_DEPTH", "PART_MAX_BYTES", "NameBook"]

NAME_MAX_BYTES = 1024  # of the whole name; leaves room for the folder it goes to below Linux's 4096
PART_MAX_BYTES = 255  # of one part between slashes; what ext4, xfs and NTFS can hold
NAME_MAX_DEPTH = 32  # parts; bounds what the folders implied by hostile names cost

_DRIVE = re.compile(r"[A-Za-z]:")


def _check_name(name: str) -> str:
    """Return the name without the slash that marks a folder, or raise InvalidInput."""
    path = name.removesuffix("/")
    if "\0" in name:
        problem = "has a NUL"
    elif "\\" in name:
        problem = "has a backslash, which is a separator on some systems"
    elif name.startswith("/"):
        problem = "is absolute"
    elif _DRIVE.match(name):
        problem = "begins like a drive of Windows"
    elif ".." in path.split("/"):
        problem = "has a '..' part"
    elif any(part in ("", ".") for part in path.split("/")):
        problem = "has an empty or '.' part"
    else:
        problem = _problem_of_size(path)
    if problem:
        raise InvalidInput(f"archive entry {name[:NAME_MAX_BYTES]!r} {problem}; only plain relative names are allowed")
    return path


def _problem_of_size(path: str) -> str:
    try:
        size_bytes = len(path.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size_bytes > NAME_MAX_BYTES:
        return f"has a name of {size_bytes} bytes (limit {NAME_MAX_BYTES})"
    parts = path.split("/")
    if len(parts) > NAME_MAX_DEPTH:
        return f"is {len(parts)} levels deep (limit {NAME_MAX_DEPTH})"
    if any(len(part.encode()) > PART_MAX_BYTES for part in parts):
        return f"has a part of more than {PART_MAX_BYTES} bytes"
    return ""


def _folded(path: str) -> str:
    """Equal for names that a file system which ignores case or Unicode composition takes for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


class NameBook:
    """The names seen in one archive; `add` refuses each name that is bad by itself or clashes with an earlier one."""

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        self._folders: dict[str, str] = {}  # also those that only stand in front of others' names
        self._folder_entries: set[str] = set()

    def add(self, name: str, *, is_folder: bool) -> None:
        path = _check_name(name)
        key = _folded(path)
        self._refuse_clash(name, self._files.get(key))
        if is_folder:
            if key in self._folder_entries:
                self._refuse_clash(name, self._folders[key])
            self._folder_entries.add(key)
            self._add_folder(name, path)
        else:
            self._refuse_clash(name, self._folders.get(key))
            self._files[key] = path
        while "/" in path:
            path = path.rpartition("/")[0]
            self._add_folder(name, path)

    def _add_folder(self, name: str, folder: str) -> None:
        key = _folded(folder)
        self._refuse_clash(name, self._files.get(key))
        if self._folders.setdefault(key, folder) != folder:
            self._refuse_clash(name, self._folders[key])

    @staticmethod
    def _refuse_clash(name: str, earlier: str | None) -> None:
        if earlier is not None:
            raise InvalidInput(
                f"archive entry {name!r} clashes with {earlier!r}: the same name twice (case does not count), "
                "or a file that would also be a folder"
            )
