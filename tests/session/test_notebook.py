"""A watched training run in a real Jupyter kernel: live cells, interrupts, cells that run again, report."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

import pytest

import backlight

pytestmark = pytest.mark.slow

nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
pytest.importorskip("ipykernel", reason="needs ipykernel")

CELLS = {
    "define": """
import os, signal, torch
from torch import nn
import backlight

def train(steps=20, head=True, interrupt=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD((model if head else model[0]).parameters(), lr=0.1)
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == interrupt:
            os.kill(os.getpid(), signal.SIGINT)
    return [p.detach().clone() for p in model.parameters()]
""",
    "plain": "plain = train()",
    "watched": """
with backlight.watch(run="runs/first", every=1) as watch:
    watched = train()
""",
    "again": """
with backlight.watch(run="runs/first", every=1) as watch:
    train(head=False)
""",
    "identical": "all(torch.equal(a, b) for a, b in zip(plain, watched))",
    "load": "%load_ext backlight",
    "magic": "%%backlight --every 1 --run runs/magic\ntrain()",
    "magic fails": '%%backlight --run runs/fails\ntrain(5)\nraise ValueError("own failure")',
    "magic refuses": "%%backlight --nope\ntrain()",
    "interrupted": '%%backlight --run runs/interrupted\ntrain(10**6, interrupt=7)',
    "started": 'first = backlight.watch(run="runs/started").start()\ntrain(3)',
    "started again": 'second = backlight.watch(run="runs/started").start()\ntrain(10**6, interrupt=4)',
    "leaves": """
%%backlight --run runs/leaves
try:
    train(10**6, interrupt=7)
except KeyboardInterrupt:
    raise SystemExit(1)
""".strip(),
    "started leaves": """
third = backlight.watch(run="runs/started").start()
try:
    train(10**6, interrupt=7)
except KeyboardInterrupt:
    raise SystemExit(1)
""",
    "magic does not parse": "%%backlight --run runs/unfinished\ntrain(",
    "cleared": """
from IPython.display import clear_output, display
seen = []
def follow(message):
    seen.append(message["content"].get("data", {}).get("text/plain", ""))
    return message
get_ipython().display_pub.register_hook(follow)
with backlight.watch(run="runs/cleared"):
    train(3)
    clear_output(wait=True)
    display("first plot")
    train(3, head=False)
    clear_output(wait=True)
    display("last plot")
    shown_with_plot = seen[-1].splitlines()[0]
_ = get_ipython().display_pub.unregister_hook(follow)
""",
    "cleared displays": "print(seen[0].splitlines()[0]); print(shown_with_plot)",
    "cleared for text": """
with backlight.watch(run="runs/text"):
    train(head=False)
    clear_output(wait=True)
    print("done")
""",
    "hosted": """
from backlight.integrations.hosted import Hosted
hosted = Hosted("Callback", "runs/hosted", {})
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
hosted.begin([model], [optimizer], name="model")
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
hosted.end()
""",
    "quiet": 'with backlight.watch(run="runs/quiet", quiet=True):\n    train(3)',
    "report": 'backlight.open_run("runs/first").report()',
}  # fmt: skip

Outputs = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Outputs:
    """Outputs of each cell of the notebook, run in a kernel of its own."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": folder}},
    )
    client.execute(env={**os.environ, "JPY_SESSION_NAME": "notes/study.ipynb"})
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


