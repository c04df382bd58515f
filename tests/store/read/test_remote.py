"""A run behind a URL is read as one in a directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.findings.evaluate import findings_of
from backlight.store.errors import RunFormatError
from backlight.store.read.run import open_run
from backlight.store.write.compact import compact

fsspec: Any = pytest.importorskip("fsspec")


def uploaded(path: Path, url: str) -> str:
    files, root = fsspec.core.url_to_fs(url)
    files.put(str(path), root, recursive=True)
    return url


@pytest.mark.parametrize("is_compacted", [False, True], ids=["databases", "columns"])
def test_a_run_behind_a_url_is_read_as_here(
    tmp_path: Path, record: Callable[..., Any], is_compacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "run", 30)
    if is_compacted:
        compact(tmp_path / "run")
    copied = []
    memory: Any = fsspec.get_filesystem_class("memory")
    get = memory.get_file
    monkeypatch.setattr(memory, "get_file", lambda self, *a, **b: copied.append(a[0]) or get(self, *a, **b))
    url = uploaded(tmp_path / "run", f"memory://bucket/{is_compacted}")
    here, there = open_run(tmp_path / "run"), open_run(url)
    a, b = here.frame("gradient", "norm"), there.frame("gradient", "norm")
    assert np.array_equal(a.values, b.values)
    assert (a.names, there.losses, there.run_id) == (b.names, (), here.run_id)
    assert np.array_equal(here.scalar("loss").values, there.scalar("loss").values)
    assert findings_of(there) == findings_of(here)
    assert any(name.endswith(".db") for name in copied) != is_compacted
    assert not any(name.endswith(".parquet") for name in copied)
    folder = there.path
    assert folder.is_dir()
    assert folder.parent.parent.name.startswith(
        "backlight-read-"
    )  # removed also after this process was killed
    del there
    assert not folder.exists()


def test_a_url_without_a_run_is_one_error() -> None:
    with pytest.raises(RunFormatError, match=r"cannot be read|is not a backlight run"):
        open_run("memory://nothing/there")
    with pytest.raises(RunFormatError, match=r"^nosuch://x: cannot be read: ValueError: Protocol not known"):
        open_run("nosuch://x")


def test_without_fsspec_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        RunFormatError, match=r"needs fsspec, which is not installed: pip install 'backlight\[remote\]'"
    ):
        open_run("s3://bucket/run")
