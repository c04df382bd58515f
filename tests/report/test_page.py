"""The page as a file: atomic, offline, with a strict policy, without torch, hostile names escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic import Plan, finding, health_of, write_report, write_run

from backlight.cli.app import main
from backlight.findings.pages import rule_page
from backlight.registry import RULES
from backlight.report import page as pages
from backlight.report.page import render_page
from backlight.report.panel import Drawn, Panel, PanelWarning, in_order
from backlight.report.source import Source

HOSTILE = "</script><img src=x onerror=window.owned=1><!--"


class Elements(HTMLParser):
    """Parser that collects elements with attributes and the text of scripts, styles and titles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.content: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag
        if tag in self.content:
            self.content[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open in self.content:
            self.content[self._open][-1] += data


def parsed(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    return elements


def model_of(text: str) -> Any:
    return json.loads(parsed(text).content["script"][0])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = write_run(tmp_path_factory.mktemp("page") / "run", Plan(steps=30, nan_step=20))
    return render_page(Source(run, (finding("blocks.0.mlp.up.bias", 20),), health_of(run)))


def test_policy_allows_exactly_the_page_content(page: str) -> None:
    elements = parsed(page)
    policy = next(a["content"] for _, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy

    def allowed(content: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    data, library, program = elements.content["script"]
    assert f"script-src {allowed(library)} {allowed(program)};" in policy
    assert allowed(data) not in policy
    assert f"style-src {allowed(elements.content['style'][0])};" in policy


def test_page_makes_no_requests(page: str) -> None:
    elements = parsed(page)
    assert {tag for tag, _ in elements.found} <= {
        "html", "head", "meta", "title", "style", "body", "noscript", "code", "script",
    }  # fmt: skip
    for _, attributes in elements.found:
        assert not {"src", "href", "srcset", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
    css = elements.content["style"][0]
    assert "url(" not in css
    assert "@import" not in css
    code = "".join(elements.content["script"][1:])
    for call in ("fetch(", "XMLHttpRequest", "WebSocket", "sendBeacon", "import(", "innerHTML", "eval("):
        assert call not in code


def test_finding_has_its_evidence_link(page: str) -> None:
    model = model_of(page)
    assert model["verdict"]["headline"] == model["findings"][0]["title"]
    assert model["verdict"]["detail"].startswith("1 error. ")
    (shown,) = model["findings"]
    assert model["verdict"]["lead"] == 0
    assert shown["evidence"][0]["label"] == "gradient NaN and Inf of blocks.0.mlp.up.bias"
    assert shown["evidence"][0]["place"] == {
        "panel": "parameters", "row": 10, "column": "non_finite", "step": 20, "layer": None,
    }  # fmt: skip
    assert shown["evidence"][1]["value"] == "nan"
    assert shown["refuted"].startswith("the same step")
    assert shown["line"]["step"] == 20
    assert shown["line"]["path"].endswith("blocks.0.mlp.up.bias")


def fields_of(declared: str, name: str) -> dict[str, bool]:
    """Return the fields of an interface in ``types.d.ts``, and whether each is required."""
    depth, body = 0, ""
    for sign in declared[declared.index("{", declared.index(f"interface {name} ")) :]:
        depth += (sign in "{[<(") - (sign in "}])")
        depth -= sign == ">" and not body.endswith("=")
        body += sign if depth == 1 else ""
        if not depth:
            break
    return {field: not optional for field, optional in re.findall(r"(\w+)(\??): ?", body)}


def test_types_of_the_scripts_are_those_of_the_data(page: str) -> None:
    data = model_of(page)
    panels = {panel["kind"]: panel for panel in data["panels"] if "kind" in panel}
    chart, heat_map = panels["lines"]["data"]["charts"][0], panels["parameters"]["data"]
    declared = (pages.ASSETS / "types.d.ts").read_text()
    evidence = data["findings"][0]["evidence"][0]
    for name, value in {
        "ReportData": data,
        "Verdict": data["verdict"],
        "Finding": data["findings"][0],
        "EvidenceData": evidence,
        "Place": evidence["place"],
        "SparklineData": data["findings"][0]["line"],
        "Parameter": data["parameters"][0],
        "Panel": panels["lines"],
        "ChartData": chart,
        "LineData": chart["lines"][0],
        "AxisData": chart["left"],
        "ParameterData": heat_map,
        "ColumnData": heat_map["columns"][0],
    }.items():
        fields = fields_of(declared, name)
        assert set(value) <= set(fields), name
        assert {field for field, required in fields.items() if required} <= set(value), name


def test_page_of_a_rule_is_part_of_the_report(page: str, tmp_path: Path) -> None:
    (found,) = model_of(page)["pages"].values()
    assert ["heading", "Symptom"] in found
    assert ["heading", "Example"] not in found
    hostile = finding("w", 1, rule="../../pyproject")
    run = write_run(tmp_path / "run", Plan(steps=5))
    assert model_of(render_page(Source(run, (hostile,))))["pages"] == {"../../pyproject": []}


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_has_a_page_of_known_sections(rule: str) -> None:
    kinds = {kind for kind, _ in rule_page(rule)}
    assert {"heading", "paragraph"} <= kinds <= {"heading", "paragraph", "item", "cell"}
    assert not [text for _, text in rule_page(rule) if "](" in text or text.count("`") % 2]


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    plan = Plan(steps=8, name=HOSTILE, rename={3: HOSTILE, 5: "\u202e\x00"}, user={HOSTILE: 1.0})
    run = write_run(tmp_path / "run", plan)
    text = render_page(Source(run, (finding(HOSTILE, 2, title=HOSTILE, detail=HOSTILE, fix=HOSTILE),)))
    elements = parsed(text)
    assert [tag for tag, _ in elements.found].count("script") == 3
    assert "img" not in [tag for tag, _ in elements.found]
    assert elements.content["title"][0].startswith(HOSTILE)
    model = model_of(text)
    assert model["parameters"][3]["name"] == HOSTILE
    assert model["parameters"][5]["name"] == "\\u202e\\x00"
    assert model["findings"][0]["title"] == HOSTILE


def test_panels_without_data_have_a_reason(page: str) -> None:
    gaps = {
        gap["reason"]: [w["text"] for w in gap["what"]] for gap in model_of(page)["verdict"]["unmeasured"]
    }
    assert gaps["It is recorded on request: backlight run --histogram."] == ["Exponent histogram"]
    missing = [panel for panel in model_of(page)["panels"] if "missing" in panel]
    assert missing
    assert not [panel for panel in missing if "data" in panel]


def test_gaps_with_the_same_reason_are_grouped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=5, gradients=False, updates=False))
    model = model_of(render_page(Source(run)))
    gaps = {gap["reason"]: [w["text"] for w in gap["what"]] for gap in model["verdict"]["unmeasured"]}
    assert gaps["no optimizer step was seen"] == [
        "gradient", "Gradient norm", "Parameters", "Samples of spikes", "Health", "Distribution over depth",
    ]  # fmt: skip
    figures = {figure["label"]: figure["value"] for figure in model["verdict"]["figures"]}
    assert figures["lowest health"] == "not measured"
    assert figures["with NaN or Inf"] == "not measured"
    assert figures["parameters measured"] == "0"


def test_report_is_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", Plan(steps=5))
    target = tmp_path / "deep" / "report.html"
    assert write_report(run, [], target) == target
    before = target.read_text()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_report(run, [], target)
    assert target.read_text() == before
    assert [file.name for file in target.parent.iterdir()] == ["report.html"]


@pytest.mark.slow
def test_report_does_not_change_the_run_and_marks_restarts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=6, attempts=2))
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    text = write_report(run, [], tmp_path / "report.html").read_text()
    assert model_of(text)["attempts"] == [3]
    after = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert before == after


@pytest.mark.slow
def test_report_does_not_need_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(steps=6))
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from backlight.store.read.run import open_run\n"
        "from backlight.report.page import render_page, write_page\n"
        "from backlight.report.source import Source\n"
        "from backlight.report.markdown import render_markdown\n"
        "from backlight.report import terminal\n"
        "run = open_run(sys.argv[1])\n"
        "page = write_page(render_page(Source(run)), Path(sys.argv[2]))\n"
        "print(page.stat().st_size, len(render_markdown(run, [])))\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "run"), str(tmp_path / "report.html")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size, words = map(int, done.stdout.split())
    assert size > 50_000
    assert words > 100


