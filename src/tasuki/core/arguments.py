"""Checks of what a caller gives in Python, where nothing was decoded yet: types of the fields of a job, JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import get_type_hints

import msgspec

from tasuki.core.job import JobSpec
from tasuki.errors import InvalidInput, WrongType

NESTING_MAX = 100
"""Lists and objects inside each other in a JSON value: each level takes a part of the stack of whoever reads it."""

_encode = msgspec.msgpack.Encoder().encode
_decode_specs = msgspec.msgpack.Decoder(list[JobSpec]).decode
_AT = re.compile(r"Expected `(?P<wanted>.+)`, got `(?P<given>.+)` - at `\$\[(?P<place>\d+)\]\.(?P<path>(?P<field>\w+)\S*)`")
_SURROGATE = re.compile("[\ud800-\udfff]").search
_IN_PYTHON = {"null": "None", "array": "list", "object": "dict"}
WAYS_OUT = {"payload": "; encode it, as in payload=text.encode()", "args": "; write args=[…]", "files": "; write files=[…]"}


def check_specs(specs: Sequence[JobSpec], names: Mapping[str, str] | None = None) -> None:
    """Raise WrongType if a job has a field of the wrong type: the server could not read it. `names` of fields in the message."""
    for place, spec in enumerate(specs):
        if type(spec) is not JobSpec:
            raise WrongType(f"specs[{place}] must be a JobSpec, got {type_name(spec)}")
    try:
        _decode_specs(_encode(specs))
    except (msgspec.ValidationError, TypeError) as error:
        raise _wrong_field(specs, error, names or {}) from None
    except (UnicodeEncodeError, OverflowError, RecursionError):
        return  # not a matter of types: the sender says which job cannot be sent


def _wrong_field(specs: Sequence[JobSpec], error: Exception, names: Mapping[str, str]) -> WrongType:
    found = _AT.search(str(error))
    if found is None:  # a type that msgpack does not have
        for field in JobSpec.__struct_fields__:
            try:
                _encode([getattr(spec, field) for spec in specs])
            except TypeError as own:
                return WrongType(f"{names.get(field, field)} must be {_hint(field)}: {str(own)[:200]}")
        return WrongType(str(error))
    field, path = found["field"], found["path"]
    given = type_name(getattr(specs[int(found["place"])], field)) if path == field else found["given"]
    wanted = _hint(field) if path == field else re.sub(r"\w+", lambda word: _IN_PYTHON.get(word[0], word[0]), found["wanted"])
    named = names.get(field, field) + path.removeprefix(field)
    return WrongType(f"{named} must be {wanted}, got {given}{WAYS_OUT.get(named, '')}")


def _hint(field: str) -> str:
    hint = get_type_hints(JobSpec)[field]
    return hint.__name__ if isinstance(hint, type) and "[" not in str(hint) else str(hint).replace("tasuki.core.job.", "")


def type_name(value: object) -> str:
    """Return the name of a value's type, for a message."""
    return type(value).__name__


def check_text(name: str, text: object) -> str:
    """Return the text if every database and program can be given it, else raise an error that begins with its name."""
    if not isinstance(text, str):
        raise WrongType(f"{name} must be str, got {type_name(text)}")
    if "\0" in text:
        raise InvalidInput(f"{name} has a NUL character; leave it out")
    if not text.isascii() and _SURROGATE(text):
        raise InvalidInput(f"{name} has a lone surrogate, which UTF-8 does not have; leave it out")
    return text


def check_nesting(name: str, encoded: bytes) -> None:
    """Raise InvalidInput if the lists and objects of a JSON text are too deep inside each other."""
    if encoded.count(b"[") + encoded.count(b"{") <= NESTING_MAX:
        return
    level = [msgspec.json.decode(encoded)]
    for _ in range(NESTING_MAX + 1):
        inside = (value.values() if isinstance(value, dict) else value for value in level if isinstance(value, list | dict))
        level = list(chain.from_iterable(inside))
    if level:
        raise InvalidInput(f"{name} has lists or objects more than {NESTING_MAX} deep inside each other; make it flat")
