"""Names of parameters, from the modules of the process.

Modules are met as they are built, through torch's public registration hooks; those that were built
earlier are found by a scan. Wrappers that put a prefix before every name are looked through.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from backlight.capture.engines import SHARES, shared
from backlight.capture.sharding import shards
from backlight.user_code import SourceLine, user_line

Object = TypeVar("Object")

_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "DeepSpeedEngine": "module",
    "PipelineEngine": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Wrapper classes with the attribute that holds what they wrap."""

_ADAPTERS = {"PeftModel": "base_model", "BaseTuner": "model"}
"""Base classes of PEFT that put adapters into the layers of the model that they hold."""

_FRONTS = frozenset({"FSDPModule", "ReplicateModule", "DDP"})
"""Classes that ``fully_shard`` and ``replicate`` put before a module's own, in a new class of both."""


def live_objects(*kinds: type[Object]) -> list[Object]:
    """Return the objects of these classes, and of classes derived from them, that exist in the process."""
    objects = gc.get_objects()
    # By type: isinstance() on a third-party object may run its __class__ property, and there are many objects
    # of few types. By id: a type may be unhashable.
    types = {id(type(thing)): type(thing) for thing in objects}
    wanted = {key for key, kind in types.items() if issubclass(kind, kinds)}
    return [thing for thing in objects if id(type(thing)) in wanted] if wanted else []


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's forward is compiled, in place or as a wrapper."""
    is_wrapper = type(module).__name__ == "OptimizedModule"
    return is_wrapper or getattr(module, "__dict__", {}).get("_compiled_call_impl") is not None


def table_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Return ``_modules``, ``_parameters`` or ``_buffers`` of a module; one half built may lack them."""
    return getattr(module, "__dict__", {}).get(name) or {}


@dataclass(frozen=True)
class NamedParameter:
    """A parameter where the model holds it; ``module`` is its owner's name, ``kind`` its type."""

    name: str
    parameter: nn.Parameter
    module: str
    kind: str


MAX_TIES = 64
"""Ties of parameters that are remembered."""


@dataclass(frozen=True)
class _Place:
    """Where a parameter was registered."""

    parameter: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]
    name: str

    def now(self) -> nn.Parameter | None:
        """Return the parameter that is there now."""
        module = self.module()
        return None if module is None else table_of(module, "_parameters").get(self.name)


@dataclass(frozen=True)
class Registration:
    """A parameter that is registered: its module, the class of that, and the line of the user's code."""

    parameter: weakref.ref[nn.Parameter]
    module: weakref.ref[nn.Module]
    kind: str
    dimensions: int
    line: SourceLine | None


MAX_COPIES = 4096
"""Modules that were built by ``deepcopy`` and are remembered, at most, with those in them."""

MAX_REGISTRATIONS = 256
"""Registrations that are recorded, at most."""


