from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from backlight import codec
from backlight.store.filesystem import ProcessIdentity

ME = ProcessIdentity.of_this_process()


def identity_of_an_ended_process() -> ProcessIdentity:
    code = """
import json
from backlight import codec
from backlight.store.filesystem import ProcessIdentity
print(json.dumps(codec.plain(ProcessIdentity.of_this_process())))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return codec.convert(json.loads(out.stdout), ProcessIdentity)


def test_current_process_is_alive() -> None:
    assert ME.alive() is True


@pytest.mark.slow
def test_exited_process_is_not_alive() -> None:
    ended = identity_of_an_ended_process()
    assert ended.pid != ME.pid
    assert ended.alive() is False


NEEDS_PROC = pytest.mark.skipif(not (ME.start and ME.boot), reason="start time and boot id need /proc")


@pytest.mark.parametrize(
    ("field", "value", "alive"),
    [
        pytest.param("start", f"{ME.start}0", False, marks=NEEDS_PROC),
        pytest.param("boot", "another", False, marks=NEEDS_PROC),
        ("host", "elsewhere", None),
        ("namespace", "pid:[1]", None),
    ],
    ids=["reused pid", "another boot", "another host", "another namespace"],
)
def test_changed_identity_is_dead_or_unknown(field: str, value: str, alive: bool | None) -> None:
    assert dataclasses.replace(ME, **{field: value}).alive() is alive


def test_empty_identity_is_unknown() -> None:
    assert codec.convert({}, ProcessIdentity).alive() is None
    assert codec.convert({"pid": "text"}, ProcessIdentity).pid == 0


@pytest.mark.slow
@pytest.mark.skipif(not ME.start, reason="zombies are recognised by /proc")
def test_zombie_is_not_alive() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os._exit(0)
    os.close(write)
    try:
        assert os.read(read, 1) == b""
        zombie = dataclasses.replace(ME, pid=child)
        # The pipe closes shortly before the process is a zombie.
        for _ in range(1000):
            if zombie.alive() is False:
                break
        assert zombie.alive() is False
    finally:
        os.close(read)
        os.waitpid(child, 0)


def test_identity_round_trips_through_json() -> None:
    assert codec.convert(codec.plain(ME), ProcessIdentity) == ME
