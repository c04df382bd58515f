"""Stacks as the two sources really print them, and the user's place in them."""

from __future__ import annotations

import faulthandler
import json
import threading
from pathlib import Path

import pytest

import backlight
from backlight.diagnose.matrix import stacks
from backlight.diagnose.matrix.observations import Place, Stack


def test_faulthandlers_own_output_is_read(tmp_path: Path) -> None:
    ready, leave = threading.Event(), threading.Event()

    def other() -> None:
        ready.set()
        leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait()
    with (tmp_path / "dump").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    leave.set()
    thread.join()
    found = stacks.from_faulthandler(text, 7, 0)
    assert len(found) >= 2
    functions = [[place.function for place in stack.frames] for stack in found]
    assert any("other" in names for names in functions)
    assert any("test_faulthandlers_own_output_is_read" in names for names in functions)
    here = next(s for s in found if "test_faulthandlers_own_output_is_read" in [p.function for p in s.frames])
    assert stacks.users_place(here).file == __file__


def test_pyspys_output_is_read() -> None:
    frame = {
        "name": "Fn.backward",
        "filename": "/home/me/ops.py",
        "line": 22,
        "module": None,
        "short_filename": "ops.py",
    }
    native = {
        "name": "futex_wait",
        "filename": "/usr/lib/libc.so.6",
        "line": 0,
        "module": "libc",
        "short_filename": "libc",
    }
    thread = {
        "pid": 7,
        "os_thread_id": 7,
        "thread_id": 1,
        "thread_name": "MainThread",
        "active": False,
        "owns_gil": False,
    }
    (stack,) = stacks.from_pyspy(json.dumps([{**thread, "frames": [native, frame]}]), 2)
    assert stack == Stack(
        "py-spy", 2, 7, "MainThread",
        (
            Place("futex_wait", "/usr/lib/libc.so.6", 0, native=True),
            Place("Fn.backward", "/home/me/ops.py", 22),
        ),
        active=False, holds_lock=False, main=True,
    )  # fmt: skip
    assert stacks.native_top(stack) == "futex_wait"
    for text in ("not json", "[{}]", "[1]", "{}x"):
        with pytest.raises(ValueError, match=r"py-spy|Expecting|Extra"):
            stacks.from_pyspy(text, 0)


def test_the_users_own_code_is_told_from_libraries() -> None:
    assert stacks.is_users(Place("f", "/home/me/backlight/examples/train.py", 1))
    for file in (
        threading.__file__,
        pytest.__file__,
        backlight.__file__,
        "<frozen runpy>",
        "<string>",
        "/opt/conda/lib/python3.12/socket.py",
    ):
        assert not stacks.is_users(Place("f", str(file), 1)), file
    assert not stacks.is_users(Place("f", "/home/me/a.so", 0, native=True))


def test_a_backward_of_the_user_comes_before_the_main_thread() -> None:
    main = Stack("py-spy", 0, 7, "MainThread", (Place("main", "/home/me/train.py", 3),), main=True)
    apply = Place("BackwardCFunction.apply", "/x/site-packages/torch/autograd/function.py", 300)
    inner = Stack("py-spy", 0, 7, "autograd", (Place("Fn.backward", "/home/me/ops.py", 22), apply))
    assert stacks.at_work([main, inner]) is inner
    assert stacks.at_work([main]) is main
    assert stacks.at_work([]) is None


def test_the_last_error_and_its_line() -> None:
    library = str(Path(threading.__file__))
    text = (
        "step 1\nTraceback (most recent call last):\n"
        '  File "/home/me/train.py", line 9, in <module>\n    main()\n'
        f'  File "{library}", line 4, in run\n    self.f()\n'
        "ValueError: injected\n"
    )
    assert stacks.traceback_end(text) == ("ValueError: injected", "/home/me/train.py:9")
    assert stacks.traceback_end("all is well\n") == ("", "")
    fatal = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
        f'  File "{library}", line 1 in f\n  File "/home/me/train.py", line 5 in <module>\n'
    )
    assert stacks.traceback_end(fatal) == ("Fatal Python error: Segmentation fault", "/home/me/train.py:5")


def test_what_a_launcher_says_of_its_children_is_not_the_error() -> None:
    launcher = (
        "Traceback (most recent call last):\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )
    worker = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 9, in <module>\nKeyError: 3\n'
    )
    assert stacks.traceback_end(worker + launcher) == ("KeyError: 3", "/home/me/train.py:9")
    refused = "train.py: error: unrecognized arguments: --backend math"
    assert stacks.traceback_end(f"usage: train.py\n{refused}\n{launcher}") == (refused, "")
    assert stacks.traceback_end(launcher)[1] == ""
    chained = worker + "\nDuring handling of the above exception, another exception occurred:\n\n"
    last = worker.replace("line 9", "line 11").replace("KeyError: 3", "OSError: full")
    assert stacks.traceback_end(chained + last) == ("OSError: full", "/home/me/train.py:11")
