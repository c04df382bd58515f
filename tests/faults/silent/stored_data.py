"""Data sets whose samples change when they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from faults.silent.loop import Loop, control, fault, perceptron

SAMPLES = 48

Read = Callable[[Any, int], Any]


class Stored(Dataset[Any]):
    """Samples in one array, and their labels."""

    read: Read

    def __init__(self, as_array: bool = False) -> None:
        x = torch.rand(SAMPLES, 4) * 255
        self.x: Any = x.numpy() if as_array else x
        self.y = torch.randint(0, 3, (SAMPLES,))

    def __len__(self) -> int:
        return SAMPLES


class ScaledInPlace(Stored):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        x /= 255.0
        x -= 0.5
        return x, self.y[index]


class ScaledCopy(Stored):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index].clone()
        x /= 255.0
        x -= 0.5
        return x, self.y[index]


class NormalisedArray(Stored):
    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        return self._normalised(self.x[index]), self.y[index]

    def _normalised(self, x: Any) -> Any:
        x -= np.float32(128.0)
        x *= np.array([0.5, 0.25, 0.1, 0.05], dtype=np.float32)
        return x


class NormalisedOnce(NormalisedArray):
    def _normalised(self, x: Any) -> Any:
        return (x - np.float32(128.0)) * np.float32(0.1)


class ListOfTensors(Dataset[Any]):
    def __init__(self) -> None:
        self.samples = [torch.rand(4) + 1 for _ in range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.samples[index].mul_(0.5), index % 3


class Cached(Stored):
    """The first reading of a sample fills a cache in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = [False] * SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not self.is_ready[index]:
            self.x[index] /= 255.0
            self.is_ready[index] = True
        return self.x[index], self.y[index]


class Redrawn(Stored):
    """Every reading draws a sample into the store."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index].normal_(), self.y[index]


class Counted(Stored):
    """Counts how often each sample is read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(SAMPLES, 1)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.count[index] += 1
        return self.x[index] / 255, self.y[index]


def train_on(data: Dataset[Any], **options: Any) -> None:
    loader = DataLoader(data, batch_size=12, **options)
    model = perceptron()
    Loop(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader=loader, epochs=4).run()


@fault(rule="repeated_data", kind="changed", severity="warning", step=8, names="`x` of ScaledInPlace")
def samples_scaled_in_place(injected: bool) -> None:
    train_on(ScaledInPlace() if injected else ScaledCopy(), shuffle=True)


@fault(rule="repeated_data", kind="changed", severity="warning", step=8, names="`x` of NormalisedArray")
def array_normalised_in_place(injected: bool) -> None:
    data = (NormalisedArray if injected else NormalisedOnce)(as_array=True)
    train_on(Subset(data, range(SAMPLES)), shuffle=False)


@fault(rule="repeated_data", kind="changed", severity="warning", step=8, names="ListOfTensors")
def tensors_of_a_list_scaled_in_place(injected: bool) -> None:
    train_on(ListOfTensors() if injected else ScaledCopy(), shuffle=True)


@control
def cache_in_the_place_of_the_data() -> None:
    train_on(Cached(), shuffle=True)


@control
def samples_drawn_into_the_store() -> None:
    train_on(Redrawn(), shuffle=True)


@control
def readings_that_are_counted() -> None:
    train_on(Counted(), shuffle=True)


@control
def stored_data_scaled_between_epochs() -> None:
    """The script makes the data smaller in each epoch; reading changes nothing."""
    data = ScaledCopy()
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = Loop(model, optimizer, loader=DataLoader(data, batch_size=12, shuffle=True), epochs=4)
    loop.after_epoch = lambda _: data.x.mul_(0.9)
    loop.run()
