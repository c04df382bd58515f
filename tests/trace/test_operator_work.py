"""Operations counted from recorded arguments equal those of torch's counter, and loops over every place."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from backlight.trace.rates import ATTENTION, HAVE_WORK, OperatorRate, work
from synthetic_traces import TraceBuilder

IMAGE = [[2, 4, 9, 11], [6, 4, 3, 2], [6], [], [], [], [], [], []]
OPTIONS = ["", "", "", "[2, 1]", "[1, 1]", "[1, 2]", "False", "[0, 0]", "1"]


def recorded(run: Callable[[], None], folder: Path) -> list[tuple[str, list[Any], list[Any]]]:
    """Return name, shapes and values of the outermost operators with counted operations, as recorded."""
    with profile(record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    found, reached = [], 0.0
    for event in sorted((e for e in events if e.get("name") in HAVE_WORK), key=lambda event: event["ts"]):
        if event["ts"] >= reached:
            args = event["args"]
            found.append((event["name"], args["Input Dims"], args["Concrete Inputs"]))
            reached = event["ts"] + event["dur"]
    return found


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (lambda: F.conv2d(tensor(2, 4, 9, 11), tensor(6, 4, 3, 2), tensor(6), (2, 1), 1, (1, 2)), 2),
        (lambda: F.conv2d(tensor(4, 9, 11), tensor(6, 4, 3, 2)), 2),
        (lambda: F.conv1d(tensor(3, 4, 20), tensor(5, 4, 7), padding="same"), 2),
        (lambda: F.conv3d(tensor(1, 2, 5, 6, 7), tensor(3, 2, 2, 3, 4), stride=2), 2),
        (lambda: F.conv_transpose2d(tensor(2, 4, 9, 11), tensor(4, 3, 3, 2), stride=2), 2),
        (lambda: F.linear(tensor(5, 7), tensor(3, 7), tensor(3)), 3),
        (lambda: tensor(4, 5, 6) @ tensor(4, 6, 2), 3),
    ],
)
def test_forward_and_backward_equal_torchs_counter(
    run: Callable[[], torch.Tensor], names: int, tmp_path: Path
) -> None:
    with FlopCounterMode(display=False) as counter:
        run().sum().backward()
    found = recorded(lambda: run().sum().backward(), tmp_path)
    assert len(found) == names
    assert sum(work(*one) or 0 for one in found) == counter.get_total_flops()


def test_groups_against_a_loop(tmp_path: Path) -> None:
    def run() -> None:
        F.conv2d(torch.randn(2, 4, 9, 11), torch.randn(6, 2, 3, 2), groups=2)

    (call,) = recorded(run, tmp_path)
    # Each of 2 images, 6 channels, 7 x 10 places: 2 channels of a group under a kernel of 3 x 2.
    assert work(*call) == 2 * sum(1 for _ in product(*map(range, (2, 6, 7, 10, 2, 3, 2))))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(10, 12), (12, 10), (11, 11)])
def test_attention_against_torchs_formula_and_a_mask(
    rows: int, columns: int, causal: bool, tmp_path: Path
) -> None:
    query, key, value = tensor(2, 4, rows, 8), tensor(2, 4, columns, 8), tensor(2, 4, columns, 8)

    def run() -> None:
        F.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()

    ahead, behind = recorded(run, tmp_path)
    mask = torch.ones(rows, columns)
    share = float((mask.tril() if causal else mask).mean())
    shapes = query.shape, key.shape, value.shape
    assert work(*ahead) == pytest.approx(share * sdpa_flop_count(*shapes))
    assert work(*behind) == pytest.approx(share * sdpa_backward_flop_count(query.shape, *shapes))


def test_arguments_of_attention_are_those_of_torchs_schemas() -> None:
    for name, (query, causal) in ATTENTION.items():
        names = [
            one.name for one in getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema.arguments
        ]
        assert names[query : query + 3] == ["query", "key", "value"]
        assert names[causal] == "is_causal"


@pytest.mark.parametrize(
    ("name", "shapes", "values"),
    [
        ("aten::convolution", IMAGE, []),
        ("aten::convolution", IMAGE, [*OPTIONS[:3], "[0, 1]", *OPTIONS[4:]]),
        ("aten::convolution", IMAGE, [*OPTIONS[:3], "[1, 1, 1]", *OPTIONS[4:]]),
        ("aten::convolution", IMAGE, [*OPTIONS[:3], "[-1]", *OPTIONS[4:]]),
        ("aten::convolution", IMAGE, [*OPTIONS[:5], "[9, 9]", *OPTIONS[6:]]),
        ("aten::convolution", [[2, 4], [6, 4]], OPTIONS),
        ("aten::convolution", [[2, 4, 9, 10**400], [6, 4, 3, 2]], OPTIONS),
        ("aten::convolution_backward", [5, *IMAGE], ["", *OPTIONS, 7]),
        ("aten::_scaled_dot_product_flash_attention", [[1, 2, 3, 4]] * 3, []),
        ("aten::_scaled_dot_product_flash_attention", [[1, 2, 3]] * 3, ["False"] * 5),
        ("aten::mm", [[1, 2], "no"], []),
        ("aten::gelu", [[1, 2]], []),
    ],
)  # fmt: skip
def test_nothing_is_made_of_odd_arguments(name: str, shapes: list[Any], values: list[Any]) -> None:
    assert work(name, shapes, values) is None


def test_time_of_called_operators_counts(analysed: Callable[[TraceBuilder], Any]) -> None:
    builder = TraceBuilder()
    arguments = {"Input Dims": IMAGE, "Concrete Inputs": OPTIONS, "Input type": ["float"] * 3}
    for start in (0, 1000):
        builder.operator("aten::convolution", start, 100, **arguments)
        builder.operator("aten::cudnn_convolution", start + 10, 50, **{"Input Dims": IMAGE[:2]})
        builder.kernel("implicit_convolve_sgemm", start + 20, start + 200, 40)
        builder.operator("aten::add_", start + 70, 20, **{"Input Dims": [[2, 6, 5, 11], [1, 6, 1, 1]]})
        builder.kernel("elementwise_kernel", start + 75, start + 240, 10)
    (rate,) = analysed(builder).operator_rates
    assert isinstance(rate, OperatorRate)
    operations = work("aten::convolution", IMAGE, OPTIONS)
    assert (rate.name, rate.calls, rate.device) == ("aten::convolution", 2, 100_000)
    assert rate.tflops == pytest.approx(operations / 50e-6 / 1e12)
