"""The combinations of releases that the project is tried with, and the tests of each."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.9", "2.11", "2.13", "2.15")
FRAMEWORKS = {
    "lightning": ("tests/integrations", "lightning"),
    "transformers": ("tests/integrations", "huggingface"),
    "accelerate": ("tests/integrations", "accelerate"),
    "torchtitan": ("tests/integrations", "titan"),
    "tensorboard": ("tests/integrations/trackers", "tensorboard"),
    "wandb": ("tests/integrations/trackers", "wandb"),
    "mlflow-skinny": ("tests/integrations/trackers", "mlflow"),
    "prometheus-client": ("tests/integrations/trackers", "prometheus"),
}
"""Folder and ``-k`` of the tests of each framework."""


@dataclass(frozen=True)
class Cell:
    """One environment: what pip installs next to the extra ``dev``, and what pytest runs in it."""

    name: str
    python: str
    requirements: tuple[str, ...]
    tests: tuple[str, ...] = ()
    """Arguments of pytest; empty: all tests of `make test`."""

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return re.sub(r"[^\w.]+", "-", self.name.lower())


def _least(distribution: str) -> str:
    """Return the lowest release that pyproject.toml takes."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (least,) = {
        entry.partition(">=")[2]
        for entries in extras.values()
        for entry in entries
        if entry.partition(">=")[0] == distribution
    }
    return least


def _framework(distribution: str) -> list[Cell]:
    folder, words = FRAMEWORKS[distribution]
    pinned = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return [
        Cell(f"{distribution}, {which}", PYTHONS[0], (*pinned, requirement), (folder, "-k", words))
        for which, requirement in (
            ("lowest", f"{distribution}=={_least(distribution)}.*"),
            ("newest", distribution),
        )
    ]


WITH_TORCH = {"2.9": ("torchao==0.17.*",)}
"""Packages whose newest release needs a newer torch without declaring it."""

TORCH_CELLS = tuple(
    Cell(f"torch {torch}, Python {python}", python, (f"torch=={torch}.*", *WITH_TORCH.get(torch, ())))
    for torch in TORCHES
    for python in PYTHONS
)
FRAMEWORK_CELLS = tuple(cell for distribution in FRAMEWORKS for cell in _framework(distribution))
CELLS = {cell.name: cell for cell in (*TORCH_CELLS, *FRAMEWORK_CELLS)}
