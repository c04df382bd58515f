"""Warnings of a watch: their source location, and Python's warning filters."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import pytest

import backlight
from backlight.notifier import Notifier


@pytest.mark.parametrize(("filters", "shown"), [("default", 1), ("always", 3)])
def test_warning_filters_apply_to_repeated_runs(filters: str, shown: int, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(filters)  # type: ignore[arg-type]  # one of those that there are
        for _ in range(3):
            Notifier(tmp_path).warn("ranks", "the environment makes no sense")
    assert [warning.filename for warning in caught] == [__file__] * shown


def test_background_warning_names_the_watch_call(tmp_path: Path) -> None:
    notifier = Notifier(tmp_path)
    thread = threading.Thread(target=notifier.warn, args=("disk", "it is full"))
    with pytest.warns(RuntimeWarning, match="backlight: it is full") as caught:
        thread.start()
        thread.join()
    assert caught[0].filename == __file__


@pytest.mark.parametrize("package", ["other", "backlight_extras"])
def test_warning_names_the_calling_package(package: str, tmp_path: Path) -> None:
    caller = str(Path(backlight.__file__).parents[1] / package / "train.py")
    with pytest.warns(RuntimeWarning, match="backlight: it is full") as caught:
        exec(compile("notifier.warn('disk', 'it is full')", caller, "exec"), {"notifier": Notifier(tmp_path)})
    assert caught[0].filename == caller


def test_error_filter_does_not_end_the_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Notifier(tmp_path).warn("disk", "it is full")
    assert capsys.readouterr().err == "backlight: it is full. Your training continues unchanged.\n"
