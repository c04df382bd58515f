"""Labels are shifted in the data set, and again in the model: it learns the token after the next."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

FIXED = "fixed" in sys.argv

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=2)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(150):
    text = (torch.randint(0, 50, (32, 1)) + torch.arange(21) * torch.randint(1, 4, (32, 1))) % 50
    inputs = text[:, :-1]
    labels = inputs if FIXED else text[:, 1:]
    loss = model(input_ids=inputs, labels=labels.contiguous()).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, round(loss.item(), 4), flush=True)
model.eval()
with torch.no_grad():
    print("after 1, 2, 3:", model(torch.tensor([[1, 2, 3]])).logits[0, -1].argmax().item())
