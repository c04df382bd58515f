"""Run the matrix, store the results, and write the table of docs/setups.md.

python tests/setups/table.py              all cells, then the table; some minutes
python tests/setups/table.py --stored     the table alone, from the stored results
"""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from setups.cells import CHECKS, IN_PART, MONITORS, REFUSED, TESTED, Outcome, measure  # noqa: E402 - found by now
from setups.matrix import ALL, Cell, expected, launch  # noqa: E402 - found by now
from setups.training_setups import SETUPS  # noqa: E402 - found by now

RESULTS = Path(__file__).with_name("results.json")
PAGE = TESTS.parent / "docs" / "setups.md"
BEGIN, END = "<!-- setups: written by `make setups` -->", "<!-- end of setups -->"

MARKS = {TESTED: "✓", IN_PART: "in part", REFUSED: "refused"}


def run() -> dict[Cell, Outcome]:
    """Run every cell; multi-rank setups take one launch each."""
    import torch

    torch.set_num_threads(1)
    found: dict[Cell, Outcome] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setup in SETUPS.values():
            cells = [cell for cell in ALL if cell[1] == setup.name]
            base = Path(folder) / str(len(found))
            if setup.ranks > 1:
                found |= launch(cells, base)
            else:
                found |= {cell: measure(*cell, base / cell[0]) for cell in cells}
            print(f"{setup.name}: {', '.join(found[cell].word for cell in cells)}", flush=True)
    return found


def store(found: Mapping[Cell, Outcome]) -> None:
    """Write results with the versions they were measured with.

    Raises
    ------
    SystemExit
        If a cell is not what the matrix says: then nothing is written.
    """
    for cell, outcome in found.items():
        word, pattern = expected(cell)
        if outcome.word != word or not re.search(pattern, outcome.reason):
            raise SystemExit(f"{cell}: {outcome}, where the matrix says {word}: {pattern}")
    cells = [
        {"monitor": monitor, "setup": setup, "word": o.word, "reason": o.reason}
        for (monitor, setup), o in found.items()
    ]
    versions = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "backlight": version("backlight"),
    }
    RESULTS.write_text(json.dumps({"versions": versions, "cells": cells}, indent=1) + "\n", encoding="utf-8")


def stored() -> tuple[dict[str, str], dict[Cell, Outcome]]:
    """Return the stored versions and results."""
    data: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return data["versions"], {
        (c["monitor"], c["setup"]): Outcome(c["word"], c["reason"]) for c in data["cells"]
    }


def rendered(versions: Mapping[str, str], found: Mapping[Cell, Outcome]) -> str:
    """Return the table in Markdown, with the reported reasons as notes below it."""
    notes: dict[str, int] = {}
    lines = [
        f"| | {' | '.join(f'`{monitor}`' for monitor in MONITORS)} | weights after training |",
        f"|---|{'---|' * len(CHECKS)}",
    ]
    for setup in SETUPS:
        cells = []
        for monitor in CHECKS:
            outcome = found[monitor, setup]
            mark = "identical" if monitor == "identical" else MARKS[outcome.word]
            if outcome.reason:
                reason = re.sub(r"parameter '[\w.]+'", "a parameter", outcome.reason)
                mark += f" ({notes.setdefault(reason, len(notes) + 1)})"
            cells.append(mark)
        lines.append(f"| {setup} | {' | '.join(cells)} |")
    lines += ["", *(f"({number}) {_escaped(reason)}  " for reason, number in notes.items())]
    environment = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "backlight")
    return "\n".join([*lines, "", f"Ranks are processes on CPUs over gloo; {environment}."])


def _escaped(text: str) -> str:
    return "; ".join(f"`{part}`" for part in text.split(" | "))


def between(page: str) -> tuple[str, str, str]:
    """Split a page at its markers into the text before, between and after.

    Raises
    ------
    ValueError
        If it has no marks.
    """
    before, found, rest = page.partition(BEGIN)
    inside, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"no {BEGIN} ... {END}")
    return before, inside.strip("\n"), after


def main() -> None:
    if "--stored" not in sys.argv[1:]:
        store(run())
    table = rendered(*stored())
    before, _, after = between(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
