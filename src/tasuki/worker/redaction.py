"""Takes the values of secrets out of what a job wrote: each of their bytes becomes a `*`, so that offsets stay what they were.

Pure but for `RedactedLog`, which reads the log it is given. Found are values as they are: one that was encoded, split into lines
or reversed by the job is not. Values shorter than SECRET_MIN_BYTES are let through: masking every `1` would help nobody.

Theory of operation. What is masked is the union of all occurrences, those that overlap included: of the secrets `abcdef` and
`defghi` the text `abcdefghi` shows nothing. Of a log that still grows, the end may be the beginning of a value: `begun` tells how
many bytes that are. They wait until more is there; all else is shown at once. Whoever asks for a few bytes in the middle
is answered by what stands before and behind them too. Where a log was cut, the part of a value on either side is masked.
Whatever the values and the text are, the time is in proportion to the text: reading a log is done in the worker's loop.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tasuki.core.job import Outcome
from tasuki.worker.logs import KeptLog, LogRead, ReadableLog

SECRET_MIN_BYTES = 6
MASK = b"*"
FIRST_BYTES = 16  # of a value that are looked for before the rest of it is compared
TRIED_MAX = 16


class _Pattern:
    """One value, and how far it repeats itself (the table of Knuth, Morris and Pratt)."""

    def __init__(self, value: bytes) -> None:
        self.value = value
        self._borders = [0]
        length = 0
        for byte in value[1:]:
            length = self._longer(length, byte)
            self._borders.append(length)
        self.step = len(value) - length
        """The least distance of two occurrences."""
        self._first = value[:FIRST_BYTES]

    def _longer(self, length: int, byte: int) -> int:
        """From the longest beginning of the value that ends before this byte to the longest that ends with it."""
        while length and self.value[length] != byte:
            length = self._borders[length - 1]
        return length + 1 if self.value[length] == byte else 0

    def begun(self, data: bytes) -> int:
        """How many bytes at the end of the data are the beginning of the value, but not all of it."""
        end = data[-(len(self.value) - 1) :]
        at = end.find(self._first)
        for _ in range(TRIED_MAX):
            if at < 0:
                break
            if self.value.startswith(end[at:]):
                return len(end) - at
            at = end.find(self._first, at + 1)
        if at >= 0:  # it begins again and again: byte by byte is slower at first, and never gets slower than that
            return self._begun_slowly(end)
        short = min(len(end), len(self._first) - 1)
        return next((length for length in range(short, 0, -1) if self.value.startswith(end[-length:])), 0)

    def _begun_slowly(self, end: bytes) -> int:
        length = 0
        for byte in end:
            length = self._longer(length, byte)
        return length

    def find(self, data: bytes) -> list[tuple[int, int]]:
        """Where it occurs, as (start, end), in order; occurrences that touch are one place."""
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
        """Where an occurrence that ends here comes to its end with those that follow it at the least distance: a value like
        `aaaaaaaa` occurs at every byte of a text like it, and looking for each of them took minutes."""
        reach = len(self.value) // self.step * self.step
        while data[end : end + reach] == data[end - reach : end]:
            end += reach
            reach *= 2
        while (reach := reach // 2 // self.step * self.step) >= self.step:
            if data[end : end + reach] == data[end - reach : end]:
                end += reach
        return end


class Redactor:
    """Masks a set of values. Without any it changes nothing, at no cost."""

    def __init__(self, values: Iterable[bytes] = ()) -> None:
        kept = sorted({value for value in values if len(value) >= SECRET_MIN_BYTES})
        self._patterns = [_Pattern(value) for value in kept]
        self._backwards = [_Pattern(value[::-1]) for value in kept]
        self.reach = max((len(value) for value in kept), default=1) - 1
        """How many bytes before or after a byte can decide whether it is masked."""

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def __repr__(self) -> str:
        return f"<Redactor of {len(self._patterns)} values>"

    def mask(self, data: bytes) -> bytes:
        """The data, of the same length, without the values."""
        return _masked(data, self.found(data))

    def text(self, text: str) -> str:
        """The text without the values; a value's character counts as its bytes."""
        if not self:
            return text
        return self.mask(text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def outcome(self, outcome: Outcome) -> Outcome:
        """The outcome with a message that can be shown to anybody."""
        return msgspec.structs.replace(outcome, message=self.text(outcome.message)) if self and outcome.message else outcome

    def log(self, kept: KeptLog) -> KeptLog:
        """A log as it goes into a result."""
        if not self:
            return kept
        head, tail = self.mask(kept.head), self.mask(kept.tail)
        if kept.cut_bytes:
            head = _masked(head, [(len(head) - self.begun(kept.head), len(head))])
            tail = _masked(tail, [(0, self.ending(kept.tail))])
        return KeptLog(head, kept.cut_bytes, tail)

    def begun(self, data: bytes) -> int:
        """How many bytes at the end of the data may be the beginning of a value."""
        return max((pattern.begun(data) for pattern in self._patterns), default=0)

    def ending(self, data: bytes) -> int:
        """How many bytes at the start of the data may be the end of a value."""
        first = data[: self.reach][::-1]
        return max((pattern.begun(first) for pattern in self._backwards), default=0)

    def found(self, data: bytes) -> list[tuple[int, int]]:
        """Where values stand, as (start, end)."""
        return [place for pattern in self._patterns for place in pattern.find(data)]


NOTHING_SECRET = Redactor()


class RedactedLog:
    """A growing log as others may read it, from any offset."""

    def __init__(self, log: ReadableLog, redactor: Redactor) -> None:
        self._log = log
        self._redactor = redactor
        self._ended = False

    def end(self) -> None:
        """Nothing more will be written, so what looked like the beginning of a value is none."""
        self._ended = True

    def size_bytes(self) -> int:
        """The offset of the next byte that can be read."""
        size_bytes = self._log.size_bytes()
        if self._ended:
            return size_bytes
        start = max(0, size_bytes - self._redactor.reach)
        return size_bytes - self._redactor.begun(self._log.read(start, size_bytes - start).data)

    def read(self, offset: int, max_bytes: int) -> LogRead:
        """As the log's own; bytes that may be the beginning of a value come when it is known whether they are."""
        reach = self._redactor.reach
        before = min(reach, offset)
        start, data, cut = self._gather(offset - before, before + max_bytes + reach)
        if start + len(data) <= offset:  # only what was before; behind it lies what was cut out, or nothing yet
            start, data, cut = self._gather(offset, max_bytes + reach)
        found = self._redactor.found(data)
        if start > max(0, offset - before):  # what was before it is gone: a value may have been cut in two there
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
        """What can be read from this offset on in one go: where it begins, the bytes, and whether a cut follows."""
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
