"""Segmentation of circles with a small U-Net. With `bug`, a sigmoid stands before BCEWithLogitsLoss."""

import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

bug = "bug" in sys.argv
torch.manual_seed(0)


class Circles(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(n)
        grid = torch.arange(24.0)
        center = 6 + 12 * torch.rand(n, 2, generator=g)
        radius = 3 + 3 * torch.rand(n, generator=g)
        distance = (
            (grid[None, :, None] - center[:, :1, None]) ** 2 + (grid[None, None] - center[:, 1:, None]) ** 2
        ).sqrt()
        self.masks = (distance < radius[:, None, None]).float()[:, None]
        self.images = self.masks + 0.5 * torch.randn(n, 1, 24, 24, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.masks[i]


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = block(1, 8), block(8, 16), block(16 + 8, 8)
        self.pool, self.upsample = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.down(x)
        b = self.upsample(self.middle(self.pool(a)))
        y = self.out(self.up(torch.cat([a, b], 1)))
        return torch.sigmoid(y) if bug else y


model = UNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
criterion = nn.BCEWithLogitsLoss()
validation = Circles(100)
for epoch in range(5):
    model.train()
    for images, masks in DataLoader(Circles(512), batch_size=16, shuffle=True):
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(images), masks)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        predicted = model(validation.images) > (0.5 if bug else 0)
        overlap = (predicted & (validation.masks > 0)).sum() / (predicted | (validation.masks > 0)).sum()
    print(f"epoch {epoch} loss {loss.item():.4f} IoU {overlap:.3f}")
torch.save(model.state_dict(), "unet.pt")
