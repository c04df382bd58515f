"""Calls in C that do not begin again after a signal last as long under a watch as without it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Console = Callable[..., subprocess.CompletedProcess[str]]

CALLS = """
import ctypes, json, os, socket, sys
import torch

S = 3

C = ctypes.PyDLL(None, use_errno=True)  # holds the interpreter lock: the sampler thread is silent
class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("rest", ctypes.c_long)]
span = ctypes.byref(Time(S, 0))
read, write = os.pipe()
left, right = socket.socketpair()
left.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(Time(S, 0)))
listener = socket.create_server(("127.0.0.1", 0))
listener.setblocking(True)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bytes(Time(S, 0)))
poll = (ctypes.c_int * 2)(read, 1)
epoll = C.epoll_create1(0)
semaphore = ctypes.create_string_buffer(64)
C.sem_init(semaphore, 0, 0)
fds = ctypes.create_string_buffer(128)
fds[read // 8] = 1 << read % 8

def until():
    now = Time()
    C.clock_gettime(0, ctypes.byref(now))
    return ctypes.byref(Time(now.seconds + S, now.rest))

calls = {
    "sleep": lambda: C.sleep(S),
    "nanosleep": lambda: C.nanosleep(span, None),
    "poll": lambda: C.poll(poll, 1, S * 1000),
    "usleep": lambda: C.usleep(S * 1_000_000),
    "clock_nanosleep": lambda: C.clock_nanosleep(1, 0, span, None),
    "select": lambda: C.select(read + 1, fds, None, None, ctypes.byref(Time(S, 0))),
    "pselect": lambda: C.pselect(read + 1, fds, None, None, span, None),
    "ppoll": lambda: C.ppoll(poll, 1, span, None),
    "epoll_wait": lambda: C.epoll_wait(epoll, ctypes.create_string_buffer(12), 1, S * 1000),
    "sem_timedwait": lambda: C.sem_timedwait(semaphore, until()),
    "recv": lambda: C.recv(left.fileno(), ctypes.create_string_buffer(1), 1, 0),
    "accept": lambda: C.accept(listener.fileno(), None, None),
}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
found = {}
for name in sys.argv[1:]:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    ctypes.set_errno(0)
    returned = calls[name]()
    found[name] = [returned, os.strerror(ctypes.get_errno()) if returned else ""]
print(json.dumps(found))
"""

NAMES = (
    "sleep", "nanosleep", "poll", "usleep", "clock_nanosleep", "select", "pselect", "ppoll", "epoll_wait",
    "sem_timedwait", "recv", "accept",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "has_py_spy"),
    [
        pytest.param(NAMES[:3], False, id="three"),
        pytest.param(NAMES, True, id="all", marks=pytest.mark.full),
        pytest.param(NAMES, False, id="all without py-spy", marks=pytest.mark.full),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the calls of Linux")
def test_blocking_calls_in_c_are_not_ended_early(
    names: tuple[str, ...],
    has_py_spy: bool,
    tmp_path: Path,
    console_script: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    if not has_py_spy:
        (site / "sitecustomize.py").write_text(
            "import shutil\nwhich = shutil.which\n"
            "shutil.which = lambda name, **more: None if name == 'py-spy' else which(name, **more)\n"
        )
    (tmp_path / "train.py").write_text(CALLS)
    plain = subprocess.run(
        [sys.executable, "train.py", *names], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    watched = console_script(tmp_path, "run", "--stall", "2", "--out", "run", "train.py", *names)
    assert json.loads(watched.stdout) == json.loads(plain.stdout)
