"""The data set augments its rows in place: the changes of all epochs add up, and the data become noise."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "fixed" in sys.argv


class Images(Dataset):
    """Rows with noise and a random sign."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 32)
        self.labels = (self.images[:, :16].sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if FIXED:
            image = image.clone()
        image += 0.5 * torch.randn(32)
        return image, self.labels[index]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Images(1024), batch_size=64, shuffle=True)
for epoch in range(25):
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if epoch % 5 == 0:
        print(epoch, round(sum(losses) / len(losses), 4), flush=True)
