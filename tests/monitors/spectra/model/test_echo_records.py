"""Records of a layer are read back exactly, by step."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.shrinkage import threshold
from backlight.monitors.spectra.model.echo_records import record_arrays, record_layer, record_left_out
from backlight.store.read.run import open_run
from backlight.store.spectra import FIELDS, NUMBERS, Layer, layers, left_out, measurements, table
from backlight.store.write.writer import RunWriter
from spectra_runs import record

LAYER = Layer("blocks.0.qkv.weight:q", "blocks.0.qkv", (30, 50), "blocks.0.qkv.weight", 30, 50, 1)


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, 3))[0] for n in (30, 50))
    strength = torch.tensor([8.0, 7.9, 3.0]) * threshold(1.0, 30, 50)
    return spectral_echo((U * strength) @ V.T + torch.randn(8, 30, 50), max_directions=20)


def test_table_is_read_as_it_was_recorded(tmp_path, result):
    writer = RunWriter.create(tmp_path / "run", step_offset=0)
    record_layer(writer, LAYER)
    record_left_out(writer, "norm.weight", "one-dimensional")
    record(writer, 300, LAYER.parameter, result, batch=16, stable_ranks={"weight": 4.5, "momentum": None})
    record(writer, 20, LAYER.parameter, replace(result, identifiable=1))
    writer.close()

    run = open_run(tmp_path / "run")
    assert layers(run) == (LAYER,)
    assert left_out(run) == {"norm.weight": "one-dimensional"}
    assert [m.step for m in measurements(run, LAYER.parameter)] == [20, 300]
    found = table(run, 300, LAYER.parameter)
    assert found.singular_values.shape == (8, 30)
    np.testing.assert_allclose(found.singular_values, result.singular_values, rtol=1e-6)
    assert set(found.fields) == set(FIELDS)
    same = {"echo": "echo", "echo_null": "null", "unbiased": "diagonal", "shrunk": "shrunk"}
    for name, attribute in same.items():
        expected = getattr(result, attribute)
        assert np.isnan(expected[20:]).all()
        np.testing.assert_allclose(found[name], expected, rtol=1e-6)
    np.testing.assert_allclose(found["echo_high"], result.interval[:, 1], rtol=1e-6)
    assert found["block"][:3].tolist() == [0, 0, 1]
    assert found.measurement.blocks == result.blocks
    numbers = found.measurement.numbers
    assert set(numbers) == set(NUMBERS)
    assert found.measurement["noise_scale"] == pytest.approx(result.noise.noise_scale(16))
    assert (numbers["stable_rank_weight"], numbers["aspect_ratio"]) == (4.5, 0.6)
    assert numbers["stable_rank_gradient"] == result.stable_rank
    assert math.isnan(numbers["stable_rank_momentum"])
    assert math.isnan(measurements(run)[0]["batch"])
    assert run.scalar(f"spectra/{LAYER.parameter}/identifiable").values.tolist() == [1, 3]


@pytest.mark.slow
def test_later_attempt_replaces_earlier(tmp_path, result):
    for scale in (1.0, 2.0):
        writer = RunWriter.create(tmp_path / "run", step_offset=0, resume=scale > 1.0)
        record_layer(writer, LAYER)
        record(writer, 5, LAYER.parameter, replace(result, echo=result.echo * scale), batch=4 * scale)
        writer.close()
    found = table(open_run(tmp_path / "run"), 5, LAYER.parameter)
    np.testing.assert_allclose(found["echo"], 2 * result.echo, rtol=1e-6)
    assert found.measurement["batch"] == 8


def test_layers_without_measured_event_are_not_measured(tmp_path, result):
    writer = RunWriter.create(tmp_path / "run", step_offset=0)
    record_layer(writer, LAYER)
    record_arrays(writer, 5, LAYER.parameter, result)
    record(writer, 6, LAYER.parameter, result)
    writer.close()
    run = open_run(tmp_path / "run")
    assert [m.step for m in measurements(run, LAYER.parameter)] == [6]
    with pytest.raises(KeyError, match="was not measured at step 5; it was at 6"):
        table(run, 5, LAYER.parameter)
    with pytest.raises(KeyError, match=r"no spectra of 'elsewhere'; there are blocks\.0\.qkv\.weight:q"):
        table(run, 6, "elsewhere")


@pytest.mark.slow
def test_layer_of_noise_has_table(tmp_path):
    torch.manual_seed(3)
    noise = spectral_echo(torch.randn(4, 400, 400))
    assert noise.measured == 0
    writer = RunWriter.create(tmp_path / "run", step_offset=0)
    record_layer(writer, Layer("w", "", (400, 400), "", 400, 400))
    record(writer, 0, "w", noise, batch=1)
    writer.close()
    found = table(open_run(tmp_path / "run"), 0, "w")
    assert found["echo"].shape == (400,)
    assert np.isnan(found["echo"]).all()
    assert found.measurement.identifiable == 0


def test_unknown_stable_ranks_are_refused(tmp_path, result):
    writer = RunWriter.create(tmp_path / "run", step_offset=0)
    with pytest.raises(ValueError, match="stable_rank_loss: is no number of a layer; there are replicates"):
        record(writer, 0, "w", result, stable_ranks={"loss": 1.0})
    writer.close()
