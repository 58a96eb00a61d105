"""What was given on the command line, as the types of the parameters, without pydantic where the values are plain.

typer checks each value with a model of pydantic's, also where nothing was given, and importing pydantic takes 80 ms: as long as
all the rest of a short command. Nearly all our parameters are texts, switches, numbers and paths, which are read here in the
same way. Whatever else there is, and whatever is not plainly right, goes to typer: what is wrong, and in which words, is its.

Imported for `tasuki --help`, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

NOT_PLAIN = object()
# As many digits as int, float and pydantic read alike.
_WHOLE = re.compile(r"[0-9]{1,15}")
_DECIMAL = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")


class PlainCommand(TyperCommand):
    """A command whose parameters are read as told above."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_read_plainly(parameter) for parameter in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """The same for a command that has others below it."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_read_plainly(parameter) for parameter in super().get_params(ctx)]


def _read_plainly(parameter: Any) -> Any:
    # Older versions of typer convert without pydantic, and know no descriptor: there is nothing to do for them.
    if hasattr(parameter, "type_descriptor") and "process_value" not in vars(parameter):
        parameter.process_value = functools.partial(_process, parameter, parameter.process_value)
    return parameter


def _process(parameter: Any, typers: Callable[..., Any], context: Any, value: Any) -> Any:
    descriptor = parameter.type_descriptor
    plain = _value(value, descriptor.annotation, descriptor.parameter_info, several=parameter.multiple or parameter.nargs == -1)
    if plain is NOT_PLAIN or (parameter.required and parameter.value_is_missing(plain)):
        return typers(context, value)
    return plain if parameter.callback is None else parameter.callback(context, parameter, plain)


def _value(value: Any, wanted: Any, info: Any, *, several: bool) -> Any:
    if value is None:
        return () if several else None
    if info.parser is not None or info.min is not None or info.max is not None:
        return NOT_PLAIN
    if get_origin(wanted) is list and isinstance(value, (list, tuple)):
        values = [_one(one, get_args(wanted)[0], info) for one in value]
        return NOT_PLAIN if NOT_PLAIN in values else values
    return _one(value, wanted, info)


def _one(value: Any, wanted: Any, info: Any) -> Any:
    if type(value) is wanted and wanted in (bool, int, float):
        return value
    if not isinstance(value, str) or not _is_unicode(value):
        return NOT_PLAIN
    if wanted is str:
        return value
    if wanted is int and _WHOLE.fullmatch(value):
        return int(value)
    if wanted is float and _DECIMAL.fullmatch(value):
        return float(value)
    if wanted is Path and _is_any_path(info) and (os.access(value, os.R_OK) or not os.path.lexists(value)):
        return Path(value)
    return NOT_PLAIN


def _is_unicode(text: str) -> bool:
    """Not so for what the shell gave in another encoding, which Python keeps as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_any_path(info: Any) -> bool:
    """Nothing is asked of the path but that it can be read if it is there, as typer does where nothing was said."""
    return info.file_okay and info.dir_okay and info.path_type is None and not (info.exists or info.writable or info.resolve_path)
