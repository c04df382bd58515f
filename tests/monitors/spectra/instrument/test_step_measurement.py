"""Spectra in a training run: training is unchanged and replicates are its microbatches."""

from __future__ import annotations

import copy
import io
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.measure.spectra.measurement import spectral_echo
from backlight.monitors.spectra.instrument.worker_thread import StepMeasurement
from backlight.store import spectra as stored
from spectra.training import batch, build, loss_of, same, train, train_once, unmeasured, watch, weights

Replicates = dict[tuple[int, str], list[Tensor]]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "accumulation": ({}, {}),
    "one microbatch": ({}, {"micro": 1}),
    "shared weights": ({"tied": True}, {}),
    "checkpointing": ({"reentrant": False}, {}),
    "re-entrant checkpointing": ({"reentrant": True, "tied": True}, {}),
    "autocast": ({}, {"autocast": True}),
    "gradient scaling": ({}, {"scaler": True}),
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Replicates:
    """Record the measured replicates by step and layer."""
    found: Replicates = {}
    original = StepMeasurement._layer

    def keep(self: Any, caught: Any, name: str, G: list[Tensor], *rest: Any) -> None:
        found[caught.step, name] = [part.clone() for part in G]
        original(self, caught, name, G, *rest)

    monkeypatch.setattr(StepMeasurement, "_layer", keep)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:backlight. spectra of:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_and_replicates_are_microbatches(
    case: str, tmp_path: Path, measured: Replicates
) -> None:
    options, loop = CASES[case]
    model = build(**options)
    truth: Replicates = {}
    kept: dict[str, Tensor] = {}

    # The change of .grad in each backward: the gradient of its microbatch, up to rounding.
    def before(step: int, micro: int) -> None:
        for name, parameter in model.named_parameters():
            now = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            if micro:
                truth.setdefault((step, name), []).append(now - kept[name])
            kept[name] = now

    plain = train_once(model, {**loop, "before": before})
    drawn = torch.get_rng_state()
    assert same(plain, train_once(build(**options), loop, tmp_path))
    assert torch.equal(drawn, torch.get_rng_state())
    steps = {m.step for m in stored.measurements(backlight.open_run(tmp_path))}
    assert steps == {step for step, _ in measured} == (set() if case == "one microbatch" else {0, 2})
    size = 1024.0 if loop.get("scaler") else 1.0
    for (step, name), replicates in measured.items():
        assert len(replicates) == 4
        for found, expected in zip(replicates[:3], truth[step, name], strict=True):
            largest = float(expected.abs().max()) / size
            torch.testing.assert_close(found, expected / size, rtol=0.0, atol=1e-6 * largest + 1e-9)


@pytest.mark.slow
def test_measurement_of_replicates_is_recorded(tmp_path: Path, measured: Replicates) -> None:
    train_once(build(), {}, tmp_path, spectra={"fused": {"*.qkv.weight": ["q", "k", "v"]}})
    run = backlight.open_run(tmp_path)
    layers = {layer.parameter: layer for layer in stored.layers(run)}
    assert {"block.qkv.weight:q", "block.qkv.weight:k", "block.up.weight"} <= set(layers)
    assert "block.qkv.weight" not in layers
    assert layers["block.qkv.weight:v"].split_of == "block.qkv.weight"
    assert stored.left_out(run)["block.norm.weight"].startswith("one dimension")
    table = stored.table(run, 2, "block.qkv.weight:k")
    alone = spectral_echo(measured[2, "block.qkv.weight:k"])
    np.testing.assert_allclose(table["echo"], alone.echo, rtol=1e-6)
    np.testing.assert_allclose(table.singular_values, alone.singular_values, rtol=1e-5)
    assert table.measurement["batch"] == 8
    assert table.measurement["noise_scale"] == pytest.approx(alone.noise.noise_scale(8))


