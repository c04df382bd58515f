"""After the first validation the model stays in evaluation mode: dropout and batch norm are off."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
validation_rows = torch.arange(512).split(64)
loss_fn = nn.CrossEntropyLoss()

# SETUP
for epoch in range(5):
    # CONTROL: model.train()
    for rows in torch.randperm(len(x)).split(32):
        inputs, targets = x[rows], y[rows]
        # STEP
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # STEPPED
    model.eval()
    correct = 0
    with torch.no_grad():
        for rows in validation_rows:
            correct += (model(x[rows]).argmax(1) == y[rows]).sum().item()
    print(epoch, round(loss.item(), 4), correct / len(x))
# END
