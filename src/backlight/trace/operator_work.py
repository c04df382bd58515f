"""Floating-point operations of an operator, from the arguments that it recorded (``record_shapes=True``)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MATRICES: Mapping[str, int] = {
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1,
    "aten::_scaled_mm": 0, "aten::_int_mm": 0,
}  # fmt: skip
"""Operators of two matrices, with the argument that is the first of both."""

CONVOLUTIONS: Mapping[str, int] = {"aten::convolution": 0, "aten::convolution_backward": 1}
"""Convolutions, with the argument that is the input; the weight is the next."""

ATTENTION: Mapping[str, tuple[int, int]] = {
    "aten::_scaled_dot_product_flash_attention": (0, 4),
    "aten::_scaled_dot_product_flash_attention_backward": (1, 11),
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 4),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 7),
    "aten::_scaled_dot_product_efficient_attention": (0, 6),
    "aten::_scaled_dot_product_efficient_attention_backward": (1, 11),
    "aten::_scaled_dot_product_cudnn_attention": (0, 6),
    "aten::_scaled_dot_product_cudnn_attention_backward": (1, 14),
    "aten::_scaled_dot_product_fused_attention_overrideable": (0, 5),
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": (1, 13),
}
"""Fused attention, with the argument that is the query, before key and value, and that which is is_causal."""

HAVE_WORK = frozenset({*MATRICES, *CONVOLUTIONS, *ATTENTION})
"""Operators whose operations are counted; what they call is counted with them."""


def work(name: str, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    """Return the floating-point operations of one call; None where they are not known.

    ``shapes`` and ``values`` are what the profiler calls Input Dims and Concrete Inputs. A multiplication and
    its addition are two operations; of attention the softmax is left out, and what a causal mask excludes.
    """
    if (both := matrices(name, shapes)) is not None:
        return 2 * math.prod(both[0]) * both[1][-1]
    if name in CONVOLUTIONS:
        return _convolution(CONVOLUTIONS[name], shapes, values)
    if name in ATTENTION:
        return _attention(*ATTENTION[name], shapes, values)
    return None


def is_shape(value: Any) -> bool:
    """Return whether a value is a shape, of sides and dimensions that tensors can have."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(isinstance(side, int) and 0 <= side < 2**32 for side in value)
    )


def matrices(name: str, shapes: Sequence[Any]) -> tuple[list[int], list[int]] | None:
    """Return the shapes of the two matrices of a product, None for any other operator."""
    first = MATRICES.get(name)
    if first is None or (found := _taken(shapes, first, 2)) is None:
        return None
    one, other = found
    return (one, other) if len(one) >= 2 and len(other) == len(one) else None


def _taken(shapes: Sequence[Any], first: int, count: int) -> list[list[int]] | None:
    found = list(shapes[first : first + count])
    return found if len(found) == count and all(map(is_shape, found)) else None


def _convolution(first: int, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    # The weight, which holds the channels of one group, meets every place of the smaller of both images: of a
    # transposed convolution the input, else the output.
    found, options = _taken(shapes, first, 2), [_parsed(value) for value in values[3 + first :]]
    if found is None or len(options) < 4 or options[3] not in {"True", "False"}:
        return None
    image, weight = found
    if len(image) < 3 or len(weight) != len(image):
        return None
    times = 1
    if first:  # backward: gradients of the input and of the weight, each as much as forward
        gradient = shapes[0]
        mask = _parsed(values[-1])
        if not is_shape(gradient) or not isinstance(mask, str):
            return None
        times = [part.strip() for part in mask.strip("[]").split(",")][:2].count("True")
        places = gradient[2:]
    elif options[3] == "False":
        places = _places(image[2:], weight[2:], *options[:3])
    if options[3] == "True":
        places = image[2:]
    if places is None:
        return None
    return 2 * times * image[0] * int(math.prod(places)) * math.prod(weight)


def _places(image: list[int], kernel: list[int], *options: Any) -> list[int] | None:
    """Return the sides of the output of a convolution."""
    if not all(is_shape(option) and len(option) in {1, len(image)} for option in options):
        return None
    stride, padding, dilation = (option * (len(image) // len(option)) for option in options)
    if not all(stride):
        return None
    places = [
        (side + 2 * added - apart * (width - 1) - 1) // step + 1
        for side, width, step, added, apart in zip(image, kernel, stride, padding, dilation, strict=True)
    ]
    return places if min(places) >= 0 else None


def _attention(first: int, causal: int, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    found = _taken(shapes, first, 3)
    if found is None or len(values) <= causal or any(len(shape) != 4 for shape in found):
        return None
    query, key, value = found
    rows, columns, width, out = query[2], key[2], query[3], value[3]
    pairs = rows * columns
    if values[causal] == "True":
        both = min(rows, columns)
        pairs = both * (both + 1) // 2 + (rows - both) * columns
    # Backward computes the scores again, and takes the gradients of query, key, value and scores.
    sides = 3 * width + 2 * out if first else width + out
    return 2 * query[0] * query[1] * pairs * sides


def _parsed(value: Any) -> Any:
    """Return the list of numbers in a text, else the text."""
    try:
        found = json.loads(value)
    except (ValueError, TypeError):
        return value
    return found if isinstance(found, list) else value
