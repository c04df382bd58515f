"""For each rule: false alarms on sound public programs, and injected faults that it finds.

Reads what `bench/healthy.py` stored; an error or a warning there is a false alarm unless
`bench/healthy/true_findings.py` states what it is right about. The faults are those of
`bench/silent_errors.py` in one process, trained anew, and one stored run per rule of
`tests/injected_faults.py`. `--write` puts the figures into `docs/findings`.

    python bench/rules.py --healthy build/healthy.json --write
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from healthy.true_findings import TRUE
from rich.console import Console
from rich.table import Table

import backlight
from backlight.findings.evaluate import evaluate_rules, findings_of
from backlight.registry import RULES

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.silent import FAULTS, published_cases, well_known
from injected_faults import FAULTS as STORED

PAGES = Path(__file__).parents[1] / "docs" / "findings"
MARK = "Measured with `bench/rules.py`: "
PROGRAMS_LINK = "[public programs](index.md#sound-public-programs)"
"""Their number is stated there only."""


def false_alarms(results: list[dict[str, Any]]) -> tuple[Counter[str], int]:
    """Return, by rule, on how many programs it was wrong, and the number of programs that ran."""
    ran = [one for one in results if not one.get("problem")]
    wrong = Counter(
        rule
        for one in ran
        for rule in {finding["rule"] for finding in one["findings"] if finding["severity"] != "info"}
        if (one["name"], rule) not in TRUE
    )
    return wrong, len(ran)


def recall() -> tuple[Counter[str], Counter[str]]:
    """Return, by rule, the faults that it found and those that it should find."""
    found: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    folder = Path(tempfile.mkdtemp())
    for name in (name for name in RULES if RULES.origin(name) is None):
        expected[name] += 1
        found[name] += any(finding.rule == name for finding in findings_of(STORED[name](folder / name)))
    for number, fault in enumerate(
        [*FAULTS.values(), *well_known.FAULTS.values(), *published_cases.CASES.values()]
    ):
        rule = str(fault.expected.get("rule", ""))
        if rule in RULES:
            torch.manual_seed(0)
            with backlight.watch(run=folder / f"trained-{number}", every=1, quiet=True):
                fault.train(True)
            run = backlight.open_run(folder / f"trained-{number}")
            expected[rule] += 1
            found[rule] += any(finding.rule == rule for finding in evaluate_rules(run))
    return found, expected


def write(rule: str, line: str) -> None:
    """Put the figures of a rule into its page, before its limits or its example."""
    page = PAGES / f"{rule}.md"
    text = re.sub(rf"{re.escape(MARK)}.*\n\n", "", page.read_text(encoding="utf-8"))
    place = next(at for at in ("<!-- limits -->", "## Example") if at in text)
    page.write_text(text.replace(place, f"{MARK}{line}\n\n{place}", 1), encoding="utf-8")


def main() -> None:
    """Print one row per rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--healthy", type=Path, default=Path("build/healthy.json"))
    parser.add_argument("--write", action="store_true", help="write the figures into docs/findings")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wrong, programs = false_alarms(json.loads(options.healthy.read_text()))
    found, expected = recall()
    table = Table(title=f"{len(expected)} rules, {programs} sound programs")
    for column in ("rule", "programs with a false alarm", "injected faults found"):
        table.add_column(column)
    for rule in sorted(expected):
        table.add_row(rule, f"{wrong[rule]} of {programs}", f"{found[rule]} of {expected[rule]}")
        if options.write:
            write(
                rule,
                f"a false error or warning on {wrong[rule]} of the {PROGRAMS_LINK}, "
                f"{found[rule]} of {expected[rule]} injected faults found.",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        main()
