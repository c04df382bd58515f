from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from answers import strict_loads
from backlight import atomic_files, codec, untrusted_files
from backlight.records import Severity
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import read_document, seal, write_document
from backlight.untrusted_files import MAX_TEXT_BYTES


def test_json_accepts_numpy_and_sets() -> None:
    text = codec.encode_row(
        {
            "scalar": np.float32(0.5),
            "array": np.arange(3),
            "path": Path("a/b"),
            "set": {2, 1},
            "severity": Severity.ERROR,
            "name": "\udcff\0ü",
            3: (1, 2),
        }
    )
    assert text.isascii()
    assert json.loads(text) == {
        "scalar": 0.5,
        "array": [0, 1, 2],
        "path": "a/b",
        "set": [1, 2],
        "severity": "error",
        "name": "\udcff\0ü",
        "3": [1, 2],
    }


def test_documents_are_strict_json_and_those_of_python_are_read(tmp_path: Path) -> None:
    infinite = {"a": [float("inf"), np.float32("nan")]}
    write_document(tmp_path / "new.json", infinite)
    assert strict_loads((tmp_path / "new.json").read_text())["a"] == ["Infinity", "NaN"]
    (tmp_path / "old.json").write_bytes(seal(codec.encode_row(infinite)))
    assert str(read_document(tmp_path / "old.json")) == "{'a': [inf, nan]}"


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[]", "holds a JSON list, expected an object"),
        (b"[" * 100_000, "nests deeper than 64"),
        (b'{"a":' * 70 + b"[]" + b"}" * 70, "nests deeper than 64"),
    ],
)
def test_damaged_document_is_rejected(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(RunFormatError, match=match):
        read_document(path)


def test_oversized_document_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    with pytest.raises(RunFormatError, match="expected at most"):
        read_document(path)


def test_missing_document_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RunFormatError, match="cannot be read: No such file"):
        read_document(tmp_path / "x.json")


DOCUMENT = {"format": 2, "name": "a\udcffb", "steps": [1, 2.5, None], "deep": {"crc": 7, "empty": {}}}


@pytest.mark.slow
def test_no_changed_bit_passes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_document(path, DOCUMENT)
    content = path.read_bytes()
    assert read_document(path) == DOCUMENT
    for at in range(8 * len(content)):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(RunFormatError, match=r"x\.json: [^\n]+\Z"):
            read_document(path)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"format": 2}', "it has no checksum: it was changed after it was written; restore it"),
        (b'{"crc": 0, "format": 1}', "its checksum does not match"),
        (b'{"format": 1, "crc": 4294967296}', "its checksum does not match"),
        (b'{"format": 1, "crc": "1"}', "its checksum does not match"),
        (b'{"format": 1, "deep": {"a": 1, "crc": 1}}', "it has no checksum"),
        (b'{"deep": {"a": 1, "crc": 1}}', None),
    ],
)
def test_only_documents_without_a_format_may_lack_a_checksum(
    tmp_path: Path, content: bytes, match: str | None
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    if match is None:
        assert read_document(path) == json.loads(content)
    else:
        with pytest.raises(RunFormatError, match=match):
            read_document(path)


def test_document_is_read_again_while_its_writer_overwrites_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    write_document(path, {"a": "x" * 100})
    old = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "write", full)
    write_document(path, {"a": "y"})  # takes the place of the old one, and spaces
    new = path.read_bytes()
    assert len(new) == len(old)
    contents = [new[:50] + old[50:], new]
    monkeypatch.setattr(untrusted_files, "read", lambda *_, **__: contents.pop(0))
    assert read_document(path) == {"a": "y"}
    assert contents == []
