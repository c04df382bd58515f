"""Predicted memory against peaks that others have measured on a GPU and published.

Each prediction is of the tensors of a step. What was published is what the caching allocator had reserved,
which is more, or what nvidia-smi showed, of which the page gives the share of the context.

    OMP_NUM_THREADS=1 python bench/published_memory.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from backlight.diagnose.memory.predictor import Predictor
from backlight.launch.recipe import read_recipe

RECIPE = Path(__file__).with_name("published_recipe.py")
MIB = 2**20

OPTIM = "rasbt/pytorch-memory-optim, logs.md (torch 2.1, A100, reserved)"
TUTORIAL = "pytorch/tutorials, optimizer_step_in_backward_tutorial.py (allocated)"
GUIDE = (
    "Transformers 4.21, Efficient Training on a Single GPU (V100, nvidia-smi less its 1,343 MiB of context)"
)


@dataclass(frozen=True)
class Published:
    """A step by its settings in the recipe, the bytes that were published for it, and where."""

    name: str
    settings: dict[str, Any]
    nbytes: float
    source: str


CASES = (
    Published("ViT-L/16, batch 64, fp32, Adam", {"batch": 64, "before": "over"}, 26.79e9, OPTIM),
    Published(
        "the same, autocast to fp16", {"batch": 64, "precision": "fp16_autocast", "before": "over"},
        18.21e9, OPTIM,
    ),
    Published("the same, bf16 weights", {"batch": 64, "precision": "bf16", "before": "over"}, 13.82e9, OPTIM),
    Published(
        "ViT-L/16, batch 16, bf16 weights", {"batch": 16, "precision": "bf16", "before": "over"},
        5.69e9, OPTIM,
    ),
    Published(
        "ViT-L/16, 4 x batch 4, bf16 weights", {"batch": 4, "precision": "bf16", "before": "added"},
        3.91e9, OPTIM,
    ),
    Published("ViT-L/16, batch 1, fp32, Adam", {"batch": 1}, 6.0e9, TUTORIAL),
    Published(
        "BERT-large, 4 x 512 tokens, fp32", {"model": "bert", "batch": 4, "each": True},
        (14949 - 1343) * MIB, GUIDE,
    ),
    Published(
        "BERT-large, 4 times 1 x 512 tokens", {"model": "bert", "batch": 1, "each": True, "before": "added"},
        (8681 - 1343) * MIB, GUIDE,
    ),
    Published(
        "the same, checkpointing",
        {"model": "bert", "batch": 1, "each": True, "before": "added", "checkpointing": True},
        (6775 - 1343) * MIB, GUIDE,
    ),
)  # fmt: skip


def main() -> None:
    table = Table("step", "published GB", "predicted GB", "ratio", "assumed", "source")
    with Predictor() as predictor:
        for case in CASES:
            found = predictor.predict(read_recipe(RECIPE, case.settings))
            table.add_row(
                case.name, f"{case.nbytes / 1e9:.2f}", f"{found.peak / 1e9:.2f}",
                f"{found.peak / case.nbytes:.2f}", "; ".join(found.assumed), case.source,
            )  # fmt: skip
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
