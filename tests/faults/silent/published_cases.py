"""Small ports of the silent errors of TrainCheck (OSDI 2025) whose mechanism fits into one process.

Each has the name that TrainCheck's list of cases gives it, from the issue, pull request or thread with the
original. Those of several ranks are in ``tests/faults/published_on_ranks.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from faults.injection import Fault, registrar
from faults.silent.loop import STEPS, Loop, nothing, train

CASES: dict[str, Fault] = {}
"""Ports by the name of their function; ``case`` is the public id."""

port = registrar(CASES)


def images(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        yield torch.randn(8, 1, 8, 8), torch.randint(0, 3, (8,))


class Convolutions(nn.Module):
    """Two stages of convolution and batch norm, and a classifier."""

    def __init__(self, frozen_stages: int = 0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.frozen_stages = frozen_stages

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean(dim=(2, 3)))


# User code


@port(
    case="stackoverflow-60335387",
    rule="gradients_not_cleared",
    severity="error",
    names="optimizer used gradients",
)
def gradients_are_never_cleared(injected: bool) -> None:
    model = Convolutions()
    loop = Loop(model, torch.optim.Adam(model.parameters(), lr=1e-3), data=images)
    if injected:
        loop.clear = nothing
    loop.run()


@port(case="pytorch-forum-84911", rule="trained_tensors", severity="error", names="stem.1.weight")
def head_frozen_after_its_optimizer_was_made(injected: bool) -> None:
    """Everything but batch norm is frozen, the new head as well, which is all that the optimizer holds."""
    model = Convolutions()
    model.head = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    for name, parameter in model.named_parameters():
        is_norm = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d)
        parameter.requires_grad = is_norm if injected else name.startswith("head")
    train(model, optimizer, data=images, has_scaler=False)  # it refuses to step without gradients


# Frameworks


class FreezingInTrain(Convolutions):
    """Freezes its first stages when it is put into training mode, as the models of mmpretrain do."""

    def train(self, mode: bool = True) -> FreezingInTrain:
        super().train(mode)
        if mode and self.frozen_stages:
            self.stem.eval()
            self.stem.requires_grad_(False)
        return self


@port(case="mmpretrain-702", rule="module_modes", severity="info", names="`FreezingInTrain.train()`")
def frozen_stages_are_trained(injected: bool) -> None:
    """The runner never calls ``train()``, so that the stages that the configuration freezes are trained."""
    model = FreezingInTrain(frozen_stages=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not injected:
        model.train()
    train(model, optimizer, data=images)


@port(case="pytorch-51800", rule="module_modes", severity="info", names="spectral norm")
def spectral_norm_evaluated_before_its_first_training_step(injected: bool) -> None:
    """In evaluation mode the power iteration does not run: the norm is that of two random vectors."""
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 64)), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if not injected:
        model(torch.randn(8, 4))
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(8, 4))
    model.train()
    train(model, optimizer)


class SpecialisedStep(torch.optim.SGD):
    """A step whose compiled code is not guarded: a call without any gradient fixes what later calls do."""

    is_specialised = False
    has_guard = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        updated = [p for p in group["params"] if p.grad is not None]
        self.is_specialised |= not updated and not self.has_guard
        with torch.no_grad():
            for parameter in [] if self.is_specialised else updated:
                parameter.sub_(group["lr"] * parameter.grad)


@port(case="pytorch-115607", rule="weights_unchanged", severity="error", names="0.weight", begins=3)
def compiled_step_does_nothing_after_one_without_gradients(injected: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = SpecialisedStep(model.parameters(), lr=0.1)
    optimizer.has_guard = not injected
    loop = Loop(model, optimizer, has_scaler=False, sets_to_none=True, clips="")
    backward = loop.backward
    loop.backward = lambda loss: None if loop.step == 2 else backward(loss)
    loop.run()


class CompiledLinear(nn.Linear):
    """A linear layer in a program that was compiled for autocast, which itself runs without it."""

    compiled_for: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            if self.compiled_for is None:
                return F.linear(x.float(), self.weight, self.bias)
            bias = None if self.bias is None else self.bias.to(self.compiled_for)
            return F.linear(x.to(self.compiled_for), self.weight.to(self.compiled_for), bias)


@port(
    case="lightning-thunder-725", rule="mixed_precision", severity="warning", names="autocast (cpu, bfloat16)"
)
def compiler_does_not_apply_autocast(injected: bool) -> None:
    model = nn.Sequential(CompiledLinear(4, 16), nn.ReLU(), CompiledLinear(16, 3))
    for layer in model[::2]:
        layer.compiled_for = None if injected else torch.bfloat16

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    train(
        forward,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_of=lambda out, y: F.cross_entropy(out.float(), y),
        parts=(model,),
        autocast=False,
    )


class Attention(nn.Module):
    """Attention with dropout through the fused function, which takes no notice of ``eval()``."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.always, self.dropout = always, 0.2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        p = self.dropout if self.always or self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return self.out(x.transpose(1, 2).flatten(2))


