"""Differences of module trees, and model arguments without effect."""

from __future__ import annotations

from backlight.analysis.fingerprint_diff import describe_shapes, describe_trees, differences, layers
from backlight.records import Fingerprint


def tree(count: int, *, inner: int = 0) -> dict[str, str]:
    modules = {"": "GPT", "token": "Embedding", "blocks": "ModuleList"}
    for i in range(count):
        modules[f"blocks.{i}"] = "Block"
        modules |= {f"blocks.{i}.experts.{j}": "Linear" for j in range(inner)}
    return modules


def printed(count: int, parameters: int, *arguments: str) -> Fingerprint:
    return Fingerprint(
        script="train.py",
        arguments=arguments,
        module_hash=f"{count}-{parameters}",
        modules=tuple(tree(count).items()),
        parameter_count=parameters,
    )


def difference_texts(a: Fingerprint, b: Fingerprint) -> str:
    return ", ".join(difference.text for difference in differences((a, b)))


def test_layers_are_repeated_children_of_outermost_container() -> None:
    assert layers(tree(24)) == ("blocks", 24)
    assert layers(tree(2, inner=8)) == ("blocks", 2)
    assert layers({"": "Net", "0": "Linear", "1": "ReLU", "2": "Linear"}) == ("", 2)
    assert layers({"": "Net", "0": "Linear", "1": "ReLU"}) is None
    assert layers({"": "Net", "first": "Linear", "last": "Linear"}) is None


def test_trees_that_differ_in_depth_are_described() -> None:
    assert describe_trees([tree(24), tree(32)]) == ("24 layers in blocks", "32 layers in blocks")
    assert describe_trees([tree(2), {**tree(2), "more": "Linear"}]) == ("no others", "more Linear")
    assert describe_trees([tree(2), tree(2)]) == ()


def test_shapes_that_differ_are_named() -> None:
    one, other = {"a": (2, 3), "b": (3,)}, {"a": (4, 3), "b": (3,)}
    assert describe_shapes([one, other, one]) == ("a [2, 3]", "a [4, 3]", "a [2, 3]")


def test_every_run_has_its_value() -> None:
    runs = [printed(24, 10, "--lr", "1"), printed(24, 10, "--lr", "2"), printed(24, 10)]
    (found,) = differences(runs)
    assert (found.field, found.values) == ("arguments.--lr", ("1", "2", "not given"))


def test_ignored_argument_is_reported() -> None:
    # Both asked for 24 layers, and one got 32.
    one = printed(24, 61_900_000, "--n_blocks", "24")
    other = printed(32, 85_100_000, "--n_blocks", "24")
    assert difference_texts(one, other) == (
        "modules 24 layers in blocks against 32 layers in blocks (the argument `n_blocks` was ignored in B), "
        "parameters 61,900,000 against 85,100,000"
    )
    neither = printed(32, 85_100_000, "model.n_blocks=12"), printed(24, 61_900_000, "model.n_blocks=12")
    assert "(the argument `model.n_blocks` was ignored)," in difference_texts(*neither)


def test_model_argument_without_effect_is_reported() -> None:
    one, other = printed(24, 1000, "--layers", "24"), printed(24, 1000, "--layers", "32")
    assert difference_texts(one, other) == (
        "--layers 24 against 32 (the argument `layers` was ignored: modules and parameters are the same)"
    )


def test_effective_argument_is_not_reported_as_ignored() -> None:
    assert "ignored" not in difference_texts(
        printed(24, 10, "--layers", "24"), printed(32, 20, "--layers", "32")
    )
    assert "ignored" not in difference_texts(printed(24, 10, "--lr", "1"), printed(24, 10, "--lr", "2"))
    # The number of layers is right in both: something else made the parameters differ.
    assert "ignored" not in difference_texts(
        printed(24, 10, "--layers", "24"), printed(24, 20, "--layers", "24")
    )
