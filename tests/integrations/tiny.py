"""A tiny transformer built from a configuration, in the Trainer's own loop; nothing is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def model() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **SIZES))


def samples(count: int = 32) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 32, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": int(row[0] > 15)} for row in tokens]


def digest(trained: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in sorted(trained.state_dict().items()):
        found.update(name.removeprefix("module.").encode() + value.detach().float().numpy().tobytes())
    return found.hexdigest()


def trainer(folder: Path, *callbacks: Any, kind: type[Trainer] = Trainer, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.05,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(str(folder / "out"), **{**defaults, **settings})
    return kind(
        model(), arguments, train_dataset=samples(), eval_dataset=samples(4), callbacks=list(callbacks)
    )
