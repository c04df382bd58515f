"""The pytest plugin: tests that train fail by findings, and only by them."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

TESTS = """
import unittest

import pytest
import torch
from torch import nn


def build(trained):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    parameters = model.parameters() if trained else model[0].parameters()
    return model, torch.optim.SGD(parameters, lr=0.1)


def train(model, optimizer, steps=12):
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_sound(backlight_watch, tmp_path):
    model, optimizer = build(trained=True)
    with backlight_watch(model, optimizer, fail_on="warning") as watch:
        train(model, optimizer)
    assert watch.path.parent.parent == tmp_path
    assert watch.step == 12


def test_weights_are_identical(backlight_watch):
    model, optimizer = build(trained=True)
    train(model, optimizer)
    plain, random = [p.clone() for p in model.parameters()], torch.get_rng_state()
    model, optimizer = build(trained=True)
    with backlight_watch(model, optimizer):
        train(model, optimizer)
    assert all(map(torch.equal, plain, model.parameters()))
    assert torch.equal(random, torch.get_rng_state())


def test_untrained_head(backlight_watch):
    model, optimizer = build(trained=False)
    with backlight_watch(model, optimizer, fail_on="no_update"):
        train(model, optimizer)


def test_untrained_head_is_no_error(backlight_watch):
    model, optimizer = build(trained=False)
    with backlight_watch(model, optimizer):
        train(model, optimizer)


@pytest.mark.backlight(steps=5, fail_on="warning")
def test_marked_ends_after_5_steps():
    train(*build(trained=True), steps=10**9)


@pytest.mark.backlight(fail_on="warning")
def test_marked_untrained_head():
    train(*build(trained=False))


@pytest.mark.backlight(steps=12, fail_on="warning")
def test_marked_untrained_head_ends_after_12_steps():
    train(*build(trained=False), steps=10**9)


@pytest.mark.backlight
def test_marked_without_a_step():
    build(trained=True)


def test_updates_by_hand(backlight_watch):
    model, _ = build(trained=True)
    with backlight_watch(model):
        model(torch.randn(4, 8)).sum().backward()


@pytest.mark.backlight
def test_marked_own_failure():
    train(*build(trained=True))
    raise RuntimeError("own failure")


@pytest.mark.backlight(fail_on="typo")
def test_marked_typo():
    train(*build(trained=True))


@pytest.mark.backlight("warning")
def test_marked_by_position():
    train(*build(trained=True))


@pytest.mark.backlight
class TestOld(unittest.TestCase):
    def test_marked_test_case(self):
        train(*build(trained=True))


def test_unmarked():
    train(*build(trained=False))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Message of each test of ``TESTS``, empty where it passed, from an own process."""
    folder = tmp_path_factory.mktemp("own tests")
    (folder / "test_own.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "--strict-markers",
         f"--junitxml={folder / 'out.xml'}", "--basetemp", str(folder / "tmp"), "test_own.py"],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = {}
    for case in ET.parse(folder / "out.xml").iter("testcase"):
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        found[str(case.get("name"))] = "" if problem is None else str(problem.get("message"))
        assert problem is None or "another exception" not in (problem.text or "")
    return found


@pytest.mark.parametrize(
    "name",
    [
        "test_sound",
        "test_weights_are_identical",
        "test_untrained_head_is_no_error",
        "test_marked_ends_after_5_steps",
        "test_unmarked",
    ],
)
def test_passes(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("test_untrained_head", "`2.weight` and `2.bias` are not in any optimizer"),
        ("test_marked_untrained_head", "`2.weight` and `2.bias` are not in any optimizer"),
        ("test_marked_untrained_head_ends_after_12_steps", "are not in any optimizer"),
        ("test_marked_without_a_step", "recorded no optimizer step"),
        ("test_updates_by_hand", "watch.mark_step()"),
        ("test_marked_own_failure", "own failure"),
        ("test_marked_typo", "fail_on: no severity or rule is called 'typo'"),
        ("test_marked_by_position", "got 'warning', expected settings by name"),
        ("test_marked_test_case", "a method of unittest.TestCase is not watched"),
    ],
)
def test_fails_by_name(outcomes: dict[str, str], name: str, message: str) -> None:
    assert message in outcomes[name]
