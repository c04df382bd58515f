"""Distillation. With `bug`, the student is a copy of a teacher in evaluation mode and is trained so."""

import copy
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

bug = "bug" in sys.argv
torch.manual_seed(0)
x = torch.randn(3000, 16)
y = (x[:, :8].pow(2).sum(1) > 7.3).long() + (x[:, 8] > 0).long()
teacher = nn.Sequential(
    nn.Linear(16, 96),
    nn.BatchNorm1d(96),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(96, 96),
    nn.ReLU(),
    nn.Linear(96, 3),
)


def batches():
    return torch.randperm(len(x)).split(100)


optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
for epoch in range(6):
    for index in batches():
        loss = F.cross_entropy(teacher(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
teacher.eval()
print(f"teacher {loss.item():.4f}")

student = copy.deepcopy(teacher)
for layer in student:
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()
if not bug:
    student.train()
optimizer = torch.optim.Adam(student.parameters(), lr=2e-3)
for epoch in range(8):
    for index in batches():
        with torch.no_grad():
            soft = F.softmax(teacher(x[index]) / 2, dim=1)
        logits = student(x[index])
        loss = 0.5 * F.cross_entropy(logits, y[index]) + 2 * F.kl_div(
            F.log_softmax(logits / 2, dim=1), soft, reduction="batchmean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"student epoch {epoch} loss {loss.item():.4f}")
torch.save(student.state_dict(), "student.pt")
