"""The stalls monitor: how often its diagnoses are right, and what it costs while nothing stalls.

The fault suite of the tests is run and scored: correct, inconclusive, wrong. Cost: nanoseconds of a
heartbeat, and the time that the monitor adds to a step of the demo model, by interleaved blocks with and
without it.

    OMP_WAIT_POLICY=PASSIVE python bench/stalls.py [--all]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import backlight
from backlight.records import Finding
from backlight.store.read.run import open_run
from backlight.watchdog.shared_state import SharedState, Slot

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]

from overhead import Training  # noqa: E402 - in this directory

from faults.stall_faults import HERE, ISSUED, ONE, RANKS, STALL, Fault, findings_on, run_faults, score  # noqa: E402 - in this directory


def heartbeat_cost(count: int = 200_000) -> float:
    """Return the nanoseconds that the hook of a parameter takes."""
    from backlight.monitors.stalls.instrument.heartbeat import _arrived

    with tempfile.TemporaryDirectory() as folder:
        shared_state = SharedState(Path(folder) / "rank-00000.state")
        slots, rows = shared_state.slots, shared_state.rows
        parameter = torch.zeros(1)
        rounds = []
        for _ in range(5):
            begin = time.perf_counter_ns()
            for _ in range(count):
                _arrived(slots, rows, 3, parameter)
            rounds.append((time.perf_counter_ns() - begin) / count)
        assert slots[Slot.REACHED] == 5 * count
    return statistics.median(rounds)


def added_time(pairs: int, block: int) -> list[float]:
    """Return, for pairs of blocks, seconds with the monitor over seconds without it."""
    training = Training("cpu")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        watch = backlight.watch(
            training.model, training.optimizer, run=Path(folder) / "run", monitors="stalls"
        )
        with watch:
            (monitor,) = (one for one in watch.monitors if one.name == "stalls")
            for number in range(pairs):
                seconds = {}
                for on in (True, False) if number % 2 else (False, True):
                    (monitor.resume if on else monitor.pause)()
                    training.step()
                    seconds[on] = statistics.median(training.step()[0] for _ in range(block))
                ratios.append(seconds[True] / seconds[False])
            monitor.resume()
    return ratios


def launches(*, everything: bool) -> list[list[Fault]]:
    """Return the faults by launch: those that let go share a process, the others end theirs."""
    one = [f for f in ONE if everything or not f.slow]
    ranks = [f for f in (*RANKS, *ISSUED) if everything or not f.slow]
    together = [
        [f for f in one if not f.alone],
        [f for f in ranks if not f.lasting and not f.name.startswith("ddp_")],
    ]
    alone = [f for f in one if f.alone]
    alone += [f for f in ranks if f.lasting or f.name.startswith("ddp_")]
    return [*together, *([f] for f in alone)]


def lateness(findings: list[Finding], run: Path) -> float | None:
    """Return the seconds from the timeout to the last stack sample behind a diagnosis.

    None for what has no timeout: a dead or stopped rank, calls that differ, a backward that moves.
    """
    for finding in findings:
        if finding.subject.verdict not in {"BLOCKED", "SPIN", "LONG_OP", "PHASE"}:
            continue
        text = open_run(run).read_evidence(finding.evidence[0].path).decode()
        times = dict(re.findall(r"^  (taken|heartbeat) = (\d+)$", text, re.MULTILINE))
        return (int(times["taken"]) - int(times["heartbeat"])) / 1e9 - STALL
    return None


def launched(faults: list[Fault]) -> tuple[list[tuple[Fault, str, str, float | None]], list[Finding], int]:
    """Run faults and their controls.

    Returns fault, score, claim and lateness of each; findings on the controls; and the number of
    controls.
    """
    script = HERE / ("one_process.py" if faults[0].world == 1 else "ranks.py")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        findings, _, _ = run_faults(faults, run)
        for index, fault in enumerate(faults):
            own = findings_on(fault, index, findings, alone=len(faults) == 1)
            rows.append((fault, *score(fault, own, script), lateness(own, run)))
    kept = [f for f in faults if f.world > 1 or not f.lasting]
    if not kept:
        return rows, [], 0
    with tempfile.TemporaryDirectory() as folder:
        said, _, _ = run_faults(kept, Path(folder) / "run", seconds=0.02, control=kept[0].lasting)
    return rows, said, len(kept)


def suite(*, everything: bool, jobs: int) -> Table:
    """Run the fault suite and return the table of its score."""
    table = Table(title="diagnoses of injected faults")
    for column in ("fault", "ranks", "expected", "score", "late", "detail"):
        table.add_column(column)
    counts = {"correct": 0, "inconclusive": 0, "wrong": 0}
    late: list[float] = []
    silent = controls = 0
    with ThreadPoolExecutor(jobs) as pool:
        for rows, findings, number in pool.map(launched, launches(everything=everything)):
            for fault, result, why, after in rows:
                counts[result] += 1
                late += [] if after is None else [after]
                said = "" if after is None else f"{after:.1f} s"
                table.add_row(fault.name, str(fault.world), fault.kind or "none", result, said, why[:100])
            controls += number
            silent += 0 if findings else number
            for finding in findings:
                table.add_row("control", "", "silence", "wrong", "", finding.title)
    total = sum(counts.values())
    table.caption = f"{total} faults: " + ", ".join(
        f"{n} {w} ({100 * n / total:.1f} %)" for w, n in counts.items()
    )
    table.caption += f"; {silent} of {controls} controls silent"
    if late:
        table.caption += (
            f"; after the threshold: median {statistics.median(late):.1f} s, longest {max(late):.1f} s"
        )
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the whole suite, several minutes")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--block", type=int, default=12)
    parser.add_argument("--no-suite", action="store_true")
    parser.add_argument("--no-cost", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time: more make a busy machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if not options.no_cost:
        cost = Table(title="what the monitor costs while nothing stalls")
        cost.add_column("what")
        cost.add_column("value", justify="correct")
        cost.add_row("one beat (the hook of a parameter)", f"{heartbeat_cost():.0f} ns")
        low, middle, high = statistics.quantiles(added_time(options.pairs, options.block), n=4)
        cost.add_row("added to a step of the demo model, median", f"{(middle - 1) * 100:+.2f} %")
        cost.add_row("quartiles over pairs of blocks", f"{(low - 1) * 100:+.2f} … {(high - 1) * 100:+.2f} %")
        console.print(cost)
    if not options.no_suite:
        console.print(suite(everything=options.all, jobs=options.jobs))


if __name__ == "__main__":
    main()
