from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from backlight.records import to_json
from backlight.store.platform.process import ProcessIdentity

ME = ProcessIdentity.of_this_process()


def identity_of_an_ended_process() -> ProcessIdentity:
    code = """
import json
from backlight.records import to_json
from backlight.store.platform.process import ProcessIdentity
print(json.dumps(to_json(ProcessIdentity.of_this_process())))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ProcessIdentity.from_json(json.loads(out.stdout))


def test_current_process_is_alive() -> None:
    assert ME.alive() is True


def test_exited_process_is_not_alive() -> None:
    ended = identity_of_an_ended_process()
    assert ended.pid != ME.pid
    assert ended.alive() is False


@pytest.mark.skipif(not ME.start, reason="the start time of a process needs /proc")
def test_reused_pid_is_another_process() -> None:
    assert dataclasses.replace(ME, start=str(int(ME.start) - 1)).alive() is False


@pytest.mark.skipif(not ME.boot, reason="the id of a boot needs /proc")
def test_process_of_another_boot_is_not_alive() -> None:
    assert dataclasses.replace(ME, boot="another").alive() is False


def test_process_on_another_host_is_unknown() -> None:
    assert dataclasses.replace(ME, host="elsewhere").alive() is None


def test_process_in_another_namespace_is_unknown() -> None:
    assert dataclasses.replace(ME, namespace="pid:[1]").alive() is None


def test_empty_identity_is_unknown() -> None:
    assert ProcessIdentity.from_json({}).alive() is None
    assert ProcessIdentity.from_json({"pid": "text"}).pid == 0


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
    assert ProcessIdentity.from_json(to_json(ME)) == ME
