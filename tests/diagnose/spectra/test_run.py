"""Spectra of a recipe: values, ranks, resuming, refusals."""

from __future__ import annotations

import json
import shutil
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from backlight.diagnose.spectra import checkpoint_measurement
from backlight.diagnose.spectra.options import SpectraRequest
from backlight.diagnose.spectra.run import measure_spectra
from backlight.launch.recipe import read_recipe
from backlight.measure.spectra.measurement import spectral_echo
from backlight.monitors.spectra.settings import SpectraError
from backlight.store.errors import StoreError
from backlight.store.read.run import open_run
from backlight.store.spectra import FIELDS, layers, left_out, measurements, table
from run_builder import build_run
from spectra.processes import start_ranks

EXAMPLE = Path(__file__).parents[3] / "examples" / "gpt_recipe.py"

RECIPE = """
import time
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.qkv, self.drop, self.head = nn.Linear(4 * dim, 3 * dim), nn.Dropout(0.1), nn.Linear(3 * dim, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x[:, None]))).flatten(1)
        return self.head(self.drop(self.qkv(x)))

def build_model(dim=8):
    return Net(dim)

def batches(rank, world_size, batch=12, dim=8):
    generator = torch.Generator().manual_seed(1000 + rank)
    while True:
        x = torch.randn(batch, dim, generator=generator)
        yield x, (x[:, :5] + torch.randn(batch, 5, generator=generator)).argmax(1)

def loss(model, batch, pause=0.0):
    x, y = batch
    return F.cross_entropy(model(x), y)

def split(name, tensor):
    return dict(zip([f"{name}:{p}" for p in "qkv"], tensor.chunk(3))) if name == "qkv.weight" else None
"""

