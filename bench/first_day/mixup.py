"""CNN with mixup and a schedule over epochs. With `bug`, the schedule takes a step with every batch."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

bug = "bug" in sys.argv
torch.manual_seed(0)
EPOCHS = 8
patterns = torch.randn(5, 1, 12, 12)
labels = torch.arange(1000) % 5
images = patterns[labels] + 1.5 * torch.randn(1000, 1, 12, 12)
loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True, drop_last=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(3),
    nn.Flatten(),
    nn.Linear(288, 5),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
share = torch.distributions.Beta(0.4, 0.4)
for epoch in range(EPOCHS):
    model.train()
    for x, y in loader:
        weight, order = share.sample(), torch.randperm(len(x))
        output = model(weight * x + (1 - weight) * x[order])
        loss = weight * F.cross_entropy(output, y) + (1 - weight) * F.cross_entropy(output, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if bug:
            scheduler.step()
    if not bug:
        scheduler.step()
    print(f"epoch {epoch} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.4f}")
torch.save(model.state_dict(), "mixup.pt")
