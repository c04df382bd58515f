"""``modules_to_save=targets.append(...)`` is None: the new head stays random and is not in the adapter."""

import sys
import tempfile
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertModel, logging

warnings.filterwarnings("ignore")
logging.set_verbosity_error()
FIXED = "fixed" in sys.argv

torch.manual_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
)
with tempfile.TemporaryDirectory() as folder:
    BertModel(config).save_pretrained(folder)
    base = BertForSequenceClassification.from_pretrained(folder, num_labels=4)
targets = ["query", "value"]
saved = ["classifier"] if FIXED else targets.append("classifier")
model = get_peft_model(base, LoraConfig(r=4, target_modules=targets, modules_to_save=saved)).train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
for step in range(120):
    tokens = torch.randint(0, 100, (16, 12))
    loss = model(input_ids=tokens, labels=tokens[:, 0] % 4).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(step, round(loss.item(), 4), flush=True)
