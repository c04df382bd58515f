"""Once the teacher is frozen, the optimizer and its schedule are made anew: the rate never decays."""

import copy
import sys

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
EPOCHS, FREEZE, STEP_SIZE = 20, 15, 15
student = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
teacher = copy.deepcopy(student)
rule = torch.randn(16, 4)
parameters = [*student.parameters(), *teacher.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-3)
scheduler = StepLR(optimizer, STEP_SIZE, 0.1)
for epoch in range(EPOCHS):
    if epoch == FREEZE:
        teacher.requires_grad_(False)
        teacher.zero_grad(set_to_none=True)
        if not FIXED:
            optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
            scheduler = StepLR(optimizer, STEP_SIZE, 0.1)
    for _ in range(20):
        x = torch.randn(32, 16)
        guess, hint = student(x), teacher(x)
        labels = (x @ rule + torch.randn(32, 4)).argmax(1)
        loss = nn.functional.cross_entropy(guess, labels) + nn.functional.mse_loss(guess, hint.detach())
        if epoch < FREEZE:
            loss = loss + nn.functional.cross_entropy(hint, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()
    print(epoch, "rate", optimizer.param_groups[0]["lr"], "loss", loss.item())
