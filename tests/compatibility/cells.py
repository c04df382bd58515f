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
    "ray": ("tests/integrations", "ray"),
    "deepspeed": ("tests/integrations", "deepspeed"),
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


def _required(distribution: str) -> tuple[str, str]:
    """Return what pyproject.toml requires, with its extras, and the lowest release that it takes."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ((name, least),) = {
        (name, least)
        for entries in extras.values()
        for name, _, least in (entry.partition(">=") for entry in entries)
        if least and name.partition("[")[0] == distribution
    }
    return name, least


def _framework(distribution: str) -> list[Cell]:
    folder, words = FRAMEWORKS[distribution]
    name, least = _required(distribution)
    pinned = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return [
        Cell(f"{distribution}, {which}", PYTHONS[0], (*pinned, requirement), (folder, "-k", words))
        for which, requirement in (
            ("lowest", f"{name}=={least}"),
            ("newest", name),
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
