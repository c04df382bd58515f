"""Hints of the static reading on public training programs that are sound, before any run confirms them.

Reads the programs of `bench/healthy.py`, or with `--all` every file of the clones that calls `backward()`,
and prints each hint that is shown where a run does not answer: what is false there is a false hint.

    python bench/reading.py --clones ~/clones --all
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from pathlib import Path

from healthy.programs import PROGRAMS
from rich.console import Console

from backlight.launch.reading.script_files import read_script


def main() -> None:
    """Read, and print the hints, their numbers by kind and the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clones", type=Path, required=True, help="folder of clones, by owner+name or name")
    parser.add_argument("--all", action="store_true", help="every file of the clones with a backward pass")
    options = parser.parse_args()
    console, seconds = Console(soft_wrap=True), []
    if options.all:
        scripts = {
            file for file in options.clones.rglob("*.py") if ".backward()" in file.read_text(errors="ignore")
        }
    else:
        named = [(p.repository.replace("/", "+"), p.script) for p in PROGRAMS]
        named += [(p.repository.rpartition("/")[2], p.script) for p in PROGRAMS]
        scripts = {place for parts in named if (place := options.clones.joinpath(*parts)).is_file()}
    hints = {}
    for script in sorted(scripts):
        begin = time.perf_counter()
        hints |= {(hint.path, hint.line, hint.name): hint for hint in read_script(str(script))}
        seconds.append(time.perf_counter() - begin)
    shown = [hint for hint in hints.values() if not hint.needs_run]
    for hint in shown:
        console.print("\n".join(hint.view()), markup=False, highlight=False)
    kinds = dict(Counter(hint.name for hint in shown))
    late = dict(Counter(hint.name for hint in hints.values() if hint.needs_run))
    console.print(f"{len(scripts)} scripts: shown {kinds or 0}; only where a run confirms them {late or 0}")
    if seconds:
        console.print(
            f"per script: median {statistics.median(seconds) * 1e3:.0f} ms, most {max(seconds) * 1e3:.0f}"
        )


if __name__ == "__main__":
    main()
