"""A run that trains, in a terminal: one frame from what was read of it, for any width.

Everything from a run is printed as plain text: neither markup nor an escape sequence in a name has any
effect.
"""

from __future__ import annotations

import contextlib
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from backlight.findings.losses import losses_of
from backlight.records import Finding, Severity
from backlight.report.live.follower import FollowedRun, Stand, Standing
from backlight.report.panel import error_text
from backlight.report.source import Source
from backlight.report.sparkline import sparkline
from backlight.report.verdict import sampled_text, tally, where
from backlight.text import count, duration, number, percent, told_apart, visible

BEAT = 0.1
"""Seconds between two looks at keyboard and news."""

LEAVE = {"q", "Q", "\x03", "\x1b"}

RECENT = 20
"""Steps over which speed and phases are taken."""

WORST = 5
"""Parameters that are named."""

WIDE = 64
"""Columns from which on the share of zeros has space as well."""

SLIM = 44
"""Columns below which lines of a course and medians have none."""

NONE = "\N{EN DASH}"

FINDINGS = 6
"""Findings that are named; the rest of them is counted."""

STANDS = {
    Standing.READING: "cyan",
    Standing.WAITING: "cyan",
    Standing.RUNNING: "bold green",
    Standing.FINISHED: "bold",
    Standing.FAILED: "bold red",
    Standing.KILLED: "bold red",
    Standing.UNKNOWN: "bold yellow",
    Standing.UNREADABLE: "bold red",
}
SEVERITIES = {
    Severity.ERROR: ("✕", "bold red"),
    Severity.WARNING: ("!", "bold yellow"),
    Severity.INFO: ("i", "bold cyan"),
}
PHASES = ("blue", "yellow", "green", "magenta", "cyan", "red", "white", "bright_black")


def frame(name: str, stand: Stand, source: Source | None, width: int) -> RenderableType:
    """Return what the terminal shows of a run; ``source`` is None where nothing could be read yet."""
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append("backlight ", "bold blue").append(visible(name), "bold").append("  ")
    head.append(f"● {stand.word.value}", STANDS[stand.word])
    parts: list[RenderableType] = [head]
    if source is None or source.run.last_step() < 0:
        return Group(*parts, Text(stand.detail, "dim"))
    shown = [_unharmed(section, source, width) for section in (_status, _phases, _worst, _findings)]
    parts += [line for lines in shown if lines for line in (*lines, Text())][:-1]
    if stand.word is not Standing.RUNNING:
        parts += [Text(), Text(stand.detail, "dim")]
    return Group(*parts)


def _unharmed(
    section: Callable[[Source, int], list[RenderableType]], source: Source, width: int
) -> list[RenderableType]:
    """Return the lines of one section; one that fails says so in its place, and the others stay."""
    try:
        return section(source, width)
    except Exception as error:  # noqa: BLE001 - what breaks in one section must not end the terminal
        name = section.__name__.strip("_")
        return [Text(f"{name} could not be shown: {error_text(error)}", "bold red")]


def _status(source: Source, width: int) -> list[RenderableType]:
    steps = source.run.last_step() + 1
    losses, norm = losses_of(source.run), source.scalar("total_norm")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True, overflow="ellipsis")
    slim = width < SLIM
    if not slim:
        table.add_column(no_wrap=True, overflow="crop", style="blue")
    available = 0 if slim else min(60, width - 34)
    rows = [("step", number(steps - 1), "" if slim else _speed(source))]
    if slim:
        rows.append(("speed", _speed(source).split(" (", maxsplit=1)[0], ""))
    for label, loss in losses.items():
        rows.append((visible(label), number(float(loss.values[-1])), sparkline(loss.values, available)))
    if not losses:
        rows.append(("loss", "not measured", ""))
    rates = [(name, source.scalar(name)) for name in source.scalar_names("lr")]
    values = {float(rate.values[-1]) for _, rate in rates if len(rate.values)}
    shown = ", ".join(number(value) for value in sorted(values)[:3]) if values else "not measured"
    rows.append(("learning rate", shown, ""))
    shown = number(float(norm.values[-1])) if len(norm.values) else "not measured"
    rows.append(("total norm", shown, sparkline(norm.values, available)))
    if source.health is not None and len(source.health[1]):
        scores = source.health[1][~np.isnan(source.health[1])]
        shown = number(float(scores[-1]), 3) if len(scores) else "not measured"
        line = sparkline(source.health[1], available)
        if source.untrained:
            shown, line = "not measured", f"{count(len(source.untrained), 'parameter')} never trained"
        rows.append(("health", shown, line))
    for row in rows:
        table.add_row(*row[: 2 if slim else 3])
    sampled = sampled_text(source.run)
    return [table, *([Text(f"recorded: {sampled}", "dim")] if sampled else [])]


def _speed(source: Source) -> str:
    recent = source.step_times[-RECENT:]
    middle = float(np.median(recent)) if len(recent) else 0.0
    if middle <= 0:
        return ""
    return f"{number(1 / middle, 3)} steps/s ({duration(middle)} each)"