NAMES = ["conv.weight", "qkv.weight:q", "qkv.weight:k", "qkv.weight:v", "head.weight"]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The run of the unchanged recipe in one process."""
    folder = tmp_path_factory.mktemp("reference")
    (folder / "recipe.py").write_text(RECIPE, encoding="utf-8")
    measure(folder / "recipe.py", folder / "run")
    return folder / "run"


def replace_in(recipe, old, new):
    text = recipe.read_text(encoding="utf-8")
    assert old in text
    recipe.write_text(text.replace(old, new), encoding="utf-8")
    return recipe


def measure(recipe, out, **options):
    return measure_spectra(SpectraRequest(recipe=recipe, out=out, **{"replicates": 5, **options}))


def assert_equal_runs(first, second):
    """Assert that two runs contain bitwise equal results."""
    one, other = open_run(first), open_run(second)
    assert layers(one) == layers(other)
    keys = [(m.step, m.parameter) for m in measurements(one)]
    assert sorted(keys) == sorted((m.step, m.parameter) for m in measurements(other))
    assert keys
    for step, parameter in keys:
        a, b = table(one, step, parameter), table(other, step, parameter)
        assert repr(a.measurement) == repr(b.measurement)
        np.testing.assert_array_equal(a.singular_values, b.singular_values)
        for name in FIELDS:
            np.testing.assert_array_equal(a[name], b[name], err_msg=f"{parameter} {name}")


def test_results_equal_those_of_the_functions(recipe, tmp_path):
    replace_in(recipe, "Dropout(0.1)", "Dropout(0.0)")
    outcome = measure(recipe, tmp_path / "run", settings={"batch": 10})
    assert (outcome.layers, outcome.measured, outcome.resumed, outcome.batch) == (5, 5, 0, 10)
    run = open_run(tmp_path / "run")
    assert [layer.parameter for layer in layers(run)] == NAMES
    assert set(left_out(run)) == {"conv.bias", "norm.weight", "norm.bias", "qkv.bias", "head.bias"}
    assert run.monitors == ("spectra",)

    loaded = read_recipe(recipe, {"batch": 10})
    # The weights that were measured follow from the seed.
    from backlight.monitors.spectra.instrument.replicate_gradient import seed_by

    seed_by(0, "model")
    model = loaded.build_model()
    found = []
    for replicate in range(5):
        value = loaded.loss(model, next(loaded.batches(replicate, 5)))
        found.append(torch.autograd.grad(value, [model.conv.weight, model.qkv.weight]))
    expected = {
        "conv.weight": spectral_echo([g[0].reshape(4, 3) for g in found]),
        "qkv.weight:k": spectral_echo([g[1].chunk(3)[1] for g in found]),
    }
    for name, result in expected.items():
        stored = table(run, 0, name)
        np.testing.assert_allclose(stored["echo"], result.echo, rtol=1e-6)
        np.testing.assert_allclose(stored.singular_values, result.singular_values, rtol=1e-6)
        assert stored.measurement["signal_share"] == pytest.approx(result.noise.signal_share, rel=1e-9)
        assert stored.measurement["noise_scale"] == pytest.approx(result.noise.noise_scale(10), rel=1e-9)
    s = torch.linalg.svdvals(model.head.weight.detach().double())
    rank = float((s**2).sum() / s[0] ** 2)
    assert table(run, 0, "head.weight").measurement["stable_rank_weight"] == pytest.approx(rank, rel=1e-4)
    s = torch.linalg.svdvals(torch.stack([g[0].reshape(4, 3) for g in found]).mean(0).double())
    rank = float((s**2).sum() / s[0] ** 2)
    assert table(run, 0, "conv.weight").measurement["stable_rank_gradient"] == pytest.approx(rank, rel=1e-4)


def test_results_do_not_depend_on_budget_and_selection(recipe, tmp_path, reference):
    outcome = measure(recipe, tmp_path / "sweeps", budget=6000)
    assert outcome.sweeps > 2
    assert_equal_runs(reference, tmp_path / "sweeps")
    measure(recipe, tmp_path / "part", include=["qkv.weight:k", "conv"])
    one, part = open_run(reference), open_run(tmp_path / "part")
    for name in ("qkv.weight:k", "conv.weight"):
        np.testing.assert_array_equal(table(one, 0, name)["echo"], table(part, 0, name)["echo"])
    measure(recipe, tmp_path / "other", seed=1)
    other = table(open_run(tmp_path / "other"), 0, "qkv.weight:k")
    assert not np.array_equal(other["echo"], table(one, 0, "qkv.weight:k")["echo"])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_results_do_not_depend_on_the_number_of_ranks(recipe, tmp_path, reference, ranks):
    arguments = ("--replicates", 5, "--budget", 9000, "--out", tmp_path / "several", "--json")
    started = start_ranks(ranks, "-m", "backlight", "spectra", recipe, *arguments)
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, ended
    answer = json.loads(ended[0][0])
    assert (answer["run"]["world_size"], answer["run"]["measured"], len(answer["layers"])) == (ranks, 5, 5)
    assert_equal_runs(reference, tmp_path / "several")
    run = open_run(tmp_path / "several")
    owners = [event.rank for event in run.events("spectra_measured")]
    assert len(owners) == 5
    assert len(set(owners)) == min(ranks, 5)


@pytest.mark.full
def test_error_of_one_rank_is_raised_on_every_rank(recipe, tmp_path):
    # Replicate 3 belongs to rank 1 of 2, and its batch leaves the head unused.
    condition = "if torch.equal(x, next(batches(3, 5))[0]):"
    replace_in(
        recipe,
        "    x, y = batch\n",
        f"    x, y = batch\n    {condition}\n        return model.qkv.weight.sum()\n",
    )
    arguments = ("--replicates", 5, "--out", tmp_path / "run")
    ranks = start_ranks(2, "-m", "backlight", "spectra", recipe, *arguments)
    messages = [process.communicate(timeout=60)[1].splitlines()[-1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert messages[0] == messages[1]
    assert messages[0].startswith("backlight: layer 'conv.weight': replicate 3 gave it no gradient")
    with pytest.raises(SpectraError, match=r"layer 'conv\.weight': replicate 3 gave it no gradient"):
        measure(recipe, tmp_path / "one")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_killed_run_is_resumed(recipe, tmp_path, reference, ranks):
    replace_in(recipe, "    x, y = batch\n", "    x, y = batch\n    time.sleep(0.1)\n")
    options = ("--replicates", 5, "--budget", 3000, "--out", tmp_path / "run")
    started = start_ranks(ranks, "-m", "backlight", "spectra", recipe, *options)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if measurements(open_run(tmp_path / "run")):
                    break
            except StoreError:
                pass
            time.sleep(0.01)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    before = {m.parameter for m in measurements(open_run(tmp_path / "run"))}
    assert 0 < len(before) < 5
    outcome = measure(recipe, tmp_path / "run", budget=10**9)
    assert outcome.resumed >= len(before)
    assert outcome.resumed + outcome.measured == 5
    run = open_run(tmp_path / "run")
    assert len(run.attempts) == 2
    assert len(run.events("spectra_measured")) == 5
    assert_equal_runs(reference, tmp_path / "run")
    assert measure(recipe, tmp_path / "run").measured == 0
    assert len(open_run(tmp_path / "run").attempts) == 2


def test_layers_with_missing_arrays_are_measured_again(recipe, tmp_path, reference):
    shutil.copytree(reference, tmp_path / "run")
    min((tmp_path / "run" / "attempt-000" / "arrays").iterdir()).unlink()
    outcome = measure(recipe, tmp_path / "run")
    assert outcome.measured >= 1
    assert outcome.measured + outcome.resumed == 5
    assert_equal_runs(reference, tmp_path / "run")


def test_deleted_run_directory_is_reported(recipe, tmp_path):
    def delete_run(stage):
        if "sending" in stage.text:
            shutil.rmtree(tmp_path / "run")

    request = SpectraRequest(recipe=recipe, replicates=5, out=tmp_path / "run")
    with pytest.raises(SpectraError, match="run the same command again once that is fixed"):
        measure_spectra(request, delete_run)


def test_checkpoints_are_measured_in_order_and_resumed(recipe, tmp_path):
    model = read_recipe(recipe).build_model()
    for step in (10, 9):
        torch.save({"model": model.state_dict()}, tmp_path / f"step-{step}.pt")
        torch.nn.init.normal_(model.head.weight)
    stages = []
    pattern = str(tmp_path / "step-*.pt")
    request = SpectraRequest(recipe=recipe, checkpoints=[pattern], replicates=4, out=tmp_path / "run")
    outcome = measure_spectra(request, stages.append)
    assert [(c.step, c.path.name) for c in outcome.checkpoints] == [(9, "step-9.pt"), (10, "step-10.pt")]
    assert stages[-1].done == stages[-1].total == 10
    run = open_run(tmp_path / "run")
    weights = [m["stable_rank_weight"] for m in measurements(run, "head.weight")]
    assert len(set(weights)) == 2
    torch.save(model.state_dict(), tmp_path / "step-11.pt")
    later = measure_spectra(request)
    assert (later.measured, later.resumed) == (5, 10)
    torch.save(model.state_dict(), tmp_path / "step-9.pt")
    with pytest.raises(SpectraError, match=r"step 9 was measured on other weights \(.*step-9\.pt\)"):
        measure_spectra(request)


def test_run_of_another_configuration_is_refused(recipe, tmp_path, reference):
    shutil.copytree(reference, tmp_path / "run")
    with pytest.raises(
        SpectraError, match=r"another configuration \(--replicates was 5, is 6\); use the same"
    ):
        measure(recipe, tmp_path / "run", replicates=6)
    with pytest.raises(SpectraError, match="--method was auto, is svd"):
        measure(recipe, tmp_path / "run", method="svd")
    with pytest.raises(SpectraError, match=r"\(the recipe changed\)"):
        measure(replace_in(recipe, "relu", "gelu"), tmp_path / "run")
    build_run(tmp_path / "foreign")
    build_run(tmp_path / "foreign", resume=True, scalars={"loss": [1.0]})
    with pytest.raises(SpectraError, match="is a run of something else; choose another --out"):
        measure(recipe, tmp_path / "foreign")


REFUSALS = {
    "one batch for all ranks": ("seed(1000 + rank)", "seed(7)", {}, "replicates 0 and 1 got the same batch"),
    "batches of two sizes": (
        "generator = torch", "batch += rank // 4\n    generator = torch", {},
        "the batch of replicate 4 has 13 samples, that of replicate 0 has 12",
    ),
    "no batch": ("while True:", "while rank < 3:", {}, r"batches\(3, 5\) gave no batch"),
    "NaN in one replicate": (
        "x = torch.randn(batch, dim, generator=generator)",
        "x = torch.randn(batch, dim, generator=generator) * (float('nan') if rank == 2 else 1)", {},
        "the gradient of replicate 2 holds NaN",
    ),
    "all gradients zero": ("return F.cross_entropy(model(x), y)", "return 0 * model(x).sum()", {},
                           r"layer 'conv\.weight': all 5 replicates are zero"),
    "a loss that fails": ("x, y = batch", "x, y, z = batch", {},
                          "replicate 0: loss or backward failed: ValueError: not enough values"),
    "a loss without a graph": ("F.cross_entropy(model(x), y)", "model(x).sum().detach()", {},
                               "replicate 0: the loss has no graph"),
    "batches that do not come again": (
        "seed(1000 + rank)", "seed(time.time_ns() % 2**40)", {"budget": 100},
        r"batches\(0, 5\) began with another batch when it was called again",
    ),
    "too few": ("", "", {"replicates": 2}, "--replicates 2: at least 3 are needed"),
    "a device": ("", "", {"device": "moon"}, "--device moon: cannot be used here"),
    "a type": ("", "", {"dtype": "int8"}, "--dtype int8: expected one of float32, bfloat16, float64"),
    "no checkpoint": ("", "", {"checkpoints": ["nowhere/*.pt"]}, r"'nowhere/\*\.pt' matches no file"),
    "no matrix": ("", "", {"include": ["norm"]}, "--include 'norm' matches none of 5 matrices"),
    "a setting": ("", "", {"settings": {"dimm": 3}}, "takes the setting 'dimm'; did you mean 'dim'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_recipe_or_option_is_refused(recipe, tmp_path, case):
    old, new, options, text = REFUSALS[case]
    with pytest.raises(SpectraError, match=text):
        measure(replace_in(recipe, old, new), tmp_path / "run", **options)


def test_batch_of_an_unknown_type_has_no_noise_scale(recipe, tmp_path):
    replace_in(recipe, "import time\n", "import time\nfrom types import SimpleNamespace\n")
    replace_in(recipe, "yield x, (x[:, :5] + torch.randn(batch, 5, generator=generator)).argmax(1)",
            "yield SimpleNamespace(x=x, y=x[:, :5].argmax(1))")  # fmt: skip
    replace_in(recipe, "x, y = batch\n", "x, y = batch.x, batch.y\n")
    assert np.isnan(measure(recipe, tmp_path / "run").batch)
    numbers = table(open_run(tmp_path / "run"), 0, "head.weight").measurement
    assert np.isnan(numbers["noise_scale"])
    assert numbers["signal_share"] > 0
    # Batches of this type cannot be compared, so the gradients are.
    replace_in(recipe, "seed(1000 + rank)", "seed(1000 + rank % 4)")
    replace_in(recipe, "Dropout(0.1)", "Dropout(0.0)")
    with pytest.raises(
        SpectraError, match="replicates 0 and 4 are the same, as if both came from the same data"
    ):
        measure(recipe, tmp_path / "other")


def test_unusable_checkpoints_are_refused(recipe, tmp_path):
    torch.save(torch.nn.Linear(3, 3).state_dict(), tmp_path / "other.pt")
    with pytest.raises(SpectraError, match=r"other\.pt: does not fit the model of .*recipe\.py"):
        measure(recipe, tmp_path / "run", checkpoints=[str(tmp_path / "other.pt")])
    torch.save({"model": torch.nn.Linear(3, 3)}, tmp_path / "code.pt")
    with pytest.raises(SpectraError, match=r"code\.pt: refused, because .* opening it could run code"):
        measure(recipe, tmp_path / "run", checkpoints=[str(tmp_path / "code.pt")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_give_similar_results(recipe, tmp_path, reference, dtype):
    measure(recipe, tmp_path / "run", dtype=dtype)
    other = table(open_run(tmp_path / "run"), 0, "head.weight").measurement["signal_share"]
    plain = table(open_run(reference), 0, "head.weight").measurement["signal_share"]
    assert other == pytest.approx(plain, abs=0.05)
    assert other != plain


def test_gradients_held_stay_within_the_budget(tmp_path, monkeypatch):
    n_blocks = 3
    held = {"now": 0, "peak": 0}
    original = checkpoint_measurement.gradients

    def release(size):
        held["now"] -= size

    def counted(*args, **kwargs):
        found = original(*args, **kwargs)
        for tensor in found.values():
            held["now"] += tensor.nbytes
            weakref.finalize(tensor, release, tensor.nbytes)
        held["peak"] = max(held["peak"], held["now"])
        return found

    monkeypatch.setattr(checkpoint_measurement, "gradients", counted)
    settings = {"dim": 16, "heads": 2, "n_blocks": n_blocks, "seq": 16, "batch": 2}
    budget = 5 * 2 * 16 * 64 * 4  # two of the larger matrices of a block, each five times
    outcome = measure(
        EXAMPLE, tmp_path / "run", settings=settings, budget=budget, exclude=["token", "head", "position"]
    )
    assert outcome.layers == 6 * n_blocks
    assert budget / 2 < held["peak"] <= budget


def test_injected_directions_are_found(tmp_path):
    settings = {"dim": 32, "heads": 2, "n_blocks": 1, "seq": 32, "batch": 4}
    measure(EXAMPLE, tmp_path / "control", settings=settings, replicates=12)
    control = table(open_run(tmp_path / "control"), 0, "blocks.0.up.weight")
    strongest = float(control["singular_value"][0])
    sizes = [6 * strongest, 3 * strongest]
    injection = f"""
