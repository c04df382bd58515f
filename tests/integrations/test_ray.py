"""Ray Train with two workers on this machine, over loopback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backlight
from backlight.findings.evaluate import findings_of
from backlight.launch.subprocess import run_in_own_session
from integrations.torchrun import HERE, environment

pytest.importorskip("ray", reason="Ray is not installed: pip install 'backlight[ray]'")


def drive(folder: Path, case: str) -> str:
    """Run a driver; return the error of the fit."""
    done = run_in_own_session(
        [sys.executable, str(HERE / "ray_driver.py"), str(folder), case],
        limit=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, environment=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return (folder / "error.txt").read_text()


def noted(folder: Path, name: str) -> list[Any]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


def diagnoses(folder: Path) -> list[str]:
    """Return the diagnoses that the controller, which is not a worker, has printed."""
    return re.findall(r"^backlight: ([A-Z]{4,}.*)$", (folder / "controller.txt").read_text(), re.MULTILINE)


def test_hang_fails_the_job_with_one_diagnosis_that_names_rank_line_and_collective(tmp_path: Path) -> None:
    error = drive(tmp_path, "hang")
    (claim,) = diagnoses(tmp_path)
    workers = (tmp_path / "workers.txt").read_text()
    assert "RayTrainWorker" in workers
    assert "backlight: " not in workers
    assert error.startswith("HangError:")
    assert claim in error
    source = (HERE / "ray_loop.py").read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(source) if "# injected" in text)
    assert "rank 1" in claim
    assert f"ray_loop.py:{line} in skip_collective" in claim
    assert re.search(r"[Ww]aiting for it: rank 0 in (the )?all_reduce", claim)
    # Watching has changed neither weights nor random state.
    assert noted(tmp_path, "plain") == noted(tmp_path, "watched")
    # One run for all ranks, in the storage of the trainer, with ranks and attempt of Ray's context.
    run = backlight.open_run(tmp_path / "hang" / "backlight")
    assert [rank.rank for rank in run.ranks()] == [0, 1]
    fingerprint = run.fingerprint()  # not that of Ray's worker
    assert (Path(fingerprint.script).name, fingerprint.arguments) == ("ray_loop.py", ())
    for rank, variables in enumerate(noted(tmp_path, "variables")):
        assert (variables["RANK"], variables["WORLD_SIZE"]) == (str(rank), "2")
        assert re.fullmatch(r"ray-hang\+[0-9a-f]{32}", variables["BACKLIGHT_RUN_ID"])
    first, second = json.loads((tmp_path / "reports.json").read_text())
    assert (first["mine"], second) == (1, {"mine": 1})
    assert first["backlight/loss"] == pytest.approx(
        run.scalar("loss", rank=0).values[first["backlight/step"]]
    )


@pytest.mark.full
def test_restarted_workers_are_a_new_attempt(tmp_path: Path) -> None:
    error = drive(tmp_path, "retry")
    assert error == ""
    assert len(diagnoses(tmp_path)) == 1  # the second attempt is healthy
    run = backlight.open_run(tmp_path / "retry" / "backlight")
    assert [attempt.status.value for attempt in run.attempts] == ["killed", "finished"]
    assert run.attempts[1].step_offset == 24
    stalls = [finding for finding in findings_of(run) if finding.monitor == "stalls"]
    assert [finding.subject.rank for finding in stalls] == [1]


@pytest.mark.full
def test_directory_that_an_earlier_worker_still_writes_costs_no_training(tmp_path: Path) -> None:
    error = drive(tmp_path, "held")
    (claim,) = diagnoses(tmp_path)
    assert claim in error
    assert noted(tmp_path, "plain") == noted(tmp_path, "watched")
    (own,) = (tmp_path / "held").glob("backlight-*")
    assert f"evidence: backlight findings {own}\n" in (tmp_path / "controller.txt").read_text()
    assert [rank.rank for rank in backlight.open_run(own).ranks()] == [0, 1]
    assert len(backlight.open_run(tmp_path / "held" / "backlight").attempts) == 1


@pytest.mark.full
def test_worker_group_of_another_size_is_a_new_attempt_without_a_finding(tmp_path: Path) -> None:
    error = drive(tmp_path, "elastic")
    assert error == ""
    assert diagnoses(tmp_path) == []
    run = backlight.open_run(tmp_path / "elastic" / "backlight")
    assert [attempt.world_size for attempt in run.attempts] == [1, 2]
    assert [finding.rule for finding in findings_of(run) if finding.monitor == "stalls"] == []


@pytest.mark.full
@pytest.mark.parametrize("case", ["lightning", "huggingface"])
def test_framework_inside_ray_train_records_in_its_storage(tmp_path: Path, case: str) -> None:
    pytest.importorskip({"huggingface": "transformers"}.get(case, case))
    error = drive(tmp_path, case)
    assert error == ""
    assert diagnoses(tmp_path) == []
    assert noted(tmp_path, "plain") == noted(tmp_path, "watched")
    run = backlight.open_run(tmp_path / case / "backlight")
    assert run.status.value == "finished"
    assert [rank.rank for rank in run.ranks()] == [0, 1]


@pytest.mark.full
def test_storage_that_is_no_file_system_gets_a_copy_of_each_attempt(tmp_path: Path) -> None:
    error = drive(tmp_path, "remote")
    (claim,) = diagnoses(tmp_path)
    assert "skip_collective" in claim
    assert claim in error
    (copy,) = (tmp_path / "bucket" / "remote").glob("backlight-*")
    assert [rank.rank for rank in backlight.open_run(copy).ranks()] == [0, 1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"run": "a/b"}, "run='a/b', expected the name of a directory"),
        ({"fail_after": -1.0}, "fail_after=-1.0, expected seconds, or None"),
    ],
)
def test_unusable_argument_is_refused_in_the_driver(given: dict[str, Any], expected: str) -> None:
    from backlight.integrations.ray import BacklightCallback

    with pytest.raises(ValueError, match=expected):
        BacklightCallback(**given)
