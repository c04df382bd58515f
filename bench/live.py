"""Cost of a live page of a long run, next to the written report of the same run.

A run of many steps and parameters is written; its static page is opened in headless Chromium and scrolled
from top to bottom, frame by frame. Then the same is done with the live page, while further steps are
written and the page follows them. Frame times are those that ``requestAnimationFrame`` sees while the page
is scrolled; a long task is one that holds the page for more than 50 ms. Last a NaN is written, and the time
until the page shows the finding is taken. Evaluation alone is timed in the processor's seconds, also of a
run of several ranks that hold parts of every parameter, next to what it takes to read that run as a whole.

    python bench/live.py --blocks 42 --steps 10000
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "report"))

from growing import Growing
from synthetic import Plan

from backlight.analysis.live import Live, followed
from backlight.analysis.report import write_html
from backlight.findings.evaluate import findings_of
from backlight.store.read.run import Run, open_growing, open_run

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1440,1000"
)

SCROLL = """
const done = arguments[arguments.length - 1];
const [pixels, frames] = [arguments[0], []];
const tasks = [];
const observer = new PerformanceObserver((list) => {
  for (const { duration } of list.getEntries()) tasks.push(duration);
});
observer.observe({ entryTypes: ["longtask"] });
let [last, down] = [performance.now(), true];
const until = last + arguments[1];
const step = (now) => {
  frames.push(now - last);
  last = now;
  const end = document.documentElement.scrollHeight - innerHeight;
  if (scrollY >= end - 1) down = false;
  if (scrollY <= 0) down = true;
  scrollBy({ top: down ? pixels : -pixels, behavior: "instant" });
  if (now < until) requestAnimationFrame(step);
  else {
    observer.disconnect();
    done({ frames: frames.slice(2), tasks, nodes: document.getElementsByTagName("*").length });
  }
};
requestAnimationFrame(step);
"""

SHOWN = "return document.documentElement.dataset.drawn"

READY = "return document.documentElement.dataset.ready === 'yes'"


class Browser:
    """Headless Chromium, closed at the end."""

    def __init__(self, profile: str) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        self.driver.set_script_timeout(60)

    def ready(self, address: str) -> float:
        """Open a page and return the seconds until everything near the screen is drawn."""
        begun = time.perf_counter()
        self.driver.get(address)
        while not self.driver.execute_script(READY):
            time.sleep(0.02)
        return time.perf_counter() - begun

    def shows(self, selector: str) -> float:
        """Return the seconds until an element is on the page.

        Raises
        ------
        TimeoutError
            If it does not come.
        """
        begun = time.perf_counter()
        while not self.driver.find_elements("css selector", selector):
            if time.perf_counter() - begun > 60:
                raise TimeoutError(f"{selector} did not come within 60 s")
            time.sleep(0.02)
        return time.perf_counter() - begun

    def scrolled(self, seconds: float) -> dict[str, Any]:
        """Scroll up and down and return what the page's clock saw."""
        time.sleep(1)
        return self.driver.execute_async_script(SCROLL, 40, 1000 * seconds)  # type: ignore[no-any-return]


def late(seen: dict[str, Any]) -> float:
    """Return the time of the slowest hundredth of frames, in milliseconds."""
    ordered = sorted(seen["frames"])
    return float(ordered[int(0.99 * (len(ordered) - 1))])


def evaluation_times(runs: Sequence[Growing], reopen: Callable[[Path], Run]) -> list[float]:
    """Return the processor's seconds that evaluation took at the first look, and at later ones."""
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        findings_of(reopen(runs[0].path))
        seconds.append(time.process_time() - begun)
        for run in runs:
            run.steps(5)
    return [seconds[0], median(seconds[1:])]


def judged_ranks(folder: Path, ranks: int, steps: int, blocks: int) -> list[float]:
    """Return the same of a run of ``ranks`` shards, and last what it takes to read it as a whole."""
    plan = Plan(steps=steps + 100, blocks=blocks)
    made = [Growing(folder, plan, rank=rank, world_size=ranks, sharded=True) for rank in range(ranks)]
    for run in made:
        run.steps(steps)
    seconds = [*evaluation_times(made, open_growing()), evaluation_times(made, open_run)[1]]
    for run in made:
        run.close()
    return seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=42, help="12 parameters each, and 3 besides")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank-steps", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="of scrolling")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as profile:
        run = Growing(Path(folder) / "run", Plan(steps=options.steps + 4000, blocks=options.blocks))
        run.steps(options.steps)
        report = write_html(run.path, Path(folder) / "report.html")
        first, later = evaluation_times([run], open_growing())
        parts = judged_ranks(Path(folder) / "ranks", options.ranks, options.rank_steps, options.blocks)
        live = Live(followed([run.path]))
        served = threading.Thread(target=live.run)
        served.start()
        browser = Browser(profile)
        training = threading.Event()

        def train() -> None:
            while not training.is_set() and run.done < options.steps + 3900:
                run.steps(5)
                training.wait(0.25)

        writer = threading.Thread(target=train)
        try:
            opened = [browser.ready(report.as_uri())]
            static = browser.scrolled(options.seconds)
            opened.append(browser.ready(live.new_address()))
            time.sleep(3)  # the panels below the screen
            writer.start()
            before = int(browser.driver.execute_script(SHOWN))
            followed_page = browser.scrolled(options.seconds)
            drawn = int(browser.driver.execute_script(SHOWN)) - before
            training.set()
            writer.join()
            run.steps(1, broken=5)
            found = browser.shows("article.finding.error")
        finally:
            training.set()
            browser.driver.quit()
            live.close()
            served.join(20)
            if writer.ident is not None:
                writer.join()
            run.close()
        table = Table(
            title=f"{len(run.names)} parameters x {options.steps:,} steps, scrolled for {options.seconds:g} s"
        )
        table.add_column("figure")
        for heading in ("report", "live, training", "ratio"):
            table.add_column(heading, justify="right")

        def row(label: str, one: float, other: float, unit: str) -> None:
            ratio = f"{other / one:.2f}" if one else ""
            table.add_row(label, f"{one:.3g} {unit}", f"{other:.3g} {unit}", ratio)

        row("ready", opened[0], opened[1], "s")
        row("median frame", median(static["frames"]), median(followed_page["frames"]), "ms")
        row("slowest hundredth of frames", late(static), late(followed_page), "ms")
        row("slowest frame", max(static["frames"]), max(followed_page["frames"]), "ms")
        row("time in long tasks", sum(static["tasks"]), sum(followed_page["tasks"]), "ms")
        row("elements of the page", static["nodes"], followed_page["nodes"], "")
        Console().print(table)
        print(
            f"evaluation took {first:.2f} s of the processor at the first look, {later:.2f} s at later ones"
        )
        print(
            f"of {options.ranks} ranks and {options.rank_steps:,} steps {parts[0]:.2f} s, "
            f"later {parts[1]:.2f} s; read as a whole {parts[2]:.2f} s, {parts[2] / parts[1]:.1f} x as much"
        )
        print(f"a NaN that was just written is a finding on the page after {found:.2f} s")
        print(f"panels of the live page that were brought up to date meanwhile: {drawn}")


if __name__ == "__main__":
    main()
