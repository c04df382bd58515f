"""Commands that run a script, through the installed console script: local modules, misplaced options."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.cli import app as application

pytestmark = pytest.mark.slow

Console = Callable[..., subprocess.CompletedProcess[str]]

TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
arguments = parser.parse_args()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
print("trained with", arguments.lr)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a working directory with ``train.py`` and the package ``mine`` without ``__main__``."""
    (tmp_path / "train.py").write_text(TRAIN)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "names.py").write_text("")
    (package / "train.py").write_text(f"from mine import names\n{TRAIN}")
    (package / "broken.py").write_text("import not_installed_anywhere\n")
    return tmp_path


def script_commands() -> list[str]:
    commands = application.all_commands()
    named = [name for name in commands if any("-m" in p.opts for p in commands[name].params)]
    return [name.removesuffix(" measure") for name in named]


@pytest.mark.parametrize(
    "name",
    [
        name if name in {"run", "nan"} else pytest.param(name, marks=pytest.mark.full)
        for name in script_commands()
    ],
)
def test_a_module_of_the_working_directory_is_found(name: str, console_script: Console, folder: Path) -> None:
    done = console_script(folder, name, "-m", "mine.train", "--lr", "0.2")
    assert done.returncode == 0, done.stderr
    if name in {"run", "nan"}:  # the others end the script
        assert "trained with 0.2\n" in done.stdout


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("mine.tain", "no module named 'mine.tain' in "),
        ("mine", "no module named 'mine.__main__' in "),
        ("train.py", "-m train.py: is a file, expected the name of a module; leave out -m"),
    ],
)
def test_a_missing_module_is_refused(
    module: str, message: str, console_script: Console, folder: Path
) -> None:
    done = console_script(folder, "run", "-m", module)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"backlight: {message}")
    assert not (folder / "runs").exists()


def test_an_import_error_inside_a_module_is_shown_as_by_python(console_script: Console, folder: Path) -> None:
    done = console_script(folder, "run", "-m", "mine.broken")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert "ModuleNotFoundError: No module named 'not_installed_anywhere'\n" in done.stderr


@pytest.mark.parametrize("name", ["run", "nan"])
def test_an_option_of_the_script_before_its_name_is_explained(
    name: str, console_script: Console, folder: Path
) -> None:
    done = console_script(folder, name, "--lr", "0.1", "train.py")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("backlight: No such option '--lr'")
    expected = f"; options of the script come after its name: backlight {name} train.py --lr ...\n"
    assert done.stderr.endswith(expected)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("run", "--steps=3"),
        pytest.param("why-no-grad", "--steps=3", marks=pytest.mark.full),
        pytest.param("profile", "--timed=3", marks=pytest.mark.full),
    ],
)
def test_an_option_of_backlight_that_the_script_refuses_is_explained(
    name: str, option: str, console_script: Console, folder: Path
) -> None:
    done = console_script(folder, name, "train.py", option)
    assert done.returncode == 2
    assert (
        f"backlight: {option} came after train.py, so the script received it. Options of backlight come "
        f"before the script: backlight {name} {option} ... train.py\n"
    ) in done.stderr


def test_a_fail_on_that_the_script_ignores_is_explained(console_script: Console, folder: Path) -> None:
    (folder / "train.py").write_text(TRAIN.replace("parse_args()", "parse_args([])"))
    done = console_script(folder, "check", "train.py", "--steps", "2", "--fail-on", "error")
    assert done.returncode == 0, done.stderr
    assert (
        "backlight: --steps, --fail-on came after train.py, so the script received it. Options of backlight "
        "come before the script: backlight check --steps ... train.py\n"
    ) in done.stderr


def test_an_option_unknown_to_both_gets_no_hint(console_script: Console, folder: Path) -> None:
    assert "came after" not in console_script(folder, "run", "train.py", "--colour", "3").stderr


def test_samples_of_a_requested_step(console_script: Console, folder: Path) -> None:
    done = console_script(folder, "run", "--out", "first", "--set", "health.decompose=2", "train.py")
    assert done.returncode == 0, done.stderr
    done = console_script(folder, "findings", "first", "--samples", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Sample 0 of 1 has the largest share of the squared gradient norm, 100 %")
    done = console_script(folder, "findings", "first", "--samples", "1", "--json")
    answer = json.loads(done.stdout)
    assert (answer["step"], answer["decomposed"]) == (1, [])
    assert "`backlight run --set health.decompose=1`" in answer["text"]
    done = console_script(folder, "findings", "first", "--samples", "1", "--fail-on", "error")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--samples excludes --format and --fail-on" in done.stderr
