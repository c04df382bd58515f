"""The spectra panels: ranked layers, thinned tables with a remark, exact curves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from backlight.measure.noise_scale import noise_scale
from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.shrinkage import noise_values
from backlight.monitors.spectra import panels as shared
from backlight.monitors.spectra.model.echo_records import record_layer
from backlight.monitors.spectra.panels import (
    FAR,
    FIELDS,
    explorer,
    frobenius,
    joint_noise_scale,
    spectra_of,
    steps_of,
    thinned,
)
from backlight.records import Evidence
from backlight.report.evidence_links import place_of
from backlight.report.page import model
from backlight.report.panel import PANELS, Drawn, NotMeasured, in_order
from backlight.report.source import Source
from backlight.store.read.run import open_run
from backlight.store.spectra import Layer, table
from backlight.store.write.writer import RunWriter
from backlight.text import visible
from report.synthetic import finding
from run_builder import build_run
from spectra_runs import STRENGTHS, Injected, record, replicates, write_spectra_run

QKV, UP, HEAD = STRENGTHS
PLAN = Injected(steps=(0, 100, 200, 300), update_ranks=(4.0, 3.0, 2.0, 1.9))
NAMES = ("spectra", "spectra_layers", "spectra_signal")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(write_spectra_run(tmp_path_factory.mktemp("spectra") / "run", PLAN))


def drawn(source: Source, name: str) -> Drawn:
    result = PANELS[name].render(source)
    assert isinstance(result, Drawn), result
    return result


def field(layer: dict[str, object], name: str, step: int) -> np.ndarray:
    return np.asarray(layer["table"])[step, FIELDS.index(name)]


@pytest.mark.slow
def test_layers_are_sorted_by_their_share_of_signal(source: Source) -> None:
    rows = drawn(source, "spectra_layers").data["tables"][0]["rows"]
    shares = [float(row[3]) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert [row[0] for row in rows] == [history.name for history in spectra_of(source)]
    assert rows[-1][0] == HEAD
    assert rows[-1][2] == "300"


@pytest.mark.slow
def test_explorer_shows_stored_values(source: Source) -> None:
    data = drawn(source, "spectra").data
    layer = next(one for one in data["layers"] if one["name"] == UP)
    stored = table(source.run, 200, UP)
    for name in ("echo", "echo_low", "echo_null", "left_alignment", "shrunk", "unbiased_high"):
        np.testing.assert_allclose(field(layer, name, 2), stored[name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(layer["spectrum"][2, 0], np.median(stored.singular_values, axis=0), rtol=1e-6)
    figures = dict(zip(data["numbers"], layer["figures"][2], strict=True))
    assert figures["edge"] == stored.measurement["edge"]
    assert math.isnan(figures["stable_rank_momentum"])
    # What independent noise of this level and shape has.
    p, q, sigma = stored.layer.rows, stored.layer.columns, stored.measurement["noise_sigma"]
    np.testing.assert_allclose(layer["spectrum"][2, 3], noise_values(sigma, p, q), rtol=1e-6)
    assert figures["threshold"] == pytest.approx(sigma * (p * q) ** 0.25)
    assert figures["stable_rank_noise"] == pytest.approx(p * q / (p**0.5 + q**0.5) ** 2)


@pytest.mark.slow
def test_frobenius_norm_is_that_of_replicates(source: Source) -> None:
    G = replicates(PLAN, UP, 1).double()
    truth = float(torch.linalg.matrix_norm(G).square().mean().sqrt())
    assert frobenius(table(source.run, 100, UP)) == pytest.approx(truth, rel=1e-5)


def test_curve_of_muon_equals_its_iteration(source: Source) -> None:
    layer = next(one for one in drawn(source, "spectra").data["layers"] if one["name"] == UP)
    stored = table(source.run, 0, UP)
    x = stored["singular_value"] / frobenius(stored)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    np.testing.assert_allclose(field(layer, "muon", 0), x, rtol=1e-4)


def test_gaps_are_in_units_of_noise(source: Source) -> None:
    layer = next(one for one in drawn(source, "spectra").data["layers"] if one["name"] == QKV)
    stored = table(source.run, 0, QKV)
    s, sigma = stored["singular_value"], stored.measurement["noise_sigma"]
    gaps = field(layer, "gap", 0)
    np.testing.assert_allclose(gaps[:-1], np.abs(s[:-1] - s[1:]) / sigma, rtol=1e-5)
    assert math.isnan(gaps[-1])


def test_charts_have_line_per_layer(source: Source) -> None:
    signal = drawn(source, "spectra_signal").data["charts"]
    by_title = {chart["title"]: chart["lines"] for chart in signal}
    assert "Stable rank of the momentum" not in by_title
    assert by_title["Stable rank of the update"][0]["values"].tolist() == [4.0, 3.0, 2.0, 1.9]
    assert {line["label"] for line in signal[0]["lines"]} == set(STRENGTHS)


def test_thinned_tables_have_remark(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explorer(source)[1] == []
    monkeypatch.setattr(shared, "NUMBERS", 3 * 20 * 32 * 2)
    monkeypatch.setattr(shared, "DIRECTIONS", 16)
    monkeypatch.setattr(shared, "LAYERS", 2)
    data, remarks = explorer(source)
    assert [one["name"] for one in data["layers"]] == [o.name for o in spectra_of(source)[:2]]
    first = data["layers"][0]
    assert first["steps"][0] == 0
    assert first["steps"][-1] == 300
    assert len(first["directions"]) == 16
    assert first["directions"][:8].tolist() == list(range(8))
    assert first["table"].shape == (len(first["steps"]), len(FIELDS), 16)
    assert len(remarks) == 2
    assert remarks[0].startswith("3 layers were measured; the 2 with the largest share")
    monkeypatch.setattr(shared, "NUMBERS", 1)
    data, remarks = explorer(source)
    assert data["layers"][0]["steps"].tolist() == [0, 300]
    assert "Of up to 4 measured steps 2 are shown, evenly spread." in remarks


@pytest.mark.parametrize("amount", [1, 95, 96, 97, 1000, 4096])
def test_thinned_indices_are_ascending_and_hold_both_ends(amount: int) -> None:
    indices = thinned(amount, 96)
    assert indices[0] == 0
    assert indices[-1] == amount - 1
    assert len(indices) <= 96
    assert (np.diff(indices) > 0).all()


def test_run_without_spectra_has_no_panel(tmp_path: Path) -> None:
    source = Source(build_run(tmp_path / "run", monitors=("spectra",)))
    for name in NAMES:
        result = PANELS[name].render(source)
        assert isinstance(result, NotMeasured)
        assert result.reason.endswith(".")


@pytest.mark.slow
def test_pure_noise_is_rendered(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), shapes={HEAD: (330, 340)}, strengths={}, replicates=4)
    noise = Source(write_spectra_run(tmp_path / "run", plan))
    layer = drawn(noise, "spectra").data["layers"][0]
    assert np.isnan(field(layer, "echo", 0)).all()
    assert np.isnan(layer["spectrum"][:, :3]).all()
    (row,) = drawn(noise, "spectra_layers").data["tables"][0]["rows"]
    assert row[6].startswith("0 of ")


@pytest.mark.slow
def test_attempts_are_joined(tmp_path: Path) -> None:
    write_spectra_run(tmp_path / "run", Injected(steps=(0, 10)))
    run = write_spectra_run(tmp_path / "run", Injected(steps=(10, 20)))
    assert steps_of(spectra_of(Source(run))).tolist() == [0, 10, 20]


def test_evidence_links_to_its_layer() -> None:
    drawn_panels = {panel.name for panel in in_order()}

    def layer_at(path: str) -> tuple[str, str | None, int | None]:
        found = place_of(Evidence(path, 5), finding("w", 3), in_order(), drawn_panels, {})
        return found.panel, found.layer, found.step

    assert layer_at("scalars/spectra/a.weight/edge") == ("spectra", "a.weight", 5)
    assert layer_at("scalars/spectra/odd/name/edge") == ("spectra", "odd/name", 5)
    assert layer_at("arrays/spectra/odd/name/directions/echo") == ("spectra", "odd/name", 5)


def test_headline_is_the_signal_share(source: Source) -> None:
    page = model(source)
    assert page["verdict"]["headline"] == "Median signal share of 3 layers: 0.331"
    detail = "Spectra of 3 layers over replicates were measured at 4 steps."
    assert page["verdict"]["detail"].startswith(f"No findings. {detail}")
    assert {f["label"]: f["value"] for f in page["verdict"]["figures"]}["replicates"] == "12"


@pytest.mark.slow
def test_names_are_made_visible(tmp_path: Path) -> None:
    hostile = "layer\N{RIGHT-TO-LEFT OVERRIDE}.weight"
    plan = Injected(steps=(0,), shapes={hostile: (8, 9)}, strengths={hostile: (5.0,)})
    layer = drawn(Source(write_spectra_run(tmp_path / "run", plan)), "spectra").data["layers"][0]
    assert layer["name"] == visible(hostile)


@pytest.mark.slow
def test_drift_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    plan = Injected(shapes={HEAD: (20, 36)})
    writer = RunWriter.create(tmp_path / "run", monitors=("spectra",), step_offset=0)
    record_layer(writer, Layer(HEAD, "head", (20, 36), "", 20, 36))
    found = spectral_echo(replicates(plan, HEAD, 0))
    for step, stayed in ((0, math.nan), (5, 0.75)):
        drift = {"drift_left": stayed, "drift_right": 0.5, "drift_directions": 2.0}
        record(writer, step, HEAD, found, drift=drift)
    writer.close()
    charts = drawn(Source(open_run(tmp_path / "run")), "spectra_signal").data["charts"]
    by_title = {chart["title"]: chart["lines"][0]["values"] for chart in charts}
    left = by_title["Overlap of the leading left directions with those before"]
    assert math.isnan(left[0])
    assert left[1] == 0.75
    assert by_title["Overlap of the leading right directions with those before"].tolist() == [0.5, 0.5]


@pytest.mark.slow
def test_notes_name_noise_and_the_batch(tmp_path: Path) -> None:
    weak = Source(write_spectra_run(tmp_path / "weak", Injected(steps=(0, 10), strengths={UP: (8.0,)})))
    assert any(
        "In 2 of 3 layers no direction is found" in note for note in drawn(weak, "spectra_layers").remarks
    )
    strengths = {name: (100.0,) for name in STRENGTHS}
    plan = Injected(steps=(0,), strengths=strengths)
    notes = drawn(Source(write_spectra_run(tmp_path / "strong", plan)), "spectra_signal").remarks
    assert any(note.startswith("The batch of 48 samples, at a noise scale of") for note in notes)
    plan = Injected(steps=(0,), strengths=strengths, checkpoints=True)  # replicates that are no step's batch
    checkpoints = drawn(Source(write_spectra_run(tmp_path / "checkpoints", plan)), "spectra_signal")
    assert not any("batch" in note for note in checkpoints.remarks)


@pytest.mark.slow
def test_noise_scale_of_layers_together_is_that_of_their_joint_gradient(tmp_path: Path) -> None:
    plan = Injected(steps=(0,), strengths={UP: (8.0,), HEAD: (60.0,)})
    histories = spectra_of(Source(write_spectra_run(tmp_path / "run", plan)))
    names = [history.name for history in histories]
    whole = torch.cat([torch.stack(list(replicates(plan, name, 0))).flatten(1) for name in names], 1).double()
    R, mean, square = len(whole), whole.mean(0), float(whole.square().sum(1).mean())
    share = (R * float(mean.square().sum()) - square) / ((R - 1) * square)
    expected = plan.batch * (1 - share) / share
    found = joint_noise_scale(histories)
    assert found.value == pytest.approx(expected, rel=1e-4)
    products = (whole @ whole.sum(0)).numpy()
    direct = noise_scale(whole.square().sum(1).numpy(), products, plan.batch)
    assert found.interval == pytest.approx(direct.interval, rel=1e-3)
    layers = [history.last["noise_scale"] for history in histories]
    assert not math.isclose(expected, sorted(layers)[len(layers) // 2], rel_tol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strength", "words"),
    [(3.0, "most of each step is noise"), (100.0, "a smaller batch would give nearly the same steps")],
)
def test_claim_about_batch_needs_interval_that_excludes_it(
    tmp_path: Path, strength: float, words: str
) -> None:
    plan = Injected(steps=(0,), strengths={name: (strength,) for name in STRENGTHS})
    source = Source(write_spectra_run(tmp_path / "run", plan))
    scale = joint_noise_scale(spectra_of(source))
    batch = plan.batch * spectra_of(source)[0].last.replicates
    (note,) = [note for note in drawn(source, "spectra_signal").remarks if note.startswith("The batch")]
    far = scale.interval.low > FAR * batch or scale.interval.high * FAR < batch
    assert (words in note) == far, (note, scale)
    listed = drawn(source, "spectra_layers").data["tables"][0]["rows"]
    assert all("-" in row[5][1:] or row[5].startswith("> ") for row in listed), listed
