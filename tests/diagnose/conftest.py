"""Names of parameters must not depend on models that earlier tests of the same process left behind."""

import sys
from pathlib import Path
from typing import Protocol

import pytest

from earlier_models import _frozen, _no_models_of_others  # noqa: F401 - fixtures


class Command(Protocol):
    """Runs the command line in this process."""

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Return its exit code, and what it and the script have printed."""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
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
        return (leaving.value.code, *capfd.readouterr())

    return run
