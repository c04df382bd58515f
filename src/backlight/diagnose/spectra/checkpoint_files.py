"""Checkpoints by pattern, in the order in which a person would count them, with the step of each."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checkpoint:
    """A state of a model.

    Attributes
    ----------
    path
        Its file, None for the model as it is built.
    step
        The last number in the name of the file where those of all files ascend, else its position.
    """

    path: Path | None
    step: int

    def __str__(self) -> str:
        """Return what messages call it."""
        return "the freshly built model" if self.path is None else str(self.path)


def find_checkpoints(patterns: Sequence[str]) -> tuple[Checkpoint, ...]:
    """Return what the patterns match, in natural order: ``step-9.pt`` before ``step-10.pt``.

    Without a pattern that is the freshly built model.

    Raises
    ------
    ValueError
        If a pattern matches nothing.
    """
    if not patterns:
        return (Checkpoint(None, 0),)
    found: dict[Path, None] = {}
    for pattern in patterns:
        matched = glob.glob(pattern, recursive=True)  # noqa: PTH207 - pathlib refuses absolute patterns
        if not matched:
            raise ValueError(f"--checkpoints {pattern!r} matches no file, seen from {Path.cwd()}")
        found.update(dict.fromkeys(Path(name) for name in matched))
    paths = sorted(found, key=lambda path: natural(str(path)))
    last = [re.findall(r"\d+", path.stem) for path in paths]
    numbers = [int(digits[-1]) for digits in last if digits]
    named = len(numbers) == len(paths) and all(a < b for a, b in itertools.pairwise(numbers))
    return tuple(
        Checkpoint(path, numbers[place] if named and numbers[place] < 2**62 else place)
        for place, path in enumerate(paths)
    )


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts digits by their value and everything else as text."""
    return [(0, int(t), "") if t.isdigit() else (1, 0, t) for t in re.split(r"(\d+)", text) if t]
