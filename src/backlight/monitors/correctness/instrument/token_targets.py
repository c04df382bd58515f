"""Whether the targets of a language model are its next tokens, and whether the end of a sequence is one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.batches import plain_tensors
from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.loss_graph import CLASS_LOSSES, are_plain, terms
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import FIRST_STEPS, Check
from backlight.monitors.correctness.rules import loss_input as facts

ROWS, COLUMNS = 8, 1024
"""Sequences of a batch, and tokens of each, that are compared."""

LEAST_TARGETS = 64
"""Targets that count in a comparison."""

MAX_SHIFT = 3
"""Tokens between an input and its target, at most, that are looked for."""

STEPS = 2
"""Steps at which targets are shifted before that is reported."""

ENDS = 16
"""Ends of sequences that are all ignored before that is reported."""


class TokenTargets(Check):
    """``loss_input``: targets that are not the next token of the input, and ignored ends of sequences.

    The tokens are the first integers of shape ``[B, T]`` that a forward is given, the targets those of the
    class losses of its backward. One loss for the next token ends the search for shifts: others may look
    further ahead on purpose.
    """

    name = "token_targets"
    steps = "all"

    def _start(self) -> None:
        self._tokens: tuple[Tensor, Tensor | None] | None = None
        self._shifts: list[int] = []
        self._ends = 0
        self._is_next = False  # some loss has the next tokens as targets
        self._has_end = False  # some end of a sequence counts

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the first tokens of a forward, and the mask that belongs to them; not of the busiest step."""
        if self.step >= FIRST_STEPS:
            HUB.remove(self)
        elif self.step and torch.is_grad_enabled() and not HUB.backward_depth and not is_transforming():
            arguments = plain_tensors(kwargs.get("input_ids", args))
            tokens = next((x for x in arguments if x.ndim == 2 and _is_index(x)), None)
            mask = next(iter(plain_tensors(kwargs.get("attention_mask"))), None)
            self._tokens = None
            if tokens is not None and min(tokens.shape[1], tokens.numel() // 2) > MAX_SHIFT:
                is_alike = mask is not None and (mask.shape, mask.device) == (tokens.shape, tokens.device)
                is_used = is_alike and mask is not None and not mask.is_floating_point()
                self._tokens = tokens, (mask if is_used else None)

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Compare the targets of the losses below with the tokens."""
        noted, self._tokens = self._tokens, None
        if noted is None or is_capturing_graph() or self.step >= FIRST_STEPS:
            return
        tokens, mask = noted
        for root in roots:
            for kind, node in terms(root.grad_fn):
                if kind not in CLASS_LOSSES or not are_plain(node, "target"):
                    continue
                targets = _in_rows(node._saved_target, *tokens.shape)
                if targets is None or targets.device != tokens.device:
                    continue
                parts = [x[:ROWS, :COLUMNS] for x in (tokens, targets, mask) if x is not None]
                ends = list(itertools.accumulate(part.shape[1] for part in parts))[:-1]
                then = functools.partial(self._compare, self.step, node._saved_ignore_index, ends)
                self.when_known(then, torch.cat(parts, dim=1))  # one launch, one transfer

    def _compare(self, step: int, ignored: int, ends: list[int], columns: NDArray[np.generic]) -> None:
        tokens, targets, *mask = np.split(columns.astype(np.int64), ends, axis=1)
        # torch hands out the index without its sign.
        is_ignored = targets == (ignored - 2**64 if ignored >= 2**63 else ignored)
        if mask:
            self._compare_ends(step, tokens, targets, is_ignored, mask[0] != 0)
        shifts = [k for k in range(1, MAX_SHIFT + 1) if _is_shifted(tokens, targets, is_ignored, k)]
        self._is_next = self._is_next or 1 in shifts
        self._shifts += shifts[:1]
        if not self._is_next and len(self._shifts) >= STEPS and shifts and len(set(self._shifts)) == 1:
            self.report(facts.ShiftedTwice(step, shifts[0]))

    def _compare_ends(
        self,
        step: int,
        tokens: NDArray[np.int64],
        targets: NDArray[np.int64],
        is_ignored: NDArray[np.bool_],
        is_token: NDArray[np.bool_],
    ) -> None:
        """Find sequences that end with the padding token, whose target is ignored."""
        padding = np.unique(tokens[~is_token])
        if len(padding) != 1 or self._has_end:
            return
        self._has_end = bool((targets[~is_ignored] == padding[0]).any())
        for row in range(len(tokens)):
            places = np.flatnonzero(is_token[row])
            # Right of the padding nothing follows; the one target of the end is that of the token before.
            last = int(places[-1]) if len(places) else 0
            is_whole = last and last + 1 < tokens.shape[1] and not is_ignored[row, : last - 1].all()
            self._ends += bool(is_whole and tokens[row, last] == padding[0] and is_ignored[row, last - 1])
        if not self._has_end and self._ends >= ENDS:
            self.report(facts.EndIgnored(step, int(padding[0]), self._ends))


def _is_index(x: Tensor) -> bool:
    return x.dtype in {torch.int64, torch.int32}


def _in_rows(targets: Tensor, rows: int, columns: int) -> Tensor | None:
    """Return targets as ``[B, T]``, or without the last column; None where their number is another one."""
    for length in (columns, columns - 1):
        if targets.numel() == rows * length:
            return targets.detach().reshape(rows, length)
    return None


def _is_shifted(
    tokens: NDArray[np.int64], targets: NDArray[np.int64], is_ignored: NDArray[np.bool_], shift: int
) -> bool:
    """Return whether every target that counts is the token ``shift`` places after its own."""
    width = min(targets.shape[1], tokens.shape[1] - shift)
    here, there = targets[:, :width], tokens[:, shift : shift + width]
    counted = ~is_ignored[:, :width]
    return bool(
        counted.sum() >= LEAST_TARGETS
        and (here == there)[counted].all()
        and len(np.unique(here[counted])) > 1
    )
