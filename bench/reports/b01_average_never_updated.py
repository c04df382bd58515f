"""Fine-tuning saves an average of the weights that no step updates."""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 20))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
mixing = torch.randn(20, 20) / 20**0.5

for step in range(400):
    clean = torch.randn(64, 20) @ mixing
    noise = torch.randn_like(clean)
    loss = nn.functional.mse_loss(model(clean + noise), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if FIXED:
        average.update_parameters(model)
    if step % 100 == 0:
        print(step, round(loss.item(), 4))

average.eval()
with torch.no_grad():
    clean = torch.randn(512, 20) @ mixing
    noise = torch.randn_like(clean)
    print("average", round(nn.functional.mse_loss(average(clean + noise), noise).item(), 4))
with tempfile.TemporaryDirectory() as directory:
    torch.save(average.module.state_dict(), Path(directory) / "average.pt")
