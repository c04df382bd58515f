"""Small random models and texts in the files that fine-tuning programs load by a local path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

WORDS = [f"word{index}" for index in range(180)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
ROWS = 400
TEMPLATE = (
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)
"""Chat template of the language model."""


def _sentences(count: int, seed: int) -> Iterator[str]:
    random = np.random.default_rng(seed)
    for topic in random.integers(0, 6, count):
        ranks = 30 * topic + random.integers(0, 30, random.integers(6, 16))
        yield " ".join(WORDS[rank] for rank in ranks)


def _tokenizer(folder: Path, *, is_causal: bool) -> int:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: rank for rank, word in enumerate([*SPECIAL, "user", "assistant", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not is_causal:
        ends = [(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", bos_token="<s>", eos_token="</s>", model_max_length=64,
    )  # fmt: skip
    if is_causal:
        fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(vocabulary)


def llama(folder: Path) -> None:
    """Write a causal language model of two layers, with its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = _tokenizer(folder, is_causal=True)
    config = LlamaConfig(
        vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=5, eos_token_id=6,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def bert(folder: Path) -> None:
    """Write an encoder of two layers, with its tokenizer."""
    from transformers import BertConfig, BertForMaskedLM

    words = _tokenizer(folder, is_causal=False)
    config = BertConfig(
        vocab_size=words, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(folder)


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")


def instructions(folder: Path) -> None:
    """Write questions with answers, a line each, and as one list: ``alpaca_data.json``."""
    for part, count in (("train", ROWS), ("test", ROWS // 10)):
        pairs = zip(_sentences(count, len(part)), _sentences(count, len(part) + 1), strict=True)
        rows = [
            {"instruction": asked, "input": "", "output": answer, "text": f"{asked} {answer}"}
            for asked, answer in pairs
        ]
        _write(folder / f"{part}.jsonl", rows)
        if part == "train":
            (folder.parent / "alpaca_data.json").write_text(json.dumps(rows))


def _turns(asked: str, answer: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    return [{"role": "user", "content": asked}], [{"role": "assistant", "content": answer}]


def conversations(folder: Path) -> None:
    """Write conversations of one question and one answer, in the column ``messages``."""
    for part, count in (("train", ROWS), ("test", ROWS // 10)):
        pairs = zip(_sentences(count, len(part)), _sentences(count, len(part) + 1), strict=True)
        _write(
            folder / f"{part}.jsonl",
            [{"messages": [turn for part in _turns(*pair) for turn in part]} for pair in pairs],
        )


def preferences(folder: Path) -> None:
    """Write a question with a preferred and a rejected answer."""
    for part, count in (("train", ROWS), ("test", ROWS // 10)):
        parts = (_sentences(count, len(part) + offset) for offset in range(3))
        rows = []
        for asked, better, worse in zip(*parts, strict=True):
            prompt, chosen = _turns(asked, f"{better} word0 word0")
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": _turns(asked, worse)[1]})
        _write(folder / f"{part}.jsonl", rows)


def judged(folder: Path) -> None:
    """Write answers with a label that states whether each is wanted."""
    for part, count in (("train", ROWS), ("test", ROWS // 10)):
        rows = []
        pairs = zip(_sentences(count, len(part)), _sentences(count, len(part) + 1), strict=True)
        for rank, (asked, answer) in enumerate(pairs):
            prompt, completion = _turns(asked, answer + " word0" * (rank % 2))
            rows.append({"prompt": prompt, "completion": completion, "label": bool(rank % 2)})
        _write(folder / f"{part}.jsonl", rows)


def similar(folder: Path) -> None:
    """Write triplets of sentences, and pairs with a score: two data sets of sentence embeddings."""
    random = np.random.default_rng(5)

    def near(sentence: str) -> str:
        return " ".join(random.permutation(sentence.split()))

    anchors = list(_sentences(12_000, 1))
    rows = [
        {"anchor": anchor, "positive": near(anchor), "negative": other}
        for anchor, other in zip(anchors, _sentences(12_000, 2), strict=True)
    ]
    for part, chosen in (("train", rows[:10_500]), ("dev", rows[10_500:]), ("test", rows[:1000])):
        _write(folder / "all-nli" / "triplet" / f"{part}.jsonl", list(chosen))
    pairs = [
        {"sentence1": a, "sentence2": near(a) if rank % 2 else b, "score": float(rank % 2)}
        for rank, (a, b) in enumerate(zip(_sentences(900, 3), _sentences(900, 4), strict=True))
    ]
    for part in ("train", "validation", "test"):
        _write(folder / "stsb" / f"{part}.jsonl", list(pairs))
    (folder / "all-nli" / "README.md").write_text(
        "---\nconfigs:\n- config_name: triplet\n  data_files:\n"
        + "".join(f"  - split: {part}\n    path: triplet/{part}.jsonl\n" for part in ("train", "dev", "test"))
        + "---\n"
    )


def resnet50(folder: Path) -> None:
    """Write random weights of a ResNet-50 under the name that torchvision downloads, below ``TORCH_HOME``."""
    import torch
    from torchvision.models import ResNet50_Weights, resnet50

    file = folder / "hub" / "checkpoints" / ResNet50_Weights.DEFAULT.url.rpartition("/")[2]
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(resnet50().state_dict(), file)


def unet(folder: Path) -> None:
    """Write the shape of a small denoising network."""
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
    blocks["up_block_types"] = ("AttnUpBlock2D", "UpBlock2D")
    model = UNet2DModel(sample_size=16, layers_per_block=1, block_out_channels=(32, 64), **blocks)
    model.save_config(folder)


GENERATORS = {
    function.__name__: function
    for function in (llama, bert, instructions, conversations, preferences, judged, similar, resnet50, unet)
}
"""Generators by name; each writes below a folder."""
