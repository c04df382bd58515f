"""Run the tests with other releases, store the results, and write the table of docs/compatibility.md.

python tests/compatibility/table.py                      every cell, which takes hours
python tests/compatibility/table.py --only "torch 2.15"  cells whose name holds this text
python tests/compatibility/table.py --read               count what the folders of the cells hold, run nothing
python tests/compatibility/table.py --stored             the table alone, from the stored results

A cell that was run keeps its folder in build/compatibility: the environment, and one log per test run (by
pytest-reportlog). The last outcome of a test counts, so a log of tests that were run again can be added.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from compatibility.cells import CELLS, FRAMEWORK_CELLS, ROOT, TORCH_CELLS, Cell

RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "compatibility.md"
FOLDER = ROOT / "build" / "compatibility"
BEGIN, END = "<!-- written by `make compatibility` -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Result:
    """What the tests of a cell gave.

    ``problem`` is the error of an installation that failed, ``note`` states which tests were run, if not all.
    """

    date: str
    versions: dict[str, str]
    passed: int = 0
    skipped: int = 0
    failures: tuple[str, ...] = ()
    problem: str = ""
    note: str = ""


def install(cell: Cell, folder: Path) -> str:
    """Make the virtual environment of a cell, unless it is there; return the last line of an error."""
    python = folder / "venv" / "bin" / "python"
    if python.exists():
        return ""
    interpreter = shutil.which(f"python{cell.python}")
    if interpreter is None:
        return f"no python{cell.python} in PATH"
    pip = [python, "-m", "pip", "install", "-q"]
    pinned = [one for one in cell.requirements if one.startswith("torch==")]
    commands = (
        [interpreter, "-m", "venv", folder / "venv"],
        [*pip, "-e", f"{ROOT}[dev]", "pytest-reportlog", *pinned],
        # Apart: TRL wants newer releases of transformers and accelerate than the lowest that we take.
        [*pip, *cell.requirements],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(folder / "venv", ignore_errors=True)
            return (done.stderr.strip() or "unknown error").splitlines()[-1]
    return ""


def run(cell: Cell, folder: Path, jobs: str) -> None:
    """Run the tests of a cell; their logs replace those of an earlier run."""
    for log in folder.glob("*.jsonl"):
        log.unlink()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    marked = "not alone" if cell.tests else "not full and not alone"
    parallel = [*cell.tests, "-n", jobs, "--dist", "worksteal", "-m", marked]
    alone = ["-n", "2", "--dist", "loadfile", "-m", "alone and not full"]
    phases = [parallel] if cell.tests else [parallel, alone]
    for number, phase in enumerate(phases, 1):
        command = [folder / "venv/bin/python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *phase]
        log = f"--report-log={folder / f'{number}.jsonl'}"
        subprocess.run([*command, log], cwd=ROOT, env=environment, check=False)


def read(folder: Path) -> Result | None:
    """Count the outcomes in the logs of a cell; None if it has none."""
    outcomes: dict[str, str] = {}
    for log in sorted(folder.glob("*.jsonl")):
        for name, outcome in _last_outcomes(log).items():
            outcomes[name] = outcome
    if not outcomes:
        return None
    newest = max(log.stat().st_mtime for log in folder.glob("*.jsonl"))
    return Result(
        date=datetime.date.fromtimestamp(newest).isoformat(),
        versions=_versions(folder / "venv" / "bin" / "python"),
        passed=list(outcomes.values()).count("passed"),
        skipped=list(outcomes.values()).count("skipped"),
        failures=tuple(sorted(name for name, outcome in outcomes.items() if outcome == "failed")),
    )


def _last_outcomes(log: Path) -> dict[str, str]:
    """Return one outcome per test: failed if its setup, call or teardown did, else skipped or passed."""
    outcomes: dict[str, str] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            report = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            continue
        if report.get("$report_type") == "CollectReport" and report["outcome"] == "failed":
            outcomes[report["nodeid"]] = "failed"
        if report.get("$report_type") != "TestReport":
            continue
        name, outcome = report["nodeid"], report["outcome"]
        if report["when"] == "setup" or outcome != "passed":
            outcomes[name] = outcome
    return outcomes


def _versions(python: Path) -> dict[str, str]:
    names = ["torch", "numpy", *{cell.name.split(",")[0] for cell in FRAMEWORK_CELLS}]
    code = (
        "import importlib.metadata as m, json, platform\n"
        "def found(name):\n"
        "    try:\n        return m.version(name)\n"
        "    except m.PackageNotFoundError:\n        return ''\n"
        f"print(json.dumps({{'Python': platform.python_version(), **{{n: found(n) for n in {names!r}}}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return {name: version for name, version in json.loads(done.stdout).items() if version}


def stored() -> dict[str, Result]:
    """Return the stored results by the name of their cell."""
    data: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: Result(**{**one, "failures": tuple(one["failures"])}) for name, one in data.items()}


def rendered(results: Mapping[str, Result]) -> str:
    """Return both tables in Markdown, and the failed tests below them."""
    lines = ["| cell | date | with | passed | failed | skipped |", "|---|---|---|---|---|---|"]
    notes = []
    for cell in (*TORCH_CELLS, *FRAMEWORK_CELLS):
        result = results.get(cell.name)
        if result is None or result.problem:
            lines.append(f"| {cell.name} | not run{f': {result.problem}' if result else ''} | | | | |")
            continue
        subject = cell.name.split(",")[0] if cell.tests else ""
        versions = [f"{name} {result.versions[name]}" for name in ("Python", "torch", subject) if name]
        versions += [result.note] if result.note else []
        numbers = f"{result.passed:,} | {len(result.failures)} | {result.skipped}"
        lines.append(f"| {cell.name} | {result.date} | {', '.join(versions)} | {numbers} |")
        notes += [f"- {cell.name}: `{name}`" for name in result.failures]
    if notes:
        lines += ["", "Failed:", "", *notes]
    return "\n".join(lines)


def between(page: str) -> tuple[str, str, str]:
    """Split a page at its markers into the text before, between and after."""
    before, _, rest = page.partition(f"{BEGIN}\n")
    inside, _, after = rest.partition(f"\n{END}")
    return before, inside, after


def write(results: Mapping[str, Result]) -> None:
    """Write the stored results and the page."""
    ordered = {name: asdict(results[name]) for name in CELLS if name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    before, _, after = between(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(f"{before}{BEGIN}\n{rendered(results)}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    parser.add_argument("--jobs", default="2", help="parallel processes of pytest")
    parser.add_argument("--read", action="store_true", help="count the logs of the cells, run nothing")
    parser.add_argument("--note", default="", help="with --read: which tests were run, if not all")
    parser.add_argument("--stored", action="store_true", help="write the table from the stored results")
    options = parser.parse_args()
    results = stored()
    cells = [] if options.stored else [cell for name, cell in CELLS.items() if options.only in name]
    for cell in cells:
        folder = FOLDER / cell.folder
        if not options.read:
            folder.mkdir(parents=True, exist_ok=True)
            problem = install(cell, folder)
            if problem:
                today = datetime.date.today().isoformat()
                results[cell.name] = Result(today, {}, problem=problem)
                print(f"{cell.name}: not run: {problem}", flush=True)
                continue
            run(cell, folder, options.jobs)
        result = read(folder)
        if result is not None:
            results[cell.name] = replace(result, note=options.note)
            print(f"{cell.name}: {result.passed} passed, {len(result.failures)} failed", flush=True)
        write(results)
    write(results)


if __name__ == "__main__":
    main()
