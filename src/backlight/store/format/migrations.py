"""How a run of an older format is read by this release: on copies, never in the folder.

``MIGRATIONS[n]`` takes what format ``n`` wrote to format ``n + 1``. ``manifest`` gets the parsed
document and returns the new one; ``database`` gets a connection to a private copy of a rank's
database and changes its tables.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backlight.store.format.schema import FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from a format to the next."""

    manifest: Callable[[dict[str, Any]], dict[str, Any]]
    database: Callable[[sqlite3.Connection], None]


MIGRATIONS: dict[int, Migration] = {}
"""Format 1 is the first: there is nothing older to read yet."""


def migrate_manifest(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document as the format of this release would have it."""
    for version in range(int(document["format"]), FORMAT_VERSION):
        document = {**MIGRATIONS[version].manifest(document), "format": version + 1}
    return document


def migrate_database(connection: sqlite3.Connection, version: int) -> None:
    """Change a private copy of a database of format ``version`` in place."""
    for step in range(version, FORMAT_VERSION):
        MIGRATIONS[step].database(connection)
