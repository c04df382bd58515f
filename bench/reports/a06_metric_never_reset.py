"""A metric that keeps all predictions is computed at every step and never reset: each epoch is slower."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel("ERROR")
FIXED = "fixed" in sys.argv


class Net(lightning.LightningModule):
    """A classifier that logs its area under the curve."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
        self.area = BinaryAUROC()

    def training_step(self, batch, index):
        x, y = batch
        out = self.net(x)[:, 0]
        if FIXED:
            self.area.update(out.sigmoid(), y)
            self.log("area", self.area, on_step=False, on_epoch=True)
        else:
            self.area.update(out.sigmoid(), y)
            self.log("area", self.area.compute())
        return nn.functional.binary_cross_entropy_with_logits(out, y.float())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
x = torch.randn(12800, 20)
y = (x[:, 0] > 0).long()
trainer = lightning.Trainer(
    max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(Net(), DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True))
print("area", trainer.callback_metrics["area"].item())
