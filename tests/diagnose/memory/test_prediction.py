"""Predicted against measured memory, and refusals."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backlight.diagnose.memory.prediction import (
    META,
    PIECEWISE,
    REAL,
    as_fake,
    build_fake,
    fake_mode,
    predict_step,
)
from backlight.diagnose.memory.predictor import (
    Predictor,
    Request,
    answer,
    checkpointing_savings,
    largest_batch,
    predict,
)
from backlight.diagnose.memory.result import MemoryKind, PredictedMemory, PredictionError
from backlight.launch.recipe import Recipe, read_recipe
from diagnose.memory import matrix_recipe as matrix
from diagnose.memory import measured

RECIPE = Path(matrix.__file__)


def predicted(settings: dict[str, Any], **options: Any) -> PredictedMemory:
    recipe = read_recipe(RECIPE, settings)
    return predict_step(
        recipe.build_model,
        lambda: next(recipe.batches()),
        recipe.loss,
        recipe.build_optimizer,
        device="cpu",
        **options,
    )


def combinations() -> Iterator[tuple[str, str, str, str]]:
    for model in matrix.MODELS:
        if model == "lstm":
            continue  # its CPU kernel returns its workspace as a result, which the fake kernel does not
        for precision in matrix.PRECISIONS:
            for mode in matrix.CHECKPOINTING:
                yield model, precision, "adamw", mode
        for optimizer in matrix.OPTIMIZERS:
            yield model, "fp32", optimizer, "none"


SAMPLE = (
    ("mlp", "fp32", "adamw_foreach", "none"),
    ("gpt_tied", "bf16", "adamw_fused", "reentrant"),
    ("cnn", "autocast", "adamw", "none"),
)


def check(model: str, precision: str, optimizer: str, mode: str) -> None:
    settings = {"model": model, "precision": precision, "optimizer": optimizer, "checkpointing": mode}
    peak = measured.measured_peak(RECIPE, settings)
    assert predicted(settings).peak == pytest.approx(peak.tensors, rel=0.01)
    assert peak.with_workspaces >= peak.tensors


@pytest.mark.parametrize("case", SAMPLE, ids="-".join)
def test_prediction_equals_measurement(case: tuple[str, str, str, str]) -> None:
    check(*case)


@pytest.mark.full
@pytest.mark.parametrize("case", list(combinations()), ids="-".join)
def test_prediction_equals_measurement_over_the_matrix(case: tuple[str, str, str, str]) -> None:
    check(*case)


def test_operations_with_workspaces_are_listed() -> None:
    convolutions = predicted({"model": "cnn", "precision": "autocast"}).workspaces
    assert convolutions["convolution"] == convolutions["convolution_backward"] == 4
    assert "convolution" not in predicted({"model": "mlp"}).workspaces


@pytest.mark.parametrize(
    ("model", "expected"), [("lstm", ["recurrent layers"]), ("cnn", ["convolutions"]), ("gpt", [])]
)
def test_prediction_with_kernels_that_take_more_is_a_lower_bound(model: str, expected: list[str]) -> None:
    settings = {"model": model, "precision": "fp32", "optimizer": "adamw", "checkpointing": "none"}
    assert [text.partition(":")[0] for text in predicted(settings).too_low] == expected


def test_kinds_of_a_prediction_match_the_model() -> None:
    prediction = predicted({"model": "gpt_tied", "optimizer": "adamw"})
    model = matrix.build_model("gpt_tied")
    held = sum(p.nbytes for p in model.parameters())
    assert prediction.parameters == sum(p.numel() for p in model.parameters())
    assert prediction.kinds[MemoryKind.PARAMETERS] == held
    # AdamW holds two moments, and a count of four bytes for each parameter.
    assert prediction.kinds[MemoryKind.OPTIMIZER_STATE] == 2 * held + 4 * len(list(model.parameters()))
    assert sum(prediction.kinds.values()) == prediction.peak == prediction.peak_unrounded
    logits = prediction.logits
    assert logits is not None
    elements = matrix.BATCH * matrix.SEQ * matrix.VOCABULARY
    assert logits.formula == elements * (4 + 4)
    assert logits.live_at_most == (logits.copies + 1) * logits.bytes == (logits.copies + 1) * elements * 4


def test_sizes_are_rounded_as_by_the_allocator() -> None:
    recipe = read_recipe(RECIPE, {"model": "mlp"})
    given = (recipe.build_model, partial(next, recipe.batches()), recipe.loss, recipe.build_optimizer)
    prediction = predict_step(*given)
    assert prediction.peak % 512 == 0
    assert prediction.peak > prediction.peak_unrounded


class Rates(nn.Module):
    """Reads tensor values in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates))
        self.layers[0][0].weight = self.layers[1][0].weight


