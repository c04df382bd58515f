"""Every step's outputs are kept for the end of the epoch, with their graphs: memory grows."""

import logging
import resource
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
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)
        )
        self.outputs = []

    def training_step(self, batch, index):
        x, y = batch
        out = self.net(x)
        loss = nn.functional.mse_loss(out, y.repeat(1, 8))
        self.outputs.append(loss.detach() if FIXED else {"loss": loss, "out": out})
        if index % 200 == 0:
            print(index, "MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


torch.manual_seed(0)
x = torch.randn(64 * 800, 64)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(TensorDataset(x, x), batch_size=64))
