"""LightningModule with a backbone and a head. With `bug`, the optimizer holds the backbone only."""

import sys

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

bug = "bug" in sys.argv
L.seed_everything(0, verbose=False)
x = torch.randn(2400, 20)
y = x[:, :5].argmax(1)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.ReLU()
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def on_validation_epoch_end(self):
        print(f"accuracy {self.trainer.callback_metrics['accuracy']:.4f}")

    def configure_optimizers(self):
        return torch.optim.Adam((self.backbone if bug else self).parameters(), lr=3e-3)


model = Classifier()
trainer = L.Trainer(
    max_epochs=6,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
)
train, validation = TensorDataset(x[:2000], y[:2000]), TensorDataset(x[2000:], y[2000:])
trainer.fit(model, DataLoader(train, batch_size=50, shuffle=True), DataLoader(validation, batch_size=200))
torch.save(model.state_dict(), "lightning.pt")
