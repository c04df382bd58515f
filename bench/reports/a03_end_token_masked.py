"""The padding token is the end token, which the collator masks: the model never learns to stop."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

FIXED = "fixed" in sys.argv
END, PAD = 0, 1 if FIXED else 0

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=40, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=END
)
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def collate(count: int) -> dict[str, torch.Tensor]:
    """Return sentences of rising numbers, each with its end, padded to one length."""
    rows = torch.full((count, 20), PAD)
    for row in rows:
        length, first = int(torch.randint(4, 14, ())), int(torch.randint(2, 20, ()))
        row[:length] = torch.arange(first, first + length)
        row[length] = END
    labels = rows.clone()
    labels[rows == PAD] = -100
    lengths = (rows != PAD).sum(1) + (PAD == END)
    return {
        "input_ids": rows,
        "labels": labels,
        "attention_mask": (torch.arange(20) < lengths[:, None]).long(),
    }


for step in range(150):
    loss = model(**collate(32)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, round(loss.item(), 4), flush=True)
model.eval()
with torch.no_grad():
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, do_sample=True, pad_token_id=PAD)
print("stops" if END in out[0].tolist() else "never stops", out[0].tolist())
