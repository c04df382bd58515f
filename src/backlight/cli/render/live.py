"""The terminal of ``backlight top``: a frame that is drawn anew while a run is followed, until a key."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from backlight.report.live.follower import Followed
from backlight.report.live.terminal import frame

BEAT = 0.1
"""Seconds between two looks at keyboard and news."""

LEAVE = {"q", "Q", "\x03", "\x1b"}


def show(run: Followed, console: Console, *, once: bool = False) -> None:
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
        import termios
        import tty

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