def _phases(source: Source, width: int) -> list[RenderableType]:
    """Return the phases of the newest steps as one bar with its legend."""
    names = source.scalar_names("phase") if len(source.step_times) else ()
    recent: dict[str, float] = {}
    for name in names:
        values = source.scalar(name).values[-RECENT:]
        values = values[np.isfinite(values)]
        if len(values):
            recent[visible(name.removeprefix("phase/")).replace("_", " ")] = float(values.mean())
    total = sum(recent.values())
    if total <= 0:
        return []
    order = sorted(recent.items(), key=lambda item: -item[1])
    bar, legend, left = Text(no_wrap=True, overflow="crop"), Text(), width
    for place, (name, seconds) in enumerate(order):
        style = PHASES[place % len(PHASES)]
        cells = min(left, round(seconds / total * width))
        left -= cells
        bar.append("█" * cells, style)
        words = f" {name} {percent(seconds / total)}"
        if legend and len(legend.plain.rpartition("\n")[2]) + 3 + len(words) > width:
            legend.append("\n")
        elif legend:
            legend.append("  ")
        legend.append("■", style).append(words)
    return [bar, legend]


def _worst(source: Source, width: int) -> list[RenderableType]:
    """Return the parameters that stand out now: not finite first, then those far from their median."""
    frames = source.frames
    if not frames.has("gradient"):
        return [Text(source.reason("gradient", otherwise="No gradient was recorded."), "dim")]
    last = frames.stats["rms_last"]
    middle = frames.stats["rms_median"]
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.abs(np.log10(last / middle))
    broken = np.nan_to_num(frames.stats.get("non_finite_sum", np.zeros(len(last)))) > 0
    has_value = frames.stats["measured"] > 0
    rank = np.where(broken, np.inf, np.nan_to_num(factor, nan=0.0, posinf=1e300))
    rank = np.where(has_value, rank, -1.0)
    order = np.argsort(-rank, kind="stable")[:WORST]
    wide, slim = width >= WIDE, width < SLIM
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, expand=False)
    available = max(8, width - (44 if wide else 22 if slim else 32))
    table.add_column("furthest from their median", no_wrap=True, overflow="ellipsis", max_width=available)
    columns = ["rms now", *([] if slim else ["median"]), *(["zeros"] if wide else []), "NaN, Inf"]
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    zeros, amount = frames.stats.get("zero_share_last"), frames.stats.get("non_finite_sum")
    order = order[has_value[order]]
    names = [visible(source.parameters[row].name) for row in order]
    shown = told_apart(names, available)
    for name, row in zip(names, order, strict=True):
        table.add_row(
            Text(shown[name]),
            number(float(last[row]), 3),
            *([] if slim else [number(float(middle[row]), 3)]),
            *([_share(zeros, int(row))] if wide else []),
            Text(number(float(amount[row])), "bold red" if broken[row] else "")
            if amount is not None
            else NONE,
        )
    return [table]


def _share(shares: NDArray[np.float64] | None, row: int) -> str:
    is_measured = shares is not None and bool(np.isfinite(shares[row]))
    return percent(float(shares[row])) if shares is not None and is_measured else NONE


def _findings(source: Source, _width: int) -> list[RenderableType]:
    findings = source.findings
    if not findings:
        lacks = source.run.shortfall
        return [Text(f"No findings so far: {lacks}.") if lacks else Text("No findings.", "green")]
    lines: list[RenderableType] = [Text(f"Findings: {tally(findings)}", "bold")]
    named = _distinct(findings)
    for finding in named[:FINDINGS]:
        sign, style = SEVERITIES[finding.severity]
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{sign} ", style).append(visible(finding.rule).replace("_", " "), style)
        # The space belongs to the title, which mostly has the name.
        ends = tuple(re.findall("…([^`]+)", finding.title))  # of names that the title shortens
        is_named = (finding.subject.parameter or "").endswith(ends) if ends else False
        about = [
            (k, v)
            for k, v in where(finding)
            if k == "step" or not (v in finding.title or (is_named and k in {"parameter", "module"}))
        ][:2]
        subject = ", ".join(f"step {value}" if label == "step" else value for label, value in about)
        line.append(f"  {subject}  " if subject else "  ", "bold").append(visible(finding.title))
        lines.append(line)
    hidden = len(findings) - min(FINDINGS, len(named))
    if hidden:
        lines.append(Text(f"and {count(hidden, 'more finding')}: backlight findings RUN", "dim"))
    return lines


def _distinct(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding of each rule first, then the others: many of one rule must not hide another."""
    first: list[Finding] = []
    rest: list[Finding] = []
    seen: set[str] = set()
    for finding in findings:
        (rest if finding.rule in seen else first).append(finding)
        seen.add(finding.rule)
    return [*first, *rest]


def show(run: FollowedRun, console: Console, *, once: bool = False) -> None:
    """Print one frame, or frames until the run has ended or until q or Ctrl-C is pressed."""
    if once or not console.is_terminal:
        run.look()
        console.print(frame(run.name, run.stand, run.source, console.width))
        return
    run.start()
    try:
        with _keys() as pressed, Live(console=console, auto_refresh=False, screen=True) as screen:
            drawn, width = None, 0
            while not run.stand.over:
                run.touch()
                if (run.version, console.width) != (drawn, width):
                    drawn, width = run.version, console.width
                    screen.update(frame(run.name, run.stand, run.source, width), refresh=True)
                if pressed(BEAT) in LEAVE:
                    break
    except KeyboardInterrupt:
        pass  # how it is left
    finally:
        run.close()
    # The last frame stays in the terminal, as the screen behind it is gone.
    console.print(frame(run.name, run.stand, run.source, console.width))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key and returns it, empty where none came."""
    try:
        import termios  # noqa: PLC0415 - not on every system
        import tty  # noqa: PLC0415 - not on every system

        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (ImportError, OSError, ValueError, termios.error):
        yield _no_keys  # no keyboard here: Ctrl-C still works
        return
    tty.setcbreak(number)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""
