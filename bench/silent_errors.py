"""Errors of a training loop that crash nothing: how many the default monitors find, and alarms on controls.

Each error of ``tests/faults/silent/`` is trained with and without it, and so is each loop that comes
close to one. An error is found if its rule has the expected severity; it is known at the step of the first
contradiction. A warning or an error in a control is a false alarm.

    python bench/silent_errors.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import backlight
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.records import Severity
from backlight.store.read.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.silent import CONTROLS, FAULTS


def watched(train: Callable[[], None]) -> tuple[Run, Findings]:
    """Return the run of a training loop under the default monitors, and its findings."""
    torch.manual_seed(0)
    folder = Path(tempfile.mkdtemp())
    with backlight.watch(run=folder / "run", every=1, quiet=True):
        train()
    run = backlight.open_run(folder / "run")
    return run, evaluate_rules(run)


def alarms(findings: Findings) -> list[str]:
    """Return the rules of warnings and errors."""
    return [finding.rule for finding in findings if finding.severity is not Severity.INFO]


def main() -> None:
    """Print one row per error, and the totals."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = Table(title="silent errors")
    for column in ("error", "found", "known at step", "also reported", "control"):
        table.add_column(column)
    found, known, silent, other = 0, [], 0, 0
    for name, fault in FAULTS.items():
        run, findings = watched(lambda fault=fault: fault.train(True))
        rule = str(fault.expected["rule"])
        hits = [f for f in findings if f.rule == rule and f.severity.value == fault.expected["severity"]]
        steps = [event.step or 0 for event in run.events("contradiction") if event.payload["rule"] == rule]
        found += bool(hits)
        known += [min(steps)] if hits and steps else []
        also = sorted({one for one in alarms(findings) if one != rule})
        control = alarms(watched(lambda fault=fault: fault.train(False))[1])
        silent += not control
        table.add_row(
            name,
            rule if hits else "no",
            str(min(steps)) if steps else "",
            ", ".join(also),
            ", ".join(control),
        )
    for name, train in CONTROLS.items():
        control = alarms(watched(train)[1])
        other += not control
        table.add_row(name, "", "", "", ", ".join(control))
    console = Console(width=140)
    console.print(table)
    console.print(f"found {found} of {len(FAULTS)}; known at step {statistics.median(known):g} in the median")
    console.print(
        f"without a warning or an error: {silent} of {len(FAULTS)} controls, "
        f"{other} of {len(CONTROLS)} loops that come close"
    )


if __name__ == "__main__":
    main()
