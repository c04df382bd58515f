"""Batches of any form: size, device, digest and parts."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from backlight.capture.batches import digest, digest_of_weights, moved, nbytes, samples

Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: torch.Tensor
    name: str = "a"


X = torch.arange(6.0).reshape(3, 2)
FORMS = [X, (X, 1), [X], {"x": X, "y": None}, Pair(X, X), Item(X), (torch.tensor(2.0), X), ({"x": [X]},)]


@pytest.mark.parametrize("batch", FORMS, ids=lambda b: type(b).__name__)
def test_batches_of_every_form_are_described(batch):
    assert samples(batch) == 3
    assert nbytes(batch) >= 24
    assert digest(batch) == digest(moved(batch, torch.device("cpu")))
    other = moved(batch, torch.device("cpu"), torch.float64)
    assert type(other) is type(batch)
    assert digest(other) != digest(batch)


def test_digests_differ_between_batches():
    assert digest((X, 1)) != digest((X, 2))
    assert digest(X) != digest(X.reshape(2, 3))
    assert digest(X) != digest(X + 1e-6)
    assert digest(X.T) == digest(X.T.contiguous())
    assert digest(np.arange(3)) != digest(np.arange(4))
    assert digest(X.bfloat16()) != digest(X.half())
    assert digest((X, object())) is None


def test_integers_keep_their_type():
    codes = torch.arange(4)
    assert moved(codes, torch.device("cpu"), torch.bfloat16).dtype == torch.int64


def test_batch_without_tensors_has_no_size():
    assert samples("text") is None
    assert samples({"x": torch.tensor(1.0)}) is None


def test_batch_weights():
    a, b = torch.nn.Linear(2, 2).state_dict(), torch.nn.Linear(2, 2).state_dict()
    assert digest_of_weights(a) != digest_of_weights(b)
    assert digest_of_weights(a) == digest_of_weights({name: value.clone() for name, value in a.items()})
