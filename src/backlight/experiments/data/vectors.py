"""Real-valued samples: a linear teacher on Gaussian inputs, and images with labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backlight.experiments.data.split import Split, generator


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
            "the digits come from scikit-learn, which is not installed: pip install 'backlight[grokking]', "
            "or set data.path to an .npz file of images"
        ) from error
    images, labels = datasets.load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def load_images(path: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images [N, pixels] fp32 in [0, 1] and labels, then test images and labels.

    ``path`` is an .npz file with ``x_train``, ``y_train``, ``x_test`` and ``y_test``: integers from 0 to
    255 or floating numbers from 0 to 1, the usual form of MNIST. Nothing pickled is read.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If an array is missing, or images and labels do not fit together.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path: no file {file}; expected an .npz file with the arrays {', '.join(KEYS)}"
        )
    with np.load(file, allow_pickle=False) as held:
        missing = [key for key in KEYS if key not in held]
        if missing:
            raise ValueError(
                f"{file}: no array {', '.join(missing)}; expected {', '.join(KEYS)}, got "
                f"{', '.join(held.files) or 'none'}"
            )
        arrays = [held[key] for key in KEYS]
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
