from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.analysis.compare import compare
from backlight.analysis.fingerprint_diff import Role, arguments
from backlight.records import Fingerprint, to_json
from backlight.store.read.run import Run
from backlight.store.write.writer import RunWriter
from health_runs import write_synthetic

PRINT = Fingerprint(
    script="train.py",
    arguments=("--lr", "0.1", "--layers", "24"),
    versions={"torch": "2.13.0", "python": "3.11.7", "backlight": "0.1"},
    device="cpu: x86_64",
    host="one",
    module_hash="abc",
    modules=(("", "Net"), ("first", "Linear"), ("last", "Linear")),
    parameter_count=32,
    dtypes={"float32": 32},
    optimizers=("SGD",),
    flags={"tf32": "False"},
)


def write(
    path: Path,
    fingerprint: Fingerprint | None = PRINT,
    *,
    factor: float = 1.0,
    seed: int = 0,
    steps: range = range(60),
    rate: float = 0.1,
) -> Run:
    writer = RunWriter.create(path, name=path.name, monitors=("health",))
    if fingerprint is not None:
        writer.fingerprint(fingerprint)
    for step in steps:
        writer.scalar(step, "accuracy", step / 60, source="user")
    rms = np.random.default_rng(seed).lognormal(0, 0.1, (len(steps), 2)) * [factor, 1.0]
    gradients = dict(zip(("first.w", "last.w"), rms.T, strict=True))
    scalars = {
        "loss": [2.0 - step / 100 for step in steps],
        "total_norm": np.hypot(*rms.T),
        "lr/0/0": [rate] * len(steps),
        "clip/factor": [0.5 if step % 2 else 1.0 for step in steps],
    }
    updates = {name: values * 0.01 for name, values in gradients.items()}
    return write_synthetic(path, gradients, steps=steps, update=updates, scalars=scalars, writer=writer)


def changed(**fields: Any) -> Fingerprint:
    return dataclasses.replace(PRINT, **fields)


