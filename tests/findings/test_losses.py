"""Labels of the losses of several networks, and what a step counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.findings.losses import loss_labels, loss_name, losses_of
from backlight.findings.recorded_steps import counts_at
from run_builder import build_run, parameter

NETWORKS = [
    parameter("generator.first.weight", group="0/0"),
    parameter("generator.last.weight", group="0/1"),
    parameter("critic.first.weight", group="1/0"),
    parameter("critic.last.weight", group="1/0"),
]


def test_loss_is_that_of_the_module_which_its_optimizer_holds() -> None:
    assert loss_labels(["loss/0", "loss/1"], NETWORKS, ["Adam()", "SGD()"]) == {
        "loss/0": "loss of generator", "loss/1": "loss of critic",
    }  # fmt: skip


def test_loss_of_no_single_module_is_that_of_its_optimizer() -> None:
    same = [parameter("net.a.weight", group="0/0"), parameter("net.b.weight", group="1/0")]
    mixed = [*NETWORKS, parameter("encoder.weight", group="0/0")]
    both = [parameter(f"net.{name}", group=f"{number}/0") for name in "ab" for number in (0, 1)]
    assert loss_labels(["loss/0"], mixed, ["Adam(lr=1)"]) == {"loss/0": "loss of Adam 0"}
    assert loss_labels(["loss/0", "loss/1"], both, ["Adam()"]) == {
        "loss/0": "loss of Adam 0", "loss/1": "loss of optimizer 1",
    }  # fmt: skip
    assert loss_labels(["loss/0", "loss/1"], same, []) == {
        "loss/0": "loss of net.a.weight", "loss/1": "loss of net.b.weight",
    }  # fmt: skip


def test_parameters_have_the_loss_of_their_optimizer(tmp_path: Path) -> None:
    scalars = {"loss": [3.0] * 4, "loss/0": {0: 1.0, 2: 1.0}, "loss/1": {1: 2.0, 3: 2.0}}
    run = build_run(tmp_path / "two", table=NETWORKS, scalars=scalars)
    assert {label: loss.values.tolist() for label, loss in losses_of(run).items()} == {
        "loss of generator": [1.0, 1.0], "loss of critic": [2.0, 2.0],
    }  # fmt: skip
    assert [loss_name(run, group) for group in ("0/1", "1/0", "2/0")] == ["loss/0", "loss/1", "loss"]
    one = build_run(tmp_path / "one", table=NETWORKS, scalars={"loss": [3.0], "loss/0": [1.0]})
    assert loss_name(one, "0/0") == "loss"


@pytest.mark.parametrize(
    ("forwards", "step", "expected"),
    [
        ([2.0, 2.0, 4.0], 2, ("forwards", 4.0, 2.0)),
        ([2.0, 4.0, 2.0], 2, ("forwards", 2.0, 3.0)),
        ([2.0, 2.0, 2.0], 2, None),
        ([2.0, 4.0, 4.0], 0, None),
        ([2.0, 4.0, 4.0], 9, None),
        ([9.0, 2.0, 2.0, 2.0], 3, None),  # the first lies before the window
    ],
)
def test_counts_are_named_where_they_vary(
    forwards: list[float], step: int, expected: tuple[str, float, float] | None, tmp_path: Path
) -> None:
    run = build_run(tmp_path / "run", scalars={"forwards": forwards})
    assert counts_at(run, step, window=2) == expected
