"""``backlight open`` and ``backlight top`` in processes of their own."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import run_captured

pytestmark = pytest.mark.slow

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from backlight.cli.app import main; main(sys.argv[1:])"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
    from growing import Growing  # in the directory of the report tests

    growing = Growing(tmp_path_factory.mktemp("live") / "run")
    growing.steps(30, broken=2)
    growing.close()
    return growing.path


def test_top_once_prints_one_frame_without_torch_and_server(run: Path) -> None:
    program = f"import sys; sys.modules['uvicorn'] = None; {WITHOUT_TORCH}"
    done = run_captured([sys.executable, "-c", program, "top", "--once", str(run)], timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "● finished" in done.stdout
    assert "non finite" in done.stdout


def test_q_restores_the_terminal_and_prints_the_last_frame(tmp_path: Path) -> None:
    pty = pytest.importorskip("pty")
    folder = tmp_path / "run"
    folder.mkdir()
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "backlight", "top", str(folder)],
        stdin=follower, stdout=follower, stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    try:
        output = read_until(leader, b"Waiting for the first step")
        assert b"\x1b[?1049h" in output  # alternate screen
        os.write(leader, b"q")
        rest = read_until(leader, b"Waiting for the first step")
        assert process.wait(timeout=20) == 0
        assert b"\x1b[?1049l" in rest
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def read_until(terminal: int, expected: bytes) -> bytes:
    output = b""
    end = time.monotonic() + 40
    while expected not in output and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                output += os.read(terminal, 65536)
            except OSError:
                break  # the process has ended
    assert expected in output
    return output


def test_page_is_served_until_interrupted(run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TORCH, "open", "--no-browser", str(run)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)
        assert address, line
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor()
        )
        with opener.open(address[0], timeout=20) as entry:
            place = re.search(rb"url=([^\"]+)", entry.read())
        assert place
        start = address[0].partition("/?")[0] + place[1].decode()
        with opener.open(start, timeout=20) as page:
            assert b"<title>run" in page.read()
            assert "token" not in page.geturl()
            updates = page.geturl() + "news?after=0"
        with opener.open(updates, timeout=30) as answer:
            assert b"non_finite" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(updates, timeout=20)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_missing_run_and_taken_port_are_refused_in_one_line(
    run: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    errors = refused("top", tmp_path / "nothing")
    assert errors.startswith(f"backlight: {tmp_path}/nothing: there is no such folder")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert "other" in refused("open", tmp_path / "other")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        errors = refused("open", "--no-browser", "--port", port, run)
    assert f"port {port} of 127.0.0.1" in errors
    assert "--port" in errors


def test_open_waits_for_a_run_that_has_not_started(run: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    for arguments, line in (
        ([str(later)], f"backlight: {later} does not exist yet; waiting for it to start, Ctrl-C ends\n"),
        ([], "backlight: runs/ holds no run yet; waiting for it to start, Ctrl-C ends\n"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-c", WITHOUT_TORCH, "open", "--no-browser", *arguments],
            stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == line
            shutil.copytree(run, tmp_path / "arriving")
            (tmp_path / "runs").mkdir(exist_ok=True)
            (tmp_path / "arriving").rename(later if arguments else tmp_path / "runs" / "first")
            link = next(read for read in process.stderr if "live page at" in read).split()[4]
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(link, timeout=60) as page:
                assert page.status == 200  # it serves
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
            process.communicate()
