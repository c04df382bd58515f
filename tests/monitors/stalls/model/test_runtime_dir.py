"""Runtime directories: owner and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.monitors.stalls.model import runtime_dir


def test_runtime_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError, match="belongs to another user"):
        runtime_dir.create(tmp_path / "link")


def test_runtime_directory_depends_on_attempt_and_launch(tmp_path: Path) -> None:
    one = runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one == runtime_dir.runtime_directory(tmp_path, 0, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 1, "a")
    assert one != runtime_dir.runtime_directory(tmp_path, 0, "b")
