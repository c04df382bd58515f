"""What is read from the output and the run directory of a case."""

from __future__ import annotations

import threading
from pathlib import Path

from backlight.diagnose.test_matrix.case_run import (
    count_progress,
    last_error,
    last_stall,
    open_case_run,
    steps_at,
)
from run_builder import build_run

LAUNCHER = (
    "Traceback (most recent call last):\n"
    '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
)
WORKER = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in <module>\nKeyError: 3\n'


def test_progress_is_read_from_the_last_match() -> None:
    assert count_progress(r"step (\d+)/(\d+)", "step 1/9\nstep 7/9\n") == 7
    assert count_progress(r"epoch (\w+)", "epoch one\nepoch two\n") == 2
    assert count_progress("x", "xx") == 2
    assert count_progress("x", "") == 0


def test_steps_count_by_the_recorded_times(tmp_path: Path) -> None:
    build_run(tmp_path / "run", name="base", scalars={"time": [100.0, 101.0, 102.0]})
    run = open_case_run(tmp_path)
    assert steps_at(run, [99.0, 100.0, 101.5, 200.0]) == (0, 1, 2, 3)
    assert last_stall(run) is None
    assert open_case_run(tmp_path / "elsewhere") is None
    assert (steps_at(None, [1.0]), last_stall(None)) == (None, None)


def test_the_last_error_and_its_line() -> None:
    library = str(Path(threading.__file__))
    text = (
        "step 1\nTraceback (most recent call last):\n"
        '  File "/home/me/train.py", line 9, in <module>\n    main()\n'
        f'  File "{library}", line 4, in run\n    self.f()\n'
        "ValueError: injected\n"
    )
    assert last_error(text) == ("ValueError: injected", "/home/me/train.py:9")
    assert last_error("all is well\n") == ("", "")
    fatal = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
        f'  File "{library}", line 1 in f\n  File "/home/me/train.py", line 5 in <module>\n'
    )
    assert last_error(fatal) == ("Fatal Python error: Segmentation fault", "/home/me/train.py:5")


def test_the_report_of_a_launcher_is_not_the_error() -> None:
    assert last_error(WORKER + LAUNCHER) == ("KeyError: 3", "/home/me/train.py:9")
    refused = "train.py: error: unrecognized arguments: --backend math"
    assert last_error(f"usage: train.py\n{refused}\n{LAUNCHER}") == (refused, "")
    assert last_error(LAUNCHER)[1] == ""
    chained = WORKER + "\nDuring handling of the above exception, another exception occurred:\n\n"
    last = WORKER.replace("line 9", "line 11").replace("KeyError: 3", "OSError: full")
    assert last_error(chained + last) == ("OSError: full", "/home/me/train.py:11")
