"""Errors of a training loop that crash nothing: how many the default monitors find, and alarms on controls.

Three tables: ports of the cases of TrainCheck (OSDI 2025), further well-known errors, and loops without an
error that come close to one. Each error is trained with and without it. It is found if its rule has the
expected severity; its object is named if title, detail, subject or evidence hold it; it is known at the first
step that the finding rests on, counted from the step at which the error begins. A warning or an error in a
control is a false alarm.

With ``--habits`` every program is trained with habits that have nothing to do with its error (clipping,
autocast, accumulation, a schedule, a gradient scaler, an average of weights, ``torch.compile``, evaluations,
where and how gradients are cleared), so that every combination of ``--strength`` of them occurs; with 10 that
is the whole product. What is found must not depend on them.

    python bench/silent_errors.py
    python bench/silent_errors.py --habits
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, set_start_method
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import backlight
from backlight.findings.evaluate import Findings, evaluate_rules
from backlight.session.settings import DEFAULT_MONITORS
from backlight.store.read.run import Run

if str(Path(__file__).parent) in sys.path:  # not in a process that trains with habits
    sys.path.remove(str(Path(__file__).parent))  # it has another `ranks`
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults import published_on_ranks
from faults.injection import Fault, text_of
from faults.silent import CONTROLS, FAULTS, published_cases, well_known
from faults.silent_runs import HabitRun, alarms, habit_runs, watched
from ranks.launching import launched

TESTS = Path(__file__).parents[1] / "tests"

UNKNOWN = {
    "transformers-23723": (
        "no training: `generate` returns more tokens than `max_new_tokens`, an argument whose meaning only "
        "the library knows; nothing that backward, a loss or an optimizer holds is wrong"
    ),
    "transformers-17877": (
        "no wrong value: weights that are drawn four times have the same distribution as weights drawn once"
    ),
}
"""Cases of TrainCheck that a watcher of training cannot know, with the reason."""

NOT_OBSERVABLE = {
    "wrong labels, test data in the training set, inputs normalised in another way than before": (
        "the values are valid; what they should be is outside of the process"
    ),
    "a hyperparameter that is merely bad": "only a comparison of runs shows it",
    "a loss or gradients multiplied by a wrong constant": (
        "it is one with the learning rate, which the author may have chosen so"
    ),
    "a formula with valid shapes and types that is not the one of the paper": (
        "nothing in the process holds the intention"
    ),
    "a wrong metric": "it is computed from values that take no part in backward",
    "a schedule that is built for more steps than the run takes": "the run may go on after a restart",
    "an average of weights whose batch norm statistics are never updated": (
        "they may be computed once, after the training, as `update_bn` does"
    ),
    "a sum that is wrong on all ranks in the same way": "no rank holds the right one",
}
"""Errors that cannot be known from inside a process, with the reason."""


@dataclass(frozen=True)
class Row:
    """How one error, and its control, were reported."""

    name: str
    case: str
    rule: str
    is_named: bool
    known: int | None
    also: Sequence[str]
    control: Sequence[str]


def in_folder(train: Callable[[], object]) -> tuple[Run, Findings]:
    """Return the run of a training loop under the default monitors, and its findings."""
    return watched(Path(tempfile.mkdtemp()) / "run", train, DEFAULT_MONITORS)


def on_ranks(names: Sequence[str]) -> dict[str, tuple[tuple[Run, Findings], Findings]]:
    """Train cases on two ranks; return run and findings of each, and the findings of its control."""
    os.environ.setdefault("PYTHONPATH", str(TESTS.parent / "src"))
    folder = Path(tempfile.mkdtemp())
    script = TESTS / "faults" / "published_on_ranks.py"
    launched(2, script, folder, ",".join(names), PET_LOG_DIR=str(folder))
    runs = {name: backlight.open_run(folder / name) for name in names}
    controls = {name: evaluate_rules(backlight.open_run(folder / f"{name}-control")) for name in names}
    return {name: ((run, evaluate_rules(run)), controls[name]) for name, run in runs.items()}


def row(fault: Fault, run: Run, findings: Findings, control: Findings) -> Row:
    """Compare the findings with what is expected of them."""
    expected = fault.expected
    rule = str(expected.get("rule", ""))
    hits = [f for f in findings if f.rule == rule and f.severity.value == expected.get("severity")]
    object_ = expected.get("names")
    is_named = any(
        str(object_) in text_of(hit) if object_ else bool(hit.subject.parameter or hit.subject.module)
        for hit in hits
    )
    steps = [event.step or 0 for event in run.events("contradiction") if event.payload["rule"] == rule]
    steps = steps or [hit.subject.step for hit in hits if hit.subject.step is not None]
    known = min(steps) - int(str(expected.get("begins", 0))) if hits and steps else None
    also = [one for one in alarms(findings) if one != rule]
    name = fault.name.replace("_", " ")
    return Row(
        name, str(expected.get("case", "")), rule if hits else "", is_named, known, also, alarms(control)
    )


def rows_of(faults: dict[str, Fault]) -> list[Row]:
    """Train errors of one process, each with its control."""

    def trained(fault: Fault, injected: bool) -> tuple[Run, Findings]:
        return in_folder(lambda: fault.train(injected))

    return [row(fault, *trained(fault, True), trained(fault, False)[1]) for fault in faults.values()]


def rows_on_ranks() -> list[Row]:
    """Train errors of two ranks, each with its control."""
    cases, hanging = published_on_ranks.CASES, published_on_ranks.HANGING
    found = on_ranks([name for name in cases if name not in hanging])
    for name in hanging:
        found |= on_ranks([name])
    return [row(cases[name], run, findings, control) for name, ((run, findings), control) in found.items()]


def print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one row per error, and the totals."""
    table = Table(title=title)
    cases = ["case"] if any(one.case for one in rows) else []
    for column in ("error", *cases, "found", "named", "known after steps", "also", "control"):
        table.add_column(column)
    for one in rows:
        table.add_row(
            one.name,
            *([one.case] if cases else []),
            one.rule or "no",
            "yes" if one.is_named else "no" if one.rule else "",
            "" if one.known is None else str(one.known),
            ", ".join(one.also),
            ", ".join(one.control),
        )
    console.print(table)
    found = [one for one in rows if one.rule]
    known = [one.known for one in found if one.known is not None]
    console.print(
        f"found {len(found)} of {len(rows)}, object named in {sum(one.is_named for one in found)}, "
        f"known after {statistics.median(known):g} steps in the median, {max(known)} at most; "
        f"controls without a warning or an error: {sum(not one.control for one in rows)} of {len(rows)}"
    )


