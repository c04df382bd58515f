"""Checkpoints come in the order in which a person counts, with the steps that their names say."""

import pytest

from backlight.diagnose.spectra.checkpoints import _natural, find_checkpoints


def found(tmp_path, names, *patterns):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    files = find_checkpoints([str(tmp_path / pattern) for pattern in patterns or ("*.pt",)])
    return [(one.step, str(one.path.relative_to(tmp_path))) for one in files]


def test_steps_of_names(tmp_path):
    names = ["gpt2-step100.pt", "gpt2-step20.pt", "gpt2-step3.pt"]
    assert found(tmp_path, names) == [(3, names[2]), (20, names[1]), (100, names[0])]


def test_steps_are_positions_where_names_hold_no_number(tmp_path):
    assert found(tmp_path, ["final.pt", "step-5.pt"]) == [(0, "final.pt"), (1, "step-5.pt")]


def test_positions_where_numbers_do_not_ascend(tmp_path):
    names = ["1-of-2.pt", "2-of-2.pt"]
    assert found(tmp_path, names) == [(0, names[0]), (1, names[1])]


def test_several_patterns_and_folders(tmp_path):
    names = ["a/2.pt", "a/10.pt"]
    assert found(tmp_path, names, "a/*.pt", "**/10.pt") == [(2, "a/2.pt"), (10, "a/10.pt")]


def test_the_freshly_built_model():
    (one,) = find_checkpoints([])
    assert (one.path, one.step, str(one)) == (None, 0, "the freshly built model")


def test_nothing_matches(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\*' matches no file in "):
        find_checkpoints([str(tmp_path / "nothing*")])


def test_natural_order():
    assert sorted(["b2", "b10", "a10", "2", "a"], key=_natural) == ["2", "a", "a10", "b2", "b10"]
