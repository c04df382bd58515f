"""What the report of a long run costs: seconds to write, megabytes of page and memory, seconds to open.

The run is synthetic, with one spike and one NaN injected in it; the bench checks that both are still in
the page. Opening is timed by the page itself, from the start of the navigation to its mark
``backlight-ready``, in headless Chromium.

    python bench/report.py --blocks 42 --steps 10000
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))

from synthetic import Plan, finding, health_of, write_run

from backlight.report.page import render_page, write_page
from backlight.report.source import COLUMNS, Source
from backlight.store.read.run import open_run

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1440,1000"
)
READY = "return performance.getEntriesByName('backlight-ready')[0]?.startTime ?? null"


def opening(page: Path, times: int) -> list[float]:
    """Return seconds from the start of the navigation until the page is ready, a cold browser first."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        try:
            seconds = []
            for _ in range(times):
                driver.get(page.as_uri())
                WebDriverWait(driver, 60, 0.05).until(lambda d: d.execute_script(READY))
                seconds.append(driver.execute_script(READY) / 1000)
            return seconds
        finally:
            driver.quit()


MEASURED = """
import atexit, pathlib
def peak():
    print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
atexit.register(peak)
from backlight.cli.app import main
main()
"""
"""Runs a command, and prints its peak memory in KB last."""


def report_memory(run: Path, target: Path) -> float:
    """Return the peak memory of `backlight report` in a process of its own, in MB."""
    command = [sys.executable, "-c", MEASURED, "report", str(run), "-o", str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) / 1e3


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=42, help="12 parameters each, and 3 besides")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1, help="steps of which one is recorded")
    parser.add_argument("--times", type=int, default=5, help="openings in a browser")
    options = parser.parse_args()
    every = options.every
    spike, broken = (options.steps // 2 + 17) // every * every, options.steps * 9 // 10
    plan = Plan(
        steps=options.steps,
        every=options.every,
        blocks=options.blocks,
        spike_row=9,
        spike_step=spike,
        nan_row=5,
        nan_step=broken,
        clip=1.0,
        phases=True,
        user={"accuracy": 1.0, "test_loss": 2.0},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        health = health_of(write_run(path, plan))
        target = Path(folder) / "report.html"
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            run = open_run(path)
            names = [parameter.name for parameter in run.parameters()]
            write_page(render_page(Source(run, [finding(names[5], broken)], health)), target)
            seconds.append(time.perf_counter() - start)
        frames = Source(run).frames
        high = frames.extremes["rms"].high[:, 9]
        kept = np.nanmax(high) == run.frame("gradient", "rms").values[spike // every, 9]
        bad = frames.extremes["rms"].broken[:, 5].sum() == len(
            range(0, options.steps, every)[-(-broken // every) :]
        )
        memory = report_memory(path, Path(folder) / "again.html")
        opened = opening(target, options.times) if options.times else []
        size = target.stat().st_size / 1e6
    raw = len(names) * options.steps // every * len(COLUMNS) * 8 * 4 / 3 / 1e6
    table = Table(title=f"report of {len(names)} parameters x {options.steps:,} steps")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_row("write the page, median of 3", f"{statistics.median(seconds):.2f} s")
    table.add_row("size of the page", f"{size:.2f} MB")
    table.add_row("the same columns unreduced, as base64", f"{raw:,.0f} MB")
    table.add_row("ranges of steps in the heat map", f"{len(frames.buckets):,}")
    table.add_row("peak memory of `backlight report`", f"{memory:,.0f} MB")
    if opened:
        table.add_row("open, cold browser", f"{opened[0]:.2f} s")
    if opened[1:]:
        table.add_row(f"open again, median of {len(opened) - 1}", f"{statistics.median(opened[1:]):.2f} s")
    table.add_row("injected spike still in the page", "yes" if kept else "NO")
    table.add_row("injected NaN steps still counted", "yes" if bad else "NO")
    Console().print(table)


if __name__ == "__main__":
    main()
