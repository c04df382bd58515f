"""The main process saves, and only the others call ``wait_for_everyone()``: they wait for ever."""

import sys
import tempfile

import torch
from accelerate import Accelerator
from torch import nn

FIXED = "fixed" in sys.argv

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
folder = tempfile.mkdtemp()
for epoch in range(4):
    for _ in range(20):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    print(accelerator.process_index, epoch, round(loss.item(), 4), flush=True)
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/{epoch}.pt")
    if FIXED or not accelerator.is_main_process:
        accelerator.wait_for_everyone()
print(accelerator.process_index, "done", flush=True)
accelerator.end_training()
