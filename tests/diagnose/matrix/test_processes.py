"""The processes of a case are found wherever they went, and nothing else is ever ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backlight.diagnose.matrix import processes
from backlight.diagnose.matrix.evidence import Collection, collect
from backlight.diagnose.matrix.processes import MARK, Tree

OURS = f"of-{uuid.uuid4().hex}"
CHILD = "import time; print('up', flush=True); time.sleep(60)"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(code: str, *, mark: str = OURS) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, MARK: mark},
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


LEADER = """
import subprocess, sys, time
apart = dict(start_new_session=True, stdout=subprocess.DEVNULL)
child = subprocess.Popen([sys.executable, 'child.py'], **apart)
between = subprocess.run([sys.executable, 'between.py'], stdout=subprocess.PIPE, text=True)
print(child.pid, between.stdout, flush=True)
time.sleep(60)
"""

BETWEEN = """
import subprocess, sys
apart = dict(start_new_session=True, stdout=subprocess.DEVNULL)
print(subprocess.Popen([sys.executable, 'child.py'], **apart).pid)
"""


def test_every_descendant_is_found_and_only_those_are_ended(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "between.py").write_text(BETWEEN)
    bystander = start(CHILD, mark=f"not-{OURS}")
    # A child in a session of its own, and a grandchild whose parent is gone at once.
    leader = start(LEADER)
    assert bystander.stdout.readline() == "up\n"
    child, orphan = (int(word) for word in leader.stdout.readline().split())
    tree = Tree(leader.pid, OURS)
    found = [p.pid for p in tree.living(thorough=True)]
    assert found[0] == leader.pid
    assert set(found) == {leader.pid, child, orphan}
    said = tree.end(grace=3)
    leader.wait(5)
    assert said == (f"SIGTERM to {', '.join(str(pid) for pid in found)}",)
    assert tree.living(thorough=True) == []
    assert bystander.poll() is None


def test_what_ignores_the_first_signal_gets_the_second(start: Start) -> None:
    leader = start(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {CHILD}")
    assert leader.stdout.readline() == "up\n"
    said = Tree(leader.pid, OURS).end(grace=0.3)
    assert said == (f"SIGTERM to {leader.pid}", f"SIGKILL to {leader.pid}")
    assert leader.wait(5) == -signal.SIGKILL


def test_a_stopped_process_is_ended(start: Start) -> None:
    leader = start(CHILD)
    assert leader.stdout.readline() == "up\n"
    os.kill(leader.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while processes.look(leader.pid).state != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Tree(leader.pid, OURS).end(grace=3) == (f"SIGTERM to {leader.pid}",)
    assert leader.wait(5) == -signal.SIGTERM


def test_a_signal_never_reaches_who_got_the_pid_since(start: Start) -> None:
    leader = start(CHILD)
    assert leader.stdout.readline() == "up\n"
    now = processes.look(leader.pid)
    other = processes.Process(now.pid, now.parent, now.session, now.started - 1, "S", 1, 0.0, "python")
    assert not processes.send(other, signal.SIGKILL)
    assert leader.poll() is None


def test_stacks_are_asked_for_only_where_a_handler_is(start: Start, tmp_path: Path) -> None:
    plain = start(CHILD)
    handling = start(
        f"import faulthandler; f = open({str(tmp_path / 'dump')!r}, 'w')\n"
        f"faulthandler.register({processes.DUMP_SIGNAL}, file=f, all_threads=True)\n"
        "def held():\n    import time; print('up', flush=True); time.sleep(60)\nheld()\n"
    )
    assert (plain.stdout.readline(), handling.stdout.readline()) == ("up\n", "up\n")
    assert not processes.catches(plain.pid, processes.DUMP_SIGNAL)
    assert processes.catches(handling.pid, processes.DUMP_SIGNAL)
    collection = Collection(tmp_path / "evidence", tmp_path)
    collect(collection, [processes.look(plain.pid), processes.look(handling.pid)])
    assert plain.poll() is None
    assert handling.poll() is None
    by_signal = [s for s in collection.stacks if s.source == "faulthandler"]
    assert {s.pid for s in by_signal} == {handling.pid}
    assert [s.frames[0].function for s in by_signal] == ["held"] * 3
    assert all(s.main for s in by_signal)
    names = {Path(kept.path).name for kept in collection.kept}
    assert {"processes.txt", f"proc-{plain.pid}.txt", f"stacks-signal-{handling.pid}.txt"} <= names
    assert all((tmp_path / kept.path).stat().st_size for kept in collection.kept)
    missing = {m.what: m.why for m in collection.missing}
    assert "no handler is installed there" in missing[f"stacks by signal of process {plain.pid}"]


def test_without_pyspy_that_is_said(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = start(CHILD)
    assert leader.stdout.readline() == "up\n"
    monkeypatch.setattr("backlight.diagnose.matrix.evidence.pyspy", lambda: None)
    collection = Collection(tmp_path / "evidence", tmp_path)
    collect(collection, [processes.look(leader.pid)])
    assert collection.stacks == []
    assert ("Python and native stacks by py-spy", "not installed: pip install py-spy") in [
        (m.what, m.why) for m in collection.missing
    ]


def test_tracing_that_is_denied_is_said(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = start(CHILD)
    assert leader.stdout.readline() == "up\n"
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\necho 'Permission Denied: ptrace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("backlight.diagnose.matrix.evidence.pyspy", lambda: str(program))
    collection = Collection(tmp_path / "evidence", tmp_path)
    collect(collection, [processes.look(leader.pid)])
    assert [(m.what, m.why) for m in collection.missing if "py-spy" in m.what] == [
        (f"stacks by py-spy of process {leader.pid}", "Permission Denied: ptrace")
    ]
    assert processes.look(999_999_999) is None
