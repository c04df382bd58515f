"""Ctrl-C on a job of torchrun: it ends as it does alone, and its run is reported as interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from backlight.records import RunStatus
from backlight.report.source import Source
from backlight.report.verdict import outcome
from backlight.store.read.run import open_run
from ranks.launching import HERE, launched

FIRST_STEPS = 8


def interrupted(folder: Path, *prefix: str, ranks_too: bool) -> tuple[int, str]:
    """Interrupt a job once every rank has trained; ``ranks_too`` as a terminal does, which all belong to."""
    folder.mkdir()
    markers = [folder / f"rank-{rank}" for rank in range(2)]

    def interrupt(job: subprocess.Popen[str]) -> None:
        while not all(marker.exists() for marker in markers) and job.poll() is None:
            time.sleep(0.05)
        for pid in [int(marker.read_text()) for marker in markers] if ranks_too else []:
            os.kill(pid, signal.SIGINT)
        job.send_signal(signal.SIGINT)

    return launched(2, *prefix, HERE / "interrupting.py", folder, meanwhile=interrupt)


@pytest.mark.parametrize("ranks_too", [False, pytest.param(True, marks=pytest.mark.full)])
def test_interrupted_job_ends_as_it_does_alone_and_is_reported_as_interrupted(
    ranks_too: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    code, plain = interrupted(tmp_path / "plain", ranks_too=ranks_too)
    watching = ("-m", "backlight", "run", "--out", str(path))
    watched_code, errors = interrupted(tmp_path / "watched", *watching, ranks_too=ranks_too)
    assert watched_code == code != 0, errors[-3000:]
    assert "KeyboardInterrupt" in plain
    assert "KeyboardInterrupt" in errors
    assert errors.count("next: backlight report") == 1, "the summary of the job, by rank 0"
    assert "✕ Interrupted at step" in errors
    assert "✓" not in errors
    run = open_run(path)
    assert run.status is RunStatus.FAILED
    assert {state.rank for state in run.ranks()} == {0, 1}
    assert {event.payload["type"] for event in run.events("exception")} == {"KeyboardInterrupt"}
    said = outcome(Source(run))
    assert said.tone == "error"
    assert said.headline.startswith("Interrupted at step")
    assert run.last_step() >= FIRST_STEPS - 1
    assert run.scalar("loss").steps[:FIRST_STEPS].tolist() == [*range(FIRST_STEPS)]
