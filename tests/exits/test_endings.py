"""However a script ends, exit code, output and files are those of plain Python, and a summary is printed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import pytest

from backlight.launch.script import Interrupted, copy_ignored, launch
from backlight.store.read.run import open_run

TRAIN = """
import atexit, os, random, signal, sys, threading, time
import torch
random.seed(1)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
log = open("log.txt", "w")
log.write("not flushed")
atexit.register(lambda: open("checkpoint", "w").write("saved"))
atexit.register(lambda: print("drawn", random.random()))
atexit.register(lambda: print("at exit", getattr(sys, "last_type", None), sys.excepthook.__name__))
def save():
    time.sleep(0.3)
    open("late", "w").write("saved")
threading.Thread(target=save).start()
"""

ENDINGS = {
    "exit with a message": "sys.exit('of the script')",
    "exception": "def fail():\n    raise ValueError('of the script')\nfail()",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
}
"""More are in ``programs``, without the place of the summary."""


@dataclass
class Ended:
    code: int
    output: str
    errors: str
    files: dict[str, str]


def start(folder: Path, *command: str | Path) -> Callable[[], Ended]:
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN + ENDINGS[folder.parent.name])
    process = subprocess.Popen(
        [*command, "train.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )

    def end() -> Ended:
        output, errors = process.communicate()
        files = {name: (folder / name).read_text() for name in ("log.txt", "checkpoint", "late")}
        return Ended(process.returncode, output, errors.replace(str(folder), ""), files)

    return end


@pytest.mark.parametrize("ending", ENDINGS)
def test_ending_is_that_of_plain_python_and_the_summary_is_printed(ending: str, tmp_path: Path) -> None:
    (tmp_path / ending).mkdir()
    console_script = Path(sys.executable).with_name("backlight")
    starting = [
        start(tmp_path / ending / "plain", sys.executable),
        start(tmp_path / ending / "watched", console_script, "run", "--out", "run"),
    ]
    plain, watched = (end() for end in starting)
    assert (watched.code, watched.output, watched.files) == (plain.code, plain.output, plain.files)
    assert set(plain.files.values()) == {"not flushed", "saved"}
    assert "at exit" in plain.output
    assert "drawn" in plain.output
    printed, summary, rest = watched.errors.partition("\nrun\n")
    assert printed.startswith("backlight: recording in run;")
    assert summary, watched.errors
    assert "next: backlight report run" in rest
    traceback = plain.errors
    if ending == "interrupt":
        assert plain.code == -signal.SIGINT
        assert watched.errors.endswith(traceback), "the interpreter prints it after the summary"
    else:
        assert f"{printed}\n".endswith(traceback), "the script's last words come first"
    run = open_run(tmp_path / ending / "watched" / "run")
    assert run.last_step() == 2


class Failing:
    """A watch whose end is interrupted."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("script", "watch", "is_first"),
    [
        ("raise KeyboardInterrupt('first')", Failing(KeyboardInterrupt("second")), True),
        ("", Failing(KeyboardInterrupt("second")), False),
        ("raise ValueError", Failing(KeyboardInterrupt("second")), False),
    ],
)
def test_second_interrupt_ends_the_end_of_the_run_at_once(
    script: str,
    watch: AbstractContextManager[None],
    is_first: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    path = tmp_path / "train.py"
    path.write_text(script)
    called: list[str] = []
    with pytest.raises(Interrupted) as interrupted:
        launch(watch, str(path), [], module=False, after=lambda: called.append("summary"))
    assert not called
    error = interrupted.value.error
    assert str(error) == ("first" if is_first else "second")
    stack = error.__traceback__
    assert [stack.tb_frame.f_code.co_filename] == [str(path)] if is_first else stack is None
    with pytest.raises(Interrupted, match=r"^$") as interrupted:
        launch(nullcontext(), str(path), [], module=False, after=lambda: interrupt("in the summary"))


def interrupt(text: str) -> None:
    raise KeyboardInterrupt(text)


def test_copy_of_an_interrupt_by_torchrun_is_ignored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(KeyboardInterrupt), copy_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one was ignored as well")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr("backlight.launch.script.COPY_S", -1.0)
    with pytest.raises(KeyboardInterrupt), copy_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("a late one was ignored")


def test_interrupt_is_ignored_under_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(KeyboardInterrupt), copy_ignored():
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it was ignored")


def is_followed(folder: Path) -> bool:
    """Return whether the watchdog process of the run in ``folder`` holds descriptors of the training process.

    One is that of the guard of its own end.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"watchdog.process" in command and str(folder).encode() in command:
                links = [os.readlink(link) for link in (process / "fd").iterdir()]  # noqa: PTH115 - no path
                return links.count("anon_inode:[pidfd]") > 1
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_without_a_handler_is_followed_by_the_summary(number: int, tmp_path: Path) -> None:
    """The process is gone at once; its watchdog process prints what it would have printed."""
    text = TRAIN.replace("threading.Thread(target=save).start()", "")
    loop = "while True:\n    optimizer.step()\n    print('ready', flush=True)\n    time.sleep(0.05)\n"
    (tmp_path / "train.py").write_text(f"{text}\n{loop}")
    command = [Path(sys.executable).with_name("backlight"), "run", "--out", "run", "train.py"]
    with (tmp_path / "errors.txt").open("w") as errors:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=errors, text=True)
    assert process.stdout is not None
    while not is_followed(tmp_path) or open_run(tmp_path / "run").last_step() < 2:
        assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate()
    assert process.returncode == -number
    while "next: backlight report run" not in (printed := (tmp_path / "errors.txt").read_text()):
        time.sleep(0.05)
    assert f"Killed by {signal.Signals(number).name}." in printed
    assert "Incomplete: recording stopped at step" in printed
