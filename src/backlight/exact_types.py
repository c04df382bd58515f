"""Dataclasses from plain values that have the types of the fields already, without pydantic.

Importing pydantic takes a watched process longer than all that it reads. Values of other types, and what a
dataclass refuses, are left to pydantic, which converts them or names the fault.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_Reader = Callable[[Any], Any]


class _OtherTypeError(Exception):
    """A value that pydantic has to look at."""


def exact(kind: type[T], data: object) -> T | None:
    """Return the dataclass ``kind`` with the fields ``data``; None where a type differs or it is refused."""
    try:
        record: T = _dataclass_reader(cast("Any", kind))(data)
    except (_OtherTypeError, ValueError, TypeError, NameError):
        return None
    return record


@functools.cache
def _dataclass_reader(kind: Any) -> _Reader:
    hints = get_type_hints(kind, include_extras=True)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind) if field.init}

    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if type(value) is not dict:
            raise _OtherTypeError
        return kind(**{name: reader(value[name]) for name, reader in readers.items() if name in value})

    return read


def _reader(hint: Any) -> _Reader:
    """Return a function that returns values of the type ``hint`` and refuses all others."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint in {str, bool, int, float, type(None)}:
        return _same_type(hint)
    if origin in {Union, types.UnionType}:
        return _any_of([_reader(one) for one in arguments])
    if origin in {list, tuple} and (origin is list or arguments[1:] == (...,)):
        return _items(origin, _reader(arguments[0]))
    if origin is tuple:
        return _row([_reader(one) for one in arguments])
    if origin in {dict, Mapping} and arguments[0] is str:
        return _mapping(_reader(arguments[1]))
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return _member(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_reader(hint)
    return _refuse


def _refuse(value: Any) -> Any:
    raise _OtherTypeError


def _same_type(kind: type) -> _Reader:
    return lambda value: value if type(value) is kind else _refuse(value)


def _any_of(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        for reader in readers:
            try:
                return reader(value)
            except _OtherTypeError:
                continue
        raise _OtherTypeError

    return read


def _items(kind: type, reader: _Reader) -> _Reader:
    return lambda value: kind(map(reader, value)) if type(value) in {list, kind} else _refuse(value)


def _row(readers: list[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) not in {list, tuple} or len(value) != len(readers):
            raise _OtherTypeError
        return tuple(reader(one) for reader, one in zip(readers, value, strict=True))

    return read


def _mapping(reader: _Reader) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise _OtherTypeError
        return {key: reader(one) for key, one in value.items()}

    return read


def _member(kind: type[enum.StrEnum]) -> _Reader:
    return lambda value: kind(value) if type(value) in {str, kind} else _refuse(value)
