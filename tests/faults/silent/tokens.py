"""Language models whose targets are not the next tokens, or whose sequences have no end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import control, fault, train

WORDS, LENGTH, END = 20, 12, 0


class LanguageModel(nn.Module):
    """Predicts each token from the ones before, by a running mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.embed(input_ids).cumsum(1))


def sequences(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):
        tokens = torch.randint(1, WORDS, (16, LENGTH))
        yield tokens, tokens


def learn(loss_of: Callable[[Tensor, Any], Tensor], data: Callable[[int], Iterator[Any]] = sequences) -> None:
    model = LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, loss_of=loss_of, data=data)


def ahead(shift: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of the token ``shift`` places ahead, with ignored targets at the end."""

    def loss_of(out: Tensor, tokens: Tensor) -> Tensor:
        targets = F.pad(tokens[:, shift:], (0, shift), value=-100)
        return F.cross_entropy(out.flatten(0, 1), targets.flatten())

    return loss_of


@fault(rule="loss_input", kind="shifted", severity="error", step=2, names="2 places")
def labels_shifted_twice(injected: bool) -> None:
    learn(ahead(2 if injected else 1))


@control
def several_tokens_ahead() -> None:
    learn(lambda out, tokens: ahead(1)(out, tokens) + ahead(2)(out, tokens))


@control
def masked_tokens() -> None:
    """The model reads around a few masked tokens, whose targets are at the same place."""

    def loss_of(out: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(
            out.flatten(0, 1), tokens.where(torch.rand(tokens.shape) < 0.5, -100).flatten()
        )

    learn(loss_of)


@control
def sequences_of_one_token() -> None:
    """Every shift fits."""

    def data(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(count):
            tokens = torch.randint(1, WORDS, (16, 1)).expand(16, LENGTH).contiguous()
            yield tokens, tokens

    learn(ahead(2), data)


@control
def tags_of_tokens() -> None:
    learn(lambda out, tokens: F.cross_entropy(out.flatten(0, 1), ((tokens * 7 + 3) % WORDS).flatten()))


def ended(padding: int, is_ended: bool = True) -> Callable[[int], Iterator[Any]]:
    """Return sequences of several lengths that end with ``END``, and are filled with ``padding``."""

    def data(count: int) -> Iterator[Any]:
        for _ in range(count):
            tokens = torch.randint(2, WORDS, (16, LENGTH))
            lengths = torch.randint(4, LENGTH - 1, (16, 1))
            places = torch.arange(LENGTH)
            tokens = tokens.where(places < lengths, padding)
            if is_ended:
                tokens = tokens.where(places != lengths, END)
            mask = (places < lengths + is_ended).long()
            yield {"input_ids": tokens, "attention_mask": mask}, (tokens, mask)

    return data


def generate(
    padding: int, labels_of: Callable[[Tensor, Tensor], Tensor], is_ended: bool = True, masked: bool = True
) -> None:
    model = LanguageModel()

    def forward(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch) if masked else model(batch["input_ids"])

    def loss_of(out: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return ahead(1)(out, labels_of(*pair))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(forward, optimizer, parts=(model,), loss_of=loss_of, data=ended(padding, is_ended))


@fault(rule="loss_input", kind="end_ignored", severity="warning", step=2, names="Token 0")
def end_ignored_as_padding(injected: bool) -> None:
    padding = END if injected else 1
    generate(padding, lambda tokens, _: tokens.masked_fill(tokens == padding, -100))


@control
def padding_ignored_by_the_mask() -> None:
    generate(END, lambda tokens, mask: tokens.masked_fill(mask == 0, -100))


@control
def sequences_without_an_end() -> None:
    generate(END, lambda tokens, _: tokens.masked_fill(tokens == END, -100), is_ended=False)


@control
def end_ignored_once() -> None:
    """Some sequences are too long, and are cut before their end."""

    def labels_of(tokens: Tensor, mask: Tensor) -> Tensor:
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:2] = labels[:2].masked_fill(labels[:2] == END, -100)
        return labels

    generate(END, labels_of)
