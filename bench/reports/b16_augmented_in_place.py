"""A dataset in memory augments its images in place, so each epoch begins with those of the epoch before."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
np.random.seed(0)
CLASSES = 5
labels = np.arange(600) % CLASSES
images = np.random.rand(600, 3, 12, 12).astype(np.float32)
for i, label in enumerate(labels):
    images[i, label % 3, 2 * (label // 3) : 2 * (label // 3) + 5] += 0.7


class Images(Dataset):
    """Normalised images with noise and a random shift of their colours."""

    def __len__(self) -> int:
        return len(images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = images[index].copy() if FIXED else images[index]
        image -= 0.5
        image /= 0.3
        image += 0.2 * np.random.randn(3, 1, 1).astype(np.float32)
        return torch.from_numpy(image), int(labels[index])


model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(8):
    losses = []
    for x, y in DataLoader(Images(), batch_size=50, shuffle=True):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, sum(losses) / len(losses))
