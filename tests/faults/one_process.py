"""A small training with faults injected at given steps; run by the fault suite, never imported by it.

    python one_process.py SECONDS FAULT [FAULT ...]

Each fault lasts SECONDS, so that one process runs several; with SECONDS=0.01 it is the control. Two steps
without a fault precede each. The line at fault has the mark ``# at: FAULT``.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch
from injection import wait_for_watchdog
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
torch.manual_seed(0)

SECONDS = float(sys.argv[1])
FAULTS = sys.argv[2:]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LOCK, SECOND_LOCK = threading.Lock(), threading.Lock()
THRASHING = threading.Event()
LIBC = ctypes.PyDLL(None)
now = time.monotonic


def sleep() -> None:
    time.sleep(SECONDS)  # at: sleep


def spin() -> None:
    end = now() + SECONDS
    while now() < end:  # at: spin
        pass


def acquire_lock_twice() -> None:
    LOCK.acquire()
    LOCK.acquire(timeout=SECONDS)  # at: lock
    LOCK.release()


def acquire_locks_in_opposite_order() -> None:
    def other() -> None:
        with SECOND_LOCK:
            held.set()
            if LOCK.acquire(timeout=SECONDS + 1):
                LOCK.release()

    held = threading.Event()
    with LOCK:
        thread = threading.Thread(target=other)
        thread.start()
        held.wait()
        if SECOND_LOCK.acquire(timeout=SECONDS):  # at: lock_order
            SECOND_LOCK.release()
    thread.join()


def spin_in_c() -> None:
    """Read the clock until the end without any bytecode, so without a chance for another thread."""
    until_end = itertools.takewhile((now() + SECONDS).__gt__, iter(now, None))
    collections.deque(until_end, maxlen=0)  # at: gil_spin


def block_in_c() -> None:
    mutex = ctypes.create_string_buffer(64)
    LIBC.pthread_mutex_lock(mutex)
    until = time.time() + SECONDS
    limit = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    LIBC.pthread_mutex_timedlock(mutex, limit)  # at: gil_block


def run_long_operation() -> None:
    size = 256
    end = now() + SECONDS
    while now() < end and size < 20000:  # sized so that one call lasts SECONDS, or longer on a busy machine
        begin = time.thread_time()
        torch.mm(torch.ones(size, size), torch.ones(size, size))
        one = time.thread_time() - begin
        if one * 8 > SECONDS / 4:
            size = int(size * (SECONDS / one) ** (1 / 3))
            break
        size *= 2
    a = torch.ones(size, size)
    torch.mm(a, a)  # at: long_op


BACKWARD = {
    "sleep": sleep,
    "spin": spin,
    "lock": acquire_lock_twice,
    "gil_spin": spin_in_c,
    "gil_block": block_in_c,
    "long_op": run_long_operation,
    "threads": acquire_lock_twice,
    "lock_order": acquire_locks_in_opposite_order,
}


class Faulty(torch.autograd.Function):
    """Passes the gradient on, after its fault."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Any) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if ctx.fault is not None:
            ctx.fault()
        return grad, None


class Short(torch.autograd.Function):
    """A node that takes a moment."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None


class Net(nn.Module):
    """Two layers with a fault between them."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = nodes
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, fault: str = "") -> torch.Tensor:
        h = self.first(x)
        if fault == "forward":
            time.sleep(SECONDS)  # at: forward
        if fault == "evaluation" and not torch.is_grad_enabled():
            time.sleep(SECONDS)
        if fault == "slow":
            for _ in range(40):
                h = Short.apply(h, SECONDS / 40)
        if fault == "thrash":
            for _ in range(int(20 * SECONDS)):
                h = Short.apply(h, 0.001)
        if fault == "compile":
            h = torch.compile(compiled_rounds)(h)
        if fault == "nodes":
            for _ in range(self.nodes):
                h = h * 1.0
        if fault == "checkpointed":
            for _ in range(20):
                h = checkpoint(multiply, h, self.nodes // 40, use_reentrant=True)
        if fault == "nested":
            h = nested(h, 70)
        h = Faulty.apply(h, BACKWARD.get(fault))
        return self.second(h)


def multiply(h: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        h = h * 1.0
    return h


def compiled_rounds(h: torch.Tensor) -> torch.Tensor:
    """Compiles for at least SECONDS: each round has its own kernels."""
    for n in range(int(6 * SECONDS)):
        h = torch.softmax(h @ h.T @ h, -1) + n
    return h


def nested(h: torch.Tensor, depth: int) -> torch.Tensor:
    if depth == 0:
        return Faulty.apply(h, acquire_lock_twice)
    return checkpoint(nested, h, depth - 1, use_reentrant=True)


class Data(Dataset[torch.Tensor]):
    """One item per step."""

    def __len__(self) -> int:
        return 3 * len(FAULTS) + 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if fault_of(index) == "data":
            time.sleep(SECONDS)
        if fault_of(index) == "feeder":
            feeder = multiprocessing.Process(target=os._exit, args=(1,))
            feeder.start()
            with contextlib.suppress(queue.Empty):
                multiprocessing.Queue().get(timeout=SECONDS)
            feeder.join()
        if fault_of(index) == "worker_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault_of(index) == "worker_stopped":
            subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.ones(2, 8)


class Sluggish:
    """Takes SECONDS to pickle."""

    def __reduce__(self) -> Any:
        time.sleep(SECONDS)
        return (Sluggish, ())


def fault_of(step: int) -> str:
    index, offset = divmod(step, 3)
    return FAULTS[index] if offset == 2 and index < len(FAULTS) else ""


def between(fault: str, model: nn.Module) -> None:
    if fault == "between":
        time.sleep(SECONDS)  # at: between
    if fault == "evaluation":
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 8), fault)
            time.sleep(SECONDS)
        model.train()
    if fault == "save":
        torch.save(Sluggish(), os.devnull)
    if fault == "threads":
        for _ in range(120):
            threading.Thread(target=time.sleep, args=(SECONDS + 2,), daemon=True).start()
    if fault == "thrash":
        THRASHING.set()
        for _ in range(8 if SECONDS > 0.1 else 0):
            threading.Thread(target=hog, daemon=True).start()
    if fault == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def hog() -> None:
    while THRASHING.is_set():
        sum(range(1000))


def node_count() -> int:
    x = torch.ones(2, 8, requires_grad=True)
    multiply(x, 3000).sum().backward()  # the first one is slower
    begin = now()
    multiply(x, 3000).sum().backward()
    return int(SECONDS * 3000 / (now() - begin) * 2)


def main() -> None:
    # Only a running one observes how a process ends. Before the first backward the wait has no timeout.
    wait_for_watchdog()
    model = Net(node_count() if {"nodes", "checkpointed"} & set(FAULTS) else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers = 1 if {"data", "worker_stopped", "worker_killed"} & set(FAULTS) else 0
    loader = DataLoader(Data(), batch_size=None, num_workers=workers, prefetch_factor=1 if workers else None)
    for step, x in enumerate(loader):
        fault, begin = fault_of(step), now()
        between(fault, model)
        loss = model(x, fault).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        THRASHING.clear()
        if fault:
            print("after", fault, step, f"{now() - begin:.1f}", flush=True)


if __name__ == "__main__":
    main()
