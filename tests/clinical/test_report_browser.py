"""The pages in a real browser: nothing in the console, sorting and downloads work, nothing is wider than a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from report_folders import noisy, write_comparison

import polyfed_clinical as clinical
from polyfed import report
from polyfed_clinical.page import write_page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((b for name in BROWSERS if (b := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed ({', '.join(BROWSERS)})")

# Holds every page in a frame as wide as a phone, presses its buttons, and writes down what came of it.
PROBE = """<!doctype html><body>FRAMES<script>
const look = (frame) => {
  const page = frame.contentDocument, inside = frame.contentWindow;
  const found = { wide: page.documentElement.scrollWidth, tables: {}, copied: [], files: [] };
  let saved = null;
  inside.Blob = class { constructor(parts) { saved = parts.join(""); } };
  inside.URL.createObjectURL = () => "#";
  inside.HTMLAnchorElement.prototype.click = function () { found.files.push(this.download); };
  inside.navigator.clipboard.writeText = async (text) => { found.copied.push(text); };
  for (const folded of page.querySelectorAll("details")) folded.open = true;
  for (const part of page.querySelectorAll(".table")) {
    const head = part.querySelector("thead th:nth-child(2) button");
    const names = () => [...part.querySelectorAll("tbody th")].map((cell) => cell.textContent);
    const was = names();
    head?.click();
    const up = names();
    head?.click();
    for (const button of part.querySelectorAll(".tools button")) button.click();
    found.tables[part.dataset.name] = { was, up, down: names(), csv: saved };
  }
  found.unfolded = page.documentElement.scrollWidth;
  const beyond = (e) => e.getBoundingClientRect().right > 391 && !e.closest(".scroll table, pre");
  found.beyond = [...page.querySelectorAll("body *")].filter(beyond).map((e) => e.tagName + e.textContent.slice(0, 40));
  return found;
};
window.onload = () => {
  const all = [...document.querySelectorAll("iframe")].map((frame) => [frame.getAttribute("src"), look(frame)]);
  document.body.textContent = JSON.stringify(Object.fromEntries(all));
};
</script></body>"""


def opened(pages: list[Path]) -> tuple[dict, list[str]]:
    """({page's name: what the probe found}, the lines of the browser's console)."""
    folder = pages[0].parent
    probe = folder / "probe.html"
    frames = "".join(f'<iframe width="390" height="800" src="{p.name}"></iframe>' for p in pages)
    probe.write_text(PROBE.replace("FRAMES", frames))
    said = subprocess.run(
        [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom", probe.as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    body = re.search(r"<body>(\{.*\})</body>", said.stdout, re.S)
    assert body, said.stdout[-2000:] + said.stderr[-2000:]
    return json.loads(html.unescape(body[1])), [x for x in said.stderr.splitlines() if ":CONSOLE" in x]


def test_pages_work_in_a_browser(tmp_path):
    many = {f"method-with-a-long-name-{k}": noisy(np.linspace(0.5, 0.9, 21), 2, 0.02, k) for k in range(6)}
    few = {"local": noisy([0.7, 0.8, 0.9], 3, 0.01, 0), "fedavg": noisy([0.8] * 3, 3, 0.01, 1)}
    names = [f"hospital-of-a-long-name-{k}" for k in range(21)]
    write_comparison(tmp_path / "many", {"local": noisy([0.6] * 21, 2, 0.01, 99), **many}, names=names)
    write_comparison(tmp_path / "few", few, notes=["x" * 200])
    pages = [report.write_report(tmp_path / k, tmp_path / f"{k}.html") for k in ("few", "many")]
    rng = np.random.default_rng(0)
    sites = [(x := rng.normal(size=(80, 3)), (rng.random(80) < 1 / (1 + np.exp(-x[:, 0]))).astype(int)) for _ in "abc"]
    pages.append(write_page(clinical.fit(sites, "logistic"), tmp_path / "regression.html"))

    found, console = opened(pages)
    assert console == []
    assert list(found) == ["few.html", "many.html", "regression.html"]
    assert all(width <= 390 for v in found.values() for width in (v["wide"], v["unfolded"]))

    study = report.read(tmp_path / "few")
    tables = found["few.html"]["tables"]
    assert tables["methods"]["csv"] == report.compare_table(study).to("csv")
    assert tables["clients"]["csv"] == report.client_table(study).to("csv")
    assert report.cost_table(study).to("latex") in found["few.html"]["copied"]
    assert "methods.csv" in found["few.html"]["files"]
    assert [v["beyond"] for v in found.values()] == [[], [], []]
    rows = found["many.html"]["tables"]["methods"]
    means = {r[0].text: r[1].key for r in report.compare_table(report.read(tmp_path / "many")).rows}
    assert rows["up"] == sorted(means, key=lambda k: means[k])
    assert rows["down"] == rows["up"][::-1] == rows["was"]
