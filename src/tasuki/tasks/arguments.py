"""Arguments and results of a task as bytes: bound like a call, checked against the annotations, in JSON or msgpack."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec
import msgspec.inspect

from tasuki.core.job import python_types
from tasuki.errors import ConfigError, WrongType

Encoding = Literal["json", "msgpack"]
T = TypeVar("T")
_PLACE = re.compile(r"(?P<what>.*) - at `\$\.?(?P<place>.*)`", re.DOTALL)
# Exceptions of msgspec for a value that it cannot encode.
_UNSENDABLE = (TypeError, NotImplementedError, OverflowError, UnicodeEncodeError)


def _as_builtin(value: Any) -> Any:
    """Return a value that msgspec does not know, paths and pydantic models, in a form that it can encode."""
    if isinstance(value, PurePath):
        return os.fspath(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise NotImplementedError  # msgspec's word for: no such value


def _as_annotated(kind: type, value: Any) -> Any:
    """Return the path or the pydantic model that an annotation asks for."""
    if issubclass(kind, PurePath):
        return kind(value)
    return value if kind is object else kind.model_validate(value)  # type: ignore[attr-defined]  # `_unknown_types` has looked


def _unknown_types(found: Any, seen: set[int] | None = None) -> list[Any]:
    """Return the types below these of `msgspec.inspect` that neither msgspec nor `_as_annotated` can make."""
    seen = set() if seen is None else seen
    if id(found) in seen:  # a type that has itself as a part
        return []
    seen.add(id(found))
    if isinstance(found, msgspec.inspect.CustomType):
        kind = found.cls
        known = isinstance(kind, type) and (kind is object or issubclass(kind, PurePath) or hasattr(kind, "model_validate"))
        return [] if known else [kind]
    if isinstance(found, msgspec.inspect.Type | msgspec.inspect.Field):
        found = [getattr(found, name) for name in found.__struct_fields__]
    parts = found if isinstance(found, list | tuple) else ()
    return [kind for part in parts for kind in _unknown_types(part, seen)]


def _in_words(error: Exception) -> str:
    """Return the message of an error of msgspec, with the place before it and the names of Python."""
    found = _PLACE.fullmatch(str(error))
    what, place = (found["what"], found["place"]) if found else (str(error), "")
    words = python_types(what.replace("`", ""))
    words = words[:1].lower() + words[1:]
    return f"{place}: {words}" if place else words


class TaskSignature:
    """The parameters and the result of a task, as msgspec reads and writes them."""

    def __init__(self, name: str, function: Callable[..., Any], encoding: Encoding) -> None:
        self._name = name
        hints = self._hints(function)
        self.names = tuple(inspect.signature(function).parameters)
        self._struct = self._struct_of(function, hints)
        format_ = msgspec.json if encoding == "json" else msgspec.msgpack
        self._encode: Callable[[Any], bytes] = format_.Encoder(enc_hook=_as_builtin).encode
        self._none = self._encode(None)
        try:
            self._decode_json = msgspec.json.Decoder(self._struct, dec_hook=_as_annotated).decode
            self._decode_msgpack = msgspec.msgpack.Decoder(self._struct, dec_hook=_as_annotated).decode
            self._decode_result = format_.Decoder(hints.get("return", Any), dec_hook=_as_annotated).decode
            unknown = _unknown_types(msgspec.inspect.multi_type_info([self._struct, hints.get("return", Any)]))
        except TypeError as error:
            raise ConfigError(f"task {name!r} has an annotation that cannot be sent: {error}") from None
        if unknown:
            raise ConfigError(
                f"task {name!r} has an annotation that cannot be sent: {unknown[0]!r}; use types of JSON, dataclasses, "
                "TypedDict, msgspec structs, pydantic models, dates, UUID, Decimal, Path"
            )

    def _hints(self, function: Callable[..., Any]) -> dict[str, Any]:
        try:
            return get_type_hints(function, include_extras=True)
        except NameError as error:
            raise ConfigError(f"an annotation of task {self._name!r} is not known when it is used: {error}") from None

    def _struct_of(self, function: Callable[..., Any], hints: Mapping[str, Any]) -> type[msgspec.Struct]:
        """Return a struct with a field for each parameter; its constructor binds arguments as the function would."""
        fields: dict[bool, list[Any]] = {False: [], True: []}
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"parameter {str(parameter)!r} of task {self._name!r}: arguments are sent by name, so each needs one; "
                    "take a list or a dict instead"
                )
            field: list[Any] = [parameter.name, hints.get(parameter.name, Any)]
            if parameter.default is not parameter.empty:
                field.append(msgspec.field(default_factory=functools.partial(_default, parameter.default)))
            fields[parameter.kind is parameter.KEYWORD_ONLY].append(tuple(field))
        base = msgspec.defstruct("Arguments", fields[False], forbid_unknown_fields=True)
        return msgspec.defstruct("Arguments", fields[True], bases=(base,), kw_only=True) if fields[True] else base

    def encode_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return the payload for a call; WrongType names the argument that is wrong."""
        try:
            bound = self._struct(*args, **kwargs)
        except TypeError as error:
            raise WrongType(f"task {self._name!r}: {str(error)[:1].lower()}{str(error)[1:]}") from None
        if not self.names:
            return b""
        try:
            payload = self._encode(bound)
        except _UNSENDABLE as error:
            raise self._unsendable(bound, error) from None
        self.decode_arguments(payload)
        return payload

    def _unsendable(self, bound: msgspec.Struct, error: Exception) -> WrongType:
        for name in self.names:
            try:
                self._encode(getattr(bound, name))
            except _UNSENDABLE as own:
                kind = type(getattr(bound, name)).__name__
                return WrongType(f"argument {name!r} of task {self._name!r} cannot be sent: {str(own) or f'got {kind}'}")
        return WrongType(f"task {self._name!r}: {error}")

    def decode_arguments(self, payload: bytes) -> dict[str, Any]:
        """Return the arguments by name; WrongType names the one that is wrong."""
        decode = self._decode_json if payload[:1] in b"{ \n\r\t" else self._decode_msgpack
        try:
            bound = decode(payload or b"{}")
        except (msgspec.MsgspecError, ValueError) as error:  # ValueError: of a path or a model
            raise WrongType(f"argument {_in_words(error)} (task {self._name!r})") from None
        return {name: getattr(bound, name) for name in self.names}

    def encode_result(self, value: Any) -> bytes:
        """Return the result for a return value; that for None is empty."""
        if value is None:
            return b""
        try:
            return self._encode(value)
        except _UNSENDABLE as error:
            why = str(error) or f"it is of type {type(value).__name__}"
            raise WrongType(f"what task {self._name!r} returned cannot be sent: {why}") from None

    def decode_result(self, data: bytes) -> Any:
        try:
            return self._decode_result(data or self._none)
        except (msgspec.MsgspecError, ValueError) as error:
            raise WrongType(f"task {self._name!r} returned another type than its annotation: {_in_words(error)}") from None


def _default(value: T) -> T:
    return value
