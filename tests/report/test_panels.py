"""Every panel draws a run with its series, and gives a reason for a run without."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import FULL, Plan, records, write_run

from backlight.monitor import StoredStep
from backlight.records import Fingerprint
from backlight.report.panel import PANELS, Drawn, NotMeasured, in_order
from backlight.report.plots.panels import parameters as draw_parameters
from backlight.report.source import Source
from backlight.session.sampling import WHOLE_STEPS, StepSelection
from backlight.session.writer_thread import ResultQueue, WriterThread
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
from backlight.text import duration, percent
from run_builder import build_run, gradient_row, parameter

ALONE = [panel for panel in in_order() if not panel.optional]
"""Panels of a run of one process; panels of several ranks are tested in tests/ranks."""

ALWAYS = {"events", "fingerprint", "learning_rates", "loss", "thresholds"}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Source:
    plan = Plan(steps=20, gradients=False, updates=False)
    return Source(write_run(tmp_path_factory.mktemp("empty") / "run", plan))


def test_undefined_groups_are_not_drawn(empty: Source) -> None:
    result = PANELS["groups"].render(empty)
    assert isinstance(result, NotMeasured)
    assert "--set groups.NAME=PATTERN" in result.reason


def drawn(source: Source, name: str) -> Drawn:
    result = PANELS[name].render(source)
    assert isinstance(result, Drawn), result
    return result


def facts(source: Source, name: str) -> dict[str, str]:
    return {fact.label: fact.value for fact in drawn(source, name).facts}


def test_group_without_parameters_is_a_note(tmp_path: Path) -> None:
    plan = Plan(steps=5, groups={"lower": "blocks.0", "upper": "blokcs.1"})
    (note,) = drawn(Source(write_run(tmp_path / "run", plan)), "groups").remarks
    assert note.startswith("Group upper is not drawn: the group pattern 'blokcs.1' matches none")


def test_panels_have_unique_order_and_series() -> None:
    panels = in_order()
    assert len({panel.order for panel in panels}) == len(panels)
    claimed = [series for panel in panels for series in panel.series]
    assert len(claimed) == len(set(claimed))


@pytest.mark.slow
def test_lines_of_a_profile_are_listed(full: Source) -> None:
    (table,) = drawn(full, "lines").data["tables"]
    assert table["rows"] == [
        ["train.py:9 (mix)", "data", "30", "3.00", "75.0%"],
        ["no line of the script", "data", "10", "1.00", "25.0%"],
    ]


@pytest.mark.slow
def test_flame_graph_has_each_stack_on_its_caller(full: Source) -> None:
    bars = drawn(full, "lines").data["bars"]
    assert [(bar["label"], bar["level"], bar["begin"], bar["width"], bar["phase"]) for bar in bars] == [
        ("data 3.5 ms", 0, 0, 0.875, 0),
        ("before optimizer 0.5 ms", 0, 0.875, 0.125, 1),
        ("main (train.py:30) 0.5 ms", 1, 0.875, 0.125, 1),
        ("main (train.py:20) 3.5 ms", 1, 0, 0.875, 0),
        ("mix (train.py:9) 3 ms", 2, 0, 0.75, 0),
    ]


@pytest.mark.slow
def test_every_kind_has_a_drawing_function(full: Source) -> None:
    assets = Path(__file__).parents[2] / "src/backlight/report/assets/kinds"
    known = "".join(file.read_text() for file in assets.glob("*.js"))
    for panel in ALONE:
        assert f"KINDS.{drawn(full, panel.name).kind} = " in known


@pytest.mark.parametrize("name", [panel.name for panel in ALONE])
def test_every_panel_draws_the_full_run(full: Source, name: str) -> None:
    assert drawn(full, name).data


@pytest.mark.parametrize("name", [panel.name for panel in in_order() if panel.name not in ALWAYS])
def test_panel_without_data_has_a_reason(empty: Source, name: str) -> None:
    result = PANELS[name].render(empty)
    assert isinstance(result, NotMeasured)
    assert result.reason.endswith(".")


def test_reason_is_the_recorded_one(empty: Source) -> None:
    for name in ("parameters", "depth", "total_norm", "health"):
        result = PANELS[name].render(empty)
        assert isinstance(result, NotMeasured)
        assert result.reason == "No optimizer step was seen."
    assert PANELS["updates"].render(empty) == NotMeasured("The optimizer steps inside backward.")


def test_parameter_reason_is_not_the_series_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=3, unmeasured={2: "frozen"}))
    assert Source(run).reason("gradient", otherwise="unknown") == "unknown"


def test_cold_first_step_is_not_part_of_phase_shares(tmp_path: Path) -> None:
    times = {"data": [0.001] * 40, "forward": [0.004] * 40, "other": [5.001, *[0.001] * 39]}
    scalars = {f"phase/{name}": values for name, values in times.items()}
    result = drawn(Source(build_run(tmp_path / "run", monitors=("steptime",), scalars=scalars)), "phases")
    shares = {label: share for label, share, *_ in result.data["table"]["rows"]}
    assert shares == {"forward": percent(4 / 6), "data": percent(1 / 6), "other": percent(1 / 6)}
    (chart,) = result.data["charts"]
    assert chart["left"]["top"] == pytest.approx(1.05 * 6.0)


def test_profile_is_shown_as_tables(full: Source) -> None:
    (modules,) = drawn(full, "modules").data["tables"]
    assert modules["rows"][0] == ["<b>block", "2", "3.50", "3.50", "8.00", "8.00", "1.50"]
    assert drawn(full, "modules").remarks == (
        "0.25 ms of backward belong to no module: the loss, sums of gradients.",
    )
    operators, kinds, joined, copies, optimisations = drawn(full, "operators").data["tables"]
    assert operators["rows"][1] == ["(no operator)", "backward", "", "", "2.00", "25.0%"]
    assert joined["rows"] == [["aten::addmm", "AddmmBackward0", "2", "3.00", "7.00"]]
    assert copies["rows"][0][-1] == "train.py:7 (step)"
    assert copies["rows"][1][:4] == ["types not recorded", "-", "1", "-"]
    assert kinds["rows"] == [["matmul", "2", "6.00", "100.0%"]]
    assert optimisations["rows"][0][:2] == ["fused optimizer", "off"]
    assert drawn(full, "operators").remarks[0].startswith("MFU not measured: tokens per step were not given")


def test_damaged_profile_is_not_shown(full: Source, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=3, phases=True))
    for path in run.evidence():
        if path.endswith("profile.json"):
            (run.path / path).write_text("{", encoding="utf-8")
    assert isinstance(PANELS["modules"].render(Source(run)), NotMeasured)


def test_memory_is_stacked_by_kind_and_listed_by_module(full: Source) -> None:
    result = drawn(full, "memory_steps")
    lines = {line["label"]: line for line in result.data["charts"][0]["lines"]}
    assert {line["style"] for line in lines.values()} == {"area"}
    assert lines["parameters"]["values"].tolist() == [40, 40, 40, 40]
    assert lines["activations"]["values"].tolist() == [0, 60, 20, 0]
    assert [fact.value for fact in result.facts] == ["100 B", "forward", "measured"]
    rows = drawn(full, "memory_modules").data["tables"][0]["rows"]
    assert rows == [
        ["<b>block", "90 B", "90 B", "60 B", "30 B"],
        ["(no module)", "10 B", "100 B", "", "10 B"],
    ]


def test_health_line_has_gaps_where_unmeasured(full: Source) -> None:
    steps = np.arange(6)
    values = np.array([1, 1, np.nan, np.nan, 0.5, 0.75])
    result = drawn(Source(full.run, health=(steps, values)), "health")
    line = result.data["charts"][0]["lines"][0]
    assert line["gap"].tolist() == [2, 3]
    assert line["odd"].tolist() == []
    assert facts(Source(full.run, health=(steps, values)), "health")["lowest"] == "0.5 at step 4"
    assert result.remarks == ("Health was not measured at 2 of the steps.",)


def test_nan_loss_is_marked(full: Source) -> None:
    chart = drawn(full, "loss").data["charts"][0]
    (loss,) = chart["lines"]
    assert chart["steps"][loss["odd"]].tolist() == list(range(91, 120))
    assert facts(full, "loss")["first to last"].endswith(" to NaN")


def test_norm_panel_counts_clipped_and_non_finite_steps(full: Source) -> None:
    assert facts(full, "total_norm")["not finite"] == "30 of 120 steps"
    norm = full.run.scalar("total_norm").values
    assert facts(full, "total_norm")["clipped"].endswith(f"({int((norm > 0.02).sum()):,} of 120 steps)")
    labels = [line["label"] for line in drawn(full, "total_norm").data["charts"][0]["lines"]]
    assert labels == ["total norm", "clip limit"]


def test_skipped_steps_are_marked(full: Source) -> None:
    chart = drawn(full, "loss_scale").data["charts"][0]
    assert [mark["label"] for mark in chart["marks"]] == ["skipped step"]
    assert chart["marks"][0]["steps"].tolist() == [0, 20, 40, 60, 80, 100]


def test_phases_add_up_to_the_slowest_step(full: Source) -> None:
    (chart,) = drawn(full, "phases").data["charts"]
    stacked = sum(line["values"] for line in chart["lines"])
    assert np.allclose(stacked, 1e3 * full.step_times)
    first = sum(full.scalar(name).values[0] for name in full.scalar_names("phase"))
    assert facts(full, "phases")["first step"] == duration(first)


def test_table_has_exact_figures(full: Source) -> None:
    stats = drawn(full, "parameters").data["stats"]
    frame = full.run.frame("gradient", "rms")
    good = frame.values[:, 2]
    assert stats["rms_median"][2] == np.sort(good)[round(0.5 * (len(good) - 1))]
    assert stats["rms_max"][2] == good.max()
    assert stats["rms_last"][2] == good[-1]
    assert np.isnan(stats["rms_median"][7])
    assert stats["measured"][7] == 0
    assert np.isnan(stats["non_finite_sum"][7])
    assert stats["rms_max"][25] == 0
    total = full.run.frame("gradient", "non_finite").values[:, 10].sum()
    assert stats["non_finite_sum"][10] == total > 0


def test_unmeasured_zero_and_non_finite_cells_differ(full: Source) -> None:
    frames = full.frames
    rms = frames.extremes["rms"]
    assert (rms.measured[:, 7] == 0).all()
    assert (rms.high[:89, 25] == 0).all()
    assert (rms.measured[:, 25] == 1).all()
    assert rms.broken[95, 10] == 1
    assert np.isnan(rms.high[95, 10])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [WHOLE_STEPS, WHOLE_STEPS + 40])
def test_figure_of_steps_states_from_which_on_they_are_thinned(tmp_path: Path, steps: int) -> None:
    with RunWriter.create(tmp_path / "run") as writer:
        parts: list[Any] = [None, ResultQueue(), None, writer, 1.0, pytest.fail, StepSelection()]
        thread = WriterThread(*parts)
        for step in range(steps):
            thread.keep(StoredStep(step, (), {"total_norm": 1.0}, {}), in_detail=False)
    source = Source(open_run(tmp_path / "run"))
    (taken,) = [f[2] for f in PANELS["loss"].summary(source).figures(source) if f[0] == "steps recorded"]
    stored = source.scalar("total_norm").steps.tolist()
    missing = sorted(set(range(steps)) - set(stored))
    if steps == WHOLE_STEPS:
        assert (missing, taken) == ([], "of 4,096")
    else:
        # The windows are of four steps, of which the first is stored.
        assert (missing[0], len(missing)) == (4097, 30)
        assert taken == "of 4,133; from step 4,097 on one of each window, and what stands out"


def test_parameters_that_never_train_have_no_health(full: Source) -> None:
    source = dataclasses.replace(
        full, health=(np.arange(3), np.ones(3)), untrained=("head.weight", "head.bias")
    )
    (lowest,) = [figure for figure in PANELS["loss"].summary(source).figures(source) if "health" in figure[0]]
    assert lowest == ("lowest health", "not measured", "2 parameters never trained")
    text = drawn(source, "health").data["text"]
    assert text.startswith(
        "1 (0 is the worst, 1 the best) at every recorded step. 2 parameters never trained"
    )
    assert text.endswith("head.weight, head.bias.")
    falling = dataclasses.replace(source, health=(np.arange(3), np.array([1, 0.5, 1])))
    assert facts(falling, "health")["lowest of the others"] == "0.5 at step 1"
    assert "head.weight, head.bias" in drawn(falling, "health").remarks[0]


@pytest.mark.slow
def test_update_of_zero_weights_is_not_defined(tmp_path: Path) -> None:
    names = ("weight", "bias", "still", "broken")
    table = [parameter(name, (2,)) for name in names]
    moved, counts = [0.1, 0.1, 0.0, np.nan], np.tile([1, 2, 2], (4, 1))
    updates = {step: (np.stack([moved, [1.0, 0.1 * step, 0.0, 0.0]], 1), counts) for step in range(3)}
    series = {"gradient": dict.fromkeys(range(3), gradient_row(table)), "update": updates}
    source = Source(build_run(tmp_path / "run", monitors=("health",), table=table, series=series))
    ratio = source.frames.extremes["ratio"]
    assert (ratio.measured == 1).all()
    assert np.isnan(ratio.high).T.tolist() == [[False] * 3, [True, False, False], [True] * 3, [True] * 3]
    assert ratio.broken.T.tolist() == [[0] * 3, [0] * 3, [0] * 3, [1] * 3]
    data = drawn(source, "parameters").data
    assert np.array_equal(data["broken"]["update"], ratio.broken.T)
    assert facts(source, "updates")["parameters that never moved"] == "1"
    figure = draw_parameters(source, "Parameters", data)["ratio"]
    legend = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["from zero", "NaN or Inf"]


def test_histogram_shares_add_up_to_one(full: Source) -> None:
    data = drawn(full, "exponents").data
    sums = data["all"]["share"].values.sum(axis=0)
    assert np.allclose(sums, 1)
    single = data["single"]["share"].values
    assert single.shape[0] == len(records(FULL))
    assert np.isnan(single[7]).all()
    assert np.isnan(single[25]).all()


@pytest.mark.parametrize(
    ("optimizers", "rates", "labels"),
    [
        (("AdamW",), ("0/0=1",), ["AdamW"]),
        (("AdamW(lr=0.1)",), ("0/0=1", "0/1=2"), ["AdamW, group 0", "AdamW, group 1"]),
        (("AdamW",), ("0/0=1", "0/1=1", "0/2=2"), ["AdamW, group 0 and 1 more", "AdamW, group 2"]),
        (("Muon", "AdamW"), ("0/0=1", "1/0=2", "1/1=3"), ["Muon", "AdamW, group 0", "AdamW, group 1"]),
        (("SGD", "SGD"), ("0/0=1", "1/0=2"), ["SGD 0", "SGD 1"]),
        ((), ("0/0=1",), ["optimizer 0"]),
    ],
)
def test_learning_rates_are_named_by_optimizer(
    tmp_path: Path, optimizers: tuple[str, ...], rates: tuple[str, ...], labels: list[str]
) -> None:
    writer = RunWriter.create(tmp_path / "run", monitors=("health",))
    writer.fingerprint(Fingerprint(optimizers=optimizers))
    first = {f"lr/{name}": float(rate) for name, rate in (r.split("=") for r in rates)}
    for step in range(3):
        writer.scalars(step, {name: rate / (1 + step) for name, rate in first.items()})
    writer.close()
    chart = drawn(Source(open_run(tmp_path / "run")), "learning_rates").data["charts"][0]
    assert [line["label"] for line in chart["lines"]] == labels


def test_what_never_changes_is_one_line_of_text(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", monitors=("health",))
    writer.fingerprint(Fingerprint(optimizers=("AdamW",)))
    for step in range(4):
        scalars = {"lr/0/0": 1e-3, "lr/0/1": 1e-4, "scaler/scale": 1024.0, "scaler/skipped": 0.0}
        clip = {"clip/norm": 0.5, "clip/limit": 1.0, "clip/factor": 1.0, "total_norm": 0.5 + step}
        writer.scalars(step, scalars | clip)
    writer.close()
    source = Source(open_run(tmp_path / "run"), health=(np.arange(4), np.array([1.0, 1.0, np.nan, 1.0])))
    texts = {
        name: drawn(source, name).data.get("text") for name in ("learning_rates", "loss_scale", "health")
    }
    assert texts == {
        "learning_rates": "AdamW, group 0: 0.001; AdamW, group 1: 1e-4 at every recorded step.",
        "loss_scale": "1,024 at every recorded step; no step was skipped.",
        "health": "1 (0 is the worst, 1 the best) at every recorded step.",
    }
    norm = drawn(source, "total_norm")
    assert facts(source, "total_norm")["clipped"] == "never, limit 1"
    assert [line["label"] for line in norm.data["charts"][0]["lines"]] == [
        "total norm", "norm that clipping computed"
    ]  # fmt: skip


def test_repeated_events_are_one_row(full: Source) -> None:
    rows = drawn(full, "events").data["rows"]
    skips = [row for row in rows if row[1] == "scaler skip"]
    assert skips == [("0 to 100", "scaler skip", "scale: 65,536 (6 times)")]
    assert not [row for row in rows if row[1] == "unmeasured"]


def test_details_list_overrides_and_cost(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", Plan(steps=30, phases=True, overrides={"health": {"vanishing_rms": 1e-9}})
    )
    rows = dict(drawn(Source(run), "fingerprint").data["rows"])
    assert rows["time in backlight"].endswith("of the time between the first step and the last")
    limits = {row[1]: row[2] for row in drawn(Source(run), "thresholds").data["rows"]}
    assert next(iter(limits.items())) == ("vanishing_rms", "1e-9 (overridden)")
    assert not [value for name, value in limits.items() if "spike" in name and "overridden" in value]


@pytest.mark.slow
def test_long_run_is_reduced_with_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backlight.report.source.CELLS", 51 * 60)
    run = write_run(tmp_path / "run", Plan(steps=400, spike_row=20, spike_step=333))
    result = drawn(Source(run), "parameters")
    assert len(result.data["first"]) == 60
    assert result.remarks[0].startswith("400 recorded steps are drawn as 60 ranges")
    frames = Source(run).frames
    top = run.frame("gradient", "rms").values[:, 20]
    assert np.nanmax(frames.extremes["rms"].high[:, 20]) == top.max() == top[333]
