"""Two fake steps of the GPT recipe under torch's own MemTracker, in a process with nothing but torch.

bench/memory.py calls it, and starts it to measure what a whole process takes:

    python bench/mem_tracker.py n_blocks=4 batch=8 seq=64
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

GPT = Path(__file__).parents[1] / "examples" / "gpt_recipe.py"


def track(recipe: Any, settings: dict[str, int]) -> None:
    """Run two fake steps under MemTracker; ``recipe`` is the module."""
    shape = settings["batch"], settings["seq"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = recipe.build_model(**{name: value for name, value in settings.items() if name != "batch"})
        optimizer = recipe.build_optimizer(model)
        batch = (torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long))
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                if step:
                    tracker.reset_mod_stats()
                recipe.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("gpt_recipe", GPT)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    pairs = (argument.split("=") for argument in sys.argv[1:])
    track(recipe, {name: int(value) for name, value in pairs})
