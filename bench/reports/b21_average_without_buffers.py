"""A mean teacher averages the parameters only: its batch norms keep the statistics they began with."""

import copy
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
student = nn.Sequential(
    nn.Conv2d(3, 16, 3),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 4),
)
teacher = copy.deepcopy(student).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
patterns = torch.randn(4, 3, 8, 8)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 4, (32,))
    return 3 + 4 * torch.randn(32, 3, 8, 8) + 3 * patterns[labels], labels


@torch.no_grad()
def update_teacher(decay: float) -> None:
    for average, value in zip(teacher.parameters(), student.parameters(), strict=True):
        average.lerp_(value, 1 - decay)
    if FIXED:
        for average, value in zip(teacher.buffers(), student.buffers(), strict=True):
            average.copy_(value)


for step in range(300):
    student.train()
    images, labels = batch()
    loss = nn.functional.cross_entropy(student(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_teacher(0.95)
    if step % 60 == 59:
        student.eval()
        teacher.eval()
        images, labels = batch()
        with torch.no_grad():
            right = [
                (model(images).argmax(1) == labels).float().mean().item() for model in (student, teacher)
            ]
        print(step, "student", right[0], "teacher", right[1])