def trained_with_habits(one: HabitRun) -> tuple[HabitRun, str]:
    """Train a program with some habits; return what differs from what is expected."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    set_start_method("fork", force=True)  # of the workers of loaders
    if not gc.get_freeze_count():
        gc.freeze()  # a watch visits every object of the process when it begins
    try:
        return one, one.problem()
    except Exception as error:  # noqa: BLE001 - the next program is to run
        return one, f"raised {type(error).__name__}: {error}"


def print_habits(console: Console, runs: Sequence[HabitRun], jobs: int) -> None:
    """Train programs with habits, and print those whose findings depend on them."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        problems = dict(pool.map(trained_with_habits, runs))
    for one in runs:
        if problems[one]:
            console.print(f"{one.name} ({one.kind}), {one.habits}: {problems[one]}", highlight=False)
    for kind, words in (
        ("error", "with an error that have its finding and no other warning or error"),
        ("control", "with that error fixed that are silent"),
        ("close", "that come close to an error that are silent"),
    ):
        of_kind = [one for one in runs if one.kind == kind]
        sound = sum(not problems[one] for one in of_kind)
        programs = {one.name for one in of_kind}
        same = len(programs - {one.name for one in of_kind if problems[one]})
        console.print(
            f"loops {words}: {sound} of {len(of_kind)} ({100 * sound / max(len(of_kind), 1):.1f} %); "
            f"whatever the habits: {same} of {len(programs)} programs"
        )


def main() -> None:
    """Print the tables, the totals, and what cannot be known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", action="store_true", help="only the cases of TrainCheck")
    parser.add_argument("--habits", action="store_true", help="every program with other habits of its loop")
    parser.add_argument("--strength", type=int, default=2, help="habits of which all combinations occur")
    parser.add_argument("--share", type=float, default=1.0, help="of the programs with habits, at random")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that train with habits")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=170)
    if options.habits:
        runs = habit_runs(options.strength, options.share)
        print_habits(console, [one for one in runs if options.only in one.name], options.jobs)
        return
    ports = {name: one for name, one in published_cases.CASES.items() if one.expected["case"] not in UNKNOWN}
    print_rows(console, "cases of TrainCheck", [*rows_of(ports), *rows_on_ranks()])
    for case, reason in UNKNOWN.items():
        console.print(f"{case}: not found; {reason}")
    if options.published:
        return
    print_rows(console, "further errors", rows_of({**FAULTS, **well_known.FAULTS}))
    close = {name: alarms(in_folder(train)[1]) for name, train in CONTROLS.items()}
    silent = sum(not rules for rules in close.values())
    console.print(f"loops that come close, without a warning or an error: {silent} of {len(close)}")
    for name, rules in close.items():
        if rules:
            console.print(f"  {name.replace('_', ' ')}: {', '.join(rules)}")
    console.print("cannot be known from inside a process:")
    for error, reason in NOT_OBSERVABLE.items():
        console.print(f"  {error}: {reason}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        main()