@port(
    case="transformers-33844",
    rule="module_modes",
    severity="warning",
    names="scaled_dot_product_attention",
    begins=1,
)
def attention_drops_in_evaluation(injected: bool) -> None:
    model = nn.Sequential(Attention(always=injected), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def evaluate(step: int) -> None:
        if step % 3 == 1:
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(torch.randn(8, 5, 8))
            model.train()

    def data(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randn(8, 5, 8), torch.randint(0, 3, (8,))) for _ in range(count))

    loop = Loop(model, optimizer, data=data, is_compiled=False)  # functions in it are not observed
    loop.before_step = evaluate
    loop.run()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c_proj(F.gelu(self.c_fc(x)))


class Decoder(nn.Module):
    """Initialises its output projections once at every level of modules, or once."""

    def __init__(self, *, at_every_level: bool) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Block()) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.at_every_level = at_every_level
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        for name, parameter in module.named_parameters():
            if name.endswith("c_proj.weight") if self.at_every_level else name == "c_proj.weight":
                nn.init.normal_(parameter, std=0.02 / math.sqrt(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return self.head(x)


@port(case="transformers-17877")
def weights_are_initialised_at_every_level(injected: bool) -> None:
    model = Decoder(at_every_level=injected)

    def data(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randn(8, 8), torch.randint(0, 3, (8,))) for _ in range(count))

    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), data=data)


# Batches


class Crops(Dataset[tuple[Tensor, Tensor]]):
    """Random parts of one recording; each worker has a copy of the generator."""

    def __init__(self, seed: int) -> None:
        self.recording = np.random.default_rng(seed).standard_normal(4000, dtype=np.float32)
        self.random = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.random.integers(0, 3900))
        part = torch.from_numpy(self.recording[start : start + 5])
        return part[:4], (part[4] > 0).long()


def seeded(worker: int) -> None:
    """Give the generator of each worker a seed of its own."""
    info = torch.utils.data.get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.random = np.random.default_rng(info.seed)


@port(case="stackoverflow-67180955", rule="repeated_data", severity="warning", names="Crops", begins=1)
def workers_augment_alike(injected: bool) -> None:
    loader = DataLoader(Crops(0), batch_size=8, num_workers=2, worker_init_fn=None if injected else seeded)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    train(model, loader=loader, evaluates=False)


class Captioned(Dataset[dict[str, Tensor]]):
    """Images with tokens of their captions."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        one = torch.Generator().manual_seed(index)
        return {
            "input_ids": torch.randint(0, 20, (6,), generator=one),
            "pixel_values": torch.randn(8, generator=one),
            "labels": torch.randint(0, 3, (), generator=one),
        }


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.pixels, self.head = nn.EmbeddingBag(20, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return self.head(self.tokens(input_ids) + self.pixels(pixel_values))


@port(case="transformers-34204", rule="repeated_data", severity="info", names="`input_ids`")
def processor_returns_the_first_caption_only(injected: bool) -> None:
    """One row of tokens is broadcast to all images."""

    def processor(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        return {**batch, "input_ids": batch["input_ids"][:1]} if injected else batch

    model = Captioner()
    loader = DataLoader(Captioned(), batch_size=8, collate_fn=processor)
    train(
        lambda inputs: model(**inputs),
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loader=((batch, batch.pop("labels")) for batch in loader),
        parts=(model,),
        evaluates=False,
    )
