"""Lightning with backlight as a callback: an autoencoder whose second head was cut off by accident.

python examples/with_lightning.py --out runs/lightning
backlight report runs/lightning
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backlight.integrations.lightning import BacklightCallback


class TwoHeads(L.LightningModule):
    """Two heads on one encoder; the loss of the second never reaches it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, width), nn.ReLU())
        self.rebuild, self.sign = nn.Linear(width, 16), nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,) = batch
        hidden = self.encoder(x)
        loss = nn.functional.mse_loss(self.rebuild(hidden), x)
        positive = (x.sum(1, keepdim=True) > 0).float()
        sign = nn.functional.binary_cross_entropy_with_logits(self.sign(hidden), positive)
        self.log("rebuild", loss)
        self.log("sign", sign)
        return loss + sign.item()  # the accident: .item() is a number, without a gradient

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for some epochs, watched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()

    L.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(512, 16)), batch_size=32, shuffle=True)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        gradient_clip_val=0.5,
        log_every_n_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[BacklightCallback(run=options.out)],
    )
    trainer.fit(TwoHeads(), data)


if __name__ == "__main__":
    main()
