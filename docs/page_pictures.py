"""Write docs/images/report.png, parts.png, live.png: the page of a run with a finding; spectra.png: a layer.

parts.png has the numbers of the list in docs/reading-the-report.md.

    python docs/page_pictures.py                     # these four; the runs are made now
    python docs/page_pictures.py FOLDER RUN ...      # pages of runs in every width and theme

Needs Chromium and its driver.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PROGRAM = str(Path(sys.executable).with_name("backlight"))
SCRIPT = "examples/new_head.py"
WIDTH = 1400
WIDTHS = (1440, 1024, 390)
SIZE = {"width": WIDTH, "height": 1180, "deviceScaleFactor": 1, "mobile": False}
PARTS = (
    ".verdict", ".finding", "#panel-loss", "#panel-parameters", "#panel-updates", "#panel-phases",
    "#panel-depth", "#stated", "#details",
)  # fmt: skip
"""What each number of the list in docs/reading-the-report.md describes."""
MARK = """
const box = document.querySelector(arguments[1]).getBoundingClientRect();
const mark = document.body.appendChild(document.createElement("b"));
mark.textContent = arguments[0];
const style = {position: "absolute", left: `${box.x - 20}px`, top: `${box.y + scrollY - 20}px`, zIndex: 99,
  width: "48px", font: "bold 28px/48px sans-serif", textAlign: "center", borderRadius: "50%",
  background: "#b3261e", color: "#fff"};
Object.assign(mark.style, style);
"""
CHECKPOINT = """
import torch
import gpt_recipe as recipe

model = recipe.build_model()
optimizer = recipe.build_optimizer(model)
data = recipe.batches(rank=0, world_size=1, batch=32)
for _ in range(10):
    optimizer.zero_grad()
    recipe.loss(model, next(data)).backward()
    optimizer.step()
torch.save(model.state_dict(), "step-10.pt")
"""
"""Writes the checkpoint of step 10 of the example in docs/spectra.md."""
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def main() -> None:
    """Make the runs and write the pictures."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
    try:
        if len(sys.argv) > 2:
            write_every_size(driver, Path(sys.argv[1]), sys.argv[2:])
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "examples").symlink_to(ROOT / "examples")
            subprocess.run(
                [PROGRAM, "run", "--every", "1", "--out", "runs/new-head", SCRIPT], check=True, cwd=folder
            )
            page = Path(folder) / "report.html"
            subprocess.run([PROGRAM, "report", "runs/new-head", "-o", str(page)], check=True, cwd=folder)
            write(driver, page.as_uri(), "report.png")
            write_parts(driver)
            write_live(driver, Path(folder))
            write_spectra(Path(folder))
    finally:
        driver.quit()


def write_every_size(driver: webdriver.Chrome, folder: Path, runs: list[str]) -> None:
    """Write pictures of the whole pages of ``runs``; several are also compared."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {Path(run).name: ["report", run] for run in runs}
    if len(runs) > 1:
        pages["compared"] = ["compare", *runs]
    for name, command in pages.items():
        page = folder.resolve() / f"{name}.html"
        subprocess.run([PROGRAM, *command, "-o", str(page)], check=True)
        for width, scheme in itertools.product(WIDTHS, ("light", "dark")):
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            driver.get(page.as_uri())
            ready = "return document.documentElement.dataset.ready === 'yes'"
            WebDriverWait(driver, 60).until(lambda _, ready=ready: driver.execute_script(ready))
            height = driver.execute_script("return document.documentElement.scrollHeight")
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"height": height})
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
            (folder / f"{name}-{width}-{scheme}.png").write_bytes(base64.b64decode(shot["data"]))


def write_parts(driver: webdriver.Chrome) -> None:
    """Write the whole page that is shown, with the number of each part."""
    for number, part in enumerate(PARTS, start=1):
        driver.execute_script(MARK, number, part)
    end = driver.execute_script("return document.querySelector('#details').getBoundingClientRect().bottom")
    size = {"width": WIDTH, "height": int(end) + 30, "deviceScaleFactor": 0.6, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    save(driver, "parts.png")
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)


def write_live(driver: webdriver.Chrome, folder: Path) -> None:
    """Write the picture of the page of a run that goes on."""
    (folder / "runs" / "live").mkdir()
    command = [PROGRAM, "run", "--every", "5", "--out", "runs/live", SCRIPT, "--steps", "1000000"]
    training = subprocess.Popen(command, cwd=folder)
    command = [PROGRAM, "open", "--no-browser", "runs/live"]
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        write(driver, address, "live.png", steps=60)
    finally:
        for process in (server, training):
            process.terminate()
            process.wait()


def write_spectra(folder: Path) -> None:
    """Write the picture of the embedding in docs/spectra.md."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "examples")}
    subprocess.run([sys.executable, "-c", CHECKPOINT], check=True, cwd=folder, env=environment)
    layer = ["--include", "token.weight", "--replicates", "32", "--out", "runs/spectra"]
    command = [PROGRAM, "spectra", "examples/gpt_recipe.py", "--checkpoints", "step-10.pt", *layer]
    subprocess.run(command, check=True, cwd=folder)
    command = [PROGRAM, "report", "runs/spectra", "--plots", "plots"]
    subprocess.run(command, check=True, cwd=folder)
    shutil.copy(folder / "plots" / "spectra.png", IMAGES / "spectra.png")
    print("docs/images/spectra.png")


def write(driver: webdriver.Chrome, address: str, name: str, steps: int = 1) -> None:
    """Write the top of a page, once it shows a finding, its first charts and so many recorded steps."""
    driver.get(address)
    shown = "return document.querySelectorAll(arguments[0]).length"
    for wanted in (".finding", "#panel-loss .uplot", "#panel-total_norm .uplot"):
        WebDriverWait(driver, 300).until(lambda _, wanted=wanted: driver.execute_script(shown, wanted))
    recorded = "return Number(document.querySelector('.figures dd').textContent.replaceAll(',', ''))"
    WebDriverWait(driver, 300).until(lambda _: driver.execute_script(recorded) >= steps)
    drawn = (
        "return ['loss', 'total_norm'].map((name) => document.querySelector(`#panel-${name} .legend-step`))"
    )
    drawn += ".map(({textContent}) => Number(textContent.replace(/[^0-9]/g, '')))"
    WebDriverWait(driver, 300).until(lambda _: (ends := driver.execute_script(drawn))[1] > 0.9 * ends[0])
    save(driver, name)


def save(driver: webdriver.Chrome, name: str) -> None:
    """Write what the window shows."""
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    (IMAGES / name).write_bytes(base64.b64decode(shot["data"]))
    print((IMAGES / name).relative_to(ROOT))


if __name__ == "__main__":
    main()
