"""Each rank takes its share of an order of its own: samples are repeated, others missed."""

import sys

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

FIXED = "fixed" in sys.argv


class Shuffled(Sampler):
    """Random order, from a generator that nothing synchronises."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.rng = count, np.random.default_rng(seed)

    def __iter__(self):
        return iter(self.rng.permutation(self.count).tolist())

    def __len__(self) -> int:
        return self.count


accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x = torch.randn(640, 16)
y = x[:, :4].argmax(1)
sampler = Shuffled(640, seed=0 if FIXED else accelerator.process_index)
loader = DataLoader(TensorDataset(torch.arange(640), x, y), batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
for epoch in range(4):
    seen = []
    for rows, inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        seen.append(rows)
    seen = accelerator.gather(torch.cat(seen))
    if accelerator.is_main_process:
        print(epoch, round(loss.item(), 4), "samples seen", len(seen.unique()), "of 640", flush=True)
accelerator.end_training()
