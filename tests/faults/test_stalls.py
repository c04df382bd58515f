"""Fault suite: every injected stall gets its diagnosis, and its control none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from backlight.store.read.run import open_run
from backlight.watchdog.words import STARVED
from faults import missing_gradients, non_finite
from faults.stall_faults import (
    HERE,
    ISSUED,
    ONE,
    RANKS,
    STALL,
    Fault,
    findings_on,
    run_faults,
    score,
    step_of,
)
from ranks.launching import watching

pytestmark = pytest.mark.alone

TOGETHER = [f for f in ONE if not f.alone and not f.slow]
# One of each kind; a lock is held in the test of the finding that is stored while it hangs.
DEFAULT = [f for f in TOGETHER if f.name in {"sleep", "spin", "gil_spin", "slow"}]
LOCKS = [f for f in TOGETHER if f.name in {"lock", "lock_order", "gil_block", "nested", "threads"}]
ENDING = [f for f in RANKS if not f.lasting and not f.slow]
FIRST_OF_RANKS = [f for f in ENDING if f.name in {"backward", "evaluation"}]


def check(faults: list[Fault], out: Path, **options: float) -> str:
    script = faults[0].script
    findings, log, _ = run_faults(faults, out, **options)
    wrong = []
    for index, fault in enumerate(faults):
        own = findings_on(fault, index, findings, alone=len(faults) == 1)
        result, why = score(fault, own, script)
        if len({f.subject.verdict for f in own}) < len(own):
            wrong.append(f"{fault.name}: reported more than once: {[f.detail for f in own]}")
        # On an overloaded machine starvation is the correct diagnosis.
        if result != "correct" and STARVED not in why:
            wrong.append(f"{fault.name}: {result}: {why}")
    expected = {step_of(i, faults[0].world) for i in range(len(faults))}
    wrong += [f.detail for f in findings if f.subject.step not in expected and not faults[0].lasting]
    assert not wrong, "\n".join([*wrong, log[-4000:]])
    durations = dict(re.findall(r"^after (\w+) \d+ ([\d.]+)$", log, re.MULTILINE))
    for fault in faults:
        if fault.kind is None and not fault.lasting and fault.world == 1:
            assert float(durations[fault.name]) > STALL, "the period is shorter than the timeout"
    return log


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(DEFAULT, id="default"),
        pytest.param(LOCKS, id="locks", marks=pytest.mark.full),
        pytest.param([f for f in TOGETHER if f not in DEFAULT + LOCKS], id="others", marks=pytest.mark.full),
    ],
)
def test_faults_of_one_process(faults: list[Fault], tmp_path: Path) -> None:
    log = check(faults, tmp_path / "run")
    lasting = [f.name for f in faults if f.name != "kill"]
    assert [line.split()[1] for line in log.splitlines() if line.startswith("after")] == lasting


def test_controls_have_no_finding(tmp_path: Path) -> None:
    faults = [f for f in TOGETHER if f.name != "kill"]
    findings, log, code = run_faults(faults, tmp_path / "run", seconds=0.02, stall=None)
    assert code == 0, log
    assert findings == []
    assert [line.split()[1] for line in log.splitlines() if line.startswith("backlight: ")] == ["recording"]
    assert not list((tmp_path / "run").glob("attempt-000/watchdog-*"))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(FIRST_OF_RANKS, id="first"),
        pytest.param([f for f in ENDING if f not in FIRST_OF_RANKS], id="others", marks=pytest.mark.full),
    ],
)
def test_faults_of_ranks(faults: list[Fault], tmp_path: Path) -> None:
    check(faults, tmp_path / "run")


def test_collective_that_is_waited_for_elsewhere(tmp_path: Path) -> None:
    """The others wait for the handle, at another line: the cause is the rank that has not issued it."""
    check([f for f in ISSUED if f.name == "async_late"], tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("fault", [f for f in ISSUED if f.name != "async_late"], ids=lambda f: f.name)
def test_issued_collectives(fault: Fault, tmp_path: Path) -> None:
    check([fault], tmp_path / "run")


def test_first_backward_of_many_nodes_is_slow(tmp_path: Path) -> None:
    fault = next(f for f in ONE if f.name == "nodes")
    log = check([fault], tmp_path / "run")
    reported = re.search(r"SLOW, not hung: backward ([\d,]+) of ([\d,]+) nodes, [\d.]+k?/s, ETA (\d+) s", log)
    assert reported is not None, log
    done, total = (int(text.replace(",", "")) for text in reported.groups()[:2])
    assert 0 < done < total


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(f, id=f.name, marks=() if f.name == "kill" else pytest.mark.full)
        for f in RANKS
        if f.name in {"broadcast", "kill", "raise", "ends"}
    ],
)
def test_fault_that_ends_the_run(fault: Fault, tmp_path: Path) -> None:
    check([fault], tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [f for f in (*ONE, *RANKS) if f.slow or f.alone or f.lasting],
    ids=lambda f: f"{f.name}-{f.world}",
)
def test_remaining_faults(fault: Fault, tmp_path: Path) -> None:
    check([fault], tmp_path / "run")


def test_every_scenario_is_in_the_readme() -> None:
    text = (HERE / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)`", text))
    injected = (
        {f.name for f in (*ONE, *RANKS, *ISSUED)} | set(missing_gradients.FAULTS) | set(non_finite.FAULTS)
    )
    assert injected <= named


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "options"),
    [
        pytest.param([f for f in RANKS if not f.lasting], {"seconds": 0.02}, id="ranks"),
        # Every rank has the same fault, so that the ranks agree.
        *(pytest.param([f], {"control": True}, id=f.name) for f in RANKS if f.lasting),
        *(pytest.param([f], {"seconds": 0.02}, id=f.name) for f in ONE if f.alone and not f.lasting),
        *(
            pytest.param([f], {"control": True} if f.lasting else {"seconds": 0.02}, id=f.name)
            for f in ISSUED
        ),
    ],
)
def test_other_controls_have_no_finding(faults: list[Fault], options: dict[str, Any], tmp_path: Path) -> None:
    findings, log, code = run_faults(faults, tmp_path / "run", **options)
    assert (findings, code) == ([], 0), log


@pytest.mark.full
@pytest.mark.parametrize(
    "names", [("sleep", "spin", "lock", "gil_block", "slow", "thrash"), ("between", "backward")]
)
def test_overloaded_machine_makes_no_diagnosis_wrong(names: tuple[str, ...], tmp_path: Path) -> None:
    faults = [f for f in (ONE if "lock" in names else RANKS) if f.name in names]
    script = HERE / ("one_process.py" if faults[0].world == 1 else "ranks.py")
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3 * (os.cpu_count() or 1))
    ]
    try:
        findings, log, _ = run_faults(faults, tmp_path / "run", seconds=6.0)
    finally:
        for process in load:
            process.kill()
            process.wait()
    scores = [
        score(f, findings_on(f, index, findings, alone=False), script) for index, f in enumerate(faults)
    ]
    assert [s for s in scores if s[0] == "wrong"] == [], log
    assert sum(s[0] == "correct" for s in scores) >= len(scores) // 2, log


def test_finding_is_stored_while_the_process_hangs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = [HERE / "one_process.py", 600, "lock"]
    process = subprocess.Popen(
        watching("--monitors", "stalls", "--stall", 1, "--out", out, *script),
        stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        _where_it_is_recorded, line = (process.stderr.readline().decode() for _ in range(2))
        assert "BLOCKED: the main thread waits for a lock in acquire_lock_twice, one_process.py:" in line
        assert process.poll() is None
        read = [sys.executable, "-m", "backlight", "findings", str(out), "--json", "--fail-on", "stall"]
        deadline = time.monotonic() + 60
        while True:
            answer = subprocess.run(read, capture_output=True, check=False)
            if answer.returncode or time.monotonic() > deadline:
                break
        assert answer.returncode == 1, answer.stderr
        (finding,) = json.loads(answer.stdout)["findings"]
        assert finding["rule"] == "stall"
        assert finding["subject"]["verdict"] == "BLOCKED"
        assert finding["subject"]["parameter"] == "second.weight"
        assert finding["refuted_if"]
        dump = open_run(out).read_evidence(finding["evidence"][0]["path"]).decode()
        assert "in acquire_lock_twice" in dump
        assert "a lock" in dump
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
