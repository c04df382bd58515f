"""A folder of images, sorted by class, that the loader reads in order."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
CLASSES, EACH = 8, 256
centres = torch.randn(CLASSES, 3, 1, 1)
labels = torch.arange(CLASSES).repeat_interleave(EACH)
images = torch.randn(CLASSES * EACH, 3, 8, 8) + 0.5 * centres[labels]
loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=FIXED)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, CLASSES),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(6):
    model.train()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().mean().item()
    print(epoch, "loss", round(loss.item(), 4), "accuracy", round(right, 3))