class SeenModules:
    """Weak references to the modules of this process; ``changes`` counts registrations.

    ``registered`` records them while it is a list.
    """

    def __init__(self) -> None:
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._replaced: dict[int, tuple[weakref.ref[Any], weakref.ref[nn.Module], str]] = {}
        self._modeless: set[int] = set()
        self.copies: dict[int, weakref.ref[nn.Module]] = {}
        self.copied = 0  # copies so far
        self._places: dict[int, _Place] = {}
        self._ties: list[tuple[_Place, _Place]] = []
        self.changes = 0
        self.registered: list[Registration] | None = None

    def note(self, module: nn.Module) -> None:
        """Remember ``module``, to which something is being registered."""
        self.changes += 1
        if self._meet(module):
            self._modeless.add(id(module))

    def note_mode(self, module: nn.Module) -> None:
        """Remember that ``train`` or ``eval`` of ``module`` was called."""
        self._modeless.discard(id(module))
        # A deepcopy registers nothing.
        if id(module) not in self._modules and len(self.copies) < MAX_COPIES:
            reference = self.copies.get(id(module))
            if reference is None or reference() is not module:
                self.copies.pop(id(module), None)  # of one that is gone: the latest are the last
                self.copies[id(module)] = weakref.ref(module)
                self.copied += 1

    def copied_roots(self) -> list[nn.Module]:
        """Return the living copies whose ``train`` or ``eval`` was called, without the modules in them."""
        alive = [module for reference in self.copies.values() if (module := reference()) is not None]
        self.copies = {id(module): weakref.ref(module) for module in alive}
        children = {id(child) for module in alive for child in table_of(module, "_modules").values()}
        return [module for module in alive if id(module) not in {*children, *self._modules}]

    def is_modeless(self, module: nn.Module) -> bool:
        """Return whether ``module`` was built under the hooks, and neither ``train`` nor ``eval`` called."""
        reference = self._modules.get(id(module))
        return id(module) in self._modeless and reference is not None and reference() is module

    def note_replaced(self, owner: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Remember parameters that are about to be replaced, by their names below ``owner``."""
        for name, parameter in parameters:
            self._replaced[id(parameter)] = (weakref.ref(parameter), weakref.ref(owner), name)

    def replaced(self, tensor: torch.Tensor) -> tuple[nn.Module, str] | None:
        """Return the module below which ``tensor`` was a parameter and its name there, None if unknown."""
        parameter, owner, name = self._replaced.get(id(tensor), (None, None, ""))
        if parameter is None or parameter() is not tensor or owner is None or (module := owner()) is None:
            return None
        return module, name

    def note_place(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Remember where ``parameter`` is being registered, and whether it stands elsewhere as well."""
        place = _Place(weakref.ref(parameter), weakref.ref(module), name)
        first = self._places.setdefault(id(parameter), place)
        if first.parameter() is not parameter:  # the id of one that is gone
            self._places[id(parameter)] = place
        elif (first.module() is not module or first.name != name) and first.now() is parameter:
            self._ties = [*self._ties, (first, place)][-MAX_TIES:]

    def untied(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield pairs of parameters that stand where one was registered twice."""
        for places in self._ties:
            now = {id(parameter): parameter for place in places if (parameter := place.now()) is not None}
            if (tied := places[0].parameter()) is not None and (where := self.replaced(tied)) is not None:
                by_name = {named.name: named.parameter for named in named_parameters(where[0])}
                if (instead := by_name.get(where[1])) is not None:
                    now[id(instead)] = instead
            # Parameters that changed places were not tied.
            is_new = all(parameter is tied or self.replaced(parameter) is None for parameter in now.values())
            if len(now) == 2 and is_new:
                first, second = now.values()
                yield first, second

    def _meet(self, module: nn.Module) -> bool:
        reference = self._modules.get(id(module))
        if reference is not None and reference() is module:  # an id may be that of a module that is gone
            return False
        self._modules[id(module)] = weakref.ref(module)
        self._modeless.discard(id(module))
        return True

    def scan(self) -> None:
        """Look for modules that were built before the hooks were there, or by ``deepcopy``."""
        for module in live_objects(nn.Module):
            self._meet(module)

    def refresh(self) -> None:
        """Forget modules that are gone, whose ids new ones may have, and look for others."""
        self.roots()
        self.scan()

    def roots(self) -> list[nn.Module]:
        """Return the living modules that are no other module's child, oldest first."""
        self._modules = {key: ref for key, ref in self._modules.items() if ref() is not None}
        alive = [module for ref in self._modules.values() if (module := ref()) is not None]
        children = {id(child) for module in alive for child in table_of(module, "_modules").values()}
        return [module for module in alive if id(module) not in children]


def install(seen: SeenModules) -> list[Any]:
    """Note every module that registers a child or a parameter; return the handles."""

    # The hooks run before the registration: what is replaced is still there.
    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        seen.note(module)
        if child is not None:
            seen.note(child)
        former = table_of(module, "_modules").get(name)
        if former is not None and former is not child:
            seen.note_replaced(module, ((n.name, n.parameter) for n in named_parameters(former, name)))

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        seen.note(module)
        former = table_of(module, "_parameters").get(name)
        if former is not None and former is not parameter:
            seen.note_replaced(module, [(name, former)])
        if parameter is not None:
            seen.note_place(module, name, parameter)
            if seen.registered is not None and len(seen.registered) < MAX_REGISTRATIONS:
                place = (weakref.ref(parameter), weakref.ref(module), kind_of(module))
                seen.registered.append(Registration(*place, parameter.ndim, user_line()))

    return [
        register_module_module_registration_hook(on_module),
        register_module_parameter_registration_hook(on_parameter),
    ]


def inner(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper wraps; None for a module that is none."""
    kind = type(module)
    attribute = _WRAPPERS.get(kind.__name__)
    if attribute is None and kind.__module__.startswith("peft."):
        attribute = next((_ADAPTERS[c.__name__] for c in kind.__mro__ if c.__name__ in _ADAPTERS), None)
        if len(table_of(module, "_modules")) > 1:  # a prompt encoder, for instance, has parameters of its own
            attribute = None
    return table_of(module, "_modules").get(attribute) if attribute is not None else None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what is inside wrappers such as those of ``torch.compile`` and DDP."""
    while (wrapped := inner(module)) is not None:
        module = wrapped
    return module


def kind_of(module: nn.Module) -> str:
    """Return the name of a module's class: ``Linear`` also where FSDP2 or ``torch.compile`` wraps it."""
    module = unwrapped(module)
    bases = type(module).__bases__
    return (bases[1] if len(bases) == 2 and bases[0].__name__ in _FRONTS else type(module)).__name__


def walk(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of ``root`` and all below it in model order, wrappers looked through.

    A module that is used under two names is yielded under both; a cycle is entered once.
    """
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [(prefix, root, frozenset())]
    while stack:
        name, wrapper, above = stack.pop()
        module = unwrapped(wrapper)
        if id(module) in above:
            continue
        yield name, module
        inside = above | {id(module)}
        for key, child in reversed(list(table_of(module, "_modules").items())):
            if child is not None:
                stack.append((f"{name}.{key}" if name else key, child, inside))


def named_parameters(root: nn.Module, prefix: str = "") -> Iterator[NamedParameter]:
    """Yield every parameter of ``root`` in model order, a tied one under each of its names.

    Where FSDP2 has put the whole parameters in place of its shards, the shards are given: only those stay. A
    parameter that DeepSpeed cuts is given as its share.
    """
    sharded: dict[tuple[int, str], nn.Parameter] = {}
    for name, module in walk(root, prefix):
        sharded.update(shards(module))
        for key, registered in table_of(module, "_parameters").items():
            parameter = sharded.get((id(module), key), registered) if sharded else registered
            if SHARES:
                parameter = shared(parameter)
            if parameter is not None:
                full = f"{name}.{key}" if name else key
                yield NamedParameter(full, parameter, name, kind_of(module))


class Prefixes:
    """Names of root modules: a lone root needs none, others have that of their variable in the script.

    Without a variable of the main module they have the name of their class, and a number from the second on.
    A root keeps its name, so that parameters do not change theirs when another model joins.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def of(self, roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
        """Return ``roots`` with their prefixes."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0]() is not None}
        taken = {prefix for _, prefix in self._entries.values()}
        lone = len(roots) == 1 and not taken
        for root in roots:
            if id(root) not in self._entries:
                prefix = "" if lone else _free(_variable(root) or kind_of(unwrapped(root)), taken)
                taken.add(prefix)
                self._entries[id(root)] = (weakref.ref(root), prefix)
        return [(self._entries[id(root)][1], root) for root in roots]


def _variable(root: nn.Module) -> str:
    """Return the first global name of the script for ``root``, empty where there is none.

    Names inside functions are left alone: reading them keeps their objects alive.
    """
    inner = unwrapped(root)
    variables = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    names = (name for name, value in list(variables.items()) if value is root or value is inner)
    return next((name for name in names if not name.startswith("_")), "")


def _free(kind: str, taken: set[str]) -> str:
    names = itertools.chain([kind], (f"{kind}#{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken)


def holding(roots: Iterable[nn.Module], wanted: set[int]) -> list[nn.Module]:
    """Return the roots that hold a wanted parameter (by ``id``)."""
    return [r for r in roots if any(id(n.parameter) in wanted for n in named_parameters(r))]
