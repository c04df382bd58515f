"""Blocks of a model that repeat, and what wrapping one in ``torch.utils.checkpoint`` does to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from backlight.capture.modules import walk
from backlight.diagnose.memory.prediction_result import Blocks


def repeated_blocks(model: nn.Module) -> tuple[Blocks, ...]:
    """Return groups of at least two siblings of one structure, the outermost only.

    A block has modules of its own and parameters; two are alike if their modules have the same names
    and types, and their parameters the same shapes and types.
    """
    found: list[Blocks] = []
    inside: list[str] = []
    for name, module in walk(model):
        if any(name == block or name.startswith(f"{block}.") for block in inside):
            continue
        groups: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for key, child in module.named_children():
            if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                full = f"{name}.{key}" if name else key
                groups.setdefault(_structure(child), []).append((full, child))
        for members in groups.values():
            if len(members) > 1:
                names = tuple(full for full, _ in members)
                found.append(Blocks(name, type(members[0][1]).__name__, names))
                inside += names
    return tuple(found)


def checkpointed(
    model: nn.Module,
    names: Collection[str],
    entered: Callable[[str], AbstractContextManager[None]],
    *,
    reentrant: bool = False,
) -> None:
    """Make the modules of these names compute their forward again in backward, in place.

    Parameters
    ----------
    entered:
        Told of each forward, also of one that is computed again, which no hook of the module sees.
    """
    for name, module in walk(model):
        if name in names:
            module.forward = _Checkpointed(name, module.forward, entered, reentrant=reentrant)


class _Checkpointed:
    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        entered: Callable[[str], AbstractContextManager[None]],
        *,
        reentrant: bool,
    ) -> None:
        self._name, self._forward, self._entered, self._reentrant = name, forward, entered, reentrant

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self._run, *args, use_reentrant=self._reentrant, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with self._entered(self._name):
            return self._forward(*args, **kwargs)


def _structure(block: nn.Module) -> Hashable:
    return (
        tuple((name, type(module)) for name, module in block.named_modules()),
        tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters()),
    )
