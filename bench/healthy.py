"""Findings on public training programs that are sound: each finding is a claim to check by hand.

The code is cloned from GitHub, or taken from a folder of clones, and runs unchanged under `backlight run`
with synthetic data until it ends, or until its processor time is over and it gets SIGINT. Packages that a
program imports must be installed; a program that cannot start is listed with its last line. Findings are
stored with `--out`, and `bench/rules.py` reads them. With `--weights` the weights after some steps are
compared instead, watched and unwatched, where two unwatched runs with one seed agree.

    python bench/healthy.py --clones ~/clones --out build/healthy.json
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from healthy.programs import PROGRAMS, Program
from healthy.running import environment_of, execute, prepared
from rich.console import Console
from rich.table import Table

import backlight
from backlight.findings.evaluate import findings_of
from backlight.store.errors import StoreError

WEIGHT_STEPS = 12
"""Steps of optimizers after which weights are compared."""


def watched(
    program: Program, clones: Path, work: Path, seconds: float, every: int | None, monitors: str = ""
) -> dict[str, Any]:
    """Run one program under `backlight run`; return its steps and findings, or why there are none."""
    try:
        folder, script = prepared(program, clones, work)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"name": program.name, "problem": str(error)}
    out = folder / "backlight-run"
    arguments = shlex.split(program.arguments)
    often = [] if every is None else ["--every", str(every)]
    often += ["--monitors", monitors] if monitors else []
    starter = [sys.executable, "-m", "backlight", "run", "--out", str(out), *often, str(script), *arguments]
    code, last = execute(starter, folder, environment_of(folder), max(seconds, program.seconds))
    try:
        run = backlight.open_run(out)
    except (OSError, StoreError) as error:
        return {"name": program.name, "problem": f"exit code {code}: {last or error}"}
    found = findings_of(run)
    steps = run.last_step() + 1
    return {
        "name": program.name,
        "repository": program.repository,
        "arguments": program.arguments,
        "exit": code,
        "steps": steps,
        **({} if steps else {"problem": f"exit code {code}: {last}"}),
        "findings": [
            {
                "rule": finding.rule, "severity": finding.severity.value, "title": finding.title,
                "detail": finding.detail, "fix": finding.fix, "parameter": finding.subject.parameter,
            }
            for finding in found
        ],
    }  # fmt: skip


def compare_weights(program: Program, clones: Path, work: Path, seconds: float) -> str:
    """Run one program twice without backlight and once with it; return how the weights compare."""
    digests = []
    for is_watched in (False, False, True):
        try:
            folder, script = prepared(program, clones, work)
        except (OSError, subprocess.CalledProcessError) as error:
            return str(error)
        file = work / f"{len(digests)}.digest"
        file.unlink(missing_ok=True)
        watching = ["-m", "backlight", "run", "--out", str(folder / "backlight-run")] if is_watched else []
        ending = [
            str(Path(__file__).parent / "healthy" / "ended.py"),
            str(WEIGHT_STEPS),
            str(file),
            str(script),
        ]
        environment = {**environment_of(folder), "PYTHONHASHSEED": "0"}
        arguments = shlex.split(program.arguments)
        code, last = execute([sys.executable, *watching, *ending, *arguments], folder, environment, seconds)
        if not file.is_file():
            return f"not compared: exit code {code}: {last}"
        digests.append(file.read_text())
    if digests[0] != digests[1]:
        return "not compared: two unwatched runs differ"
    return "equal" if digests[1] == digests[2] else "DIFFERENT"


def main() -> None:
    """Run the programs, print every finding, and store them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clones", type=Path, default=Path("build/clones"), help="folder of clones by name")
    parser.add_argument("--work", type=Path, default=Path("build/healthy"), help="folder of copies and runs")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/healthy.json"),
        help="file of the findings; programs that it holds are not run again",
    )
    parser.add_argument("--only", default="", help="part of the names of programs to run")
    parser.add_argument("--seconds", type=float, default=90.0, help="processor time per program")
    parser.add_argument(
        "--every",
        type=int,
        help="record every Nth step; 1 records most on a busy machine",
    )
    parser.add_argument("--monitors", default="", help="as of `backlight run`: +activations adds one")
    parser.add_argument("--weights", action="store_true", help="compare weights, watched and unwatched")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    options = parser.parse_args()
    # A shell starts what runs in the background with SIGINT ignored, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stored = json.loads(options.out.read_text()) if options.out.is_file() else []
    results = {one["name"]: one for one in stored if one["name"] in {program.name for program in PROGRAMS}}
    done = {name for name, one in results.items() if not one.get("problem") and not options.only}
    chosen = [
        program
        for program in PROGRAMS
        if options.only.lower() in program.name.lower() and program.name not in done
    ]
    console = Console(width=170, highlight=False)
    clones, work = options.clones.resolve(), options.work.resolve()
    if options.weights:
        chosen = [one for one in PROGRAMS if options.only.lower() in one.name.lower()]
        compared = {}
        for one in chosen:
            compared[one.name] = compare_weights(one, clones, work, options.seconds)
            console.print(f"{one.name}: {compared[one.name]}", markup=False)
        counts = [[*compared.values()].count(result) for result in ("equal", "DIFFERENT")]
        console.print(f"equal weights {counts[0]}, different {counts[1]}, of {len(compared)} programs")
        return

    def run(program: Program) -> None:
        result = watched(program, clones, work, options.seconds, options.every, options.monitors)
        results[program.name] = result
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([*results.values()], indent=1) + "\n")
        console.print(
            f"{program.name}: {result.get('problem') or str(result['steps']) + ' steps'}", markup=False
        )
        for finding in result.get("findings", ()):
            console.print(f"  {finding['severity']} {finding['rule']}: {finding['title']}", markup=False)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, chosen))
    counted = [one for one in results.values() if not one.get("problem")]
    table = Table(title=f"{len(counted)} of {len(results)} programs ran")
    for column in ("severity", "findings", "programs"):
        table.add_column(column)
    for severity in ("error", "warning", "info"):
        per = [sum(f["severity"] == severity for f in one["findings"]) for one in counted]
        table.add_row(severity, str(sum(per)), str(sum(map(bool, per))))
    console.print(table)


if __name__ == "__main__":
    main()
