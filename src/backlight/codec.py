"""Records as JSON types and JSON text, and back: the one place of both directions.

JSON has neither NaN nor infinities, and jq and JavaScript refuse Python's own ``NaN``. :func:`encode` writes
them as texts that Python's ``float``, JavaScript's ``Number`` and :func:`convert` read back. null stays what
was not measured. Keys that a record does not have are ignored: a newer backlight may have added them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from json import JSONDecoder, JSONEncoder  # by name: a watched script may replace functions of json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

NOT_FINITE = ("NaN", "Infinity", "-Infinity")

MAX_DEPTH = 64
"""Documents that nest deeper are refused: what copies or compares them calls itself for each level."""

_TOO_DEEP = f"it nests deeper than {MAX_DEPTH}"
_PARTS = {dict, list}
_DECODER, _ROW_ENCODER = JSONDecoder(), JSONEncoder()


def plain(value: Any) -> Any:
    """Return records, enumerations, arrays and containers as the types that JSON has.

    Of what JSON does not know, the text. Numbers that are not finite stay: see :func:`finite`.
    """
    return _lists(_builtins(value))


def _builtins(value: Any) -> Any:
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_builtin)


def _builtin(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if type(value).__module__ == "numpy" else str(value)


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def finite(value: Any) -> Any:
    """Return JSON types in which a number that is not finite is one of :data:`NOT_FINITE`."""
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE[0] if math.isnan(value) else NOT_FINITE[1 if value > 0 else 2]
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def encode(value: Any, *, indent: int | None = None) -> str:
    """Return JSON in plain ASCII that every parser reads."""
    return JSONEncoder(indent=indent, allow_nan=False).encode(finite(_builtins(value)))


def encode_row(value: Any) -> str:
    """Return the JSON of a row of a database; Python's ``NaN`` and ``Infinity`` stay, and are read back."""
    return _ROW_ENCODER.encode(_builtins(value))


def decode(text: str) -> Any:
    """Return what a JSON text holds; ValueError where it is none, or nested too deeply."""
    try:
        document = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [document]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if type(part) is dict else part for part in level if type(part) in _PARTS)
        level = [value for part in parts for value in part if type(value) in _PARTS]
        if not level:
            return document
    raise ValueError(_TOO_DEEP)


def convert(data: Any, kind: type[T], where: str | None = None, place: str = "") -> T:
    """Return JSON types as ``kind``, a record or a container of records.

    Texts that read as a number pass as one. ``where`` stands in front of messages, by default the name of the
    kind; ``place`` is that of the data in a larger document, as ``training``.

    Raises
    ------
    ValueError
        If they are none: where, the key, what was expected and what it is. A subclass that a record raises
        passes through.
    """
    try:
        return msgspec.convert(data, kind, strict=False, dec_hook=_record_of)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ValueError) and type(cause) is not ValueError:
            raise cause from None
        where = getattr(kind, "__name__", str(kind)) if where is None else where
        worded = _worded(str(error), data, place, is_of_record=cause is not None)
        raise ValueError(f"{where}: {worded}" if where else worded) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


_NAMES = {"object": "keys with values", "array": "a list"}


def _record_of(base: type[Any], data: Any) -> Any:
    """Return the record of the subclass of ``base`` whose fields are those of ``data``."""
    if isinstance(data, base):
        return data
    for kind in base.__subclasses__():
        if isinstance(data, dict) and {field.name for field in dataclasses.fields(kind)} == set(data):
            return msgspec.convert(data, kind, strict=False, dec_hook=_record_of)
    raise ValueError(f"expected a {base.__name__}")


_MISSING = re.compile(r"Object missing required field `(.*)`")
_KINDS = re.compile(r"`([^`]*)`")
_PLACE = re.compile(r" - at `\$(.*)`\Z")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")
MAX_GOT = 60
"""Characters of a value in a message."""


def _worded(message: str, data: Any, place: str, *, is_of_record: bool) -> str:
    """Return ``training.lr: expected float, got 'fast'`` of a message of msgspec about ``data``."""
    fault, path = _PLACE.sub("", message), _PLACE.search(message)
    names, value = [place], data
    for name, index, other in _STEP.findall(path[1] if path else ""):
        # msgspec does not say which key of a mapping it was.
        if other:
            value = next(iter(value.values())) if isinstance(value, dict) and len(value) == 1 else None
        elif value is not None:
            value = value[int(index)] if index else value.get(name) if isinstance(value, dict) else None
        names.append(name or index)
    place = ".".join(filter(None, names))
    if missing := _MISSING.fullmatch(fault):
        fault = f"the key {missing[1]!r} is missing"
    elif not is_of_record:
        kind, sign, _ = _KINDS.sub(lambda kind: _NAMES.get(kind[1], kind[1]), fault).partition(", got ")
        got = repr(value)
        shown = got if len(got) <= MAX_GOT else f"{got[: MAX_GOT - 3]}..."
        fault = f"{kind[:1].lower()}{kind[1:]}{f', got {shown}' if sign else ''}"
    return f"{place}: {fault}" if place else fault
