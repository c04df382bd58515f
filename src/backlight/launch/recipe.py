"""Recipes: a Python file that tells commands how to build a model, its batches and its loss.

``build_model(**settings)``, ``batches(rank, world_size, **settings)`` and ``loss(model, batch)``; where
wanted ``build_optimizer(model)``, ``load(model, path)`` and ``split(name, tensor)`` for fused weights.
A function is given those settings that its signature names, or all of them if it takes ``**settings``.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from backlight import untrusted_files
from backlight.text import assignments, did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import nn

REQUIRED = ("build_model", "batches", "loss")
"""Functions that most commands need."""

_SIGNATURES = {
    "build_model": "build_model(**settings)",
    "batches": "batches(rank, world_size, **settings)",
    "loss": "loss(model, batch)",
    "build_optimizer": "build_optimizer(model)",
    "load": "load(model, path)",
    "split": "split(name, tensor)",
}
_OWN = {"batches": {"rank", "world_size"}, "build_optimizer": {"model"}}
"""Arguments that a function is given by a command, not by a setting."""
_numbers = itertools.count()


MINIMAL = """\
import torch
from my_model import MyModel

def build_model():
    return MyModel()

def batches(rank, world_size):
    while True:
        yield torch.randn(8, 16), torch.randint(10, (8,))

