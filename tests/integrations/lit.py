"""Small LightningModules and a trainer for the tests; imported inside tests, because Lightning is slow."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def data(samples: int = 64) -> DataLoader[Any]:
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode() + value.detach().float().numpy().tobytes())
    return found.hexdigest()


class Net(L.LightningModule):
    """A regression model with an unused head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Pair(L.LightningModule):
    """Manual optimization of two models with one optimizer and one backward each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.one, self.two = nn.Linear(8, 4), nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:
        first, second = self.optimizers()
        hidden = self.one(batch[0])
        first.zero_grad()
        self.manual_backward(hidden.square().mean())
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        second.zero_grad()
        loss = nn.functional.mse_loss(self.two(self.one(batch[0]).detach()), batch[1])
        self.manual_backward(loss)
        second.step()
        self.log("loss_two", loss)

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.SGD(self.one.parameters(), lr=0.1),
            torch.optim.Adam(self.two.parameters(), lr=0.01),
        )


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    defaults = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet}
    return L.Trainer(**{**defaults, **settings}, default_root_dir=folder, callbacks=list(callbacks))
