"""`memory predict` against the allocator: five models, fp32 and autocast, eager and SDPA, with dropout."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import torch
from check import Check

from backlight.diagnose.memory.predictor import Predictor
from backlight.launch.recipe import read_recipe

EXPECTED = "the predicted peak of a step is within 3 % and 24 MiB of the measured one, which has workspaces"
RECIPE = Path(__file__).with_name("memory_recipe.py")
SHARE, WORKSPACES = 0.03, 24 * 2**20
"""What a prediction may be off; cuBLAS alone keeps a workspace of 8 to 32 MiB, and convolutions theirs."""


def cases(check: Check) -> list[dict[str, Any]]:
    """Return the settings of all cases; autocast and fused attention are predicted for CUDA."""
    is_cuda = check.kind == "cuda"
    precisions, kernels = (("fp32", "autocast"), ("sdpa", "eager")) if is_cuda else (("fp32",), ("eager",))
    models = [("mlp", "eager"), ("cnn", "eager"), *itertools.product(("gpt", "gpt_wide"), kernels)]
    models += [("encoder", "sdpa")] if is_cuda else []
    common = {"dropout": 0.1, "kind": check.kind, "small": int(check.is_small)}
    return [
        {"model": model, "attention": attention, "precision": precision, **common}
        for (model, attention), precision in itertools.product(models, precisions)
    ]


def measured(check: Check, settings: dict[str, Any]) -> int:
    """Return the peak of the third step on the device."""
    recipe = read_recipe(RECIPE, settings)
    gc.collect()
    base = torch.accelerator.memory_allocated()
    model = recipe.build_model().to(check.kind)
    optimizer = recipe.build_optimizer(model)
    batch = tuple(part.to(check.kind) for part in next(recipe.batches()))
    for step in range(3):
        if step == 2:
            check.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        value = recipe.loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    check.synchronize()
    # The simulated allocator gives blocks of up to twice the size.
    counter = "allocated_bytes" if check.simulated is None else "requested_bytes"
    return int(torch.accelerator.memory_stats()[f"{counter}.all.peak"]) - base


def main(check: Check) -> None:
    """Predict and measure each case."""
    with Predictor() as predictor:
        for settings in cases(check):
            predicted = predictor.predict(read_recipe(RECIPE, settings), device="cuda").peak
            found = measured(check, settings)
            name = ", ".join(str(settings[key]) for key in ("model", "attention", "precision"))
            allowed = SHARE * found + WORKSPACES
            if check.simulated is not None:
                allowed = SHARE * found + 2**16
            check.expect(
                f"{name}: predicted MiB",
                f"{predicted / 2**20:.2f} ({predicted / found - 1:+.1%})",
                f"{found / 2**20:.2f}, +- {allowed / 2**20:.2f}",
                holds=abs(predicted - found) <= allowed,
            )
    if check.kind != "cuda":
        check.leave_out(
            "autocast and fused attention", f"predictions follow the rules of CUDA, not of {check.kind}"
        )


if __name__ == "__main__":
    Check.run(main, EXPECTED)
