"""Seeded random streams, training and test samples, their control of random labels, and images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
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


def linear_teacher(
    inputs: int, outputs: int, train_size: int, test_size: int, seed: int
) -> tuple[Split, Tensor]:
    """Return samples x ~ N(0, I) with targets x Tᵀ, and the teacher T [outputs, inputs], all fp64.

    T has entries N(0, 1/(2·inputs·outputs)), as Levi et al. (2310.16441) draw teacher and student.
    """
    draw = generator(seed, "teacher")
    teacher = torch.randn(outputs, inputs, generator=draw, dtype=torch.float64)
    teacher *= (2 * inputs * outputs) ** -0.5
    samples = torch.randn(train_size + test_size, inputs, generator=draw, dtype=torch.float64)
    targets = samples @ teacher.T
    return Split(
        samples[:train_size], targets[:train_size], samples[train_size:], targets[train_size:]
    ), teacher


KEYS = ("x_train", "y_train", "x_test", "y_test")


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 1,797 images of 8 by 8 pixels as [1797, 64] fp32 in [0, 1], and labels 0 to 9."""
    try:
        from sklearn import datasets  # noqa: PLC0415 - an extra, and slow to import
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the digits come from scikit-learn, which is not installed: pip install 'backlight[research]', "
            "or set data.path to an .npz file of images"
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def load_images(path: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return images [N, pixels] fp32 in [0, 1] and labels of an .npz file, for training, then for testing."""
    # Integers from 0 to 255 or floating numbers from 0 to 1, as MNIST usually is. Nothing pickled is read.
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path: no file {file}; expected an .npz file with the arrays {', '.join(KEYS)}"
        )
    with np.load(file, allow_pickle=False) as archive:
        missing = [key for key in KEYS if key not in archive]
        if missing:
            raise ValueError(
                f"{file}: no array {', '.join(missing)}; expected {', '.join(KEYS)}, got "
                f"{', '.join(archive.files) or 'none'}"
            )
        arrays = [archive[key] for key in KEYS]
    result = []
    for name, images, labels in (("train", *arrays[:2]), ("test", *arrays[2:])):
        if labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"{file}: {len(images)} images and labels of shape {labels.shape} for {name}; expected one "
                "label for each image"
            )
        scale = 255.0 if np.issubdtype(images.dtype, np.integer) else 1.0
        flat = images.reshape(len(images), -1).astype(np.float32) / scale
        result += [torch.from_numpy(flat), torch.from_numpy(labels.astype(np.int64))]
    return result[0], result[1], result[2], result[3]


def image_split(path: str, train_size: int, test_size: int, seed: int) -> Split:
    """Return ``train_size`` training images and ``test_size`` test images (0: all), drawn by ``seed``."""
    # An empty path stands for the digits, whose training and test images are disjoint.
    if path:
        train_x, train_y, test_x, test_y = load_images(path)
        train = torch.randperm(len(train_x), generator=generator(seed, "split"))
        test = torch.randperm(len(test_x), generator=generator(seed, "test"))
    else:
        train_x, train_y = load_digits()
        test_x, test_y = train_x, train_y
        order = torch.randperm(len(train_x), generator=generator(seed, "split"))
        train, test = order, order[train_size:]
    if not 0 < train_size <= len(train) or not len(test):
        raise ValueError(
            f"data.train_size is {train_size}, but there are {len(train_x)} images; take fewer, or set "
            "data.path to a larger set"
        )
    train, test = train[:train_size], test[: test_size or None]
    return Split(train_x[train], train_y[train], test_x[test], test_y[test])
