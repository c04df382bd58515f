"""Public reports of training that went wrong: how often the cause is named by what the user runs first.

`bench/reports/` holds a small script for each report, with the same mistake, and without it where the
argument is `fixed`. The TOML files list them: thread, symptom, cause, what of the printed text names or
points to the cause, and what backlight printed before any code was written for it: `unseen_run` and
`unseen_command`, which are never changed. The scripts are run, and both counts are printed, as well as each
warning or error without the mistake.

    python bench/reports.py
    python bench/reports.py --only a01,a02 --command
    python bench/reports.py --recorded
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent / "reports"
LEVELS = ("named", "pointed", "silent", "misleading")
ENDING_S = 60.0


def entries(only: str | None) -> list[dict[str, Any]]:
    """Return the reports of all TOML files, or those whose names are listed with commas."""
    listed = [
        entry for file in sorted(FOLDER.glob("*.toml")) for entry in tomllib.loads(file.read_text())["report"]
    ]
    return [entry for entry in listed if only is None or entry["name"] in only.split(",")]


def execute(arguments: list[str], entry: dict[str, Any], folder: Path, limit_s: float) -> str:
    """Run ``backlight`` with these arguments, on the ranks of the report; return what it printed."""
    ranks = entry.get("ranks", 1)
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    child = subprocess.Popen(
        [sys.executable, *launcher, "-m", "backlight", *arguments], cwd=folder, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        return child.communicate(timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGINT)
    try:
        return child.communicate(timeout=ENDING_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        return child.communicate()[0]


def alarms(run: Path, folder: Path) -> list[str]:
    """Return rule, title and detail of the warnings and errors of a run."""
    shown = subprocess.run(
        [sys.executable, "-m", "backlight", "findings", str(run), "--json"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not shown.stdout.strip():
        return []
    listed = json.loads(shown.stdout)["findings"]
    loud = [finding for finding in listed if finding["severity"] in ("error", "warning")]
    return [f"{finding['rule']}: {finding['title']}: {finding['detail']}" for finding in loud]


def level(entry: dict[str, Any], text: str, is_alarmed: bool) -> str:
    """Return how well a text names the cause of a report."""
    for name in ("named", "pointed"):
        if name in entry and re.search(entry[name], text):
            return name
    return "misleading" if is_alarmed else "silent"


def tried(entry: dict[str, Any], arguments: list[str], limit_s: float, asks: bool) -> dict[str, Any]:
    """Run the script of a report under ``backlight run``, and with the command that its symptom suggests."""
    script = str(FOLDER / entry["script"])
    limit_s = entry.get("limit_s", limit_s)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        printed = execute(["run", "--out", "run", script, *arguments], entry, folder, limit_s)
        loud = alarms(folder / "run", folder)
        # A hang is diagnosed while it lasts, and is printed at once.
        stalls = re.findall(r"(?m)^backlight: .*$", printed) if entry.get("hangs") else []
        answer = {
            "printed": printed,
            "run": level(entry, "\n".join(loud + stalls), bool(loud)),
            "alarms": loud,
        }
        if asks and entry.get("command"):
            asked = execute([*entry["command"].split(), script, *arguments], entry, folder, limit_s)
            best = level(entry, asked, is_alarmed=False)
            answer |= {"asked": asked, "command": min(answer["run"], best, key=LEVELS.index)}
        return answer


def recorded(listed: list[dict[str, Any]], console: Console) -> None:
    """Print how often each set was named when it was counted."""
    listed = [entry for entry in listed if "unseen_run" in entry]
    sets = sorted({entry["set"] for entry in listed})
    table = Table("set", "reports", "by", *LEVELS)
    for name in sets:
        members = [entry for entry in listed if entry["set"] == name]
        for field, label in (
            ("unseen_run", "`backlight run`"),
            ("unseen_command", "with the symptom's command"),
        ):
            if not any(field in entry for entry in members):
                continue  # the commands were not run
            levels = Counter(entry.get(field, entry["unseen_run"]) for entry in members)
            table.add_row(str(name), str(len(members)), label, *(str(levels[each]) for each in LEVELS))
    console.print(table)


def main() -> None:
    """Run the reports, and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="names of reports, with commas")
    parser.add_argument("--recorded", action="store_true", help="print what was recorded, and run nothing")
    parser.add_argument("--command", action="store_true", help="run the command of each symptom as well")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one run")
    parser.add_argument("--keep", type=Path, help="folder for what is printed")
    options = parser.parse_args()
    console = Console(width=160)
    listed = entries(options.only)
    recorded(listed, console)
    if options.recorded:
        return
    now: Counter[str] = Counter()
    false = 0
    for entry in listed:
        answer = tried(entry, ["bug"], options.limit, options.command)
        # Without the mistake a hang ends, in its usual time.
        control = tried({**entry, "hangs": False}, ["fixed"], options.limit, asks=False)
        now[answer["run"]] += 1
        false += len(control["alarms"])
        print(entry["name"], entry["script"], "now:", answer["run"], answer.get("command", ""), flush=True)
        for line in answer["alarms"]:
            print("    ", line, flush=True)
        for line in control["alarms"]:
            print("     WITHOUT THE MISTAKE:", line, flush=True)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for kind, text in (
                ("bug", answer["printed"]),
                ("fixed", control["printed"]),
                ("command", answer.get("asked")),
            ):
                if text is not None:
                    (options.keep / f"{entry['name']}.{kind}.txt").write_text(text)
    print(
        "now, by `backlight run` alone:",
        ", ".join(f"{now[each]} {each}" for each in LEVELS),
        f"of {len(listed)}",
    )
    print("warnings and errors without the mistake:", false)


if __name__ == "__main__":
    main()
