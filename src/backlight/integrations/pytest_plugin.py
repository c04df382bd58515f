"""Pytest plugin: a test that trains fails with the findings of its training run.

The fixture ``backlight_watch`` watches a block of a test, the marker ``backlight`` a whole test::

    def test_trains(backlight_watch):
        model, optimizer = build()
        with backlight_watch(model, optimizer):
            train(model, optimizer, steps=20)


    @pytest.mark.backlight(steps=20, fail_on="warning")
    def test_main():
        main()

pytest loads it wherever backlight is installed; torch is imported when a watch begins. The run directory is
below the test's ``tmp_path``.
"""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

if TYPE_CHECKING:
    from backlight.session.watch import Watch

MARKER = "backlight"
FIXTURE = "backlight_watch"


class BacklightWatch:
    """What the fixture ``backlight_watch`` gives: call it for a watch that fails the test by its findings."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    @contextlib.contextmanager
    def __call__(
        self, model: Any = None, optimizer: Any = None, *, fail_on: str = "error", **settings: Any
    ) -> Iterator[Watch]:
        """Watch the block, record every step, and fail the test.

        Parameters
        ----------
        model, optimizer:
            As of :func:`backlight.watch`; None for every one of the process.
        fail_on:
            Severities and rules that fail the test, separated by commas; ``"error"`` by default.
        **settings:
            As of :func:`backlight.watch`; ``steps`` ends the block after so many optimizer steps.

        Raises
        ------
        ValueError
            If ``fail_on`` or a setting names something unknown.
        """
        from backlight.capture.training_stop import StopTraining  # noqa: PLC0415 - imports torch
        from backlight.findings.evaluate import named_findings  # noqa: PLC0415
        from backlight.session.watch import watch  # noqa: PLC0415

        fails = named_findings([name.strip() for name in fail_on.split(",")], "fail_on")
        self._count += 1
        name = "run" if self._count == 1 else f"run-{self._count}"
        options = {"run": self._folder / name, "every": 1, "quiet": True, "summary": False, **settings}
        with contextlib.suppress(StopTraining), watch(model, optimizer, **options) as watched:
            yield watched
        _check(watched, fails)


def _check(watched: Watch, fails: Callable[[Any], bool]) -> None:
    """Fail the test by the findings, or because nothing was measured."""
    __tracebackhide__ = True
    if not watched.is_recorded or not watched.step:
        _fail(f"backlight recorded no optimizer step, so that nothing was checked\n{watched.findings}")
    findings = watched.findings
    failing = [finding for finding in findings if fails(finding)]
    if failing:
        _fail(f"backlight: {failing[0].title}\n{findings}\nrun: {watched.path}")


def _fail(message: str) -> NoReturn:
    __tracebackhide__ = True
    # What ended the steps is no part of the failure.
    raise pytest.fail.Exception(message, pytrace=False) from None


@pytest.fixture(name=FIXTURE)
def _backlight_watch(tmp_path: Path) -> BacklightWatch:
    """Watch training runs of a test: ``with backlight_watch(model, optimizer): ...``."""
    return BacklightWatch(tmp_path / "backlight")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(fail_on='error', **settings): watch the training run of a test, and fail by findings",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give marked tests the fixture that watches them."""
    for item in items:
        if item.get_closest_marker(MARKER) and isinstance(item, pytest.Function):
            item.fixturenames.append(FIXTURE)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a marked test that would run without a watch, or without its settings."""
    for marker in item.iter_markers(MARKER):
        if marker.args:
            _fail(
                f"pytest.mark.{MARKER}: got {marker.args[0]!r}, expected settings by name: "
                f"@pytest.mark.{MARKER}(steps=20)"
            )
        if issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
            _fail(
                f"pytest.mark.{MARKER}: a method of unittest.TestCase is not watched; "
                "mark a function or a method of a plain class"
            )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a marked test under a watch."""
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return (yield)
    watch: Any = pyfuncitem.funcargs[FIXTURE]
    with watch(**marker.kwargs):
        yield
    return True