def loss(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)
"""
"""A recipe to begin with, shown where a script is given instead."""


class RecipeError(ValueError):
    """A recipe cannot be used: what is wrong, in which file, and the way out."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with its settings; made by :func:`read_recipe`."""

    path: Path
    module: ModuleType = field(repr=False)
    settings: Mapping[str, Any]

    def has(self, function: str) -> bool:
        """Tell whether the recipe defines ``function``."""
        return callable(getattr(self.module, function, None))

    def with_settings(self, settings: Mapping[str, Any]) -> Recipe:
        """Return the same recipe with ``settings`` over those that it has."""
        merged = {**self.settings, **settings}
        _check_settings(self.path, self.module, merged)
        return Recipe(self.path, self.module, MappingProxyType(merged))

    def build_model(self) -> nn.Module:
        """Return a new model."""
        from torch import nn  # noqa: PLC0415 - reading a recipe's settings needs no torch

        model = self._call("build_model")
        if not isinstance(model, nn.Module):
            raise self._wrong("build_model", model, "a torch.nn.Module")
        return model

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Return an iterator over the batches of ``rank``; ranks are given disjoint data by the recipe."""
        batches = self._call("batches", rank=rank, world_size=world_size)
        try:
            return iter(batches)
        except TypeError:
            raise self._wrong("batches", batches, "an iterable of batches") from None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of ``batch``, a tensor with one element."""
        import torch  # noqa: PLC0415 - reading a recipe's settings needs no torch

        value = self.module.loss(model, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise self._wrong("loss", value, "a tensor with one element")
        return value

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer over ``model``."""
        optimizer = self._call("build_optimizer", model)
        if not hasattr(optimizer, "param_groups"):
            raise self._wrong("build_optimizer", optimizer, "a torch.optim.Optimizer")
        return optimizer  # type: ignore[no-any-return]

    def load(self, model: nn.Module, path: Path) -> None:
        """Load a checkpoint by the recipe's ``load``, else a state dict with ``weights_only=True``."""
        if self.has("load"):
            self.module.load(model, path)
            return
        state = _read_checkpoint(path)
        for key in ("model", "state_dict"):
            if isinstance(state.get(key), Mapping):
                state = state[key]
        state = {
            name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in state.items()
        }
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
            more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
            raise RecipeError(
                f"{path}: does not fit the model of {self.path}: {' '.join(lines[:3])}{more}; "
                "check the settings (--set), or define load(model, path) in the recipe"
            ) from None

    def split(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the matrices that the weight ``name`` fuses, by name; the whole one without a rule."""
        if not self.has("split"):
            return {name: tensor}
        parts = self.module.split(name, tensor)
        if parts is None:
            return {name: tensor}
        if not isinstance(parts, Mapping) or not parts:
            expected = "a dictionary from names to tensors, or None for a weight that is not fused"
            raise self._wrong(f"split({name!r}, …)", parts, expected)
        return parts

    def _wrong(self, function: str, got: Any, expected: str) -> RecipeError:
        shape = getattr(got, "shape", None)
        what = type(got).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
        return RecipeError(f"{self.path}: {function} returned {what}, expected {expected}")

    def _call(self, function: str, *positional: Any, **named: Any) -> Any:
        if not self.has(function):
            raise RecipeError(
                f"{self.path}: defines no {function}; add `def {_SIGNATURES[function]}` to the recipe"
            )
        names, takes_all = _accepted(self.module, function)
        taken = {key: value for key, value in self.settings.items() if takes_all or key in names}
        target: Callable[..., Any] = getattr(self.module, function)
        return target(*positional, **named, **taken)


def read_recipe(
    path: str | Path, settings: Mapping[str, Any] | None = None, needs: Sequence[str] = REQUIRED
) -> Recipe:
    """Execute a recipe file with ``settings`` and check that it defines what a command needs."""
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe; expected a Python file below {Path.cwd()}")
    refuse_script(path)
    module = _execute(path)
    functions = [name for name in _SIGNATURES if callable(getattr(module, name, None))]
    missing = [name for name in needs if name not in functions]
    if missing:
        wanted = ", ".join(f"`def {_SIGNATURES[name]}`" for name in missing)
        raise RecipeError(
            f"{path}: not a recipe for this command: expected {wanted}; "
            f"found {', '.join(functions) or 'none of the functions of a recipe'}"
        )
    taken = dict(settings or {})
    _check_settings(path, module, taken)
    return Recipe(path, module, MappingProxyType(taken))


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs of a command line; a value is a Python literal, else text."""
    texts = assignments(pairs, "--set", "name=value, such as --set dim=512", RecipeError)
    for key in texts:
        if not key.isidentifier():
            raise RecipeError(f"--set {key}: expected a Python name, such as --set dim=512")
    return {key: parse_value(text) for key, text in texts.items()}


def parse_value(text: str) -> Any:
    """Return a Python literal, true and false in any case as booleans, or the text itself."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def refuse_script(path: Path) -> None:
    """Refuse a file that is no recipe without executing it: a training script would train."""
    try:
        tree = ast.parse(untrusted_files.read(path, links=True))
    except untrusted_files.RefusedFileError as error:
        raise RecipeError(f"{error}; give a Python file") from None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # reading or executing it reports that
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.Import(names=imported) | ast.ImportFrom(names=imported):
                names.update(alias.asname or alias.name for alias in imported)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    if names.isdisjoint({"build_model", "batches", "*"}):  # many a script has a variable "loss"
        raise RecipeError(
            f"{path}: is a script, not a recipe; expected a file that defines build_model, batches and loss, "
            f"such as:\n\n{MINIMAL}"
        )


def _execute(path: Path) -> ModuleType:
    name = f"backlight_recipe_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path}: not a Python file; a recipe ends in .py")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickled data loader workers look their module up by name.
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RecipeError(
            f"{path}: fails when it is read: {type(error).__name__}: {error}{_line(error, path)}"
        ) from error
    return module


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path]
    return f" (line {lines[-1]})" if lines else ""


def _accepted(module: ModuleType, function: str) -> tuple[set[str], bool]:
    """Return the settings that a function names, and whether it takes all others."""
    target = getattr(module, function, None)
    parameters = inspect.signature(target).parameters.values() if callable(target) else ()
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    names = {p.name for p in parameters if p.kind in named} - _OWN.get(function, set())
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _check_settings(path: Path, module: ModuleType, settings: Mapping[str, Any]) -> None:
    accepted = [_accepted(module, name) for name in ("build_model", "batches", "build_optimizer")]
    if any(takes_all for _, takes_all in accepted):
        return
    names = sorted(set().union(*(names for names, _ in accepted)))
    for key in settings:
        if key not in names:
            raise RecipeError(
                f"{path}: no function of the recipe takes the setting {key!r}{did_you_mean(key, names)}"
            )


def _read_checkpoint(path: Path) -> Mapping[str, Any]:
    import torch  # noqa: PLC0415 - reading a recipe's settings needs no torch

    if not path.is_file():
        raise RecipeError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        first = _first_line(error)
        raise RecipeError(
            f"{path}: refused, because it is not a file of tensors alone and "
            f"opening it could run code ({first}); "
            "save a state_dict() instead, or define load(model, path) in the recipe for files that you trust"
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise RecipeError(f"{path}: cannot be read as a checkpoint: {_first_line(error)}") from None
    if not isinstance(state, Mapping):
        raise RecipeError(f"{path}: holds {type(state).__name__}, expected a state dict")
    return state


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
