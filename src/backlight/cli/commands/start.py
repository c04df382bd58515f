"""Commands of the group Start beside ``run``: read a report, follow a run, try backlight out."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import click

from backlight.cli.app import command
from backlight.cli.console import print_answer, print_json
from backlight.cli.options import PATH, RUNS, given_or_latest, json_option, readable_run, run_or_latest
from backlight.extras import require
from backlight.terminal import make_console, write

START_POLL_S = 0.3
"""Time between two checks of whether a run has started."""


@command("demo", "backlight demo -o runs/demo")
@click.option("--out", "-o", type=PATH, metavar="DIR", help="Run directory; default runs/demo-<time>.")
@click.option(
    "--steps", default=300, metavar="N", type=click.IntRange(min=10), help="Optimizer steps of each run."
)
def demo(*, out: Path | None, steps: int) -> int:
    """Find a bug in a small training script, then train with the fix.

    The script replaces the model's head after it created the optimizer. Both runs get a report.
    """
    from backlight.analysis.report import write_html
    from backlight.store.write.attempt import default_path

    target = out if out is not None else default_path("demo")
    # In the package of a wheel, or in a checkout.
    package = Path(__file__).parents[1]
    places = (package / "demo/new_head.py", package.parents[2] / "examples/new_head.py")
    script = next((place for place in places if place.is_file()), None)
    if script is None:
        raise FileNotFoundError(f"{places[0]}: the example is missing; install backlight again")
    # Idle OpenMP threads spin by default, which makes a busy machine many times slower.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    written = []
    for title, folder, fixed in (
        ("1. A training script with a bug: its loss falls, and part of the model never learns.", target, ()),
        (
            "2. The same script with the fix: the optimizer is created after the head is replaced.",
            target.with_name(f"{target.name}-fixed"),
            ("--fixed",),
        ),
    ):
        arguments = ["run", "--out", str(folder), str(script), "--steps", str(steps), *fixed]
        write(f"{title}\n\n$ backlight", *arguments, flush=True)
        command = [sys.executable, "-m", "backlight", *arguments]
        code = subprocess.run(command, check=False, env=environment).returncode
        if code:
            return code
        written.append(write_html(folder, folder / "report.html").resolve())
        write("", flush=True)
    write(f"report of the bug: {written[0]}\nreport of the fix: {written[1]}")
    write("Next, your own script: backlight run train.py")
    return 0


@command("doctor", "backlight doctor", "backlight doctor --full")
@click.option("--full", is_flag=True, help="Print every check, not only what does not work.")
@json_option
def doctor(*, full: bool, as_json: bool) -> int:
    """Check what works on this machine.

    The exit code is 1 if training scripts cannot be watched here.
    """
    from backlight.cli.doctor import answer, examine, is_usable

    checks = examine()
    if as_json:
        print_json(checks)
    else:
        print_answer(answer(checks), as_json=False, full=full)
    return int(not is_usable(checks))


Format = Literal["html", "md", "llms"]

SUFFIXES = {"llms": "txt"}
"""Suffix of the file of a format, where it is another word."""


@command(
    "report", "backlight report", "backlight report runs/first -o page.html",
    "backlight report runs/first --bundle run.zip",
)  # fmt: skip
@click.argument(
    "path",
    required=False,
    type=readable_run,
    metavar="[RUN]",
    help="Run or test matrix, or URL; default: the latest in runs/.",
)
@click.option(
    "--out",
    "-o",
    type=PATH,
    metavar="FILE",
    help="File to write; default RUN/report.html, of a URL ./report.html.",
)
@click.option(
    "form",
    "--format",
    default="html",
    type=click.Choice(get_args(Format)),
    help="html, md, or llms: 8 kB of text for language models.",
)
@click.option("--bundle", type=PATH, metavar="FILE", help="Archive to write instead: .tar.gz or .zip.")
@click.option("--plots", type=PATH, metavar="DIR", help="Directory for the charts as SVG and PNG.")
def report(
    *, path: Path | None, out: Path | None, form: Format, bundle: Path | None, plots: Path | None
) -> None:
    """Write the report of a run or test matrix as one offline file.

    For a URL, the file goes to the current directory. If a panel fails, the report gives the reason in its
    place, and the exit code is 2.
    """
    from backlight.analysis import report as run_report
    from backlight.report.panel import report_panel_warnings
    from backlight.store.read.remote import mirror_of

    if plots is not None:
        require("matplotlib")
    if bundle is not None and out is not None:
        raise ValueError(f"report: --out {out} and --bundle {bundle} exclude each other; give one")
    path = given_or_latest(path)
    folder = path if mirror_of(path) is None else Path()  # a copy of a URL is removed at the end
    target = out if out is not None else folder / f"report.{SUFFIXES.get(form, form)}"
    if (path / "plan.toml").is_file():  # else that package is not needed
        from backlight.diagnose.test_matrix import report as matrix_report

        if matrix_report.is_matrix(path):
            if plots is not None:
                raise ValueError(f"report: {path} is a test matrix, which has no charts; leave out --plots")
            if bundle is not None:
                write(matrix_report.write_bundle(path, bundle))
            elif form == "llms":
                raise ValueError(f"report: {path} is a test matrix; expected --format html or md")
            else:
                write(matrix_report.write_report(path, target))
            return
    with report_panel_warnings() as failed:
        if bundle is not None:
            write(run_report.write_bundle(path, bundle))
        else:
            writers = {"html": run_report.write_html, "md": run_report.write_markdown}
            write(writers.get(form, run_report.write_llms)(path, target))
            if plots is not None:
                pictures = run_report.write_pictures(path, plots)
                write(*pictures.files, sep="\n")
                if pictures.words_only:
                    write(f"no pictures, but words: {', '.join(pictures.words_only)}", file=sys.stderr)
    if failed:
        raise click.exceptions.Exit(2)


@command("open", "backlight open", "backlight open runs/first runs/second --no-browser")
@click.argument(
    "paths",
    nargs=-1,
    type=readable_run,
    metavar="[RUN...]",
    help="Runs, started or not, or URLs; default: the latest in runs/.",
)
@click.option(
    "--port", default=0, metavar="N", type=click.IntRange(min=0, max=65535), help="Port; 0 for any free port."
)
@click.option("--browser/--no-browser", default=True, help="Open the page in the browser.")
def open_page(*, paths: Sequence[Path], port: int, browser: bool) -> None:
    """Serve a live page of one or more runs on this machine."""
    from backlight.analysis.live import Live, followed, open_browser

    with contextlib.suppress(KeyboardInterrupt):  # how it is closed
        live = Live(followed(_started(paths)), port)
        try:
            write(
                f"backlight: live page at {live.new_address()} (works once)\nbacklight: Ctrl-C closes it",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            with open_browser(live.new_address()) if browser else contextlib.nullcontext():
                live.run()
        finally:
            live.close()


def _started(paths: Sequence[Path]) -> list[Path]:
    """Return the runs, once those that do not exist yet have started; without ``paths`` the latest."""
    from backlight.store.format.names import MANIFEST
    from backlight.store.read.run_list import NoRunError

    missing = [path for path in paths if not path.exists()]
    is_reported = False
    while True:
        if paths and all((path / MANIFEST).is_file() for path in missing):
            return list(paths)
        if not paths:
            with contextlib.suppress(NoRunError):
                return [given_or_latest(None)]
        if not is_reported:
            what = f"{RUNS}/ holds no run yet" if not paths else f"{missing[0]} does not exist yet"
            write(f"backlight: {what}; waiting for it to start, Ctrl-C ends", file=sys.stderr, flush=True)
            is_reported = True
        time.sleep(START_POLL_S)


@command("top", "backlight top", "backlight top runs/first --once")
@run_or_latest
@click.option("--once", is_flag=True, help="Print one frame; the default without a terminal.")
def top(*, path: Path | None, once: bool) -> None:
    """Show a run live in the terminal.

    Press q or Ctrl-C to quit.
    """
    from backlight.analysis.live import followed
    from backlight.report.live.terminal import show

    (run,) = followed([given_or_latest(path)])
    show(run, make_console(), once=once)