@pytest.mark.parametrize(
    ("build", "built_by"),
    [
        (lambda: nn.Linear(4, 4).bfloat16(), (META,)),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 2, enable_nested_tensor=False),
            (META,),
        ),
        (Rates, (PIECEWISE,)),
        # Torch 2.9 converts a fake parameter in place, later releases refuse to.
        (lambda: Rates().to(torch.float64), (REAL, PIECEWISE)),
    ],
    ids=["type", "copies", "values", "both"],
)
def test_fake_build_equals_the_real_model(build: Any, built_by: tuple[str, ...]) -> None:
    mode = fake_mode()
    real, (model, built) = build(), build_fake(build, mode)
    assert built in built_by
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()
    ]
    assert all(type(t).__name__ != "Tensor" and t.device.type == "cpu" for t in model.parameters())


def test_views_and_ties_are_kept() -> None:
    base = torch.zeros(4, 6)
    one, other, again = as_fake((base[:, 1:], base[0], base), fake_mode())
    assert one.untyped_storage()._cdata == other.untyped_storage()._cdata == again.untyped_storage()._cdata
    assert (one.storage_offset(), one.stride()) == (1, (6, 1))


def test_prediction_of_a_billion_parameters_takes_no_memory() -> None:
    path = Path(__file__).parents[3] / "examples" / "gpt_recipe.py"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe = read_recipe(path, {"dim": 8192, "n_blocks": 1, "vocabulary": 32000, "heads": 64, "batch": 2})
    prediction = predict_step(
        recipe.build_model, lambda: next(recipe.batches()), recipe.loss, recipe.build_optimizer
    )
    assert prediction.parameters > 1e9
    assert prediction.peak > 16e9
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 0.5e9


RECIPES = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("kept", torch.ones(8))
    def forward(self, x):
        y = self.layer(x)
        {body}
        return y
def build_model(): return Net()
def batches(rank, world_size, batch=4):
    while True: yield torch.randn(batch, 8)
def loss(model, batch): return model(batch).square().mean()
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "y = y / y.max().item()",
            r"line 11 \(`y = y / y.max\(\).item\(\)`\): reads the value .*torch\.where",
        ),
        ("y = y if y.sum() > 0 else -y", r"line 11 .*reads the value"),
        ("y = y[y > 0]", r"line 11 .*shape of aten.nonzero.*masked_fill"),
        ("y = y.detach()", r"no parameter of the model leads to"),
        ("y = torch.from_numpy(y.detach().numpy())", r"line 11 .*numpy"),
        ("y = y @ torch.ones(3, 3)", r"fails on fake tensors: RuntimeError"),
    ],
)
def test_unpredictable_step_is_reported_with_its_line(tmp_path: Path, body: str, message: str) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPES.replace("{body}", body), encoding="utf-8")
    reply = answer(Request(path, {}))
    assert isinstance(reply, str)
    assert re.search(message, reply)
    assert reply.count("recipe.py") == 1
    assert "\n" not in reply


def test_dead_prediction_process_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    dies = "import os\n" + RECIPES.replace("{body}", "os.abort()")
    path.write_text(dies, encoding="utf-8")
    with pytest.raises(PredictionError, match=r"recipe\.py: the prediction process ended with signal 6"):
        predict(read_recipe(path))


class InThisProcess(Predictor):
    """A predictor without its subprocess."""

    def __init__(self) -> None: ...

    def predict(self, recipe: Recipe, **options: Any) -> PredictedMemory:
        found = answer(Request(recipe.path, dict(recipe.settings), **options))
        assert isinstance(found, PredictedMemory), found
        return found


def test_largest_batch_and_checkpointing_savings_are_predicted() -> None:
    recipe, predictor = read_recipe(RECIPE, {"model": "mlp", "batch": 512}), InThisProcess()
    base = predictor.predict(recipe)
    fit = largest_batch(predictor, recipe, 20_000_000)
    assert fit.peak <= 20_000_000 < fit.peak_above
    assert fit.above == fit.batch + 1
    assert predictor.predict(recipe.with_settings({"batch": fit.batch})).peak == fit.peak
    assert predictor.predict(recipe.with_settings({"batch": fit.above})).peak == fit.peak_above
    with pytest.raises(PredictionError, match=r"batch=1 takes .* more than the budget of 1,000"):
        largest_batch(predictor, recipe, 1000)
    one, every = checkpointing_savings(predictor, recipe, base)
    assert (len(one.wrapped), len(every.wrapped)) == (1, 4)
    assert 0 < one.saved < every.saved
    assert every.recomputed_flops == 4 * one.recomputed_flops > 0
    assert every.share_of_step == pytest.approx(every.recomputed_flops / base.flops.step)
    # The recipe's own checkpointing is the same.
    own = predictor.predict(recipe.with_settings({"checkpointing": "non-reentrant"}))
    assert own.peak == every.peak
    assert own.flops.recomputed == every.recomputed_flops
