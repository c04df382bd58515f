"""Epochs are short, and the Trainer writes the model and its optimizer after each: most of the time."""

import logging
import sys
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel("ERROR")
FIXED = "fixed" in sys.argv


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60000, 128), nn.Linear(128, 10)

    def training_step(self, batch, index):
        tokens, labels = batch
        return nn.functional.cross_entropy(self.head(self.embed(tokens).mean(1)), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
tokens = torch.randint(0, 60000, (256, 16))
folder = tempfile.mkdtemp()
trainer = lightning.Trainer(
    max_epochs=12, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(folder, every_n_epochs=12 if FIXED else 1)],
)  # fmt: skip
trainer.fit(Net(), DataLoader(TensorDataset(tokens, tokens[:, 0] % 10), batch_size=32, shuffle=True))
