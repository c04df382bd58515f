"""One batch norm normalises two kinds of inputs, and its running statistics fit neither."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel("ERROR")
FIXED = "fixed" in sys.argv


class Net(lightning.LightningModule):
    """Compares sketches and photographs."""

    def __init__(self) -> None:
        super().__init__()
        self.sketch, self.photo = nn.Linear(20, 64), nn.Linear(20, 64)
        self.norm = nn.BatchNorm1d(64)
        self.norm_of_photo = nn.BatchNorm1d(64) if FIXED else self.norm
        self.head = nn.Linear(128, 1)

    def loss(self, batch):
        a, b, y = batch
        hidden = torch.cat([self.norm(self.sketch(a)).relu(), self.norm_of_photo(self.photo(b)).relu()], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.head(hidden)[:, 0], y)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("validation", self.loss(batch))

    def on_validation_epoch_end(self):
        print("validation", round(self.trainer.callback_metrics["validation"].item(), 4), flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


torch.manual_seed(0)
a, b = torch.randn(2560, 20), 30 * torch.randn(2560, 20) + 50
y = (a[:, 0] + (b[:, 0] - 50) / 30 > 0).float()
data = TensorDataset(a, b, y)
trainer = lightning.Trainer(
    max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, num_sanity_val_steps=0,
)  # fmt: skip
trainer.fit(Net(), DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=256))