@pytest.mark.slow
def test_long_run_has_a_small_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Plan(steps=3000, blocks=2, histogram=True, phases=True, user={"a": 1}))
    size = len(render_page(Source(run)))
    assert size < 3_000_000


def test_vendored_library_has_its_licence() -> None:
    vendor = Path(__file__).parents[2] / "src/backlight/report/vendor"
    head = (vendor / "uPlot.iife.min.js").read_text()[:200]
    assert re.search(r"https://github.com/leeoniya/uPlot \(v\d+\.\d+\.\d+\)", head)
    assert "MIT" in (vendor / "LICENSE.uplot").read_text()


def failing(source: Source) -> Any:
    raise LookupError(f"no such column in {source.run.name}")


WRONG = {
    "raises": (failing, "LookupError: no such column in synthetic."),
    "returns_a_list": (lambda source: [], "TypeError: it returned list, not Drawn or NotMeasured."),
    "draws_an_object": (lambda source: Drawn("lines", {"values": object()}), "TypeError: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_failing_panel_is_named_and_the_others_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    render, why = WRONG[name]
    wrong = Panel(name, "Wrong", 1, (), render, monitor="spectra")  # a monitor that did not watch
    known = in_order()
    run = write_run(tmp_path / "run", Plan(steps=5))
    whole = model_of(render_page(Source(run)))["panels"]
    monkeypatch.setattr(pages, "in_order", lambda: [wrong, *known])
    with pytest.warns(PanelWarning, match=f"Panel '{name}' could not be drawn: {re.escape(why)}"):
        model = model_of(render_page(Source(run)))
    assert model["panels"][1:] == whole
    gap = model["panels"][0]
    assert gap["missing"].startswith(f"Panel '{name}' could not be drawn: {why}")
    assert any(item["reason"] == gap["missing"] for item in model["verdict"]["unmeasured"])


@pytest.mark.slow
def test_command_reports_failing_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    known = [panel for panel in in_order() if panel.name in {"health", "total_norm"}]
    wrong = Panel("raises", "Wrong", 1, (), failing)
    run = write_run(tmp_path / "run", Plan(steps=5))
    monkeypatch.setattr(pages, "in_order", lambda: [wrong, *known])
    plots = tmp_path / "plots"
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["report", str(run.path), "--plots", str(plots)])
    out, err = capfd.readouterr()
    message = "backlight: Panel 'raises' could not be drawn: LookupError: no such column in synthetic."
    assert err.splitlines().count(message) == 1
    assert "Traceback" not in err
    assert out.splitlines()[0] == str(run.path / "report.html")
    assert message.partition("Panel ")[2] in (run.path / "report.html").read_text()
    assert (plots / "total_norm.svg").is_file()
    archive = tmp_path / "run.tar.gz"
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["report", str(run.path), "--bundle", str(archive)])
    out, err = capfd.readouterr()
    assert (out, err) == (f"{archive}\n", f"{message}\n")
    with tarfile.open(archive) as packed:
        (name,) = [name for name in packed.getnames() if name.endswith("/report.html")]
        page = packed.extractfile(name)
        assert page is not None
        assert message.partition("Panel ")[2] in page.read().decode()
