"""Fixtures of the commands that diagnose a script."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from answers import Command


@pytest.fixture(autouse=True)
def _only_new_models(only_new_models: None) -> None:
    """Names of parameters must not depend on earlier tests."""


@pytest.fixture
def command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    check_answer: Callable[[Sequence[object], int, str], None],
) -> Command:
    from backlight.cli.app import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(*arguments: str) -> tuple[int, str, str]:
        # The script's output is redirected by descriptor: it must not be written into the capture itself.
        with open(1, "w", encoding="utf-8", closefd=False) as stdout, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as leaving:
                main(list(arguments))
        out, errors = capfd.readouterr()
        check_answer(arguments, int(leaving.value.code or 0), out)
        return leaving.value.code, out, errors

    return run
