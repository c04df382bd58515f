"""``backlight grok``: commands, options and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import backlight

Run = Callable[..., tuple[int, str, str]]
Refused = Callable[..., str]

LIGHT = ("--set", "measures.vectors=0", "--set", "measures.window=0", "--set", "measures.gram=25")
SMALL = ("--set", "run.disk_free=0", "--set", "run.flush_seconds=0.2")


@pytest.mark.slow
def test_list_and_config(command: Run, tmp_path: Path) -> None:
    code, out, _ = command("grok", "list")
    assert code == 0
    assert "nanda" in out
    assert "2301.05217" in out
    found = json.loads(command("grok", "list", "--json")[1])["experiments"]
    assert {"name", "title", "arxiv", "claim", "effect", "expects"} <= set(found[0])
    code, out, _ = command(
        "grok", "run", "nanda", "--dry-run", "--preset", "paper", "--set", "training.lr=0.5"
    )
    assert code == 0
    assert "lr: 0.5" in out
    assert "p: 113" in out
    (tmp_path / "file.yaml").write_text(
        command("grok", "run", "oracle", "--dry-run", "--set", "training.steps=70")[1]
    )
    code, out, errors = command("grok", "run", "--config", tmp_path / "file.yaml", "--dry-run", "--json")
    assert code == 0, errors
    assert next(part for part in json.loads(out)["parts"] if part["name"] == "training")["times"] == 70


@pytest.mark.slow
def test_run_resume_and_export(command: Run, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, out, errors = command(
        "grok", "run", "nanda", "--preset", "ci", "--set", "training.steps=50",
        "--set", "training.log_every=25", *LIGHT, *SMALL, "--out", path,
    )  # fmt: skip
    assert code == 0, errors
    assert out.strip() == str(path)
    assert "nanda 50/50  loss" in errors
    assert "accuracy" in errors
    run = backlight.open_run(path)
    assert run.scalar("train_accuracy", "user").steps.tolist() == [0, 25, 50]
    errors = refused("grok", "run", "nanda", "--set", "training.steps=50", *SMALL, "--out", path)
    assert "holds a run already" in errors
    assert "seed is 3, was 0" in refused("grok", "run", "--out", path, "--resume", "--seed", 3)
    code, _, errors = command("grok", "run", "--out", path, "--resume", "--set", "training.steps=75")
    assert code == 0, errors
    assert backlight.open_run(path).scalar("train_accuracy", "user").steps.tolist() == [0, 25, 50, 75]
    assert command("export", path, tmp_path / "out.h5")[0] == 0
    run = backlight.open_run(path)
    with h5py.File(tmp_path / "out.h5") as file:
        stored = {str(g.attrs["name"]): g for g in file["arrays"].values() if "name" in g.attrs}
        name = next(n for n in stored if n.startswith("gradient/"))
        steps, values = run.array(name)
        assert np.array_equal(stored[name]["step"][()], steps)
        assert np.array_equal(stored[name]["value"][()], np.stack(values))


@pytest.mark.slow
def test_control_runs_alongside_the_run(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    code, _, errors = command(
        "grok", "run", "oracle", "--set", "training.steps=20", *SMALL,
        "--control", "random-labels", "--out", path,
    )  # fmt: skip
    assert code == 0, errors
    (event,) = backlight.open_run(tmp_path / "run-random-labels").events("grokking")
    assert (event.payload["control"], event.payload["control_of"]) == ("random-labels", "run")
    (event,) = backlight.open_run(path).events("grokking")
    assert (event.payload["control"], event.payload["control_of"]) == ("", "")
    run, other = (
        backlight.open_run(p).array("gradient/unembed.weight")[1][0]
        for p in (path, tmp_path / "run-random-labels")
    )
    assert not np.array_equal(run, other)


@pytest.mark.parametrize("more", [(), ("--seeds", "0-1"), ("--slurm", "nodes=1"), ("--resume",)])
def test_unknown_control_is_refused_before_training(
    refused: Refused, tmp_path: Path, more: tuple[str, ...]
) -> None:
    path = tmp_path / "run"
    errors = refused("grok", "run", "oracle", *SMALL, "--control", "nonsense", "--out", path, *more)
    assert "control 'nonsense': expected random-labels, or none" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_estimate_reports_what_does_not_fit(command: Run) -> None:
    code, out, errors = command(
        "grok", "run", "oracle", "--dry-run", "--set", "run.disk_free=900000000000000"
    )
    assert code == 0, errors
    assert "not even scalars alone fit" in errors
    code, out, _ = command("grok", "run", "oracle", "--dry-run", "--set", "run.disk_free=0", "--json")
    found = json.loads(out)
    assert found["tier"] == "full factors"
    assert {part["name"] for part in found["parts"]} >= {"training", "gram", "window", "vectors"}
    assert found["disk_bytes"] == sum(part["disk_bytes"] for part in found["parts"])


@pytest.mark.slow
def test_run_that_does_not_fit_is_refused(refused: Refused, tmp_path: Path) -> None:
    huge = ("--set", "run.disk_free=900000000000000")
    errors = refused("grok", "run", "oracle", *huge, "--degrade", "--out", tmp_path / "run")
    assert "does not fit, even with scalars alone" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_slurm_script_is_written(command: Run, refused: Refused, tmp_path: Path) -> None:
    file, logs = tmp_path / "job.sh", tmp_path / "runs" / "slurm"

    arguments = (
        "grok", "run", "oracle", *SMALL, "--seeds", "0-2", "--slurm", "partition=gpu",
        "--out", tmp_path / "runs", "--slurm-script",
    )  # fmt: skip
    errors = refused(*arguments, tmp_path / "missing" / "job.sh")
    assert "cannot be written: No such file or directory" in errors
    assert not logs.exists()
    code, out, errors = command(*arguments, file)
    assert code == 0, errors
    assert logs.is_dir()  # sbatch makes none
    assert out.strip() == str(file)
    text = file.read_text()
    for wanted in ("#SBATCH --partition=gpu", "#SBATCH --array=0-2", "#SBATCH --mem=", "--seed 2", "seed-2"):
        assert wanted in text


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the machine has an accelerator")
def test_slurm_script_of_a_gpu_job_is_written_without_one(command: Run, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    arguments = ("--set", "device=cuda", "--seed", 3, "--degrade", "--set", "training.lr=0.002", "--resume")
    code, out, errors = command(
        "grok", "run", "oracle", *SMALL, *arguments, "--out", tmp_path / "run",
        "--slurm", "partition=gpu", "--slurm-script", file,
    )  # fmt: skip
    assert (code, out.strip()) == (0, str(file)), errors
    assert "device 'cuda' is not on this machine" in errors
    text = file.read_text()
    for wanted in (
        "#SBATCH --gpus-per-node=1", "#SBATCH --partition=gpu", "'device=\"cuda\"'", "seed=3",
        "training.lr=0.002", "--degrade", "--resume",
    ):  # fmt: skip
        assert wanted in text, text


@pytest.mark.full
def test_sweep_has_a_directory_per_run(command: Run, tmp_path: Path) -> None:
    steps = ("--set", "training.steps=10")
    line = ("grok", "run", "oracle", *steps, *SMALL, "--seeds", "0,1", "--out", tmp_path)
    code, out, errors = command(*line)
    assert code == 0, errors
    assert {Path(text).name for text in out.split()} == {"seed-0", "seed-1"}
    losses = [
        backlight.open_run(tmp_path / f"seed-{i}").scalar("train_loss", "user").values[0] for i in (0, 1)
    ]
    assert losses[0] != losses[1]
    assert command(*line)[1].count("(was finished)") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "no experiment is named"),
        (("run", "nnada"), "did you mean 'nanda'?"),
        (("run", "oracle", "--set", "training.lrr=1"), "did you mean 'training.lr'?"),
        (("run", "oracle", "--out", "nowhere", "--resume"), "nowhere: holds no configuration"),
        (("run", "--config", "nofile.yaml", "--dry-run"), "nofile.yaml: cannot be read"),
        (("run", "oracle", "--dry-run", "--preset", "big"), "preset 'big': expected ci or paper"),
    ],
)
def test_refusals_are_one_line(arguments: tuple[str, ...], message: str, refused: Refused) -> None:
    assert message in refused("grok", *arguments)