def test_comparable_runs_have_tracks_and_parameter_ratios(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", factor=3.0, seed=1, steps=range(10, 80)))
    assert found.comparable
    assert found.verdict == "comparable: no differences"
    tracks = {t.name: t for t in found.tracks}
    assert set(tracks) == {"loss", "total_norm", "health", "clip/factor", "user/accuracy"}
    assert tracks["loss"].common == 50
    assert tracks["loss"].first_difference is None
    assert tracks["total_norm"].first_difference == 10
    assert tracks["total_norm"].ratio == pytest.approx(np.hypot(3, 1) / np.hypot(1, 1), rel=0.1)
    assert tracks["health"].medians == (1.0, 1.0)
    assert (found.first.clipped_share, found.first.steps) == (0.5, 60)
    worst = found.parameters[0]
    assert (worst.column, worst.parameter) == ("gradient/rms", "first.w")
    assert worst.ratio == pytest.approx(3.0, rel=0.1)
    assert json.loads(json.dumps(to_json(found), allow_nan=False))["comparable"] is True


def test_incomparable_runs_have_reasons_and_no_tracks(tmp_path: Path) -> None:
    other = changed(
        arguments=("--lr", "0.1", "--layers", "32"),
        module_hash="def",
        modules=(*PRINT.modules, ("more", "Linear")),
        parameter_count=48,
        device="cuda:0: H100",
    )
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", other))
    assert not found.comparable
    assert found.tracks == ()
    assert found.parameters == ()
    assert found.verdict == (
        "not comparable: argument --layers 24 against 32, modules: 1 only in the second (more), "
        "32 against 48 parameters, device cpu: x86_64 against cuda:0: H100"
    )
    assert found.second.last_loss == pytest.approx(2.0 - 59 / 100)  # each run is still summarised


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"script": "other.py"}, "script train.py against other.py"),
        ({"versions": PRINT.versions | {"torch": "2.9.0"}}, "torch 2.13.0 against 2.9.0"),
        ({"flags": {"tf32": "True"}}, "flag tf32 False against True"),
        ({"world_size": 4}, "ranks 1 against 4"),
        ({"optimizers": ("AdamW",)}, "optimizers SGD against AdamW"),
        ({"dtypes": {"bfloat16": 32}}, "weights in float32 32 against none"),
        (
            {"module_hash": "x", "modules": (*PRINT.modules[:-1], ("last", "Conv1d"))},
            "last Linear against Conv1d",
        ),
        ({"module_hash": "x"}, "the same names and types, but other shapes"),
        ({"arguments": ("--lr", "0.1")}, "argument --layers 24 against not given"),
        ({"arguments": ("big", *PRINT.arguments)}, "^not comparable: argument 1 not given against big"),
    ],
)
def test_difference_prevents_comparison(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", changed(**fields)))
    assert not found.comparable
    assert re.search(text, found.verdict)


def test_recorded_learning_rate_prevents_comparison(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", rate=0.2))
    assert found.verdict == "not comparable: learning rate lr/0/0 0.1 against 0.2 at step 0"
    assert compare(write(tmp_path / "c"), write(tmp_path / "d", rate=0.2), factor="lr").comparable
    same = compare(write(tmp_path / "e"), write(tmp_path / "f"), factor="--lr")
    assert "the factor '--lr' is the same in both runs" in same.notes[0]


def test_factor_may_differ_with_its_consequences(tmp_path: Path) -> None:
    deeper = changed(arguments=("--layers", "32", "--lr", "0.1"), module_hash="def", parameter_count=48)
    a, b = write(tmp_path / "a"), write(tmp_path / "b", deeper, factor=2.0)
    found = compare(a, b, factor="--layers")
    assert found.comparable
    assert found.verdict == "comparable: they differ in argument --layers 24 against 32"
    assert [d.role for d in found.differences] == [Role.FACTOR, Role.CONSEQUENCE, Role.CONSEQUENCE]
    assert "assumed to follow from '--layers'" in found.notes[0]
    assert not compare(a, b, factor="--lr").comparable
    assert not compare(a, b).comparable


def test_second_differing_argument_prevents_comparison(tmp_path: Path) -> None:
    both = changed(arguments=("--layers", "32", "--lr", "0.2"), module_hash="def")
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", both), factor="layers")
    assert not found.comparable
    assert "argument --lr 0.1 against 0.2" in found.verdict
    assert "modules" in found.verdict  # with two causes, no consequence is assumed


def test_factor_without_effect_is_reported(tmp_path: Path) -> None:
    option = changed(arguments=(*PRINT.arguments, "--option", "3"))
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", option), factor="--option")
    assert found.notes == (
        "--option had no effect: loss and total_norm are identical at all 60 common steps",
    )


def test_paths_host_and_backlight_version_are_notes(tmp_path: Path) -> None:
    moved = changed(
        host="two",
        arguments=(*PRINT.arguments, "--out-dir", "elsewhere"),
        versions=PRINT.versions | {"backlight": "0.2"},
        script="/home/me/train.py",
    )
    found = compare(write(tmp_path / "a"), write(tmp_path / "b", moved))
    assert found.comparable
    assert {d.role for d in found.differences} == {Role.NOTE}


def test_missing_fingerprint_and_steps_are_reported(tmp_path: Path) -> None:
    one = write(tmp_path / "a")
    bare = compare(one, write(tmp_path / "b", None))
    assert not bare.comparable
    assert "the second run has no fingerprint" in bare.verdict
    apart = compare(one, write(tmp_path / "c", steps=range(100, 130)))
    assert apart.comparable
    assert "share no recorded step" in apart.notes[0]
    assert apart.tracks[0].common == 0


def test_arguments_are_parsed_in_common_forms() -> None:
    given = "data.txt --lr 1e-3 --width=64 model.depth=4 -b 32 --amp --shift -0.5 --dims 1 2"
    assert arguments(tuple(given.split())) == {
        "argument 1": "data.txt", "--lr": "1e-3", "--width": "64", "model.depth": "4", "-b": "32",
        "--amp": "given", "--shift": "-0.5", "--dims": "1 2",
    }  # fmt: skip
