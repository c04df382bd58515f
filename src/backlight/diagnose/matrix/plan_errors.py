"""What is wrong with a plan, as one sentence: where, what, what was expected, the way out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError


class PlanError(ValueError):
    """A plan that cannot be run; the message names the place, what is wrong and the way out."""


def near(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?``, or the list of names where none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(names)}" if names else "; there are none"


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """Turn the first problem that pydantic found with ``model`` into one sentence."""
    # An unknown key explains a missing one that it was meant to be, so it is told first.
    problems = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    *parents, last = first["loc"] if first["loc"] else ("",)
    where = ".".join(str(part) for part in parents)
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        keys = _keys(model, list(parents))
        return f"{f'[{where}]: ' if where else ''}unknown key {str(last)!r}{near(str(last), keys)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in {"missing", "value_error"}:
        return f"{place}: {message}" if place else message
    return f"{place}: {message}, got {_short(first.get('input'))}"


def _keys(model: Any, path: list[int | str]) -> list[str]:
    """Return the keys that a model accepts at ``path``, following mappings and lists of models."""
    for part in path:
        field = model.model_fields.get(part) if _is_model(model) else None
        model = field.annotation if field is not None else model
        while not _is_model(model):
            inner = [a for a in getattr(model, "__args__", ()) if a not in (str, type(None), Ellipsis)]
            if not inner:
                return []
            model = inner[-1]
    return [f.alias or name for name, f in model.model_fields.items()] if _is_model(model) else []


def _is_model(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseModel)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
