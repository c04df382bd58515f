"""CSV whose text cells no spreadsheet takes for a formula."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from typing import Any, TextIO

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which a spreadsheet takes a cell for a formula, or for one after a separator."""


def write_rows(file: TextIO, rows: Iterable[Iterable[Any]], *, raw: bool = False) -> None:
    """Write rows as CSV; a text that begins like a formula, and is no number, gets a quote in front.

    With ``raw`` every text stays as it is.
    """
    writer = csv.writer(file)
    writer.writerows(rows if raw else ([_neutral(value) for value in row] for row in rows))


def _neutral(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value
