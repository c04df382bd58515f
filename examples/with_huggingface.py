"""The Hugging Face Trainer with backlight as a callback: a tiny GPT from a configuration, nothing is loaded.

python examples/with_huggingface.py --out runs/trainer
backlight report runs/trainer
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from backlight.integrations.huggingface import BacklightCallback

TEXT = "to be or not to be that is the question whether it is nobler in the mind to suffer " * 40


def main() -> None:
    """Train on the letters of a sentence, watched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()

    letters = sorted(set(TEXT))
    codes = torch.tensor([letters.index(letter) for letter in TEXT])
    windows = [{"input_ids": window, "labels": window} for window in codes.unfold(0, 32, 16)]
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(letters), **sizes, **tokens))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            run_name="letters",
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        callback = BacklightCallback(run=options.out, groups={"first": "transformer.h.0.*"})
        Trainer(model, arguments, train_dataset=windows, callbacks=[callback]).train()


if __name__ == "__main__":
    main()
