"""Masks secrets in a job's output: each byte of a value becomes a `*`, so that offsets stay the same.

Pure except for `RedactedLog`, which reads the log it is given. Only exact values are found, not ones that the job has encoded,
split into lines or reversed. Values shorter than SECRET_MIN_BYTES are not masked: masking every `1` would help nobody.

Theory of operation. The union of all occurrences is masked, overlapping ones included: of the secrets `abcdef` and `defghi` the
text `abcdefghi` shows nothing. The end of a growing log may be the beginning of a value: `begun` returns how many bytes. They are
held back until more follow; all others are shown at once. A read in the middle takes the bytes before and behind it into account.
Where a log was cut, the part of a value on either side is masked. The time is in proportion to the text, whatever the values are:
logs are read in the worker's loop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec

from tasuki.core.job import Outcome
from tasuki.worker.logs import KeptLog, LogRead, ReadableLog

SECRET_MIN_BYTES = 6
MASK = b"*"
FIRST_BYTES = 16  # of a value that are searched for before the rest is compared
TRIED_MAX = 16


class _Pattern:
    """One value, and its borders (the table of Knuth, Morris and Pratt)."""

    def __init__(self, value: bytes) -> None:
        self.value = value
        self._borders = [0]
        length = 0
        for byte in value[1:]:
            length = self._longer(length, byte)
            self._borders.append(length)
        self.step = len(value) - length  # the smallest distance of two occurrences
        self._first = value[:FIRST_BYTES]

    def _longer(self, length: int, byte: int) -> int:
        """Return the length of the longest prefix of the value that ends with this byte, given that of the byte before."""
        while length and self.value[length] != byte:
            length = self._borders[length - 1]
        return length + 1 if self.value[length] == byte else 0

    def begun(self, data: bytes) -> int:
        """Return how many bytes at the end of the data are a proper prefix of the value."""
        end = data[-(len(self.value) - 1) :]
        at = end.find(self._first)
        for _ in range(TRIED_MAX):
            if at < 0:
                break
            if self.value.startswith(end[at:]):
                return len(end) - at
            at = end.find(self._first, at + 1)
        if at >= 0:  # the value begins again and again: byte by byte is slower here, but always linear
            return functools.reduce(self._longer, end, 0)
        short = min(len(end), len(self._first) - 1)
        return next((length for length in range(short, 0, -1) if self.value.startswith(end[-length:])), 0)

    def find(self, data: bytes) -> list[tuple[int, int]]:
        """Return all occurrences as (start, end), in order; adjacent ones are merged."""
        found: list[tuple[int, int]] = []
        at = data.find(self.value)
        while at >= 0:
            end = self._repeated(data, at + len(self.value))
            if found and at <= found[-1][1]:
                found[-1] = (found[-1][0], end)
            else:
                found.append((at, end))
            at = data.find(self.value, end - len(self.value) + self.step)
        return found

    def _repeated(self, data: bytes, end: int) -> int:
        """Return the end of a run of occurrences at the smallest distance, of which the first ends here: a value like `aaaaaaaa`
        occurs at every byte of a similar text, and a search for each of them would take minutes."""
        reach = len(self.value) // self.step * self.step
        while data[end : end + reach] == data[end - reach : end]:
            end += reach
            reach *= 2
        while (reach := reach // 2 // self.step * self.step) >= self.step:
            if data[end : end + reach] == data[end - reach : end]:
                end += reach
        return end


class Redactor:
    """Masks a set of values. An empty one changes nothing, at no cost."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        kept = sorted({value for value in values if len(value) >= SECRET_MIN_BYTES})
        self._patterns = [_Pattern(value) for value in kept]
        self._backwards = [_Pattern(value[::-1]) for value in kept]
        self.reach = max((len(value) for value in kept), default=1) - 1
        """Number of bytes before or after a byte that can decide whether it is masked."""

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __repr__(self) -> str:
        return f"<Redactor of {len(self._patterns)} values>"

    def mask(self, data: bytes) -> bytes:
        """Return the data with the values masked, of the same length."""
        return _masked(data, self.found(data))

    def text(self, text: str) -> str:
        """Return the text with the values masked, one `*` for each of their bytes."""
        if not self:
            return text
        return self.mask(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def outcome(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the values masked in its message."""
        return msgspec.structs.replace(outcome, message=self.text(outcome.message)) if self and outcome.message else outcome

    def log(self, kept: KeptLog) -> KeptLog:
        """Return a log as it goes into a result."""
        if not self:
            return kept
        head, tail = self.mask(kept.head), self.mask(kept.tail)
        if kept.cut_bytes:
            head = _masked(head, [(len(head) - self.begun(kept.head), len(head))])
            tail = _masked(tail, [(0, self.ending(kept.tail))])
        return KeptLog(head, kept.cut_bytes, tail)

    def begun(self, data: bytes) -> int:
        """Return how many bytes at the end of the data may be the beginning of a value."""
        return max((pattern.begun(data) for pattern in self._patterns), default=0)

    def ending(self, data: bytes) -> int:
        """Return how many bytes at the start of the data may be the end of a value."""
        first = data[: self.reach][::-1]
        return max((pattern.begun(first) for pattern in self._backwards), default=0)

    def found(self, data: bytes) -> list[tuple[int, int]]:
        """Return all occurrences of values as (start, end)."""
        return [place for pattern in self._patterns for place in pattern.find(data)]


NOTHING_SECRET = Redactor()


class RedactedLog:
    """A growing log with secrets masked, readable from any offset."""

    def __init__(self, log: ReadableLog, redactor: Redactor) -> None:
        self._log = log
        self._redactor = redactor
        self._ended = False

    def end(self) -> None:
        """Show the bytes that looked like the beginning of a value: nothing more will be written."""
        self._ended = True

    def size_bytes(self) -> int:
        """Return the offset of the next byte that can be read."""
        size_bytes = self._log.size_bytes()
        if self._ended:
            return size_bytes
        start = max(0, size_bytes - self._redactor.reach)
        return size_bytes - self._redactor.begun(self._log.read(start, size_bytes - start).data)

    def read(self, offset: int, max_bytes: int) -> LogRead:
        """Read as the log itself does; bytes that may be the beginning of a value come when that is known."""
        reach = self._redactor.reach
        before = min(reach, offset)
        start, data, cut = self._gather(offset - before, before + max_bytes + reach)
        if start + len(data) <= offset:  # only bytes before it; behind them is a cut, or nothing yet
            start, data, cut = self._gather(offset, max_bytes + reach)
        found = self._redactor.found(data)
        if start > max(0, offset - before):  # the bytes before it were cut, perhaps in the middle of a value
            found.append((0, self._redactor.ending(data)))
        begun = self._redactor.begun(data)
        if cut:
            found.append((len(data) - begun, len(data)))
        shown = _masked(data, found)
        if not cut and not self._ended:
            shown = shown[: len(data) - begun]
        first = max(start, offset)
        return LogRead(first, shown[first - start :][:max_bytes])

    def _gather(self, offset: int, max_bytes: int) -> tuple[int, bytes, bool]:
        """Read from this offset on up to the next cut; return the offset, the bytes, and whether a cut follows."""
        start, data = self._log.read(offset, max_bytes)
        while data and len(data) < max_bytes:
            following, more = self._log.read(start + len(data), max_bytes - len(data))
            if not more or following > start + len(data):
                return start, data, bool(more)
            data += more
        return start, data, False


def _masked(data: bytes, places: Iterable[tuple[int, int]]) -> bytes:
    places = [(start, end) for start, end in places if start < end]
    if not places:
        return data
    masked = bytearray(data)
    for start, end in places:
        masked[start:end] = MASK * (end - start)
    return bytes(masked)