@pytest.mark.slow
def test_weights_updates_and_momenta_are_measured(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history: list[dict[str, Tensor]] = []

    def before(_step: int, micro: int) -> None:
        if micro == 0:
            history.append(weights(model))

    with watch(model, optimizer, tmp_path, every=2):
        train(model, optimizer, steps=3, before=before)
    history.append(weights(model))
    run, name = backlight.open_run(tmp_path), "block.up.weight"
    at, values = run.array(f"spectra/{name}/update_singular_values")
    assert at.tolist() == [0, 2]
    update = history[3][name] - history[2][name]
    np.testing.assert_allclose(values[1], torch.linalg.svdvals(update.double()), rtol=1e-4)
    # The step is the rate times the momentum.
    _, momenta = run.array(f"spectra/{name}/momentum_singular_values")
    np.testing.assert_allclose(values[1], 0.1 * momenta[1], rtol=1e-3)
    s = torch.linalg.svdvals(history[3][name].double())
    last = stored.measurements(run, name)[-1]
    assert last["stable_rank_weight"] == pytest.approx(float((s**2).sum() / s[0] ** 2), rel=1e-6)
    assert last["stable_rank_update"] == pytest.approx(last["stable_rank_momentum"], rel=1e-3)


@pytest.mark.slow
def test_injected_direction_of_transformer_is_recovered(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    draw = torch.Generator().manual_seed(3)
    u, v = (nn.functional.normalize(torch.randn(n, generator=draw), dim=0) for n in (32, 16))
    noise = torch.Generator().manual_seed(4)

    # The gradient of the layer is replaced in backward, so that its signal and noise are known.
    def injected(gradient: Tensor) -> Tensor:
        return 3.0 * torch.outer(u, v) + 0.1 * torch.randn(gradient.shape, generator=noise)

    model.block.up.weight.register_hook(injected)
    with watch(model, optimizer, tmp_path):
        train(model, optimizer, steps=2, micro=12)
    run = backlight.open_run(tmp_path)
    table = stored.table(run, 1, "block.up.weight")
    s, sigma, p, q = 3.0, 0.1, 32, 16
    # docs/formulas.md, section 2: the echo of a direction of that strength.
    zeta = (s**4 - sigma**4 * p * q) / (s**2 * ((s**2 + sigma**2 * p) * (s**2 + sigma**2 * q)) ** 0.5)
    assert table.measurement.identifiable == 1
    assert table["echo"][0] == pytest.approx(zeta, abs=0.01)
    assert table.measurement["noise_sigma"] == pytest.approx(sigma, rel=0.05)
    # Step 1 is compared with the direction at step 0.
    moved = run.scalar("spectra/block.up.weight/drift_left")
    assert moved.steps.tolist() == [1]
    assert moved.values[0] > 0.99


def split_settings(given: Any, count: int = 4) -> dict[str, Any]:
    return {"spectra": {"split": count}, "samples": (loss_of, given)}


@pytest.mark.slow
def test_single_microbatch_is_split_on_request(tmp_path: Path, measured: Replicates) -> None:
    plain = train_once(build(), {"micro": 1})
    now = [0]
    loop = {"micro": 1, "before": lambda step, _micro: now.__setitem__(0, 100 * step)}
    drawn = torch.get_rng_state()
    assert same(plain, train_once(build(), loop, tmp_path, **split_settings(lambda: batch(now[0]))))
    assert torch.equal(drawn, torch.get_rng_state())
    run = backlight.open_run(tmp_path)
    assert {m.step for m in stored.measurements(run)} == {0, 2}
    assert stored.measurements(run, "head.weight")[0]["batch"] == 2
    costs = [event.payload for event in run.events("spectra_cost")]
    assert [cost["extra_passes"] for cost in costs] == [4, 4]
    assert all(cost["extra_seconds"] > 0 for cost in costs)
    # Without dropout a part is the gradient of its samples.
    model = build().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    whole = batch(5)
    with watch(model, optimizer, tmp_path / "eval", **split_settings(whole)):
        loss_of(model, whole).backward()
        optimizer.step()
    for number, found in enumerate(measured[0, "head.weight"]):
        part = tuple(x[2 * number : 2 * number + 2] for x in whole)
        (expected,) = torch.autograd.grad(loss_of(model, part), [model.head.weight])  # type: ignore[arg-type]
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_split_restores_running_statistics_and_random_state(tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(12, 6)

        def loss_fn(model: nn.Module, part: Tensor) -> Tensor:
            random.random()
            np.random.rand()
            loss: Tensor = model(part).square().mean()
            return loss

        random.seed(1)
        np.random.seed(1)
        given: dict[str, Any] = {"spectra": {"split": 3}, "samples": (loss_fn, x)}
        with nullcontext() if path is None else watch(model, optimizer, path, **given):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        found.append((weights(model), random.random(), np.random.rand()))
    assert same(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert {m.step for m in stored.measurements(backlight.open_run(tmp_path))} == {0, 1, 2}


def test_one_microbatch_without_split_warns(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="one microbatch gives no echo.*'split'") as warned:
        train_once(build(), {"micro": 1}, tmp_path)
    assert len(warned) == 1
    assert [s for r, s in unmeasured(tmp_path).items() if "one microbatch" in r] == [[0, 2]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_is_measured_and_not_recompiled(tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path):
        torch._dynamo.reset()
        counted = torch._dynamo.utils.counters
        counted.clear()
        model = build().eval()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with nullcontext() if path is None else watch(compiled, optimizer, path, every=2):
            train(compiled, optimizer, steps=3)
        found.append((weights(model), counted["stats"]["unique_graphs"]))
    (plain, graphs), (measured_weights, again) = found
    assert same(plain, measured_weights)
    assert graphs == again
    measured = stored.measurements(backlight.open_run(tmp_path))
    assert {(m.step, m.replicates) for m in measured} == {(0, 4), (2, 4)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("buffer", ["host", "device"])
def test_accelerator_training_is_unchanged_and_equals_host(
    buffer: str, tmp_path: Path, measured: Replicates
) -> None:
    states = []
    for path in (None, tmp_path):
        model = build().cuda().eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings: dict[str, Any] = {"every": 2, "spectra": {"buffer": buffer}}
        with nullcontext() if path is None else watch(model, optimizer, path, **settings):
            for step in range(3):
                optimizer.zero_grad()
                for micro in range(4):
                    pair = batch(10 * step + micro)
                    loss_of(model, (pair[0].cuda(), pair[1].cuda())).backward()
                optimizer.step()
        states.append(weights(model))
    assert same(*states)
    replicates = measured[2, "block.up.weight"]
    assert {part.device.type for part in replicates} == {"cpu" if buffer == "host" else "cuda"}
    alone = spectral_echo([part.cpu() for part in replicates])
    table = stored.table(backlight.open_run(tmp_path), 2, "block.up.weight")
    k = alone.identifiable
    np.testing.assert_allclose(table["echo"][:k], alone.echo[:k], atol=1e-3)


@pytest.mark.slow
def test_layers_that_do_not_fit_are_reported_and_largest_kept(tmp_path: Path) -> None:
    size = 48 * 16 * 4  # of the fused weight
    with pytest.warns(RuntimeWarning, match=r"do not fit into spectra\.memory"):
        train_once(build(), {}, tmp_path, spectra={"memory": size * 8, "replicates": 4})
    run = backlight.open_run(tmp_path)
    assert {m.parameter for m in stored.measurements(run)} == {"block.qkv.weight"}
    assert "do not fit" in stored.left_out(run)["block.up.weight"]
    held = [event.payload["bytes"] for event in run.events("spectra_cost")]
    assert 0 < max(held) <= size * 8


@pytest.mark.slow
def test_microbatches_beyond_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    train_once(build(), {"micro": 6}, tmp_path, spectra={"replicates": 4})
    costs = [e.payload for e in backlight.open_run(tmp_path).events("spectra_cost")]
    assert [(c["replicates"], c["not_kept"]) for c in costs] == [(4, 2), (4, 2)]


@pytest.mark.slow
def test_hooks_are_removed_after_backward(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def before(_step: int, micro: int) -> None:
        assert not any(p._backward_hooks for p in model.parameters())
        if micro == 1:
            copy.deepcopy(model)
            torch.save(model, io.BytesIO())

    with watch(model, optimizer, tmp_path):
        train(model, optimizer, steps=2, before=before)
    assert not model._forward_pre_hooks
    assert stored.measurements(backlight.open_run(tmp_path))
