"""The Trainer, or a loop of Accelerate, on two ranks over gloo; run by torchrun from the tests.

torchrun --nproc-per-node 2 hf_ddp.py FOLDER trainer|accelerate plain|watched
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from integrations import tiny

torch.set_num_threads(1)


def by_trainer(folder: Path, watched: bool) -> Any:
    from backlight.integrations.huggingface import BacklightCallback

    callbacks = [BacklightCallback(folder / "run")] if watched else []
    trainer = tiny.trainer(folder, *callbacks)
    trainer.train()
    return trainer.model


def by_accelerate(folder: Path, watched: bool) -> Any:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from backlight.integrations.accelerate import watch

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = tiny.model()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), 1e-3), DataLoader(tiny.samples(), batch_size=2)
    )
    context = (
        watch(accelerator, model, optimizer, run=folder / "run") if watched else contextlib.nullcontext()
    )
    with context:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.2)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"train_loss": loss.item()})
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) / sys.argv[3]
    folder.mkdir(parents=True, exist_ok=True)
    train = by_trainer if sys.argv[2] == "trainer" else by_accelerate
    trained = train(folder, sys.argv[3] == "watched")
    (folder / f"digest-{os.environ['RANK']}").write_text(tiny.digest(trained))
    torch.distributed.destroy_process_group()
