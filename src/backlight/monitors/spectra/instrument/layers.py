"""Which matrices of a model are measured: chosen by pattern, fused weights split, all others named."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from backlight.measure.spectra.replicates import as_matrix
from backlight.monitors.spectra.model.errors import SpectraError
from backlight.store.format.spectra import Layer

Split = Callable[[str, Tensor], Mapping[str, Tensor]]
"""From the name of a weight and a tensor of its shape to the matrices that it fuses, by name."""


@dataclass(frozen=True)
class Selection:
    """What is measured of a model.

    Attributes
    ----------
    layers
        The matrices, in the order of the model.
    left_out
        The other parameters, with the reason.
    """

    layers: tuple[Layer, ...]
    left_out: Mapping[str, str]


def matrices(name: str, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a weight or its gradient is split into as matrices ``[rows, columns]``, by name.

    Convolutions become outputs x everything else; what has fewer than two dimensions is not there.

    Raises
    ------
    SpectraError
        If the split of ``name`` gave something else than tensors.
    """
    found = {}
    for part, values in given.items():
        if not isinstance(values, Tensor):
            raise SpectraError(
                f"split({name!r}, …) gave {type(values).__name__} for {part!r}; expected a tensor"
            )
        if values.ndim >= 2 and values.numel():
            found[part] = as_matrix(values, layer=part)
    return found


def select(
    model: nn.Module, split: Split, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Selection:
    """Choose what is measured of a model.

    Parameters
    ----------
    model
        Of its parameters those that need a gradient and have two dimensions or more are measured;
        convolutions as outputs x everything else.
    split
        What takes a fused weight apart.
    include, exclude
        Patterns, each with shell-style alternatives separated by commas; ``*`` also matches dots. One means
        a matrix when it matches its name, the weight that it is a part of, or a module above it.

    Raises
    ------
    SpectraError
        If a pattern matches nothing, two matrices have one name, or nothing is left to measure.
    """
    return choose(model.named_parameters(), split, include, exclude, prefix="--")


def choose(
    parameters: Iterable[tuple[str, Tensor]],
    split: Split,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    prefix: str = "",
) -> Selection:
    """Choose among named parameters, of which shapes are enough; ``prefix`` is how messages call options.

    Everything else is as in :func:`select`.

    Raises
    ------
    SpectraError
        As there.
    """
    found: dict[str, Layer] = {}
    left_out: dict[str, str] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            left_out[name] = "frozen: it needs no gradient"
        elif parameter.ndim < 2:
            left_out[name] = "one dimension: it has no singular directions"
        else:
            given = split(name, parameter.detach())
            those = matrices(name, given)
            for part, matrix in those.items():
                if part in found:
                    raise SpectraError(
                        f"two matrices are called {part!r}; split must give names of their own"
                    )
                rows, columns = matrix.shape
                found[part] = Layer(
                    parameter=part,
                    layer=name.rpartition(".")[0],
                    shape=tuple(given[part].shape),
                    split_of=name if part != name else "",
                    rows=rows,
                    columns=columns,
                    index=len(found),
                )
            for part in given:
                if part not in those:
                    left_out[part] = "no matrix: singular directions need two dimensions"
    everything = tuple(found.values())
    if not everything:
        raise SpectraError("the model has no parameter with two dimensions that needs a gradient")
    wanted = _meant(everything, include, f"{prefix}include") if include else set(found)
    unwanted = _meant(everything, exclude, f"{prefix}exclude")
    for layer in everything:
        if layer.parameter in unwanted:
            left_out[layer.parameter] = f"left out by {prefix}exclude"
        elif layer.parameter not in wanted:
            left_out[layer.parameter] = f"not in {prefix}include"
    chosen = tuple(layer for layer in everything if layer.parameter not in left_out)
    if not chosen:
        raise SpectraError(f"{prefix}include and {prefix}exclude leave none of {len(everything)} matrices")
    return Selection(chosen, left_out)


def _meant(layers: Sequence[Layer], patterns: Sequence[str], option: str) -> set[str]:
    out: set[str] = set()
    for pattern in patterns:
        wanted = [part.strip() for part in pattern.split(",") if part.strip()]
        found = {layer.parameter for layer in layers if any(_means(part, layer) for part in wanted)}
        if not found:
            known = sorted({place for layer in layers for place in _places(layer)})
            near = [n for part in wanted for n in difflib.get_close_matches(part.strip("*."), known, n=3)]
            hint = ", ".join(dict.fromkeys(near or [layer.parameter for layer in layers[:3]]))
            raise SpectraError(
                f"{option} {pattern!r} matches none of {len(layers)} matrices; there are such as {hint}"
            )
        out |= found
    return out


def _means(pattern: str, layer: Layer) -> bool:
    return any(fnmatch.fnmatchcase(place, pattern) for place in _places(layer))


def _places(layer: Layer) -> list[str]:
    """Return the names that a pattern may match: of the matrix, of its weight, and of the modules above."""
    places = [layer.parameter]
    if layer.split_of:
        places.append(layer.split_of)
    above = layer.layer
    while above:
        places.append(above)
        above = above.rpartition(".")[0]
    return places
