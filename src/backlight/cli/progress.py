"""Progress bars on standard error: of counted work, and of an experiment with loss, accuracies and phase."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from backlight.terminal import make_console

if TYPE_CHECKING:
    from backlight.experiments.runner import TrainingProgress as RunProgress


@contextlib.contextmanager
def count_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Yield a function that shows how many of how many are done, and a text; silent without a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    bar = Progress(
        BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(), console=console, transient=True, disable=quiet or not console.is_terminal,
    )  # fmt: skip
    task = bar.add_task(what, total=None)

    def show(done: int, total: int, text: str = what) -> None:
        bar.update(task, completed=done, total=total, description=text)

    with bar:
        yield show


class Bar:
    """A bar on standard error; where that is no terminal, a line for each tenth of the run."""

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._name = name
        self._console = make_console(stderr=True)
        self._tenth = -1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(name, total=1, text="")

    def __enter__(self) -> Callable[[RunProgress], None]:
        if self._console.is_terminal:
            self._bar.start()
        return self.show

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""
        self._console.print(f"backlight: {text}", style="yellow", soft_wrap=True)

    def show(self, progress: RunProgress) -> None:
        """Show how far the run is."""
        values = progress.values
        parts = [f"loss {_short(values.get('train_loss'))} / {_short(values.get('test_loss'))}"]
        parts += [f"accuracy {_share(values.get('train_accuracy'))} / {_share(values.get('test_accuracy'))}"]
        text = "  ".join([*parts, progress.phase])
        self._bar.update(self._task, completed=progress.step, total=progress.steps, text=text)
        tenth = 10 * progress.step // max(1, progress.steps)
        if not self._console.is_terminal and tenth > self._tenth:
            self._tenth = tenth
            self._console.print(f"{self._name} {progress.step}/{progress.steps}  {text}", soft_wrap=True)


def _short(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"
