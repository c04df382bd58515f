"""A random order of all rows is drawn as a list before each epoch, of which few batches are used."""

import itertools
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

FIXED = "fixed" in sys.argv
ROWS = 6_000_000


class Lines(Dataset):
    """Rows that are made as they are read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index / ROWS)


torch.manual_seed(0)
data = Lines()
sampler = RandomSampler(data, replacement=True, num_samples=960) if FIXED else RandomSampler(data)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(data, batch_size=32, sampler=sampler)
for epoch in range(10):
    begin = time.perf_counter()
    for x in itertools.islice(loader, 30):
        loss = nn.functional.mse_loss(model(x)[:, 0], x[:, 0].square())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, round(loss.item(), 5), "seconds", round(time.perf_counter() - begin, 2), flush=True)
