"""Parameters that are expected to train, by name, and the lines that created them and their optimizers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_parameter_registration_hook

from backlight.capture.modules import Prefixes, SeenModules, named_parameters, walk
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.capture.hooks import Patches


@dataclass(frozen=True)
class Candidate:
    """A parameter with its names in the living models."""

    name: str
    parameter: torch.Tensor
    owner: nn.Module | None
    module: str
    root: int
    aliases: tuple[str, ...] = ()


def named_roots(seen: SeenModules) -> list[tuple[str, nn.Module]]:
    """Return the living outermost modules with a prefix, empty where there is one only.

    Modules without parameters, such as losses, are left out.
    """
    return Prefixes().of([r for r in seen.roots() if any(True for _ in named_parameters(r))])


def candidates(roots: list[tuple[str, nn.Module]]) -> list[Candidate]:
    """Return every parameter of the models in model order, a tied one once."""
    found: dict[int, Candidate] = {}
    for index, (prefix, root) in enumerate(roots):
        modules = dict(walk(root, prefix))
        for named in named_parameters(root, prefix):
            key = id(named.parameter)
            earlier = found.get(key)
            if earlier is None:
                owner = modules.get(named.module)
                found[key] = Candidate(named.name, named.parameter, owner, named.module, index)
            else:
                found[key] = Candidate(
                    earlier.name, earlier.parameter, earlier.owner, earlier.module, earlier.root,
                    (*earlier.aliases, named.name),
                )  # fmt: skip
    return list(found.values())


def plain_tensors(roots: list[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """Return tensors that modules hold as plain attributes and that require a gradient but are no leaves."""
    found = []
    for prefix, root in roots:
        for name, module in walk(root, prefix):
            for key, value in list(vars(module).items()):
                # type() first: isinstance() on a third-party object may run its __class__ property.
                if hasattr(type(value), "requires_grad") and value.requires_grad and not value.is_leaf:
                    found.append((f"{name}.{key}" if name else key, value))
    return found


class RegistrationLines:
    """Lines at which parameters were registered and optimizers created."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[weakref.ref[Any], SourceLine]] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], SourceLine]] = {}

    def install(self, patches: Patches) -> list[Any]:
        """Start recording; return the handles of the hooks."""
        from torch.optim import Optimizer  # noqa: PLC0415 - typing only above

        registration_lines = self._optimizers

        def wrap(original: Any) -> Any:
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                line = user_line()
                original(self, *args, **kwargs)
                if line is not None:
                    registration_lines[id(self)] = (weakref.ref(self), line)

            __init__.__wrapped__ = original  # type: ignore[attr-defined]
            return __init__

        patches.replace(Optimizer, "__init__", wrap)

        def on_parameter(_module: Any, _name: str, parameter: Any) -> None:
            line = user_line()
            if parameter is not None and line is not None:
                self._parameters[id(parameter)] = (weakref.ref(parameter), line)

        return [register_module_parameter_registration_hook(on_parameter)]

    def of_parameter(self, parameter: Any) -> SourceLine | None:
        """Return the line that registered ``parameter``."""
        return _line_of(self._parameters, parameter)

    def of_optimizer(self, optimizer: Any) -> SourceLine | None:
        """Return the line that created ``optimizer``."""
        return _line_of(self._optimizers, optimizer)


def _line_of(table: dict[int, tuple[weakref.ref[Any], SourceLine]], thing: Any) -> SourceLine | None:
    known = table.get(id(thing))
    return known[1] if known is not None and known[0]() is thing else None
