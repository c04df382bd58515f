from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backlight.store.format.names import MAX_NAME_BYTES, safe_name, storable

ANY_TEXT = st.text(st.characters(), max_size=300)


@given(ANY_TEXT)
def test_safe_name_is_one_visible_path_component(text: str) -> None:
    name = safe_name(text)
    assert name == Path(name).name
    assert not name.startswith((".", "-"))
    assert 0 < len(name.encode("utf-8")) <= MAX_NAME_BYTES
    assert name.isprintable()
    assert not set(name) & set("/\\:*?\"'<>|\n\0 ")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("train.py", "train.py"),
        ("../../etc/passwd", "etc-passwd"),
        ("a\nb\0c", "a-b-c"),
        ("  ", "run"),
        ("..", "run"),
        ("CON.txt", "_CON.txt"),
        ("x" * 10_000, "x" * MAX_NAME_BYTES),
        ("größe", "größe"),
        ("\udcff", "run"),
    ],
)
def test_safe_names(text: str, name: str) -> None:
    assert safe_name(text) == name


@pytest.mark.slow
@given(ANY_TEXT)
def test_storable_text_is_valid_utf8_and_unchanged(text: str) -> None:
    stored = storable(text)
    assert stored.encode("utf-8").decode("utf-8") == stored
    assert storable(stored) == stored