_plain = loss

def loss(model, batch):
    torch.manual_seed(5)
    U, V = (torch.linalg.qr(torch.randn(n, 2))[0] for n in (128, 32))
    # Its gradient is this matrix of rank two, in every replicate.
    injected = (U * torch.tensor({sizes})) @ V.T
    return _plain(model, batch) + (injected * model.blocks[0].up.weight).sum()
"""
    recipe = tmp_path / "injected.py"
    recipe.write_text(EXAMPLE.read_text(encoding="utf-8") + injection, encoding="utf-8")
    measure(recipe, tmp_path / "injected", settings=settings, replicates=12)
    found = table(open_run(tmp_path / "injected"), 0, "blocks.0.up.weight")
    np.testing.assert_allclose(found["unbiased"][:2], sizes, rtol=0.03)
    np.testing.assert_allclose(found["strength"][:2], sizes, rtol=0.03)
    assert (found["echo"][:2] > 0.97).all()
    assert (found["echo_low"][:2] > 3 * found["echo_null"][:2]).all()
    assert found.measurement.identifiable >= 2
    assert found.measurement["stable_rank_gradient"] == pytest.approx(1.25, abs=0.05)
    for name in ("blocks.0.down.weight", "head.weight"):
        one, other = (table(open_run(tmp_path / run), 0, name) for run in ("control", "injected"))
        np.testing.assert_allclose(one["echo"], other["echo"], atol=1e-5)


def test_command_prints_layers_and_json(recipe, tmp_path, command):
    arguments = ("spectra", str(recipe), "--replicates", "5", "--out", str(tmp_path / "run"))
    code, out, errors = command(*arguments)
    assert (code, errors) == (0, "")
    assert all(name in out for name in NAMES)
    assert f"next: backlight report {tmp_path / 'run'}" in out
    code, out, errors = command(*arguments, "--json")
    assert (code, errors) == (0, "")
    answer = json.loads(out)
    assert {layer["parameter"] for layer in answer["layers"]} == set(NAMES)
    assert answer["run"]["resumed"] == 5
    code, _, errors = command(*arguments[:2], "--method", "magic")
    assert code == 2
    assert "--method magic: expected one of auto, svd, gram, randomized" in errors
