"""Stored runs side by side: configurations, series, first differences, findings, strict refusal."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from answers import strict_loads
from backlight import codec
from backlight.analysis.compare import (
    ComparabilityError,
    Comparison,
    compare,
    groups_of_repeats,
)
from backlight.analysis.fingerprint_diff import Role, arguments
from backlight.analysis.report import source_of
from backlight.records import Finding, Fingerprint, Severity, Subject
from backlight.report.overlay import curve_panels
from backlight.store.read.run import Run, open_run
from run_builder import build_health_run, build_run, build_steptime_run
from run_builder import parameter as parameter_record

PRINT = Fingerprint(
    script="train.py",
    script_hash="0000000000",
    hyperparameters={"SGD.momentum": "0"},
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
    decay_from: int | None = None,
    loss: float = 2.0,
    untrained: str = "",
    groups: int = 1,
) -> Run:
    rms = np.random.default_rng(seed).lognormal(0, 0.1, (len(steps), 2)) * [factor, 1.0]
    gradients = dict(zip(("first.w", "last.w"), rms.T, strict=True))
    scalars = {
        "loss": [loss - step / 100 for step in steps],
        "total_norm": np.hypot(*rms.T),
        "lr/0/0": [rate / (1 + (decay_from is not None and step >= decay_from)) for step in steps],
        **({"lr/0/1": [rate / 2] * len(steps)} if groups == 2 else {}),
        "clip/factor": [0.5 if step % 2 else 1.0 for step in steps],
    }
    updates = {name: values * 0.01 for name, values in gradients.items()}
    extra = [parameter_record(untrained)] if untrained else []
    user = {"accuracy": {step: step / 60 for step in steps}}
    return build_health_run(
        path, gradients, steps=steps, update=updates, scalars=scalars, user=user, extra=extra, name=path.name,
        fingerprint=fingerprint,
    )  # fmt: skip


def changed(**fields: Any) -> Fingerprint:
    return dataclasses.replace(PRINT, **fields)


def refusal(*runs: Run, factor: str | None = None) -> str:
    with pytest.raises(ComparabilityError) as refused:
        compare(runs, strict=True, factor=factor)
    return str(refused.value)


def rows_of(found: Comparison) -> dict[str, tuple[float | None, ...]]:
    return {row.name: row.values for row in found.rows}


def test_series_are_compared_over_the_last_quarter_of_common_steps(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", factor=3.0, seed=1, steps=range(10, 80))
    found = compare((a, b))
    assert found.headline == "The recorded configurations agree."
    assert found.steps == (47, 59)  # both recorded 10 to 59
    assert [(side.letter, side.steps) for side in found.runs] == [("A", 60), ("B", 80)]
    rows = {row.name: row for row in found.rows}
    assert rows["median loss"].values == pytest.approx((2 - 0.53, 2 - 0.53))
    assert rows["median loss"].is_equal
    assert rows["final loss"].values == pytest.approx((2 - 0.59, 2 - 0.79))
    assert rows["median gradient norm"].ratio == pytest.approx(np.hypot(3, 1) / np.hypot(1, 1), rel=0.15)
    assert rows["final accuracy"].values == pytest.approx((59 / 60, 79 / 60))
    assert rows["steps clipped"].texts == ("50 %", "50 %")
    assert (found.parameters[0].name, rows["median health"].values) == ("first.w: gradient", (1.0, 1.0))
    assert found.parameters[0].ratio == pytest.approx(3.0, rel=0.15)
    assert any(note.startswith("Loss is identical at all 50 common steps") for note in found.notes)
    assert json.loads(codec.encode(found))["steps"] == [47, 59]


@pytest.mark.slow
def test_parameters_that_never_train_have_no_health(tmp_path: Path) -> None:
    runs = write(tmp_path / "a"), write(tmp_path / "b", untrained="head.weight")
    assert rows_of(compare(runs))["median health"] == (1.0, None)
    panels = {p["name"]: p for p in curve_panels([("A", source_of(runs[0])), ("B", source_of(runs[1]))])}
    assert panels["health"]["stated"].endswith("B: 1 parameter never trained and has no health: head.weight.")


@pytest.mark.slow
def test_learning_rates_are_named_by_their_optimizer(tmp_path: Path) -> None:
    other = changed(optimizers=("AdamW",))
    runs = write(tmp_path / "a", groups=2), write(tmp_path / "b", other, rate=0.3, groups=2)
    labels = [name for name in rows_of(compare(runs)) if "learning rate" in name]
    assert labels == [f"final learning rate of SGD, group {n} or AdamW, group {n}" for n in (0, 1)]
    panels = {p["name"]: p for p in curve_panels([("A", source_of(runs[0]))])}
    stated = panels["learning_rates"]["stated"]
    assert stated == "SGD, group 0: 0.1 in A; SGD, group 1: 0.05 in A, at every recorded step."


@pytest.mark.slow
def test_a_learning_rate_that_differs_later_is_a_sentence(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, decay_from=at) for name, at in (("a", None), ("b", 20))]
    assert "Learning rate differs from step 20 on." in compare(runs).notes
    assert not any("rate differs" in note for note in compare([runs[0], runs[0]]).notes)


@pytest.mark.slow
def test_three_runs_have_three_columns(tmp_path: Path) -> None:
    runs = [write(tmp_path / name, loss=loss) for name, loss in (("a", 2.0), ("b", 2.0), ("c", 3.0))]
    found = compare(runs)
    assert rows_of(found)["final loss"] == pytest.approx((1.41, 1.41, 2.41))
    assert all(row.ratio is None and len(row.values) == 3 for row in found.rows)
    assert len(found.times) == 2
    assert any(note.startswith("Loss differs from step 0 on, the first common one") for note in found.notes)
    for amount in (1, 9):
        with pytest.raises(ValueError, match=f"expected 2 to 8 runs to compare, got {amount}"):
            compare(runs[:1] * amount)


@pytest.mark.slow
def test_value_that_is_not_finite_is_not_missing(tmp_path: Path) -> None:
    found = compare((write(tmp_path / "a"), write(tmp_path / "b", loss=float("nan"))))
    row = next(row for row in found.rows if row.name == "final loss")
    assert (row.texts, row.ratio, row.is_equal) == (("1.41", "NaN"), None, False)
    written = strict_loads(codec.encode(found))
    assert written["rows"][0]["values"] == [pytest.approx(1.41), "NaN"]


@pytest.mark.slow
def test_difference_without_a_recorded_cause_is_reported(tmp_path: Path) -> None:
    found = compare((write(tmp_path / "a"), write(tmp_path / "b", loss=2.5)))
    assert any("no recorded difference explains it" in note for note in found.notes)


@pytest.mark.slow
def test_differing_configurations_are_listed_and_compared(tmp_path: Path) -> None:
    other = changed(
        arguments=("--lr", "0.1", "--layers", "32"), module_hash="def", device="cuda:0: H100",
        modules=(*PRINT.modules, ("more", "Linear")), parameter_count=48,
    )  # fmt: skip
    a, b = write(tmp_path / "a"), write(tmp_path / "b", other)
    found = compare((a, b))
    assert [(d.field, d.values) for d in found.differences] == [
        ("arguments.--layers", ("24", "32")),
        ("modules", ("no others", "more Linear")),
        ("parameter_count", ("32", "48")),
        ("device", ("cpu: x86_64", "cuda:0: H100")),
    ]
    assert found.headline == "The configurations differ in --layers, modules, parameters, device."
    assert "final loss" in rows_of(found)
    assert "--layers 24 against 32; modules no others against more Linear" in refusal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"script": "other.py"}, "script train.py against other.py"),
        ({"script_hash": "1234567890"}, "script content 00000000 against 12345678"),
        ({"hyperparameters": {"SGD.momentum": "0.9"}}, "SGD.momentum 0 against 0.9"),
        ({"versions": PRINT.versions | {"torch": "2.9.0"}}, "torch 2.13.0 against 2.9.0"),
        ({"flags": {"tf32": "True"}}, "tf32 False against True"),
        ({"world_size": 4}, "ranks 1 against 4"),
        ({"optimizers": ("AdamW",)}, "optimizer SGD against AdamW"),
        ({"dtypes": {"bfloat16": 32}}, "type of weights float32 against bfloat16"),
        (
            {"module_hash": "x", "modules": (*PRINT.modules[:-1], ("last", "Conv1d"))},
            "modules last Linear against last Conv1d",
        ),
        ({"module_hash": "x"}, "shapes other shapes against other shapes"),
        ({"arguments": ("--lr", "0.1")}, "--layers 24 against not given"),
        ({"arguments": ("big", *PRINT.arguments)}, "argument 1 not given against big"),
    ],
)
def test_difference_is_refused_if_strict(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", changed(**fields))
    assert [re.search(text, d.text) is not None for d in compare((a, b)).differences] == [True]
    assert re.search(f"a and .*b are not comparable: {text}", refusal(a, b))


@pytest.mark.slow
def test_recorded_learning_rate_is_a_difference(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a"), write(tmp_path / "b", rate=0.2)
    assert "learning rate 0.1 against 0.2" in refusal(a, b)
    assert compare((a, b), strict=True, factor="lr").differences[0].role is Role.FACTOR
    assert "--factor --lr: it is the same in all runs" in refusal(a, a, factor="--lr")


@pytest.mark.slow
def test_factor_may_differ_with_its_consequences(tmp_path: Path) -> None:
    deeper = changed(arguments=("--layers", "32", "--lr", "0.1"), module_hash="def", parameter_count=48)
    a, b = write(tmp_path / "a"), write(tmp_path / "b", deeper, factor=2.0)
    found = compare((a, b), strict=True, factor="--layers")
    assert [d.role for d in found.differences] == [Role.FACTOR, Role.CONSEQUENCE, Role.CONSEQUENCE]
    assert "--layers 24 against 32" in refusal(a, b, factor="--lr")
    both = write(tmp_path / "c", changed(arguments=("--layers", "32", "--lr", "0.2"), module_hash="def"))
    assert "--lr 0.1 against 0.2; shapes" in refusal(a, both, factor="layers")


@pytest.mark.slow
def test_argument_without_effect_is_reported(tmp_path: Path) -> None:
    option = changed(arguments=(*PRINT.arguments, "--option", "3"))
    found = compare((write(tmp_path / "a"), write(tmp_path / "b", option)))
    assert found.notes == (
        "Loss and gradient norm are identical at all 60 common steps: --option does not change them.",
    )


@pytest.mark.slow
def test_paths_host_and_backlight_version_are_notes(tmp_path: Path) -> None:
    moved = changed(
        host="two",
        arguments=(*PRINT.arguments, "--out-dir", "elsewhere"),
        versions=PRINT.versions | {"backlight": "0.2"},
        script="/home/me/train.py",
    )
    found = compare((write(tmp_path / "a"), write(tmp_path / "b", moved)), strict=True)
    assert {d.role for d in found.differences} == {Role.NOTE}


@pytest.mark.slow
def test_unrelated_runs_are_said_at_the_top(tmp_path: Path) -> None:
    fingerprint = changed(script="other.py", module_hash="x", modules=(("", "CNN"),))
    other = build_health_run(tmp_path / "b", {"conv.w": np.ones(60)}, name="b", fingerprint=fingerprint)
    found = compare((write(tmp_path / "a"), other))
    assert found.headline.startswith("Unrelated training runs: their scripts differ")


@pytest.mark.slow
def test_script_without_a_file_has_no_content_to_compare(tmp_path: Path) -> None:
    notebook = changed(script_hash="")
    assert compare((write(tmp_path / "a"), write(tmp_path / "b", notebook))).differences == ()


@pytest.mark.slow
def test_missing_fingerprint_and_steps_are_reported(tmp_path: Path) -> None:
    one, bare = write(tmp_path / "a"), write(tmp_path / "b", None)
    assert "B has no fingerprint: it took no step." in compare((one, bare)).notes
    assert "b: no fingerprint, so that --strict cannot compare" in refusal(one, bare)
    apart = compare((one, write(tmp_path / "c", steps=range(100, 130))))
    assert apart.steps is None
    assert rows_of(apart)["final loss"] == pytest.approx((1.41, 0.71))


def finding(parameter: str) -> Finding:
    return Finding(
        rule="nan", monitor="health", severity=Severity.ERROR, title=f"{parameter} is NaN", detail="It is.",
        evidence=(), fix="Fix it.", refuted_if="It is not.", subject=Subject(parameter=parameter),
    )  # fmt: skip


@pytest.mark.slow
def test_findings_name_their_runs(tmp_path: Path) -> None:
    def store(name: str, *monitors: str, parameters: tuple[str, ...]) -> Run:
        return build_run(tmp_path / name, name=name, monitors=monitors, findings=map(finding, parameters))

    a = store("a", "health", parameters=("x", "y"))
    b, c = store("b", "health", parameters=("y",)), store("c", "spectra", parameters=())
    found = {row.title: (row.present, row.unknown) for row in compare((a, b, c)).findings}
    assert found == {"x is NaN": (("A",), ("C",)), "y is NaN": (("A", "B"), ("C",))}


@pytest.mark.slow
def test_repeats_are_equal_runs_of_the_directory(tmp_path: Path) -> None:
    def run(name: str, level: float, *options: str) -> Run:
        fingerprint = changed(arguments=(*PRINT.arguments, *options))
        return build_steptime_run(tmp_path / name, {"backward": level}, fingerprint=fingerprint)

    a, b = run("a", 0.1), run("b", 0.2, "--fused")
    run("c", 0.11), run("d", 0.12, "--seed", "1"), run("e", 0.13, "--layers", "9"), run("f", 0.21, "--fused")
    groups = groups_of_repeats(a, b)
    assert [sorted(round(each["step"], 2) for each in group) for group in groups] == [
        [0.1, 0.11, 0.12],
        [0.2, 0.21],
    ]
    # The difference of two equal runs is what is asked: only the others measure how much equal runs vary.
    assert [len(group) for group in groups_of_repeats(a, open_run(tmp_path / "c"))] == [1]
    assert compare((a, b)).times[0].repeats == 5


def test_arguments_are_parsed_in_common_forms() -> None:
    given = "data.txt --lr 1e-3 --width=64 model.depth=4 -b 32 --amp --shift -0.5 --dims 1 2"
    assert arguments(tuple(given.split())) == {
        "argument 1": "data.txt", "--lr": "1e-3", "--width": "64", "model.depth": "4", "-b": "32",
        "--amp": "given", "--shift": "-0.5", "--dims": "1 2",
    }  # fmt: skip
