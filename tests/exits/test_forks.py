"""Children that a script forks while it is watched use SQLite, as loaders of data in a database do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from processes import run_captured

SCRIPT = """
import os, signal, sqlite3, sys, threading, time
import torch
import backlight

torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
values = {f"metric{number}": float(number) for number in range(200)}

def child():
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (a)")
    connection.executemany("insert into t values (?)", [(i,) for i in range(20)])
    connection.close()

def read():
    while not is_over.is_set():
        backlight.open_run("run").scalar("metric7")

stuck, is_over = 0, threading.Event()
with backlight.watch(model, optimizer, run="run", every=1, quiet=True, flush_interval=0.01) as watch:
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    for number in range(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        watch.log(values)
        pid = os.fork()
        if not pid:
            child()
            os._exit(0)
        end = time.monotonic() + 60
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                stuck += 1
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.0005)
        if stuck == 3:
            break
    is_over.set()
    reader.join()
print(number + 1, "forks,", stuck, "stuck")
"""


@pytest.mark.parametrize(
    "forks", [100, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(3100)])]
)
def test_no_child_is_stuck_in_sqlite(forks: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_captured([sys.executable, "train.py", str(forks)], cwd=tmp_path, timeout=3000)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{forks} forks, 0 stuck\n"
