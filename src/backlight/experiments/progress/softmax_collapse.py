"""Softmax collapse (Prieto et al., 2501.04697): samples whose softmax is 1 to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax_collapse(logits_NC: Tensor) -> float:
    """Return the share of samples whose sum of exponentials is exactly that of the largest logit.

    There the other classes are absorbed in the precision of ``logits_NC``, and a sample whose largest
    logit is its label gives a loss and a gradient of exactly 0.
    """
    shifted = logits_NC.detach() - logits_NC.detach().amax(1, keepdim=True)
    return float((shifted.exp().sum(1) == 1).double().mean()) if len(logits_NC) else float("nan")


def smallest_margin(logits_NC: Tensor, labels_N: Tensor) -> float:
    """Return the smallest lead of a label's logit over the best other one, over N samples."""
    own = logits_NC.detach().gather(1, labels_N[:, None])
    others = logits_NC.detach().scatter(1, labels_N[:, None], -torch.inf).amax(1, keepdim=True)
    return float((own - others).min())
