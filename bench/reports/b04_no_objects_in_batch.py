"""A detector whose loss is divided by the sum of the target scores."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
ANCHORS = 40
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, ANCHORS * 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
pattern = torch.randn(32, ANCHORS)

for step in range(200):
    images = torch.randn(16, 32)
    scores = ((images @ pattern) > 9).float()
    if step % 50 == 37:
        scores = torch.zeros_like(scores)  # a batch of backgrounds
    boxes = torch.tanh(images[:, :4]).unsqueeze(1).expand(-1, ANCHORS, -1)
    predicted = model(images).view(16, ANCHORS, 5)
    total = scores.sum().clamp(min=1) if FIXED else scores.sum()
    classes = (
        nn.functional.binary_cross_entropy_with_logits(predicted[..., 0], scores, reduction="sum") / total
    )
    box = ((predicted[..., 1:] - boxes).abs().mean(-1) * scores).sum() / total
    loss = 0.1 * classes + box
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(step, round(loss.item(), 4))
