"""The size of the code base, its modules and options, and what one recorded step and one report execute.

python bench/structure.py
"""

from __future__ import annotations

import ast
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "src" / "backlight") + os.sep
LARGEST_SHOWN = 5


def lines_of(folder: str) -> dict[str, int]:
    """Return the number of lines of every Python file below a folder, by path."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}


def imports() -> tuple[int, dict[str, set[str]]]:
    """Return the lines of import statements of the package, and who imports each module, types included."""
    lines, importers = 0, {}
    names = {}
    for file in sorted((ROOT / "src").rglob("*.py")):
        parts = file.relative_to(ROOT / "src").with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    for name, file in names.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                lines += (node.end_lineno or node.lineno) - node.lineno + 1
                base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    for target in (f"{base}.{alias.name}", base) if base else (alias.name,):
                        if target in names and target != name:
                            importers.setdefault(target, set()).add(name)
                            break
    # An entry of a registry is imported by its name in a pattern, and a package by what is inside.
    return lines, {name: importers.get(name, set()) for name in names if names[name].name != "__init__.py"}


def options_shown() -> tuple[int, int]:
    """Return how many commands there are, and how many options their help shows."""
    from backlight.cli.app import all_commands

    every = list(all_commands().values())
    shown = [p for each in every for p in each.params if p.opts[0].startswith("-") and not p.hidden]
    return len(every), len(shown)


def modules_of_a_report(run: Path) -> tuple[int, int]:
    """Return how many modules of the package ``report RUN`` imports, and how many functions it enters."""
    code = """
import sys
functions = set()
def note(frame, event, _):
    if event == "call" and "/backlight/" in frame.f_code.co_filename:
        functions.add(frame.f_code)
sys.setprofile(note)
from backlight.cli.app import main
try:
    main(["report", sys.argv[1], "--out", sys.argv[2]])
except SystemExit:
    pass
sys.setprofile(None)
print(len([name for name in sys.modules if name.startswith("backlight")]), len(functions))
"""
    command = [sys.executable, "-c", code, str(run), str(run.with_name("page.html"))]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    modules, functions = out.split()[-2:]
    return int(modules), int(functions)


def percentile(values: list[int], share: float) -> int:
    """Return the value below which that share of the values lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


class Executed:
    """Counts Python calls by file of the package, on one thread or on all."""

    def __init__(self, *, everywhere: bool) -> None:
        self._everywhere = everywhere
        self.calls: dict[str, int] = {}

    def __enter__(self) -> Executed:
        if self._everywhere:
            threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._everywhere:
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            key = name.removeprefix(PACKAGE)
            self.calls[key] = self.calls.get(key, 0) + 1


def one_step(run: Path, steps: int = 11) -> tuple[Executed, Path]:
    """Train a small model with the default monitors; return what its last step executed on this thread.

    That is a step which ``correctness`` does not observe, as nearly all are.
    """
    import torch
    from torch import nn

    import backlight

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    executed = Executed(everywhere=False)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with backlight.watch(model, optimizer, run=run, every=1):
        for _ in range(steps - 1):
            step()
        with executed:
            step()
    return executed, run


def one_report(run: Path, page: Path) -> tuple[Executed, int]:
    """Render a report; return what it executed, and how many SQLite connections it opened."""
    from backlight.findings.evaluate import findings_of
    from backlight.report.page import render_page, write_page
    from backlight.report.source import Source
    from backlight.store.read.run import open_run

    connections = 0
    connect: Callable[..., Any] = sqlite3.connect

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal connections
        connections += 1
        return connect(*args, **kwargs)

    sqlite3.connect = counted
    try:
        with Executed(everywhere=True) as executed:
            opened = open_run(run)
            write_page(render_page(Source(opened, findings_of(opened))), page)
    finally:
        sqlite3.connect = connect
    return executed, connections


def main() -> None:
    """Print the figures."""
    for folder in ("src", "tests"):
        lengths = lines_of(folder)
        filled = [count for count in lengths.values() if count]
        print(f"{folder}: {sum(lengths.values()):,} lines in {len(lengths)} files ({len(filled)} not empty)")
        print(
            f"  lines per file: median {statistics.median(filled):.0f}, p95 {percentile(filled, 0.95)}, "
            f"max {max(filled)}"
        )
        largest = sorted(lengths, key=lambda name: -lengths[name])[:LARGEST_SHOWN]
        print("  largest: " + ", ".join(f"{name} {lengths[name]}" for name in largest))
    lines, importers = imports()
    total = sum(lines_of("src").values())
    single = sum(len(who) == 1 for who in importers.values())
    print(f"imports: {lines / total:.1%} of the lines; {single} modules with one importer")
    commands, options = options_shown()
    print(f"{commands} commands, {options} options shown in help")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step, run = one_step(Path(folder) / "run")
        count = sum(step.calls.values())
        print(f"one recorded step: {count} calls in {len(step.calls)} files (training thread)")
        for name in sorted(step.calls, key=lambda name: -step.calls[name]):
            print(f"  {step.calls[name]:4d} {name}")
        report, connections = one_report(run, Path(folder) / "report.html")
        print(f"one report: {len(report.calls)} files, {connections} SQLite connections")
        modules, functions = modules_of_a_report(run)
        print(f"backlight report RUN: {modules} modules imported, {functions} functions entered")


if __name__ == "__main__":
    main()
