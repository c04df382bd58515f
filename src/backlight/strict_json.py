"""JSON that every parser reads: answers of commands, pages, exports, archives, documents of a run directory.

JSON has neither NaN nor infinities, and jq and JavaScript refuse Python's own ``NaN``. They are written as
texts that Python's ``float`` and JavaScript's ``Number`` read back. null stays what was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from json import JSONEncoder  # by name: a watched script may replace functions of json
from typing import Any

from backlight.records import to_json

NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def json_types(value: Any) -> Any:
    """Return JSON types in which a number that is not finite is one of :data:`NOT_FINITE`."""
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_FINITE[0] if math.isnan(value) else NOT_FINITE[1 if value > 0 else 2]
    if isinstance(value, Mapping):
        return {str(key): json_types(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_types(inner) for inner in value]
    return value


def dump(document: Any, *, indent: int | None = None) -> str:
    """Return a document or record as JSON in plain ASCII; what JSON does not know becomes its text."""
    encoder = JSONEncoder(indent=indent, default=lambda value: json_types(plain(value)), allow_nan=False)
    return encoder.encode(json_types(to_json(document)))


def plain(value: Any) -> Any:
    """Return what numpy holds, and sets, as types that :mod:`json` knows; of anything else the text."""
    if type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(list(value)), key=str)
    return str(value)
