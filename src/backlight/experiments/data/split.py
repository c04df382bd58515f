"""Seeded random streams, training and test samples, and the control of random labels."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed in [0, 2⁶³) for one ``purpose`` of a run, such as ``"split"``."""
    # Purposes have unrelated streams, so that a longer split does not change the initial weights.
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return a generator on the CPU, so that draws do not depend on the device."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose))


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Seed the global CPU state for one purpose, and restore it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, purpose))
        yield


RANDOM_LABELS = "random-labels"
CONTROLS = ("", RANDOM_LABELS)


@dataclass(frozen=True)
class Split:
    """Samples along the first dimension; ``labels`` are classes (int64) or targets (floating)."""

    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor

    def to(self, device: torch.device) -> Split:
        """Return the split on ``device``."""
        return Split(
            self.train_inputs.to(device),
            self.train_labels.to(device),
            self.test_inputs.to(device),
            self.test_labels.to(device),
        )


def draw_split(inputs: Tensor, labels: Tensor, train_size: int, seed: int) -> Split:
    """Return ``train_size`` training samples drawn without replacement, and all others for testing."""
    total = len(inputs)
    if not 0 < train_size < total:
        raise ValueError(
            f"train_size is {train_size}, expected 1 to {total - 1}: there are {total} samples, and both "
            "training and test need some; change the training share"
        )
    order = torch.randperm(total, generator=generator(seed, "split"))
    train, test = order[:train_size], order[train_size:]
    return Split(inputs[train], labels[train], inputs[test], labels[test])


def apply_control(split: Split, control: str, seed: int) -> Split:
    """Return ``split`` unchanged, or with the labels permuted within training and within test samples."""
    if control not in CONTROLS:
        names = ", ".join(repr(name) for name in CONTROLS)
        raise ValueError(f"control is {control!r}, expected one of {names}")
    if not control:
        return split
    draw = generator(seed, RANDOM_LABELS)
    train = torch.randperm(len(split.train_labels), generator=draw)
    test = torch.randperm(len(split.test_labels), generator=draw)
    return replace(split, train_labels=split.train_labels[train], test_labels=split.test_labels[test])
