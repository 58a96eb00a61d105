"""How values travel to PostgreSQL: each parameter as the type that its statement names, in the binary format. Pure.

The driver would guess types from the values (a small number, a large one, None, an empty list: four different statements to
prepare), and writes lists element by element in Python, as text that the server parses again. Here the statement's own casts
decide, once, when it is loaded; so every statement has one form, and a column of 256 texts is one pass and one join.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple

from psycopg import adapt, pq

from tasuki.stores.sql.database import Parameters
from tasuki.stores.sql.statement_files import load

Encode = Callable[[Any], bytes]

_HEAD = Struct("!iiIii").pack  # dimensions, whether there are NULLs, type of the elements, their number, first index
_LENGTH = Struct("!i").pack
_NULL = _LENGTH(-1)
_smallint, _integer, _bigint, _float8 = (Struct(code).pack for code in ("!h", "!i", "!q", "!d"))


def _text(value: str) -> bytes:
    data = value.encode()
    # PostgreSQL refuses NUL. Free texts were cleaned of it before; what still has one is a name that somebody made up.
    return data.replace(b"\0", b"\xef\xbf\xbd") if b"\0" in data else data


_TYPES: dict[str, tuple[int, int, Encode]] = {
    # name in casts -> oid, oid of the array, encoder
    "smallint": (21, 1005, _smallint),
    "integer": (23, 1007, _integer),
    "bigint": (20, 1016, _bigint),
    "float8": (701, 1022, _float8),
    "text": (25, 1009, _text),
    "bytea": (17, 1001, bytes),
}
_INFERRED = {int: "bigint", float: "float8", str: "text", bytes: "bytea"}


class Value:
    """A parameter ready to be sent; each type has a subclass. None is NULL of that type."""

    __slots__ = ("data",)

    def __init__(self, data: bytes | None) -> None:
        self.data = data


class _Dumper(adapt.Dumper):
    """Hands the bytes on as they are."""

    format = pq.Format.BINARY

    def dump(self, obj: Value) -> bytes | None:
        return obj.data


class ParameterType(NamedTuple):
    """One type of parameter: makes its values."""

    value: type[Value]
    dumper: type[_Dumper]
    encode: Encode

    def __call__(self, value: Any) -> Value:
        return self.value(None if value is None else self.encode(value))


def _array(oid: int, encode: Encode) -> Encode:
    def encoded(values: Sequence[Any]) -> bytes:
        if not values:
            return _HEAD(0, 0, oid, 0, 0)[:12]
        if None not in values:
            data = list(map(encode, values))
            parts = chain.from_iterable(zip(map(_LENGTH, map(len, data)), data, strict=True))
            return _HEAD(1, 0, oid, len(values), 1) + b"".join(parts)
        return _HEAD(1, 1, oid, len(values), 1) + b"".join(
            [_NULL if value is None else _framed(encode(value)) for value in values]
        )

    return encoded


def _framed(data: bytes) -> bytes:
    return _LENGTH(len(data)) + data


def _kind(name: str, oid: int, encode: Encode) -> ParameterType:
    return ParameterType(
        type(f"Value_{name}", (Value,), {"__slots__": ()}), type(f"Dumper_{name}", (_Dumper,), {"oid": oid}), encode
    )


KINDS: dict[str, ParameterType] = {}
for _name, (_oid, _array_oid, _encode) in _TYPES.items():
    KINDS[_name] = _kind(_name, _oid, _encode)
    KINDS[f"{_name}[]"] = _kind(f"{_name}_array", _array_oid, _array(_oid, _encode))


def register(adapters: adapt.AdaptersMap) -> None:
    """Teach a cursor to send our values."""
    for kind in KINDS.values():
        adapters.register_dumper(kind.value, kind.dumper)


# ---------------------------------------------------------------------------------------------------- statements

_NAMED = re.compile(r"(?<!:):([a-z_0-9]+)")
_TYPED = re.compile(r"\$(\d+)::(\w+(?:\[\])?)")
_NUMBER = re.compile(r"\$(\d+)")
_WRITES = re.compile(r"\b(INSERT|UPDATE|DELETE)\b")


class Statement(NamedTuple):
    """A statement as PostgreSQL takes it, and how to make its parameters."""

    text: str
    names: tuple[str, ...]
    """Of the parameters, if they are given by name."""
    kinds: tuple[ParameterType | None, ...]
    """None: by the value, which is then never NULL."""
    writes: bool
    """It changes or locks rows."""

    def values(self, parameters: Parameters) -> list[Value]:
        if isinstance(parameters, Mapping):
            parameters = [parameters[name] for name in self.names]
        return [(kind or KINDS[_INFERRED[type(value)]])(value) for kind, value in zip(self.kinds, parameters, strict=True)]


def statement_of(text: str) -> Statement:
    names = tuple(dict.fromkeys(_NAMED.findall(text)))
    numbers = {name: number for number, name in enumerate(names, 1)}
    text = _NAMED.sub(lambda found: f"${numbers[found[1]]}", text)
    kinds = {int(number): KINDS[name] for number, name in reversed(_TYPED.findall(text))}
    count = max(map(int, _NUMBER.findall(text)), default=0)
    return Statement(text, names, tuple(kinds.get(number) for number in range(1, count + 1)), _WRITES.search(text) is not None)


@lru_cache
def statements() -> dict[str, Statement]:
    """All of postgresql.sql that need nothing added."""
    return {name: statement_of(text) for name, text in load("postgresql").one.items() if "{and}" not in text}


@lru_cache(256)
def find_statement(name: str, conditions: str) -> Statement:
    """A statement of `find` with its further conditions; there are few combinations."""
    return statement_of(load("postgresql").one[name].replace("{and}", conditions))


def columns(batch: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A batch of rows as the arrays of its columns."""
    return list(zip(*batch, strict=True))
