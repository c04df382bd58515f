"""Rows of embeddings that are for padding: they get no gradient, whatever they hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from faults.silent.loop import control, fault, train

WORDS, LENGTH, PADDING = 12, 6, 0


def padded(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return sentences of one to six words, filled up with padding."""
    for _ in range(count):
        words = torch.randint(1, WORDS, (8, LENGTH))
        lengths = torch.arange(8) % LENGTH + 1
        yield words * (torch.arange(LENGTH) < lengths[:, None]), torch.randint(0, 3, (8,))


class Bag(nn.Module):
    """Classifies the mean of embeddings; ``masks`` leaves padding out of it."""

    def __init__(self, *, zeroes: bool, masks: bool = False, padding: int | None = PADDING) -> None:
        super().__init__()
        self.words, self.head, self.masks = nn.Embedding(WORDS, 8, padding), nn.Linear(8, 3), masks
        nn.init.normal_(self.words.weight)
        if zeroes:
            nn.init.zeros_(self.words.weight[PADDING])

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.words(x)
        return self.head((vectors * (x != PADDING)[..., None] if self.masks else vectors).mean(1))


@fault(
    rule="trained_tensors", severity="warning", step=0, kind="padding_row", names="Row 0 of `words.weight`"
)
def padding_that_is_initialised_again(injected: bool) -> None:
    train(Bag(zeroes=not injected), data=padded)


class Tagged(nn.Module):
    """Reads the embeddings by a recurrent layer, up to the end with the padding, or by packed sequences."""

    def __init__(self, *, packs: bool) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(torch.randn(WORDS, 8), freeze=False, padding_idx=PADDING)
        self.layer, self.head, self.packs = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3), packs

    def forward(self, x: Tensor) -> Tensor:
        if not self.packs:
            return self.head(self.layer(self.words(x))[0][:, -1])
        lengths = (x != PADDING).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(x), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.layer(packed)[1][-1])


@fault(rule="trained_tensors", severity="warning", step=0, kind="padding_row", names="of a batch")
def padding_of_pretrained_vectors(injected: bool) -> None:
    """The control leaves the padding out by packed sequences."""
    train(Tagged(packs=not injected), data=padded, is_compiled=False)


@control
def padding_that_is_masked() -> None:
    """As the embeddings of BERT, whose padding is not zero, under an attention mask."""
    train(Bag(zeroes=False, masks=True), data=padded)


@control
def token_zero_that_is_trained() -> None:
    """No row is for padding."""
    train(Bag(zeroes=False, padding=None), data=padded)


@control
def padding_that_is_tied_to_the_output() -> None:
    """The output layer has the weights of the embedding, and trains each row of them."""
    words = nn.Embedding(WORDS, 8, PADDING)
    nn.init.normal_(words.weight)

    def model(x: Tensor) -> Tensor:
        return words(x).mean(1) @ words.weight.T

    train(model, parts=[words], data=padded, is_compiled=False)


@control
def padding_that_no_batch_has() -> None:
    def full(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randint(1, WORDS, (8, LENGTH)), torch.randint(0, 3, (8,))) for _ in range(count))

    train(Bag(zeroes=False), data=full)
