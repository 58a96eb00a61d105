"""Durations, times and sizes as people write and read them: `90s`, `1h30m`, `64MiB`. The shown forms can be typed in again."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from tasuki.errors import ConfigError

DAY_S = 86_400
UNIT_S = {"d": DAY_S, "h": 3_600, "m": 60, "s": 1}
SECONDS_ALONE_S = 120  # shorter durations are shown in seconds
FRACTIONS_S = 10  # still shorter ones with their fractions
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+|\d+(?:\.\d+)?", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", re.ASCII)


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `5m`, `1.5h`, `1d`, `1h30m` or a plain number of seconds."""
    if _DURATION.fullmatch(text.strip()) is None:
        raise ConfigError(f"{text[:40]!r} is not a duration; write 90s, 5m, 1h or 1d")
    return sum(float(number) * UNIT_S[unit or "s"] for number, unit in _PART.findall(text))


def shown_duration(seconds: float) -> str:
    """Return a duration with its two largest units: `0.5s`, `90s`, `5m`, `1h30m`, `3d4h`."""
    if seconds < FRACTIONS_S:
        return f"{round(max(seconds, 0.0), 2):g}s"
    left = round(seconds)
    if left < SECONDS_ALONE_S:
        return f"{left}s"
    counts = []
    for unit, unit_s in UNIT_S.items():
        count, left = divmod(left, unit_s)
        counts.append((count, unit))
    first = next(place for place, (count, _) in enumerate(counts) if count)
    return "".join(f"{count}{unit}" for count, unit in counts[first : first + 2] if count)


def shown_time(unix_time: float | None) -> str:
    """Return the local time with its zone, as in 2026-01-31 06:00:00+09:00; of a number that is no time, the number."""
    if unix_time is None:
        return "-"
    try:
        return datetime.fromtimestamp(int(unix_time), UTC).astimezone().isoformat(" ")
    except (OverflowError, ValueError, OSError):
        return f"{unix_time:g}"


def parse_size(text: str) -> int:
    """Return the number of bytes of `500GB`, `64MiB` or `1000`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"size {text[:40]!r} is not understood; write 500GB, 64MiB or a number of bytes")
    number, letter, binary = found.groups()
    power = " KMGT".index(letter.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def shown_size(size_bytes: float) -> str:
    """Return a number of bytes with three digits or more: `512B`, `1.50kB`, `23.4MB`."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f}B"
    for letter in "kMGT":
        size_bytes /= 1000
        if size_bytes < 999.5 or letter == "T":
            break
    return f"{size_bytes:.{2 if size_bytes < 9.995 else 1 if size_bytes < 99.95 else 0}f}{letter}B"
