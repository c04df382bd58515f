"""TRL with LoRA adapters of PEFT, watched: a tiny Llama from a configuration, nothing is loaded.

python examples/with_trl.py --out runs/grpo
python examples/with_trl.py --method dpo --out runs/dpo    # or sft
python examples/with_trl.py --constant-reward    # a reward that never differs: nothing can be learned
backlight report runs/grpo
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from backlight.integrations.huggingface import BacklightCallback

WORDS = ["<pad>", "<end>", "<unknown>", "the", "cat", "dog", "sat", "ran", "what", "is", "it", "who"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **tokens)


def main() -> None:
    """Train adapters to say "the cat"."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=("grpo", "dpo", "sft"), default="grpo")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--unwatched", action="store_true", help="train without backlight")
    parser.add_argument("--constant-reward", action="store_true")
    parser.add_argument("--save", type=Path, default=None, help="file for the adapters")
    options = parser.parse_args()

    def reward(completions: list[str], **_: object) -> list[float]:
        if options.constant_reward:
            return [1.0] * len(completions)
        return [float(text.count("the") + text.count("cat")) for text in completions]

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes, **tokens)
    )
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "max_steps": options.steps,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "logging_steps": 4,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
        given = {
            "model": model,
            "processing_class": build_tokenizer(),
            "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            "callbacks": [] if options.unwatched else [BacklightCallback(run=options.out, every=1)],
        }
        prompts = ["what is it", "who is it"] * 40
        if options.method == "grpo":
            arguments = GRPOConfig(num_generations=4, max_completion_length=8, **common)
            trainer = GRPOTrainer(
                reward_funcs=reward,
                args=arguments,
                train_dataset=Dataset.from_dict({"prompt": prompts}),
                **given,
            )
        elif options.method == "dpo":
            pairs = {"prompt": prompts, "chosen": ["the cat sat"] * 80, "rejected": ["dog ran"] * 80}
            trainer = DPOTrainer(args=DPOConfig(**common), train_dataset=Dataset.from_dict(pairs), **given)
        else:
            texts = {"text": [f"{prompt} the cat sat" for prompt in prompts]}
            trainer = SFTTrainer(args=SFTConfig(**common), train_dataset=Dataset.from_dict(texts), **given)
        trainer.train()
    if options.save is not None:
        trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        torch.save({name: parameter.detach() for name, parameter in trained.items()}, options.save)


if __name__ == "__main__":
    main()
