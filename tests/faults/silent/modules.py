"""Modules in the wrong mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from faults.silent.loop import batches, classify, control, fault


def normed(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3), *more
    )


@fault(rule="trained_in_eval_mode", severity="warning", step=0)
def trained_in_eval_mode(injected: bool) -> None:
    classify(normed().train(not injected))


@fault(rule="trained_in_eval_mode", severity="warning", step=6)
def no_train_after_the_evaluation(injected: bool) -> None:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        if number == 6:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train(not injected)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@control
def frozen_batch_norm() -> None:
    model = normed()
    model[1].eval()
    classify(model)


@control
def new_head_on_a_frozen_model() -> None:
    backbone = normed(nn.Linear(3, 64)).requires_grad_(False)
    classify(nn.Sequential(backbone, nn.Linear(64, 3)).eval())
