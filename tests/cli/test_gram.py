"""``backlight gram``: against the gradient of each sample, formed one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from backlight.diagnose.recipe_gram import measure_gram
from backlight.launch.recipe import read_recipe

RECIPE = """
import torch

def build_model(width=5):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)).double()

def batches(rank, world_size, batch=6):
    generator = torch.Generator().manual_seed(1)
    yield (torch.randn(batch, 3, generator=generator, dtype=torch.float64),
           torch.randn(batch, 2, generator=generator, dtype=torch.float64))

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.mse_loss(model(x), y)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def per_sample_gradients(path: Path) -> torch.Tensor:
    """Return ``[N, M]``, each row from a backward pass of its own."""
    recipe = read_recipe(path)
    model, (x, y) = recipe.build_model(), next(recipe.batches())
    rows = []
    for n in range(len(x)):
        found = torch.autograd.grad(
            recipe.loss(model, (x[n : n + 1], y[n : n + 1])), list(model.parameters())
        )
        rows.append(torch.cat([g.reshape(-1) for g in found]))
    return torch.stack(rows)


def test_gram_equals_the_products_of_single_gradients(
    recipe: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    A = per_sample_gradients(recipe).numpy()
    code, out, errors = command("gram", recipe, "--json", "-o", tmp_path / "gram.h5")
    assert (code, errors) == (0, f"{tmp_path / 'gram.h5'}\n")
    answer = json.loads(out)
    eigenvalues = np.linalg.eigvalsh(A @ A.T / len(A))[::-1]
    np.testing.assert_allclose(answer["second_moment"]["eigenvalues"], eigenvalues, rtol=1e-9, atol=1e-12)
    total, mean = (A**2).sum() / len(A), (A.mean(0) ** 2).sum()
    noise = len(A) * (total - mean) / (len(A) * mean - total)
    assert answer["second_moment"]["metrics"]["noise_scale"] == (pytest.approx(noise) if noise > 0 else "NaN")
    assert answer["covariance"]["metrics"]["trace"] == pytest.approx(total - mean)
    assert answer["parameters"] == A.shape[1]
    with h5py.File(tmp_path / "gram.h5") as file:
        np.testing.assert_allclose(file["matrix"][:], A @ A.T, rtol=1e-9, atol=1e-12)
        assert list(file["matrix"].attrs["dims"]) == ["sample", "other sample"]
        np.testing.assert_allclose(sum(np.array(block) for block in file["block"].values()), A @ A.T)


@pytest.mark.slow
def test_table_fits_80_columns_and_rows_limits_it(
    recipe: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command("gram", recipe, "--rows", "1", "--set", "batch=4")
    assert code == 0
    assert out.startswith("4 samples, 32 parameters, mean loss ")
    assert "1 more" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_bad_input_is_refused(
    recipe: Path, command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    for arguments, message in (
        (("--reduction", "sum"), "the loss looks like a mean over 6 samples"),
        (("--reduction", "median"), "--reduction median: expected one of mean, sum"),
        (("--dtype", "int8"), "--dtype int8: expected one of float32, float64"),
        (("-o", tmp_path / "gram.csv"), "the ending '.csv' is not known; use .h5"),
        (("--checkpoint", tmp_path / "none.pt"), "no such checkpoint"),
        (("--set", "batch=0"), "no sample"),
    ):
        code, _, errors = command("gram", recipe, *arguments)
        assert (code, errors.count("\n")) == (2, 1), errors
        assert message in errors


def test_loss_is_the_mean_over_samples(recipe: Path) -> None:
    found = measure_gram(recipe, {})
    given = read_recipe(recipe)
    assert found.loss == pytest.approx(given.loss(given.build_model(), next(given.batches())).item())
