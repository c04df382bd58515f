"""Embeddings that the configuration of a Transformers model ties, and that are two parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from backlight.capture.modules import table_of, walk
from backlight.interrupts import is_interrupt

SETTING = "tie_word_embeddings"


def by_configuration(models: Iterable[nn.Module]) -> Iterator[tuple[tuple[nn.Parameter, nn.Parameter], str]]:
    """Yield the weights of input and output embeddings that differ although ``tie_word_embeddings`` is True.

    Models that name no tied weights do not follow this setting.
    """
    for _, module in (found for model in models for found in walk(model)):
        own = vars(module)
        if getattr(own.get("config"), SETTING, None) is not True:
            continue
        if not getattr(type(module), "_tied_weights_keys", None):
            continue
        ends = [getattr(module, f"get_{end}_embeddings", None) for end in ("input", "output")]
        if not all(map(callable, ends)):
            continue
        try:
            first, second = (table_of(end(), "_parameters").get("weight") for end in ends if end is not None)
        except Exception as error:
            if is_interrupt(error):
                raise
            continue
        if first is not None and second is not None and first is not second:
            yield (first, second), f"config.{SETTING}"
