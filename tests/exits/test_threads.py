"""Training in threads: one is recorded to its end, and what is not recorded leaves no tick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import backlight

TRAIN = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn

ready = threading.Event()

def start(*arguments, **options):
    thread = threading.Thread(target=train, args=arguments, **options)
    thread.start()
    return thread

def train(steps, pause=0.0, rests=False):
    torch.manual_seed(steps)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if step == 9:
            ready.set()
            if rests:  # a thread that is inside of torch when Python ends aborts the process, watched or not
                threading.Event().wait()
        time.sleep(pause)
"""

ENDINGS = {
    "by_a_thread": ("start(60).join()", 60, ""),
    "by_one_thread_after_another": ("start(30).join(); start(30).join()", 60, ""),
    "by_an_idle_executor": ("pool = ThreadPoolExecutor(1); pool.submit(train, 60).result()", 60, ""),
    "that_goes_on_after_the_main_one": ("start(60, 0.02); ready.wait()", 60, ""),
    "that_begins_when_the_main_one_is_over": (
        "threading.Thread(target=lambda: (threading.main_thread().join(), train(60))).start()",
        60,
        "",
    ),
    "after_training_in_the_main_one": ("train(20)\nstart(60, 0.02)", 80, ""),
    "that_is_ended_with_the_process": (
        "threading.Thread(target=train, args=(60, 0.0, True), daemon=True).start(); ready.wait()",
        None,
        "recording ended while the thread that trains went on",
    ),
    "next_to_another": (
        "thread = start(100, 0.001); train(200, 0.001); thread.join()",
        None,
        "optimizer steps of another thread were not recorded",
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_training_in_threads_is_recorded_or_incomplete(ending: str, tmp_path: Path) -> None:
    code, steps, lacks = ENDINGS[ending]
    (tmp_path / "train.py").write_text(f"{TRAIN}\n{code}\n")
    command = [Path(sys.executable).with_name("backlight"), "run", "--out", "run", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    run = backlight.open_run(tmp_path / "run")
    assert run.shortfall == lacks
    printed = " ".join(done.stderr.split())
    assert (f"Incomplete: {lacks}" in printed) == bool(lacks)
    assert ("✓" in printed) is not bool(lacks)
    if steps is not None:
        assert run.scalar("loss").steps.tolist() == list(range(steps))