def shown(outputs: list[dict[str, Any]]) -> str:
    """Return the HTML of the one display of a cell."""
    (found,) = [o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    return str(found)


def errors(outputs: list[dict[str, Any]]) -> list[str]:
    return [output["ename"] for output in outputs if output.output_type == "error"]


def test_cell_shows_result_loss_norm_and_findings(outputs: Outputs) -> None:
    sound, head = shown(outputs["watched"]), shown(outputs["again"])
    assert re.search(r"finished · 20 steps · loss [\d.]+ · gradient norm [\d.]+", sound)
    assert "No findings" in sound
    assert "are not in any optimizer" in head
    assert len(outputs["watched"]) == 1  # no line on standard error as well
    assert head.count("are not in any optimizer") == 1
    assert "<code>2.weight</code>" in head


def test_front_end_without_html_shows_the_same(outputs: Outputs) -> None:
    lines = outputs["again"][0]["data"]["text/plain"].splitlines()
    assert re.match(r"backlight: finished · 20 steps · loss [\d.]+ · gradient norm [\d.]+$", lines[0])
    assert [line.partition(":")[0] for line in lines[1:-1]] == ["error"]
    assert lines[-1] == "backlight.open_run('runs/first-2').report()"


def test_weights_are_identical(outputs: Outputs) -> None:
    assert outputs["identical"][0]["data"]["text/plain"] == "True"


def test_cell_that_runs_again_makes_another_run(outputs: Outputs, folder: Path) -> None:
    assert "runs/first-2" in html.unescape(shown(outputs["again"]))
    first, second = (backlight.open_run(folder / "runs" / name) for name in ("first", "first-2"))
    assert (len(first.attempts), len(second.attempts)) == (1, 1)
    stored = first.fingerprint()
    assert stored is not None
    assert (stored.script, stored.arguments) == ("study.ipynb", ())


def test_magic_watches_its_cell(outputs: Outputs, folder: Path) -> None:
    assert "finished · 20 steps" in shown(outputs["magic"])
    assert backlight.open_run(folder / "runs" / "magic").last_step() == 19
    assert errors(outputs["magic refuses"]) == []
    assert "unrecognized arguments: --nope" in outputs["magic refuses"][0]["text"]


def test_cell_that_does_not_parse_makes_no_run(outputs: Outputs, folder: Path) -> None:
    first, *others = outputs["magic does not parse"]
    assert first["ename"] in {"SyntaxError", "_IncompleteInputError"}  # the latter since Python 3.13
    assert [(o.output_type, o["traceback"]) for o in others] == [("error", [])]  # the outer cell fails too
    assert not (folder / "runs" / "unfinished").exists()


def test_output_that_the_cell_clears_is_shown_again(outputs: Outputs, folder: Path) -> None:
    cleared = outputs["cleared"]
    assert re.search(r"finished · 6 steps", shown(cleared))
    assert cleared[-1]["data"]["text/plain"] == "'last plot'"  # what the user's code has shown stays
    assert len(cleared) == 2
    displays = outputs["cleared displays"][0]["text"].splitlines()
    assert displays[0] == "backlight: running · 0 steps"
    assert displays[1].startswith("backlight: running · 6 steps")
    assert "are not in any optimizer" in shown(outputs["cleared for text"])
    assert outputs["cleared for text"][0]["text"] == "done\n"


def test_two_models_keep_the_name_of_the_notebook(folder: Path) -> None:
    stored = backlight.open_run(folder / "runs" / "cleared").fingerprint()
    assert stored is not None
    assert (stored.script, stored.script_hash) == ("study.ipynb", "")


def test_result_of_a_framework_is_shown_once(outputs: Outputs) -> None:
    assert "finished · 3 steps" in shown(outputs["hosted"])
    assert len(outputs["hosted"]) == 1


def test_error_of_the_cell_is_shown_once(outputs: Outputs, folder: Path) -> None:
    tracebacks = [o for o in outputs["magic fails"] if o.output_type == "error" and o["traceback"]]
    assert len(tracebacks) == 1
    assert errors(outputs["magic fails"])[-1] == "ValueError"  # the outer cell fails too: "Run all" stops
    assert backlight.open_run(folder / "runs" / "fails").status.value == "failed"


@pytest.mark.parametrize(
    ("cell", "run"),
    [
        ("interrupted", "interrupted"),
        ("started again", "started-2"),
        ("leaves", "leaves"),
        ("started leaves", "started-3"),
    ],
)
def test_interrupt_closes_the_run(outputs: Outputs, folder: Path, cell: str, run: str) -> None:
    assert "backlight</strong> interrupted" in shown(outputs[cell])
    stored = backlight.open_run(folder / "runs" / run)
    assert stored.status.value == "failed"
    (event,) = stored.events("exception")
    assert event.payload["type"] == "KeyboardInterrupt"
    assert "Interrupted at step" in str(backlight.findings_of(stored))


def test_another_start_closes_the_earlier_one(outputs: Outputs, folder: Path) -> None:
    assert errors(outputs["started"]) == []
    assert backlight.open_run(folder / "runs" / "started").status.value == "finished"
    assert backlight.open_run(folder / "runs" / "started").last_step() == 2


def test_quiet_shows_nothing(outputs: Outputs, folder: Path) -> None:
    assert outputs["quiet"] == []
    assert backlight.open_run(folder / "runs" / "quiet").last_step() == 2


def test_report_is_inline_and_requests_nothing(outputs: Outputs) -> None:
    frame = shown(outputs["report"])
    assert re.match(r'<iframe srcdoc="&lt;!doctype html', frame)
    assert 'sandbox="allow-scripts"' in frame
    page = html.unescape(frame)
    assert "default-src 'none'" in page
    assert 'content="light dark"' in page
