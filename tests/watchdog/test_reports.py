"""Resolution of a stall: a rank moves again only after two further heartbeats."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from backlight.processes import ProcessEnd
from backlight.records import DiagnosisKind, Phase
from backlight.store.read.run import open_run
from backlight.watchdog.observation import ExitReason
from backlight.watchdog.reports import ENDED, RESUMED, StallStart, as_finding, find_resolution
from backlight.watchdog.shared_state import (
    RankStatus,
    SharedState,
    Slot,
    StateSnapshot,
    read_state,
)
from backlight.watchdog.text import Diagnosis
from ranks.launching import watching


def state(
    tmp_path: Path, *, progress: int, raised: int = 0, status: RankStatus = RankStatus.RUNNING
) -> StateSnapshot:
    path = tmp_path / "rank-00000.state"
    path.unlink(missing_ok=True)
    shared = SharedState(path)
    shared.open(rank=0, world_size=1, main_ident=1, main_tid=1, timeout_s=None)
    for slot, value in ((Slot.PROGRESS, progress), (Slot.RAISED, raised), (Slot.STATUS, status)):
        shared.slots[slot] = value
    return read_state(path)


@pytest.mark.parametrize(
    ("claim", "title", "detail"),
    [
        ("BLOCKED: it waits; CPU 0 %; 3 s", "BLOCKED: it waits", "CPU 0 %; 3 s."),
        ("DEAD: rank 1 has left", "DEAD: rank 1 has left", "in backward, with high confidence."),
        (
            f"DEAD: `{'a.' * 60}weight` is gone; 3 s",
            f"DEAD: `…{'a.' * 28}weight` is gone",
            f"DEAD: `{'a.' * 60}weight` is gone; 3 s.",
        ),
    ],
)
def test_detail_does_not_repeat_the_title(claim: str, title: str, detail: str) -> None:
    finding = as_finding(
        Diagnosis(DiagnosisKind.DEAD, Phase.BACKWARD, claim, "", "", confidence="high"), 0, ()
    )
    assert (finding.title, finding.detail) == (title, detail)


def test_rank_moves_again_after_two_further_heartbeats(tmp_path: Path) -> None:
    reported = StallStart(0.0, progress=5, failed_backwards=0)
    assert find_resolution(reported, state(tmp_path, progress=5)) is None
    for _ in range(2):
        assert find_resolution(reported, state(tmp_path, progress=6)) is None
    assert find_resolution(reported, state(tmp_path, progress=8)) == (RESUMED, "moves again")


@pytest.mark.parametrize(
    ("change", "how", "words"),
    [
        ({"raised": 1}, {}, "ended that backward by an exception"),
        (
            {"raised": 1, "status": RankStatus.FAILED},
            {"exit_reason": ExitReason("KeyboardInterrupt", "", 0.0)},
            "left its training by KeyboardInterrupt",
        ),
        ({"status": RankStatus.FAILED}, {}, "left its training by an exception"),
        ({"status": RankStatus.FINISHED}, {}, "has ended its training"),
        ({}, {"end": ProcessEnd(signal.SIGKILL)}, "killed by SIGKILL without having moved again"),
    ],
)  # fmt: skip
def test_other_ends_of_a_stall_are_reported(
    change: dict[str, int], how: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found = find_resolution(StallStart(0.0, 5, 0), state(tmp_path, progress=9, **change), **how)
    assert found == (ENDED, words)


@pytest.mark.alone
def test_interrupted_hang_is_reported_as_interrupted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch\n"
        "class Stuck(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, grad):\n"
        "        time.sleep(60)\n"
        "        return grad\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "Stuck.apply(x).sum().backward()\n"
    )
    command = watching("--monitors", "stalls", "--stall", "1", "--out", "run", "train.py")
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert "recording in run" in process.stderr.readline()
    assert "BLOCKED" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    process.wait(60)
    process.stderr.close()
    assert "moves again" not in errors
    deadline = time.monotonic() + 60
    while not (found := open_run(tmp_path / "run").events(ENDED)) and time.monotonic() < deadline:
        time.sleep(0.1)
    (event,) = found
    assert event.payload["rank"] == 0
    assert event.payload["how"] in {
        "left its training by KeyboardInterrupt",
        "ended that backward by an exception",  # where the watchdog sampled in between
    }
    assert open_run(tmp_path / "run").events(RESUMED) == ()
