"""Checks of what commands print with ``--json``, and of other JSON that leaves backlight."""

from __future__ import annotations

import json
from typing import Any, Protocol


class Command(Protocol):
    """Fixture ``command``, which calls the command line in this process."""

    def __call__(self, *arguments: Any) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error, including those of the script."""


def strict_loads(text: str | bytes) -> Any:
    """Return what a JSON text holds; a ValueError at the literals of Python that JSON does not have."""

    def refuse(literal: str) -> Any:
        raise ValueError(f"{literal} is not JSON")

    return json.loads(text, parse_constant=refuse)


def closed(schema: Any) -> Any:
    """Return a schema that allows no field without a description."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(part) for key, part in schema.items()}
    return found | {"additionalProperties": False} if isinstance(found.get("properties"), dict) else found
