"""Rank and world size from the environment, and a watch with invalid launcher variables."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

import backlight
from backlight.cli.doctor import examine
from backlight.distributed import World, launch_id, rank_and_size, world
from backlight.store.write.attempt import default_path, job_of
from backlight.store.write.writer import RunWriter
from cases import build_with_sgd, loop

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "BACKLIGHT_RUN_ID")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_launcher_variables_give_rank_and_size() -> None:
    assert world({}) == World()
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert world(torchrun) == World(3, 8, 1, 2)
    assert world({"WORLD_SIZE": "1"}) == World()
    srun = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
    assert world(srun) == World(2, 4)
    assert world(srun | torchrun) == World(3, 8, 1, 2)
    # One process started by a batch script is a single process, whatever SLURM_NTASKS is.
    assert world({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) == World()


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "", "WORLD_SIZE": ""},
        {"RANK": "0", "WORLD_SIZE": "9" * 30},
        {"RANK": "1.0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "abc"},
        {"WORLD_SIZE": "abc"},
        {"RANK": "٣", "WORLD_SIZE": "8"},
    ],
)
def test_invalid_variables_mean_one_process(variables: dict[str, str]) -> None:
    found = world(variables)
    assert (found.rank, found.size) == (0, 1)
    assert "expected whole numbers with 0 <= RANK < WORLD_SIZE" in found.problem


def test_restart_belongs_to_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "9",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = []
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        found.append(launch_id() or "")
    assert found[0] != found[1]
    assert job_of(found[0]) == job_of(found[1])
    assert default_path("train.py", found[0]) == default_path("train.py", found[1])
    assert default_path("train.py", found[0]) != default_path("train.py", "another+0")


@pytest.mark.slow
def test_watch_with_invalid_variables_warns_once_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(run: Path) -> tuple[Path, list[str], torch.Tensor]:
        torch.manual_seed(3)
        model, optimizer = build_with_sgd()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with backlight.watch(model, optimizer, run=run, every=1) as watch:
                loop(model, optimizer)
        return watch.path, [str(w.message) for w in caught], model.last.weight.detach().clone()

    _, _, plain = train(tmp_path / "plain")
    monkeypatch.setenv("RANK", "seven")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "first")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "-")
    assert rank_and_size() == (0, 1)
    path, messages, weight = train(tmp_path / "run")
    assert path == tmp_path / "run"
    assert [
        text for text in messages if "RANK='seven', WORLD_SIZE='2'" in text and "watched alone" in text
    ] == messages
    assert len(messages) == 1
    run = backlight.open_run(path)
    assert (run.attempts[0].world_size, run.losses) == (1, ())
    assert next(e.payload["what"] for e in run.events("unmeasured")) == "other ranks"
    assert run.frame("gradient", "norm").steps.tolist() == [0, 1, 2, 3]
    fingerprint = run.fingerprint()
    assert fingerprint is not None
    assert fingerprint.world_size == 1
    # Another such process uses the directory, so this one gets a new directory next to it.
    living = RunWriter.create(tmp_path / "taken")
    path, messages, _ = train(tmp_path / "taken")
    living.close()
    assert path.name.startswith("taken.process-")
    assert f"watched alone in {path}" in messages[0]
    assert torch.equal(weight, plain)


@pytest.mark.slow
def test_rank_document_holds_the_options(tmp_path: Path) -> None:
    model, optimizer = build_with_sgd()
    with backlight.watch(model, optimizer, run=tmp_path / "run", every=2, monitors=("health",)):
        loop(model, optimizer)
    document = json.loads((tmp_path / "run" / "attempt-000" / "rank-00000.json").read_text())
    assert document["options"]["every"] == 2
    assert document["options"]["monitors"] == ["health"]


@pytest.mark.slow
def test_doctor_reports_cluster_support(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find(what: str) -> tuple[str, str]:
        (check,) = [check for check in examine() if check.what == what]
        return check.state, check.meaning

    monkeypatch.setenv("PATH", str(tmp_path))
    state, meaning = find("Slurm")
    assert state == "optional"
    assert "--slurm-script" in meaning
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert find("Slurm")[0] == "ok"
    assert find("ranks")[0] == "ok"
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "x")
    state, meaning = find("ranks")
    assert state == "limited"
    assert "WORLD_SIZE='x'" in meaning
