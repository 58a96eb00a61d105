"""The systemd of this user: its command, and the quoting that its unit files want."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import NamedTuple

from tasuki.errors import ConfigError

SYSTEMCTL_TIMEOUT_S = 60.0

_plain = re.compile(r"[A-Za-z0-9_@+=:,./\[\]>*~-]+").fullmatch


class SystemctlResult(NamedTuple):
    """How systemctl ended."""

    code: int
    text: str


def systemctl(*arguments: str) -> SystemctlResult | None:
    """`systemctl --user …`; None where there is no such program."""
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "--user", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SYSTEMCTL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return SystemctlResult(-1, str(error))
    return SystemctlResult(done.returncode, (done.stdout or done.stderr).strip())


def version() -> int:
    """Of systemd; 0 where there is none."""
    said = systemctl("--version")
    found = re.match(r"systemd (\d+)", said.text) if said is not None else None
    return int(found.group(1)) if found else 0


# ---------------------------------------------------------------------------------------------------- quoting


def escaped(text: str) -> str:
    """For a setting that is one path: systemd replaces what begins with %."""
    if not text.isprintable():
        raise ConfigError(f"{text[:80]!r} has characters that cannot stand in a unit")
    return text.replace("%", "%%")


def quoted_once(text: str) -> str:
    """A program or an assignment, whatever is in it: there systemd replaces % alone."""
    return text if _plain(text) else f'"{_backslashed(text)}"'


def quoted(text: str) -> str:
    """An argument, whatever is in it: there systemd replaces % and $."""
    return quoted_once(text).replace("$", "$$")


def _backslashed(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return escaped(text)
