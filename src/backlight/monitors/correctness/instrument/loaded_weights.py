"""Parameters whose values come from a file: what is left as it was may then be meant."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from backlight.capture.hub import HUB, Listener
from backlight.capture.modules import named_parameters


class LoadedWeights(Listener):
    """Remembers the parameters that a state was loaded into; checks share one.

    Transformers puts the tensors of a file in place without ``load_state_dict``: its models name the file.
    """

    every_step = False

    def __init__(self) -> None:
        self._loaded: dict[int, weakref.ref[torch.Tensor]] = {}

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Remember the parameters of a module that its state names."""
        missing = set(getattr(result, "missing_keys", ()))
        for name, parameter in module.named_parameters():
            if name in state and name not in missing:
                self._loaded[id(parameter)] = weakref.ref(parameter)

    def holds(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether the values of one of these parameters come from a file."""
        wanted = {id(parameter): parameter for parameter in parameters}
        known = self._loaded
        if any(key in known and known[key]() is one for key, one in wanted.items()):
            return True
        return any(
            getattr(vars(root).get("config"), "_name_or_path", "")
            and any(id(named.parameter) in wanted for named in named_parameters(root))
            for root in HUB.seen.roots()
        )
