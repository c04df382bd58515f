"""A watched script behaves as under Python: output, exit code, arguments, exceptions, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import backlight
from backlight.records import RunStatus

TRAIN = """
import sys, torch
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
"""


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    script = folder / name
    script.write_text(TRAIN + text)
    return script


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def run_watched(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "backlight", "run", "--out", "run", *arguments, **environment)


def test_output_arguments_and_exceptions_are_unchanged(tmp_path: Path) -> None:
    write(
        tmp_path,
        "train(3)\nimport atexit, __main__\natexit.register(lambda: print('at exit', model is not None))\n"
        "print(sys.argv, __name__, __file__, __main__.model is model, sys.path[0] != '')\n"
        "print('to stderr', file=sys.stderr)\n"
        "def fail():\n    raise ValueError('of the script')\nfail()\n",
    )
    arguments = ("train.py", "--lr", "3", "--out", "x", "-h")
    plain, watched = python(tmp_path, *arguments), run_watched(tmp_path, *arguments)
    assert watched.stdout == plain.stdout
    assert "['train.py', '--lr', '3', '--out', 'x', '-h'] __main__" in watched.stdout
    assert "at exit True" in watched.stdout
    assert watched.returncode == plain.returncode == 1
    assert plain.stderr.startswith("to stderr\nTraceback")
    first, rest = watched.stderr.split("\n", 1)
    assert first == "backlight: recording in run; live page: backlight open run"
    assert rest.startswith(plain.stderr)
    run = backlight.open_run(tmp_path / "run")
    assert run.status is RunStatus.FAILED
    assert run.attempts[-1].argv[-4:] == ("3", "--out", "x", "-h")
    assert run.events("exception")[0].payload == {
        "type": "ValueError",
        "message": "of the script",
        "line": "train.py:16",
        "in_backward": False,
        "explained_by": "",
    }
    assert len(run.series_steps("gradient")) == 3


def test_interrupted_and_killed_runs_are_readable(tmp_path: Path) -> None:
    write(tmp_path, "import time\ntrain(50)\nprint('trained', flush=True)\ntime.sleep(600)\n")
    interrupted, killed = (
        subprocess.Popen(
            [sys.executable, "-m", "backlight", "run", "--every", "1", "--out", out, "train.py"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for out in ("interrupted", "killed")
    )  # fmt: skip
    for process in (interrupted, killed):
        assert process.stdout.readline() == "trained\n"
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate(timeout=60)
    assert interrupted.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    run = backlight.open_run(tmp_path / "interrupted")
    assert run.status is RunStatus.FAILED
    assert len(run.series_steps("gradient")) == 50
    # A step is closed when the next one begins, so the last step stays open.
    while len(backlight.open_run(tmp_path / "killed").series_steps("gradient")) < 49:
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    run = backlight.open_run(tmp_path / "killed")
    assert run.status is RunStatus.KILLED
    assert len(run.series_steps("gradient")) >= 49


@pytest.mark.full
def test_module_with_a_package_import_is_run(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        TRAIN + "from mine import other\ntrain(2)\nprint(__name__, __package__)\n"
    )
    (package / "other.py").write_text("")
    watched = run_watched(tmp_path, "-m", "mine.train", "--flag")
    assert watched.stdout == "__main__ mine\n", watched.stderr
    assert watched.returncode == 0


@pytest.mark.full
def test_coverage_measures_a_watched_script(tmp_path: Path) -> None:
    write(tmp_path, "train(3)\nif sys.argv[1:] == ['never']:\n    print('not covered')\n")
    coverage = ("-m", "coverage", "run", "--branch", "--include", "train.py")
    watched = python(tmp_path, *coverage, "-m", "backlight", "run", "--out", "run", "train.py")
    assert watched.returncode == 0, watched.stderr
    report = python(tmp_path, "-m", "coverage", "json", "-q", "-o", "coverage.json")
    assert report.returncode == 0, report.stderr
    (covered,) = json.loads((tmp_path / "coverage.json").read_text())["files"].values()
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert [lines[n - 1] for n in covered["missing_lines"]] == ["    print('not covered')"]


def test_steps_ends_the_script_and_invalid_ranks_are_one_warning(tmp_path: Path) -> None:
    write(tmp_path, "try:\n    train(10**9)\nfinally:\n    print('cleaned up')\n")
    watched = run_watched(tmp_path, "--steps", "5", "train.py", RANK="5", WORLD_SIZE="2")
    assert (watched.returncode, watched.stdout) == (0, "cleaned up\n"), watched.stderr
    run = backlight.open_run(tmp_path / "run")
    assert run.status is RunStatus.FINISHED
    assert list(run.series_steps("gradient")) == [0, 1, 2, 3, 4]
    first, _, *summary = watched.stderr.splitlines()
    message = "backlight: the environment says RANK='5', WORLD_SIZE='2'"
    assert first.startswith(f"train.py:0: RuntimeWarning: {message}")
    assert summary[0] == "run"  # a single process prints the summary of its run
    assert "  other ranks: the environment says RANK='5', WORLD_SIZE='2'; expected whole" in summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py: no such script"),
        (["-m", "nowhere.train"], "no module named 'nowhere.train'"),
        (["--monitors", "kitchen", "train.py"], "no monitor is called 'kitchen'"),
        (["--set", "groups=host", "train.py"], "groups: expected keys with values, got 'host'"),
        (["--set", "redact=a", "--set", "redact=b", "train.py"], "--set redact: is given twice"),
        (["--max-disk", "lots", "train.py"], "--max-disk 'lots': expected a size"),
        (["--config", "none.toml", "train.py"], "none.toml: cannot be read"),
        (["--config", "broken.toml", "train.py"], "broken.toml: not valid TOML"),
        (["--config", "unknown.toml", "train.py"], "unknown.toml: unknown key 'colour'"),
        (["--evry", "1", "train.py"], "No such option '--evry'"),
        (["--out", "taken", "train.py"], "taken: is not a backlight run and not empty"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from backlight.cli.app import main

    write(tmp_path, "print('begun')\n")
    (tmp_path / "broken.toml").write_text("monitors = [")
    (tmp_path / "unknown.toml").write_text("colour = 1")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as leaving:
        main(["run", *arguments])
    output, errors = capsys.readouterr()
    assert (leaving.value.code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        pytest.param("pass", 0, marks=pytest.mark.full),
        pytest.param("1 / 0", 1, marks=pytest.mark.full),
    ],
)
def test_objects_of_a_module_live_until_exit(tmp_path: Path, end: str, code: int) -> None:
    ends = "import os\nclass Ends:\n    def __del__(self, write=os.write):\n        write(2, b'dropped')\n"
    write(tmp_path, ends, "ends.py")
    text = f"import sys\nfrom ends import Ends\nheld = Ends()\ntrain(2)\n{end}\n"
    write(tmp_path, text, "training.py")
    watched = run_watched(tmp_path, "-m", "training")
    assert watched.returncode == code
    # Dropped at exit, not at the end of the module: the summary comes first.
    assert watched.stderr.endswith("next: backlight report run\ndropped")
