"""Sampler thread: stacks from inside, and whether a thread runs Python."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import backlight
from backlight.monitors.stalls.instrument import stack_sampler
from backlight.monitors.stalls.instrument.stack_sampler import probe_bytecode, take_sample
from backlight.watchdog.shared_state import Slot
from backlight.watchdog.stacks import (
    RecomputedRegion,
    StackSample,
    parse_samples,
    recomputed_region,
    user_frame,
)
from backlight.watchdog.timeouts import StallLimits


def test_probe_distinguishes_python_from_native_code() -> None:
    stop = threading.Event()
    tids: list[int] = []

    def spin() -> None:
        tids.append(threading.get_native_id())
        while not stop.is_set():
            pass

    def wait() -> None:
        tids.append(threading.get_native_id())
        ctypes.CDLL(None).usleep(600_000)

    answers: dict[str, set[bool | None]] = {}
    for work in (spin, wait):
        tids.clear()
        stop.clear()
        thread = threading.Thread(target=work)
        thread.start()
        while not tids:
            time.sleep(0.001)
        answers[work.__name__] = {probe_bytecode(tids[0]) for _ in range(4)}
        stop.set()
        thread.join()
    # On a busy machine either may be undecided, but never mistaken for the other.
    assert False not in answers["spin"]
    assert True not in answers["wait"]
    assert answers != {"spin": {None}, "wait": {None}}


def test_sample_names_the_function_in_c_that_is_called() -> None:
    """Also where indices, attributes and arguments make other calls on the line."""
    held = {"a": [types.SimpleNamespace(lock=threading.Lock())]}
    held["a"][0].lock.acquire()
    works = {
        "acquire": lambda: (held["a"][int("0")].lock.acquire(), None),
        "sleep": lambda: time.sleep(max(0.5, 0.1)),
    }
    for name, work in works.items():
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        called = ""
        while called != name and time.monotonic() < deadline and thread.is_alive():
            sample = take_sample(0, probed=thread.ident or 0)
            called = next((t.called for t in sample.threads if t.ident == thread.ident), "")
        assert called == name
    held["a"][0].lock.release()


def test_sample_holds_the_line_of_every_thread() -> None:
    gate = threading.Event()
    thread = threading.Thread(target=gate.wait, name="waiting")
    thread.start()
    try:
        taken: list[StackSample] = []
        sampler = threading.Thread(target=lambda: taken.append(take_sample(1)))
        sampler.start()
        sampler.join()
        (found,) = taken
        assert parse_samples(json.loads(json.dumps([dataclasses.asdict(found)]))) == (found,)
        named = {t.name: t for t in found.threads}
        assert named["waiting"].frames[0].function.endswith("wait")
        own = user_frame(named["MainThread"])
        assert own.file == __file__
        assert any(f.name in own.function for f in traceback.extract_stack())
    finally:
        gate.set()
        thread.join()


COLLECTING = """
import gc, sys, threading, time
from backlight.monitors.stalls.instrument.stack_sampler import take_sample

def let_others_run(phase, info):
    if threading.current_thread() is sampler:
        time.sleep(0.0005)

def called(depth, size):  # frames of different sizes, so that one is no longer where another was
    if depth == 0:
        return 0
    return functions[(depth + size) % 5](depth - 1, size)

functions = [called]
for size in range(4):
    names = " = ".join(f"v{i}" for i in range(7 * size + 7))
    exec(f"def called(depth, size):\\n  if depth < 0: {names} = 1\\n"
         "  return functions[(depth + size) % 5](depth - 1, size) if depth else 0")
    functions.append(called)

def sample():
    for _ in range(300):
        take_sample(0)
    print("sampled")

sampler = threading.Thread(target=sample)
gc.callbacks.append(let_others_run)
gc.set_threshold(1)
sys.setswitchinterval(1e-5)
sampler.start()
while sampler.is_alive():
    for depth in (30, 7, 13, 50, 3):
        called(depth, depth)
"""


@pytest.mark.slow
def test_frames_that_end_during_a_collection_are_not_read() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "sampled\n"), done.stderr


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_sample_of_a_recomputation_has_the_line_that_checkpoints_it(
    use_reentrant: bool, tmp_path: Path
) -> None:
    regions: list[RecomputedRegion | None] = []

    class Block(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as pool:
                sample = pool.submit(take_sample, 0).result()
            stack = sample.thread(threading.get_ident())
            assert stack is not None
            regions.append(recomputed_region(stack))
            return super().forward(x)

    model = Block(4, 4)
    with backlight.watch(model, run=tmp_path / "run", monitors=("correctness",)):
        x = torch.randn(2, 4, requires_grad=True)
        line = sys._getframe().f_lineno + 1
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    forward, again = regions
    assert forward is None
    assert again is not None
    assert again.frame is not None
    assert again.frame.function.endswith("Block.forward")
    assert again.line.endswith(f"{Path(__file__).name}:{line}")


class Held:
    """Something that the function of a thread holds."""


def test_a_sample_of_the_line_keeps_nothing_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the training thread's function holds, while the sampler goes on to something else."""
    begun, finished, sampled, released = (threading.Event() for _ in range(4))
    references: list[weakref.ref[Held]] = []

    def training() -> None:
        held = Held()
        references.append(weakref.ref(held))
        begun.set()
        finished.wait(60)

    def read_state(path: Path, now: int) -> None:
        sampled.set()
        released.wait(60)

    monkeypatch.setattr(stack_sampler, "read_state", read_state)
    thread = threading.Thread(target=training)
    thread.start()
    begun.wait(60)
    slots = memoryview(array("q", [0] * len(Slot)))
    slots[Slot.BACKWARDS], slots[Slot.MAIN_IDENT] = 1, thread.ident or 0
    slots[Slot.HEARTBEAT] = time.monotonic_ns()
    heartbeat = types.SimpleNamespace(
        shared_state=types.SimpleNamespace(slots=slots, path=tmp_path), is_counting=True,
        observe_progress=lambda _: None,
    )  # fmt: skip
    counted: list[tuple[object, ...]] = []
    lines = types.SimpleNamespace(add=lambda *line: counted.append(line))
    sampler = stack_sampler.StackSampler(
        heartbeat, StallLimits(), tmp_path / "stacks", tmp_path / "build", lambda: None, lines=lines
    )  # type: ignore[arg-type]
    polling = threading.Thread(target=sampler._poll, args=(slots,))
    polling.start()
    try:
        assert sampled.wait(60)
        finished.set()
        thread.join()
        assert [line[1].function.rpartition(".")[2] for line in counted] == ["training"]
        assert references[0]() is None
    finally:
        released.set()
        polling.join()
