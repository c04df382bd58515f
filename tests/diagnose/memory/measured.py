"""The peak of memory on the CPU by torch.profiler, which counts in the allocator: independent of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from backlight.launch.recipe import read_recipe


def measured_peak(path: Path, settings: dict[str, Any]) -> int:
    """Run two real steps of a recipe and return the largest number of bytes allocated in the second."""
    recipe = read_recipe(path, settings)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        model = recipe.build_model()
        optimizer = recipe.build_optimizer(model)
        batch = next(recipe.batches())
        for step in range(2):
            with torch.profiler.record_function(f"step {step}"):
                value = recipe.loss(model, batch)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
    events = list(profiler.profiler.kineto_results.events())
    begin = next(e.start_ns() for e in events if e.name() == "step 1")
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= begin:
            peak = max(peak, live)
    return peak
