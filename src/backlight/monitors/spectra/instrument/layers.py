"""The matrices of a model that are measured: selected by pattern, fused weights split, all others listed."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from backlight.measure.spectra.replicates import as_matrix
from backlight.monitors.spectra.settings import SpectraError
from backlight.store.spectra import Layer
from backlight.text import did_you_mean

Split = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Returns the matrices that a weight fuses, by name, given its name and a tensor of its shape."""


@dataclass(frozen=True)
class Selection:
    """The matrices to measure, in the order of the model, and the other parameters with the reason."""

    layers: tuple[Layer, ...]
    left_out: Mapping[str, str]


def matrices(name: str, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts ``parts`` of a weight or its gradient as matrices ``[rows, columns]``, by name.

    Convolutions become outputs x everything else; parts with fewer than two dimensions are left out.

    Raises
    ------
    SpectraError
        If a part is no tensor.
    """
    matrix_of = {}
    for part, values in parts.items():
        if not isinstance(values, Tensor):
            raise SpectraError(
                f"split({name!r}, …) gave {type(values).__name__} for {part!r}; expected a tensor"
            )
        if values.ndim >= 2 and values.numel():
            matrix_of[part] = as_matrix(values, layer=part)
    return matrix_of


def select_layers(
    parameters: Iterable[tuple[str, Tensor]],
    split: Split,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    prefix: str = "",
) -> Selection:
    """Select the matrices among named parameters, of which shapes are enough.

    Those that need a gradient and have two dimensions or more are measured. A pattern has shell-style
    alternatives separated by commas; ``*`` also matches dots. It selects a matrix if it matches its name, the
    weight that it is a part of, or a module above it. ``prefix`` is that of the options in messages.

    Raises
    ------
    SpectraError
        If a pattern matches nothing, two matrices have one name, or nothing is left to measure.
    """
    layers_of: dict[str, Layer] = {}
    left_out: dict[str, str] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            left_out[name] = "frozen: it needs no gradient"
        elif parameter.ndim < 2:
            left_out[name] = "one dimension: it has no singular directions"
        else:
            tensors = split(name, parameter.detach())
            parts = matrices(name, tensors)
            for part, matrix in parts.items():
                if part in layers_of:
                    raise SpectraError(
                        f"two matrices are called {part!r}; split must give each part its own name"
                    )
                rows, columns = matrix.shape
                layers_of[part] = Layer(
                    parameter=part,
                    layer=name.rpartition(".")[0],
                    shape=tuple(tensors[part].shape),
                    split_of=name if part != name else "",
                    rows=rows,
                    columns=columns,
                    index=len(layers_of),
                )
            for part in tensors:
                if part not in parts:
                    left_out[part] = "no matrix: singular directions need two dimensions"
    everything = tuple(layers_of.values())
    if not everything:
        raise SpectraError("the model has no parameter with two dimensions that needs a gradient")
    wanted = _matched(everything, include, f"{prefix}include") if include else set(layers_of)
    unwanted = _matched(everything, exclude, f"{prefix}exclude")
    for layer in everything:
        if layer.parameter in unwanted:
            left_out[layer.parameter] = f"left out by {prefix}exclude"
        elif layer.parameter not in wanted:
            left_out[layer.parameter] = f"not in {prefix}include"
    chosen = tuple(layer for layer in everything if layer.parameter not in left_out)
    if not chosen:
        raise SpectraError(f"{prefix}include and {prefix}exclude leave none of {len(everything)} matrices")
    return Selection(chosen, left_out)


def _matched(layers: Sequence[Layer], patterns: Sequence[str], option: str) -> set[str]:
    out: set[str] = set()
    for pattern in patterns:
        wanted = [part.strip() for part in pattern.split(",") if part.strip()]
        matches = {layer.parameter for layer in layers if any(_matches(part, layer) for part in wanted)}
        if not matches:
            names = sorted({name for layer in layers for name in _names(layer)})
            hint = did_you_mean(wanted[0].strip("*.") if wanted else "", names)
            raise SpectraError(f"{option} {pattern!r} matches none of {len(layers)} matrices{hint}")
        out |= matches
    return out


def _matches(pattern: str, layer: Layer) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in _names(layer))


def _names(layer: Layer) -> list[str]:
    """Return the names that a pattern may match: of the matrix, its weight, and the modules above."""
    names = [layer.parameter]
    if layer.split_of:
        names.append(layer.split_of)
    above = layer.layer
    while above:
        names.append(above)
        above = above.rpartition(".")[0]
    return names
