"""Rates reached: operations and bytes by operator and shape, bandwidths of copies and collectives."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.trace.classification import MEMCPY, MEMSET, Kind, kind_of
from backlight.trace.collectives import collectives
from backlight.trace.device_peaks import HALF_TYPES, DevicePeak, peak_of
from backlight.trace.events import ITEM_BYTES, MISSING
from backlight.trace.operators import Costs

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
    if first is None or (operands := _taken(shapes, first, 2)) is None:
        return None
    left, other = operands
    return (left, other) if len(left) >= 2 and len(other) == len(left) else None


def _taken(shapes: Sequence[Any], first: int, count: int) -> list[list[int]] | None:
    matrices_of = list(shapes[first : first + count])
    return matrices_of if len(matrices_of) == count and all(map(is_shape, matrices_of)) else None


def _convolution(first: int, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    # The weight, which holds the channels of one group, meets every place of the smaller of both images: of a
    # transposed convolution the input, else the output.
    operands, options = _taken(shapes, first, 2), [_parsed(value) for value in values[3 + first :]]
    if operands is None or len(options) < 4 or options[3] not in {"True", "False"}:
        return None
    image, weight = operands
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
        (side + 2 * added - gap * (width - 1) - 1) // step + 1
        for side, width, step, added, gap in zip(image, kernel, stride, padding, dilation, strict=True)
    ]
    return places if min(places) >= 0 else None


def _attention(first: int, causal: int, shapes: Sequence[Any], values: Sequence[Any]) -> int | None:
    operands = _taken(shapes, first, 3)
    if operands is None or len(values) <= causal or any(len(shape) != 4 for shape in operands):
        return None
    query, key, value = operands
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
        numbers = json.loads(value)
    except (ValueError, TypeError):
        return value
    return numbers if isinstance(numbers, list) else value


_FACTORS = (
    ("allreduce", "2n"), ("all_reduce", "2n"), ("gather", "n"), ("scatter", "n"),
    ("alltoall", "n"), ("all_to_all", "n"),
)  # fmt: skip
"""How often each byte crosses a link: 2 (n - 1) / n or (n - 1) / n, for other collectives once."""


@dataclass(frozen=True)
class OperatorRate:
    """One operator with one set of shapes: its device time in ns, and TFLOP/s and TB/s.

    Operations are those of matrix products, convolutions and fused attention; what these call is their time.
    Bytes are those of the inputs and one output, of matrix products, elementwise operators and copies of
    torch: what must be moved at least. None where they are not known. ``of_peak`` is the larger of the shares
    that these are of the peaks of the device, and ``limit`` which one: ``compute`` or ``memory``.
    """

    name: str
    shapes: str
    types: str
    calls: int
    device: int
    tflops: float | None
    tbytes: float | None
    of_peak: float | None = None
    limit: str = ""


@dataclass(frozen=True)
class Gemm:
    """Products of matrices of one size, ``batch`` times m x k by k x n: device time in ns, and rates."""

    m: int
    n: int
    k: int
    batch: int
    types: str
    calls: int
    device: int
    tflops: float
    tbytes: float | None
    of_peak: float | None
    limit: str


@dataclass(frozen=True)
class CopyRate:
    """Transfers of one name in GB/s: of the slowest, of all bytes in all their time, of the fastest."""

    name: str
    calls: int
    bytes: int
    min: float
    mean: float
    max: float


@dataclass(frozen=True)
class CollectiveRate:
    """Collectives of one kind, size and number of ranks.

    ``bus`` is the bandwidth of a link in GB/s that the median duration stands for, as nccl-tests defines it:
    it includes waiting for late ranks.
    """

    name: str
    ranks: int
    bytes: int
    calls: int
    median: int
    bus: float


def item_bytes(name: str) -> int | None:
    """Return the bytes of an element of a type, None for an unknown one."""
    return ITEM_BYTES.get(name.removeprefix("c10::").lower())


def operator_rates(costs: Costs) -> list[OperatorRate]:
    """Return the operators that launched device work and have shapes, the most expensive first."""
    timeline = costs.timeline
    tree, events, device = timeline.tree, timeline.events, timeline.device
    launching = device.operator[costs.device_rows]
    has_operator = launching >= 0
    # What an operator with counted operations calls, such as the library's own convolution, is its time.
    counted = events.where("name", HAVE_WORK.__contains__)[tree.rows]
    around = tree.inherited(np.where(counted, np.arange(len(counted)), MISSING))[launching[has_operator]]
    operator = np.where(around >= 0, around, launching[has_operator])
    spent = np.bincount(operator, costs.durations[has_operator], len(tree.rows)).astype(np.int64)
    indices = np.flatnonzero(spent)
    rows = tree.rows[indices]
    codes = np.zeros(len(rows), np.int64)
    for column in ("name", "shapes", "types", "values"):
        codes_of = events[column][rows] + 1
        if column == "values":
            codes_of[~counted[indices]] = 0  # of others they are no part of the shape
        codes = np.unique(codes * (len(events.words[column]) + 1) + codes_of, return_inverse=True)[1]
    _, first, inverse, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    times = np.bincount(inverse, spent[indices], len(first)).astype(np.int64)
    names = {timeline.trace.device_name(number) for number in np.unique(device.device).tolist()}
    peak = peak_of(names.pop()) if len(names) == 1 else None
    rates = []
    for row, calls, time in zip(rows[first].tolist(), counts.tolist(), times.tolist(), strict=True):
        shapes, types = events.listed("shapes", row), events.listed("types", row)
        if not shapes:
            continue
        name, seconds = events.word("name", row), time / 1e9 / calls
        operations, moved = work(name, shapes, events.listed("values", row)), _moved(name, shapes, types)
        tflops, tbytes = (None if not amount else amount / seconds / 1e12 for amount in (operations, moved))
        listed = [str(kind) for kind in types if kind]
        rates.append(
            OperatorRate(
                name, json.dumps(shapes), ", ".join(listed), calls, time, tflops, tbytes,
                *_of_peak(peak, listed, tflops, tbytes),
            )
        )  # fmt: skip
    return sorted(rates, key=lambda rate: -rate.device)


def _of_peak(
    peak: DevicePeak | None, types: Sequence[str], tflops: float | None, tbytes: float | None
) -> tuple[float | None, str]:
    """Return the larger share of the peaks, and of which it is; None where neither is known."""
    if peak is None:
        return None, ""
    shares = {}
    is_half = HALF_TYPES.intersection(types) and HALF_TYPES.issuperset(t for t in types if "::" in t)
    if tflops is not None and is_half:
        shares["compute"] = tflops * 1e12 / peak.flops
    if tbytes is not None and peak.bandwidth is not None and (tflops is None or is_half):
        shares["memory"] = tbytes * 1e12 / peak.bandwidth
    limit = max(shares, key=lambda name: shares[name], default="")
    return shares.get(limit), limit


def gemms(rates: Sequence[OperatorRate]) -> list[Gemm]:
    """Return the products of matrices of all operators by size and type, the most expensive first."""
    by_size: dict[tuple[int, int, int, int, str], list[OperatorRate]] = defaultdict(list)
    for rate in rates:
        both = matrices(rate.name, json.loads(rate.shapes))
        if both is not None and rate.tflops is not None:
            (*outer, m, k), n = both[0], both[1][-1]
            kind = rate.types.partition(", ")[0].removeprefix("c10::")
            by_size[m, n, k, math.prod(outer), kind].append(rate)
    sizes = []
    for (m, n, k, batch, kind), alike in by_size.items():
        device, most = sum(rate.device for rate in alike), max(alike, key=lambda rate: rate.device)

        def mean(column: str, alike: Sequence[OperatorRate] = alike, device: int = device) -> float | None:
            values = [(getattr(rate, column), rate.device) for rate in alike]
            products = [value * spent for value, spent in values if value is not None]
            return sum(products) / device if len(products) == len(values) else None

        sizes.append(
            Gemm(
                m, n, k, batch, kind, sum(rate.calls for rate in alike), device, mean("tflops") or 0.0,
                mean("tbytes"), mean("of_peak"), most.limit,
            )
        )  # fmt: skip
    return sorted(sizes, key=lambda size: -size.device)


def _moved(name: str, shapes: Sequence[Any], types: Sequence[Any]) -> int | None:
    """Return the bytes of the inputs and the output."""
    both = matrices(name, shapes)
    # What operators of other libraries read of their inputs is not known: a cache is not copied as a whole.
    is_plain = name.startswith("aten::") and kind_of(name) in {Kind.ELEMENTWISE, Kind.COPY}
    if both is None and not is_plain:
        return None
    sizes = [
        (math.prod(shape), item_bytes(str(kind)))
        for shape, kind in zip(shapes, types, strict=False)
        if is_shape(shape) and shape
    ]
    if not sizes or any(size is None for _, size in sizes):
        return None
    read = sum(count * (size or 0) for count, size in sizes)
    if name == "aten::copy_":
        return int(read)  # its first input is the target
    largest, size = max(sizes)
    if both is not None:
        largest = math.prod(both[0][:-1]) * both[1][-1]
    return int(read + largest * (size or 0))


def copy_rates(costs: Costs) -> list[CopyRate]:
    """Return the bandwidth of copies and fills by name, the largest volume first."""
    device, events = costs.timeline.device, costs.timeline.events
    rows = costs.device_rows[events.among(MEMCPY | MEMSET)[device.rows[costs.device_rows]]]
    rows = rows[events["bytes"][device.rows[rows]] > 0]
    names, size = events["name"][device.rows[rows]], events["bytes"][device.rows[rows]]
    length = np.maximum((device.end - device.start)[rows], 1)
    rates = []
    for code in np.unique(names):
        here = names == code
        rate = size[here] / length[here]
        whole = int(size[here].sum())
        rates.append(
            CopyRate(
                events.words["name"][int(code)], int(here.sum()), whole,
                float(rate.min()), whole / float(length[here].sum()), float(rate.max()),
            )
        )  # fmt: skip
    return sorted(rates, key=lambda rate: -rate.bytes)


def collective_rates(costs: Costs) -> list[CollectiveRate]:
    """Return the bandwidth of collectives whose elements, type and ranks are recorded, the largest first."""
    numbers = {costs.timeline.steps[index].number for index in costs.step_indices}
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for call in collectives(costs.timeline):
        if call.bytes and call.group and call.step in numbers:
            groups[call.operation or call.name, len(call.group), call.bytes].append(call.end - call.start)
    rates = []
    for (name, ranks, size), lengths in groups.items():
        median = int(np.median(lengths))
        factor = next((kind for part, kind in _FACTORS if part in name.lower()), "")
        times = {"2n": 2 * (ranks - 1) / ranks, "n": (ranks - 1) / ranks}.get(factor, 1.0)
        # What is gathered is as many times larger than what one rank gives.
        total = size * ranks if "gather" in name.lower() else size
        rates.append(CollectiveRate(name, ranks, size, len(lengths), median, times * total / max(median, 1)))
    return sorted(rates, key=lambda rate: -rate.bytes * rate.calls)
