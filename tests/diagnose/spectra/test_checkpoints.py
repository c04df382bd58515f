"""Checkpoints in natural order, with the steps of their names."""

import pytest

from backlight.diagnose.spectra.options import find_checkpoints


@pytest.mark.parametrize(
    ("names", "patterns", "expected"),
    [
        (["s-step100.pt", "s-step20.pt", "s-step3.pt"], ["*.pt"], [(3, 2), (20, 1), (100, 0)]),
        (["final.pt", "step-5.pt"], ["*.pt"], [(0, 0), (1, 1)]),  # a name without a number: positions
        (["1-of-2.pt", "2-of-2.pt"], ["*.pt"], [(0, 0), (1, 1)]),  # numbers do not ascend
        (["a/2.pt", "a/10.pt"], ["a/2.pt", "**/10.pt"], [(2, 0), (10, 1)]),
        (["b2.pt", "b10.pt", "a10.pt"], ["*.pt"], [(0, 2), (1, 0), (2, 1)]),
    ],
)
def test_checkpoints_are_in_natural_order(tmp_path, names, patterns, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    files = find_checkpoints([str(tmp_path / pattern) for pattern in patterns])
    assert [(checkpoint.step, str(checkpoint.path.relative_to(tmp_path))) for checkpoint in files] == [
        (step, names[index]) for step, index in expected
    ]


def test_no_pattern_is_the_freshly_built_model():
    (checkpoint,) = find_checkpoints([])
    assert (checkpoint.path, checkpoint.step, str(checkpoint)) == (None, 0, "the freshly built model")


def test_pattern_without_a_match_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\*' matches no file in "):
        find_checkpoints([str(tmp_path / "nothing*")])
