"""Random messages of every type, made from the types' own annotations: a new message is covered without a line here."""

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from tasuki.core.protocol import JobsRecorded, Request
from tests.wire.vectors import MESSAGE_TYPES

IDS = ("msg_id", "corr_id")  # never 0 on the wire: 0 means that there is none

_texts = st.text(max_size=12)
_integers = st.integers(-(2**63), 2**64 - 1)
_floats = st.floats(allow_nan=False)
_anything = st.recursive(
    st.none() | st.booleans() | _integers | _floats | _texts | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
_PLAIN: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
    inspect.IntType: _integers,
    inspect.StrType: _texts,
    inspect.BytesType: st.binary(max_size=40),
    inspect.BoolType: st.booleans(),
    inspect.FloatType: _floats,
    inspect.NoneType: st.none(),
    inspect.AnyType: _anything,
}


def _of(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.ListType():
            return st.lists(_of(info.item_type), max_size=3)
        case inspect.VarTupleType():
            return st.lists(_of(info.item_type), max_size=3).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_of, info.item_types))
        case inspect.DictType():
            return st.dictionaries(_of(info.key_type), _of(info.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of(*map(_of, info.types))
        case inspect.EnumType():
            return st.sampled_from(list(info.cls))
        case inspect.StructType():
            return _struct(info)
        case inspect.IntType(ge=least, le=most) if least is not None:
            return st.integers(least, most)
        case inspect.FloatType(ge=least, le=most) if least is not None:
            return st.floats(least, most)
        case _:
            return _PLAIN[type(info)]


def _struct(info: inspect.StructType) -> st.SearchStrategy[Any]:
    fields = {field.name: st.integers(1, 2**63 - 1) if field.name in IDS else _of(field.type) for field in info.fields}
    return st.builds(lambda **given: info.cls(**given), **fields)


def message(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Messages of one type, as one frame can carry them."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    if kind is JobsRecorded:  # one frame says recorded or fenced; both are two frames
        return st.builds(JobsRecorded, st.lists(_texts, min_size=1, max_size=3), st.just([])) | st.builds(
            JobsRecorded, st.just([]), st.lists(st.tuples(_texts, _texts), min_size=1, max_size=3)
        )
    if kind is Request:
        parameters = st.dictionaries(
            _texts, st.none() | st.booleans() | _integers | _floats | _texts | st.lists(_texts), max_size=3
        )
        return st.builds(Request, st.integers(1, 2**63 - 1), _texts, parameters)
    return _struct(info)


messages = st.one_of(*map(message, MESSAGE_TYPES))
