"""Each batch is split into accumulated parts: accelerate steps at every part of an epoch's last batch."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv
PARTS = 8

plugin = GradientAccumulationPlugin(num_steps=PARTS, sync_with_dataloader=not FIXED)
accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
torch.manual_seed(0)
x = torch.randn(512, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=128, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2), loader)
for epoch in range(12):
    steps = 0
    for inputs, labels in loader:
        for part in range(PARTS):
            rows = slice(part * 16, part * 16 + 16)
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs[rows]), labels[rows])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += accelerator.sync_gradients
    if epoch % 3 == 0:
        print(epoch, round(loss.item(), 4), "steps", steps, "for 4 batches", flush=True)
