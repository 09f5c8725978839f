"""The page and the figures: offline, well-formed, escaped, and complete for every kind of study."""

import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from report_folders import noisy, write_comparison, write_run
from safetensors.numpy import save_file

from polyfed import report
from polyfed.base.errors import ConfigError, RunError
from polyfed.metrics.scores import ACCURACY
from polyfed.report import caveats, forest, probabilities, style, words
from polyfed.report.pairs import Interval, Verdict
from polyfed.report.style import to_svg

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Checker(HTMLParser):
    """Follows the open tags; collects ids and everything that could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.loads, self.tags = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [] if tag in VOID else [tag]
        self.note(attrs)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.note(attrs)

    def note(self, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data", "poster", "srcset")]

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def page(paths, **keys):
    target = report.write_report(paths, **keys)
    text = target.read_text()
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert all(v.startswith(("#", "data:")) for v in checker.loads)
    assert all(f"#{i}" in {f"#{x}" for x in checker.ids} for i in (v[1:] for v in checker.loads if v.startswith("#")))
    assert not re.search(r"https?://|@import", text)
    assert all(i in checker.ids for i in re.findall(r"url\(#([^)]+)\)", text))
    assert checker.tags.count("script") == 1
    return text


METHODS = {
    "local": noisy([0.7, 0.8, 0.9], 3, 0.01, 0),
    "fedavg": noisy([0.8] * 3, 3, 0.01, 1),
    "ditto": noisy([0.9] * 3, 3, 0.01, 2),
}


THREE, MIXED = [0.7, 0.8, 0.9], [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]
CLUSTERED = {"report": {"clusters": [0, 0, 1], "mixing": MIXED}, "clusters": [0, 0, 1]}
REGRESSION = {k: noisy([1.5, 1.2], 1, 0.1, i) for i, k in enumerate(("local", "fedavg"))}
UNTESTED = {"local": [[0.7, None]] * 2, "fedavg": [[0.8, None]] * 2}


def mixing(weights):
    return lambda folder: write_run(folder, THREE, algorithm="fedamp", report={"mixing": np.array(weights).tolist()})


@pytest.mark.parametrize(("write", "said"), [
    (lambda f: write_run(f, THREE, algorithm="fpfc", **CLUSTERED), ["index against the truth: 1.00", "Mixing, fpfc"]),
    (lambda f: write_comparison(f, REGRESSION, metric="rmse", classes=None), ["RMSE", "no spread can be given"]),
    (lambda f: write_comparison(f, {k: METHODS[k] for k in ("fedavg", "ditto")}), ["cannot be said"]),
    (lambda f: write_comparison(f, UNTESTED), []), (lambda f: write_run(f, [0.7], rounds=1), []),
    (mixing(np.eye(3)), ["Mixing, fedamp"]), (mixing(np.full((3, 3), 1 / 3)), [""]),
], ids=["clusters", "regression", "no own models", "untested", "round zero", "weights", "equal weights"])  # fmt: skip
def test_every_kind_of_study_is_a_whole_page(write, said, tmp_path):
    text = page(write(tmp_path))
    assert all(word in text for word in said)
    assert ("Mixing" in text) == any("Mixing" in word for word in said), "equal weights are not drawn"


def test_comparison(tmp_path):
    text = page(write_comparison(tmp_path, METHODS, notes=["A caveat to keep."]))
    assert "A caveat to keep." in text
    assert "Gain of ditto over local" in text
    assert text.count("<svg") >= 5
    assert text.index('class="answer"') < text.index("<table")
    found = pd.read_csv(tmp_path / "results.csv")
    assert len(found) == 3 * 3 * 3
    ditto = found[(found["method"] == "ditto") & (found["seed"] == 1)]["test_accuracy"].tolist()
    assert ditto == METHODS["ditto"][1]


@pytest.mark.parametrize("keys", [{"status": "interrupted"}, {"status": "diverged"}, {"summary": False}])
def test_runs_that_did_not_finish(tmp_path, keys, undrawn):
    assert keys.get("status", "unfinished") in page(write_run(tmp_path / "run", [0.7, 0.8], **keys))


def test_everything_from_files_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    names = [evil, "$x^", "_hidden & 'quoted\""]
    values = {k: METHODS[k] for k in ("local", "fedavg")}
    text = page(write_comparison(tmp_path, values, names=names, notes=[evil], settings={"x": evil}))
    assert evil not in text
    assert "&lt;script&gt;" in text


def test_the_page_can_go_elsewhere_and_faults_are_one_line(tmp_path, undrawn):
    run = write_run(tmp_path / "run", [0.7, 0.8])
    assert report.write_report(run, tmp_path / "out.html") == tmp_path / "out.html"
    assert report.write_report([run], tmp_path) == tmp_path / "report.html"
    page = (tmp_path / "report.html").read_text()
    report.write_report(report.read(run), tmp_path)
    assert (tmp_path / "report.html").read_text() == page
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        report.write_report(run, tmp_path / "file" / "x.html")
    assert not [p for p in tmp_path.rglob(".*") if p.is_file()]


def test_figures_are_the_same_every_time_inline_and_in_files(tmp_path):
    """And laid out alike; inline ones say what they show and follow the theme."""
    study = report.read(write_comparison(tmp_path / "c", METHODS))
    one, two, filed = (report.metric_figure(study, "bytes") for _ in range(3))
    untouched = one.axes[0].get_position().bounds
    svg = to_svg(one, "f", "A <title>", "Dots")
    assert '<title id="f-title">A &lt;title&gt;</title><desc id="f-desc">Dots</desc>' in svg
    assert "var(--ink)" in svg
    assert "xmlns" not in svg
    report.save(filed, tmp_path / "a.svg")
    assert one.axes[0].get_position().bounds == filed.axes[0].get_position().bounds != untouched
    assert one.dpi == filed.dpi
    assert svg == to_svg(two, "f", "A <title>", "Dots")
    for form in ("svg", "pdf", "png"):
        first = report.save(one, tmp_path / f"a.{form}").read_bytes()
        assert first == report.save(two, tmp_path / f"b.{form}").read_bytes()
    with pytest.raises(ConfigError, match="expected a name ending"):
        report.save(one, tmp_path / "a.docx")


def test_points_of_a_figure_say_what_they_are(tmp_path):
    """One title per point, in the order of the points, escaped; those that are not finite have none."""
    with style.styled():
        figure, (axes,) = style.canvas()
        axes.plot([0, 1], [0, 1], "o-")
        style.hover(axes, [0.0, 1.0, np.nan, 2.0], [1.0, 2.0, 3.0, 1.0], ["<a>", "b", "never", "c"])
        style.hover(axes, [0.0], [2.0], ["d"])
    svg = to_svg(figure, "f", "title")
    assert re.findall(r"<title>(.*?)</title>", svg) == ["&lt;a&gt;", "b", "c", "d"]
    at = [float(x) for x in re.findall(r'<use [^>]*x="([\d.]+)"[^>]*><title>', svg)]
    assert at[0] == at[3] < at[1] < at[2]
    Checker().feed(svg)
    study = report.read(write_comparison(tmp_path, METHODS))
    gain = report.gain_figure(study, "ditto")
    said = re.findall(r"<title>(.*?)</title>", to_svg(gain, "gain", "Gain"))
    assert {text.split(":")[0] for text in said} == {*study.names, "mean over clients"}
    mean = study.verdicts.mean_gain("ditto", "local", 2)
    assert f"mean over clients: +{100 * mean.mean:.1f} points" in said[-1]


def told_by(folder, methods):
    """A comparison of which every run says probabilities: {label: (p [n], y [n]) of each of two clients}."""
    write_comparison(folder, {label: noisy([0.8, 0.8], 2, 0.01, k) for k, label in enumerate(methods)})
    for label, clients in methods.items():
        for seed in (0, 1):
            p, y = (np.concatenate([c[k] for c in clients]) for k in (0, 1))
            counts = np.array([len(c[0]) for c in clients])
            scores = {"id": np.arange(len(p)), "counts": counts, "class": y.astype(np.int64), "probability": p}
            save_file(scores, folder / f"runs/{label}-seed{seed}/scores.safetensors")
    return report.read(folder)


def test_a_model_that_knows_the_risk_is_calibrated_and_of_the_greatest_benefit(tmp_path):
    """Its curve is the diagonal, that of twice its log-odds is not; acting by it beats all, none and chance."""
    rng = np.random.default_rng(0)
    risk = [rng.beta(1, 2, 4000) for _ in range(2)]
    outcome = [rng.random(4000) < r for r in risk]
    steep = [r**2 / (r**2 + (1 - r) ** 2) for r in risk]
    study = told_by(
        tmp_path, {"local": [*zip(steep, outcome, strict=True)], "fedavg": [*zip(risk, outcome, strict=True)]}
    )
    figure = probabilities.calibration_figure(study)
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].get_lines()}
    assert np.abs(np.diff(lines["fedavg"], axis=1)).max() < 3
    assert np.abs(np.diff(lines["local"], axis=1)).max() > 6
    p, y, at = np.concatenate(risk), np.concatenate(outcome).astype(float), np.array([0.2, 0.35, 0.5, 0.7])
    best = probabilities.benefit(p, y, at)
    for other in (np.ones(8000), np.zeros(8000), rng.permutation(p)):
        assert (best > probabilities.benefit(other, y, at)).all()
    assert probabilities.benefit(np.ones(8000), y, at) == pytest.approx(y.mean() - (1 - y.mean()) * at / (1 - at))
    assert (probabilities.benefit(y, y, at) == y.mean()).all()  # who knows the outcome
    text = page(tmp_path)
    assert f"fedavg {np.mean((p - y) ** 2):.3f}, local" in text or f"fedavg {np.mean((p - y) ** 2):.3f}." in text
    assert "Is deciding by them worth it?" in text
    assert not probabilities.told(report.read(write_comparison(tmp_path / "without", METHODS)))


def test_a_leading_method_of_worse_probabilities_is_named_though_brier_was_not_asked_for(tmp_path):
    rng = np.random.default_rng(1)
    risk = [rng.uniform(0.1, 0.9, 400) for _ in range(2)]
    outcome = [rng.random(400) < r for r in risk]
    write = {
        "local": [*zip(risk, outcome, strict=True)],
        "ditto": [(r > 0.5, y) for r, y in zip(risk, outcome, strict=True)],
    }
    study = told_by(tmp_path, {k: [(p.astype(float), y) for p, y in v] for k, v in write.items()})
    assert study.verdicts.lead == ("ditto", "local")
    assert "Check the calibration of ditto" in report.answer(study)
    text = report.write_report(study, tmp_path / "page.html").read_text()
    assert "Check the calibration of ditto" in re.sub(r"<details.*?</details>", "", text, flags=re.S)  # it stands open


def luminance(colour):
    """WCAG 2.1: relative luminance of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = np.array([int(digits[k : k + 2], 16) for k in (0, 2, 4)]) / 255
    return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def grounds():
    """The variables of the page on light, on dark ground, and in print."""
    css = (Path(report.__file__).parent / "page.css").read_text()
    found = [dict(re.findall(r"(--\w+): (#\w+);", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)]
    assert len(found) == 3
    return found


def test_colours_can_be_told_from_the_ground():
    """3:1 for lines and dots (WCAG 1.4.11), 4.5:1 for text (1.4.3), on light, dark and printed pages."""
    for ground in grounds():
        for name in {style.VARIABLES[c] for c in style.SERIES} | {"--quiet", "--ink"}:
            assert contrast(ground[name], ground["--paper"]) >= 3, name
        for name in ("--ink", "--quiet", "--accent", "--gain", "--loss"):
            assert min(contrast(ground[name], ground[k]) for k in ("--paper", "--panel")) >= 4.5, name
    assert all(contrast(c, "#ffffff") >= 3 for c in (*style.SERIES, style.QUIET, style.INK))  # files are on white
    assert {c: grounds()[0][style.VARIABLES[c]] for c in style.SERIES} == {c: c for c in style.SERIES}
    labels = [f"m{k}" for k in range(11)]
    look = style.looks(["alone", *labels], {"alone": "own", **dict.fromkeys(labels, "common")})
    assert [look[k].color for k in labels[:6]] == list(style.SERIES), "six methods are in colour, and the rest grey"
    assert {look[k].color for k in labels[6:]} == {style.QUIET}
    assert look["alone"].color not in (style.QUIET, *style.SERIES)
    assert len({look[k] for k in labels}) == 11  # marker and dashes still differ


def test_curves_start_where_they_tell_something(tmp_path):
    """The made curves rise from 0.25 to about 0.8 and differ by a few points at the end."""
    study = report.read(write_comparison(tmp_path, METHODS))
    figure = report.metric_figure(study)
    low, high = figure.axes[0].get_ylim()
    ends = [g.mean() for g in study.verdicts.grids.values()]
    assert 25 < low < 100 * min(ends)
    assert 100 * max(ends) < high <= 100


def test_figures_are_written_beside_the_page(tmp_path):
    write_run(tmp_path, [0.8])
    text = report.write_report(tmp_path, figures=True).read_text()
    for form, begins in (("svg", b"<?xml"), ("pdf", b"%PDF"), ("png", b"\x89PNG")):
        files = sorted(p.name for p in (tmp_path / "report-figures").glob(f"*.{form}"))
        assert files == [f"{name}.{form}" for name in ("bytes", "partition", "rounds")]
        assert all((tmp_path / "report-figures" / f).read_bytes().startswith(begins) for f in files)
        assert all(f'href="report-figures/{f}"' in text for f in files)
    (tmp_path / "report-figures/rounds.pdf").write_text("old")
    report.write_report(tmp_path)  # as resuming does
    assert (tmp_path / "report-figures/rounds.pdf").read_bytes().startswith(b"%PDF")
    assert not (tmp_path / "results.csv").exists()  # a run has clients.csv


def test_a_method_with_a_worse_brier_score_is_told_to_check_its_calibration(tmp_path, monkeypatch):
    write_comparison(tmp_path, {"fedavg": noisy([0.9] * 3, 2, 0.01, 0), "recalibrated": noisy([0.8] * 3, 2, 0.01, 1)})
    study = report.read(tmp_path)
    brier = {"fedavg": 0.2, "recalibrated": 0.1}
    metrics = [study.metric, SimpleNamespace(name="brier")]
    monkeypatch.setattr(type(study), "metrics", property(lambda _: metrics))
    monkeypatch.setattr(type(study.first), "values", lambda run, split=None, metric=None: {"a": brier[run.label]})
    study.verdicts.mean = Verdict(None, "", None, {"fedavg": Interval(0.1, 0.0, 0.2, 2)}, "recalibrated")
    assert "Check the calibration of fedavg: its Brier score is 0.2" in " ".join(caveats.calibration(study, "fedavg"))
    brier["fedavg"] = 0.1
    assert caveats.calibration(study, "fedavg") == []


def test_no_interval_is_cut_without_an_arrow_and_that_of_the_mean_never(tmp_path):
    """Whatever the intervals: drawn whole, or with an arrow at the end where they go on, in page and file."""
    rng, scale = np.random.default_rng(3), words.Scale(ACCURACY)
    for k in range(60):
        n, half = int(rng.integers(1, 9)), 10.0 ** rng.uniform(-3, 0 if k % 2 else -1.5, 9)
        gains = [Interval(m, m - h, m + h, 3) for m, h in zip(rng.normal(0, 0.02, n), half, strict=False)]
        gains.append(Interval(0.9, 0.8, 1.0, 3, clear=True))  # all of it may lie beyond the axis
        mean = Interval(0.01, 0.01 - 20 * half[-1], 0.01 + half[-1], 3)
        left, right = forest.limits(gains, [mean])
        assert left < mean.low < mean.high < right
        rows = [forest.Row(str(i), "", g, "") for i, g in enumerate(gains)]
        text = forest.chart([*rows, forest.Row("mean", "", mean, "", whole=True)], scale, "points")
        assert text.count('class="cut"') == sum(int(g.low < left) + int(g.high > right) for g in gains)
        assert ("goes on" in text) == ('class="cut"' in text)
        assert all(-0.01 <= float(x) <= 100.01 for x in re.findall(r'x[12]?="([-\d.]+)%"', text))
    few = {"local": noisy([0.7] * 4, 10, 0.01, 0), "fedavg": noisy([0.71] * 4, 10, 0.01, 1)}
    for s, row in enumerate(few["fedavg"]):
        row[3] = 0.1 + 0.8 * (s % 2)  # one client's interval is many times as wide as the others'
    study = report.read(write_comparison(tmp_path, few))
    axes = report.gain_figure(study).axes[0]
    gains, (left, right) = study.verdicts.gains("fedavg", "local"), axes.get_xlim()
    mean = study.verdicts.mean_gain("fedavg", "local", 1)
    assert left < 100 * mean.low < 100 * mean.high < right
    arrows = {line.get_marker(): len(line.get_xdata()) for line in axes.get_lines() if line.get_marker() in "<>"}
    assert arrows == {"<": sum(100 * g.low < left for g in gains.values()),
                      ">": sum(100 * g.high > right for g in gains.values())} != {"<": 0, ">": 0}  # fmt: skip


def test_a_page_begins_with_the_sentence_and_a_chart_of_every_client_before_any_table(tmp_path):
    text = page(write_comparison(tmp_path, METHODS, notes=["Seen before.", "check before use: sex at A"]))
    assert (
        text.index('class="headline"')
        < text.index('class="forest"')
        < text.index("check before use")
        < text.index("<table")
    )
    chart = text[text.index('<ul class="forest"') : text.index("</ul>")]
    found = re.findall(r"<li class=\"(\w+)(?: whole)?\"><b>([^<]*)</b><span>([^<]*)</span>.*?<i>(.*?)</i>", chart)
    study = report.read(tmp_path)
    gains = study.verdicts.gains(*study.verdicts.lead)
    assert {name: word for _, name, word, _ in found[:-1]} == {n: g.word for n, g in gains.items()}
    assert (found[-1][1], len(found)) == ("mean over clients", len(gains) + 1)
    assert all(re.search(r"\sto\s", text) for *_, text in found)
    folded = text[text.index("<details><summary>What this rests on") :]
    assert "moves 1.00 MB per client" in folded[: folded.index("</details>")]
