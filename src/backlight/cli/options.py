"""Options and arguments that several commands share, and the values that they take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from backlight.text import assignments

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="Training script; with -m, a module.")]
Module = Annotated[bool, typer.Option("-m", help="Run SCRIPT as a module, as python -m does.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; a script prints to stderr.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]
SlurmScript = Annotated[
    Path | None, typer.Option("--slurm-script", help="Write the batch script instead of submitting it.")
]

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str, where: str) -> int:
    """Return bytes from ``"500M"``, ``"2.5G"`` or ``"1000000"``; K, M, G, T are powers of 1000.

    Raises
    ------
    ValueError
        If the text is not a positive size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)B?\s*", text, re.IGNORECASE)
    size = int(float(found[1]) * _FACTORS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ValueError(f"{where} {text!r}: expected a size such as 500M or 2G")
    return size


def parse_groups(items: Iterable[str]) -> dict[str, str]:
    """Return patterns by group name from ``NAME=PATTERN`` items.

    Raises
    ------
    ValueError
        If an item has another form, or a name comes twice.
    """
    return assignments(items, "--group", "NAME=PATTERN, such as --group host='encoder.*'")
