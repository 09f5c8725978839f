"""Recipes: the machinery that runs them, and every recipe rehearsed from beginning to end."""

import math
import os
import re
import signal
import sys
import tomllib
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from scipy import stats

from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.algorithms.local import Local
from polyfed.base.errors import ConfigError
from polyfed.core.rounds import Loop
from polyfed.data import load
from polyfed.models import build
from polyfed.runs.trainer import fit
from polyfed.studies import jobs, parallel
from polyfed_papers.adapters import absent
from polyfed_papers.recipes import RECIPES, Bench, Outcome, find
from polyfed_papers.recipes import load as recipes
from polyfed_papers.recipes.recipe import SIZES, Pilot, curves, metric_of, write
from polyfed_papers.recipes.record import load as read
from polyfed_papers.recipes.record import pack, unpack
from polyfed_papers.recipes.said import Claim, beside, claims_table, decided, ordered, ours
from polyfed_tuning.ladder import Ladder

ALL = sorted(recipes())


def small(bench, **settings):
    data = load("heart-disease").partition(seed=0)
    methods = {"Local": Local(lr=0.1), "FedAvg": FedAvg(lr=0.1)}
    given = {"rounds": 3, "local_steps": 2, "batch_size": None, **settings}
    return bench.compare("runs", build("linear", data.input_shape, 2), data, methods, **given)


def test_what_is_finished_is_read_back(tmp_path):
    first = small(Bench(tmp_path, seeds=2))
    stamp = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("summary.json")}
    again = small(Bench(tmp_path, seeds=3))
    assert len(stamp) == 4
    assert all(p.stat().st_mtime_ns == t for p, t in stamp.items())
    assert np.array_equal(metric_of(again, "FedAvg")[:2], metric_of(first, "FedAvg"))
    assert sorted(set(curves(again)["seed"])) == [0, 1, 2]
    with pytest.raises(ConfigError, match="another local-steps"):
        small(Bench(tmp_path, seeds=1), local_steps=3)


def test_a_pilot_counts_fits_and_searches_that_are_kept_by_seed(tmp_path, monkeypatch):
    """Three rounds of each are trained; all rounds, methods, values and seeds are counted."""
    monkeypatch.setattr(sys.modules[Pilot.__module__], "perf_counter", count().__next__)
    pilot = Pilot(tmp_path / "compared", seeds=1)
    pilot.count = 4
    assert [r.summary.rounds for r in small(pilot, rounds=50).results] == [3, 3]
    assert pilot.seconds == 2 * 50 * 4
    pilot, data = Pilot(tmp_path, seeds=1), load("heart-disease").partition(seed=0)
    pilot.count = 4
    model, trained = build("linear", data.input_shape, 2), []

    def search(seed: int) -> float:
        run = pilot.fit(model, data, FedAvg(lr=0.1), rounds=50, seed=seed, local_steps=1, batch_size=None)
        trained.append(run.trained.t)
        assert pilot.seconds == 50
        settings = {"grid": (0.0, 0.1), "regime": "cold", "tolerance": 0.0, "local_steps": 1, "batch_size": None}
        found = pilot.tune(model, data, FPFC(0.1), rounds=50, extend=0, check_every=1, train_on=0, **settings)
        trained.extend(row["rounds"] for row in found.rows)
        return sum(row["seconds"] for row in found.rows) * 50 / 3

    (searched,) = pilot.by_seed("x", search)
    assert trained == [3, 3, 3]
    assert pilot.seconds == pytest.approx(4 * (50 + searched))


def test_a_pilot_trains_one_place_of_a_choice_and_counts_all_its_trials(tmp_path):
    pilot, tried = Pilot(tmp_path, seeds=1), []

    def score(at):
        tried.append(at)
        pilot.seconds += 2
        return 0.0

    ladders = [Ladder((0.1, 0.2, 0.4)), Ladder((1.0, 2.0, 3.0))]
    found = pilot.all_of([(m, 0, lambda m=m: pilot.choose(m, score, ladders, 18)) for m in "ab"])
    assert found == tried == [(0.2, 2.0)] * 2
    assert pilot.seconds == 2 * 2 * 18


def test_a_choice_at_an_edge_goes_on_with_more_trials_and_trains_none_again(tmp_path):
    """The best of 1, 2, 4, ... is 64, which lies beyond the ladder."""
    bench, tried = Bench(tmp_path), []

    def score(at):
        tried.append(at[0])
        return -abs(at[0] - 64)

    assert bench.choose("step", score, [Ladder((1.0, 2.0, 4.0))], 4, 8, 16) == (64.0,)
    assert bench.choices == {"step": (8, 0)}
    assert sorted(tried) == sorted(set(tried))
    assert len(tried) == 8


def test_a_middle_size_is_estimated_before_it_starts(cli, monkeypatch):
    monkeypatch.setitem(RECIPES, "fedslr/table4", started("fedslr/table4"))
    before, _, _ = cli("reproduce", "fedslr/table4", "--scale", "middle").out.rpartition("STARTED")
    assert "a few seconds on this machine" in before
    cli("reproduce", "fpfc/table1", "--scale", "middle").line(2, "expected small or paper for fpfc/table1")


def test_a_value_that_ctrl_c_cut_short_is_not_kept(tmp_path):
    bench, data = Bench(tmp_path), load("heart-disease").partition(seed=0)
    model = build("linear", data.input_shape, 2)

    def rounds(stop: int) -> int:
        def press(progress):
            if progress.round == stop:
                signal.raise_signal(signal.SIGINT)

        return fit(model, data, FedAvg(lr=0.1), rounds=3, callbacks=[press]).trained.t

    with pytest.raises(KeyboardInterrupt):
        bench.once("x", lambda: rounds(1))
    assert bench.once("x", lambda: rounds(99)) == 3


def test_a_search_that_ctrl_c_cuts_short_ends_the_recipe(tmp_path, monkeypatch):
    """In the first value, when there is no best one to be asked for."""
    data = load("heart-disease").partition(seed=0, validation_fraction=0.2)
    model, step = build("linear", data.input_shape, 2), Loop.step
    monkeypatch.setattr(Loop, "step", lambda loop: (step(loop), signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        Bench(tmp_path).tune(model, data, FPFC(lr=0.1), grid=[0.1, 0.2], rounds=3, train_on=0).best  # noqa: B018


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_seeds_are_computed_side_by_side_and_read_here(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel, "room", lambda device="cpu": 2)
    bench = Bench(tmp_path, seeds=[3, 5, 8])
    found = bench.by_seed("x", lambda seed: {"seed": seed, "process": os.getpid()})
    assert [f["seed"] for f in found] == [3, 5, 8]
    assert len({os.getpid(), *(f["process"] for f in found)}) == 3
    assert bench.by_seed("x", lambda seed: pytest.fail("computed again")) == found


def test_methods_may_depend_on_the_seed(tmp_path, monkeypatch):
    data = load("heart-disease").partition(seed=0)
    model, rates = build("linear", data.input_shape, 2), {0: 0.1, 1: 0.2, 2: 0.3}
    tables = {}
    for room in (1, 2):
        monkeypatch.setattr(parallel, "room", lambda device="cpu", room=room: room)
        found = Bench(tmp_path / str(room)).compare(
            "runs", model, data, lambda seed: {"FedAvg": FedAvg(lr=rates[seed])}, rounds=3, batch_size=None
        )
        assert [r.seed for r in found.results] == [0, 1, 2]
        used = [tomllib.loads((r.folder / "config.toml").read_text())["algorithm"]["lr"] for r in found.results]
        assert used == [0.1, 0.2, 0.3]
        tables[room] = metric_of(found, "FedAvg").tolist()
    assert tables[1] == tables[2]


def test_a_claim_is_decided_by_the_paired_interval():
    """Over splits of the same samples by Nadeau and Bengio: s^2 (1/4 + 1/3), a quarter tested, for s^2/4."""
    a, b = np.array([0.8, 0.9, 0.85, 0.7]), np.array([0.7, 0.82, 0.75, 0.61])
    test, mean = stats.ttest_rel(a, b), (a - b).mean()
    gap, found = test.confidence_interval(0.95), ordered("a above b", a, b)
    assert found.holds is True
    assert found.p == pytest.approx(test.pvalue)
    half = (gap.high - mean) * (7 / 3) ** 0.5
    assert f"{gap.low:+.3g} to {gap.high:+.3g}" in found.evidence
    assert f"{mean - half:+.3g} to {mean + half:+.3g}" in ordered("", a, b, share=0.25).evidence
    assert ordered("b above a", b, a).holds is False
    assert ordered("noise", a, a + np.array([0.1, -0.1, 0.1, -0.1])).holds is None
    assert ordered("one seed", a[:1], b[:1]).holds is None


def test_claims_are_corrected_over_their_table_and_edges_are_marked():
    """p of .001, .02 and .03 alone: Holm asks .05/3, .05/2 and .05 of them, and stops at the first that fails."""
    claims = [Claim(str(p), True, "", p) for p in (0.03, 0.001, 0.02)]
    claims.append(Claim("no interval", True, ""))
    assert [row[3].text for row in claims_table(claims).rows] == ["decided", "decided", "decided", "–"]
    claims[2] = claims[2]._replace(p=0.026)
    assert [row[3].text for row in claims_table(claims).rows] == ["not decided", "decided", "not decided", "–"]
    table = beside("T", ["accuracy"], {"m": [("84.97", ours([0.8, 0.9], 100))]})
    assert table.headers == ["method", "accuracy, paper", "accuracy, ours"]
    assert [c.text for c in table.rows[0]] == ["m", "84.97", "85.00 ± 7.07"]
    low, inside = (decided("", low, 1.0, 0.5) for low in (-0.09, -0.2))  # widths 1.09 and 1.2
    assert (low.edge, inside.edge) == (True, False)
    assert claims_table([low]).rows[0][3].text == "not decided, edge"


def test_a_recipe_says_how_many_edges_are_left(tmp_path):
    """A choice that ended inside, one of too few trials, and the same read back; nothing kept is computed twice."""
    calls = []
    for _ in range(2):
        bench = Bench(tmp_path)
        ladder = [Ladder((0.1, 0.2, 0.3))]
        assert bench.choose("inside", lambda at: -abs(at[0] - 0.2), ladder, 3) == (0.2,)
        assert bench.choose("cut", lambda at: at[0], ladder, 3) == (0.3,)
        assert bench.once("x", lambda: calls.append(1) or {"a": np.float64(0.5)}) == {"a": 0.5}
        assert bench.tuning() == ["tuned by validation: 2 choices of 3 trials; edges left: 1 (cut)"]
    assert len(calls) == 1
    found = replace(find("fedslr/table2"), run=lambda bench: Outcome(notes=["a"])).outcome(bench)
    assert found.notes == ["a", *bench.tuning()]


def test_a_choice_that_is_cut_off_goes_on_behind_its_last_trial(tmp_path):
    tried = []

    def score(at):
        tried.append(at)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return {(0.1,): -math.inf, (0.2,): 1.0, (0.3,): math.nan}[at]

    with pytest.raises(KeyboardInterrupt):
        Bench(tmp_path).choose("x", score, [Ladder((0.1, 0.2, 0.3))], 3)
    assert Bench(tmp_path).choose("x", score, [Ladder((0.1, 0.2, 0.3))], 3) == (0.2,)
    assert tried == [(0.2,), (0.1,), (0.3,), (0.3,)]


FPFC_PAPER = "1 3 4 5 6 7 8 9 e1 e2 e3 e4 e5 e6", "1 2 3 e1 e2 e3 e4"
NUMBERS = {  # of figures and tables; Figure 1 of FedSLR is a drawing
    "fpfc": [f"{kind}{'-' * n.startswith('e')}{n}" for kind, of in zip(("figure", "table"), FPFC_PAPER, strict=True)
             for n in of.split()],
    "fedslr": [*(f"table{k}" for k in range(1, 10)), *(f"figure{k}" for k in (2, 3, 4, 5))],
}  # fmt: skip


@pytest.mark.parametrize("paper", NUMBERS)
def test_every_figure_and_table_has_its_number(paper):
    for kind in NUMBERS[paper]:
        number = re.sub("^(figure|table)-?", "", kind).upper().replace("E", "E.")
        assert number in find(f"{paper}/{kind}").title


def test_a_name_means_one_recipe_and_the_list_has_every_one(cli):
    names = [n for r in recipes().values() for n in (r.name, *r.also)]
    assert len(set(names)) == len(names)
    assert all(find(n) is r for r in recipes().values() for n in r.also)
    assert find("fedslr/table8") is find("fedslr/table7")
    listed, unknown = cli("reproduce").out, cli("reproduce", "fpfc/tabel1")
    assert all(name in listed for name in names)
    assert (unknown.status, len(unknown.err.splitlines())) == (2, 1)
    assert "fpfc/table1" in unknown.err


def test_another_name_shares_the_folder(cli, monkeypatch, tmp_path):
    """So that what one name has computed is not computed again under the other."""
    monkeypatch.setitem(RECIPES, "fedslr/table7", started("fedslr/table7"))
    said = cli("reproduce", "fedslr/table8").done()
    assert "fedslr/table7" in said.out
    assert [p.name for p in (tmp_path / "runs" / "reproduce").iterdir()] == ["fedslr-table7-small"]


def started(name):
    """The recipe with nothing to compute, which says when it starts."""

    def run(bench):
        """Nothing."""
        print("STARTED")
        return Outcome()

    return replace(recipes()[name], run=run)


@pytest.mark.parametrize("name", ALL)
def test_time_and_settings_are_said_before_it_starts(name, cli, monkeypatch):
    """The estimate for paper scale, and of every setting whose it is: the paper's, the released code's, or ours."""
    r = started(name)
    assert r.title
    assert find(name).about
    assert all(0 < r.minutes[size] for size in SIZES)
    assert {s.source for size in r.sizes for s in r.settings(size)} <= {"paper", "code", "ours"}
    monkeypatch.setitem(RECIPES, name, r)
    before, _, _ = cli("reproduce", name, "--scale", "paper", "--yes").out.partition("STARTED")
    said = re.search(rf"(?:about (\d+) (min|h|days)|a few seconds) on {re.escape(r.machine)}", before)
    assert said
    unit = {"min": 1, "h": 60, "days": 24 * 60, None: 1}[said[2]]
    assert abs(int(said[1] or 0) * unit - r.minutes["paper"]) <= max(unit / 2, 0.5)
    assert re.search(r"what +whose +value", before)
    for setting in r.settings("paper"):
        assert re.search(rf"{re.escape(setting.key[:12])}.* {setting.source} ", before)


HEAVY = {
    "fpfc/attacks-images", "fpfc/figure4", "fpfc/figure7", "fpfc/figure8-images", "fpfc/figure9",
    "fpfc/sensitivity-images", "fpfc/table-e2", "fpfc/table-e3", "fpfc/table-e4", "fpfc/table2-images", "fpfc/table3",
    "fedacs/figure1", "board/full", "board/images", "board/small", "adapters/sentences-heads", "adapters/images-heads",
    "adapters/sentences-lora", "adapters/images-lora", "adapters/groups",
}  # fmt: skip


# one for each thing that a recipe may read of its runs, or tune by
RECORDED = {"fpfc/table1", "fpfc/figure-e1", "fpfc/progress", "fedslr/table3", "fedslr/table1", "board/clusters"}


OFTEN = (
    "board/clusters", "fedacs/quantile-path", "fedcet/figure1", "fedslr/table3", "flamby/heart", "fpfc/figure3",
    "fpfc/progress",
)  # fmt: skip
SELDOM = [pytest.param(n, marks=pytest.mark.long) if n in HEAVY else n for n in ALL if n not in OFTEN]


@pytest.mark.parametrize("name", OFTEN)
def test_one_recipe_of_each_paper_runs_to_its_end(name, tmp_path, request, monkeypatch):
    rehearsed(name, tmp_path, request, monkeypatch)


@pytest.mark.parametrize("name", SELDOM)
def test_a_recipe_runs_to_its_end(name, tmp_path, request, monkeypatch):
    rehearsed(name, tmp_path, request, monkeypatch)


def rehearsed(name, tmp_path, request, monkeypatch):
    """A rehearsal: one round of everything; tables, figures and page are written, and again from its record."""
    r = RECIPES[name]
    if name.startswith("adapters/") and (missing := absent("images" if "images" in name else "sentences")):
        pytest.skip(f"not installed: {', '.join(missing)}")
    where = next((request.getfixturevalue("data_dir")(folder) for folder in r.data), None)
    bench = Bench(tmp_path, "small", 1, data_dir=where, rehearse=True)
    outcome = r.run(bench)
    page = write(r, bench, outcome)
    assert outcome.tables or outcome.figures
    assert page.read_text().startswith(f"# {name}")
    assert len(list(tmp_path.glob("*.svg"))) == len(outcome.figures)
    shown = (tmp_path / "page.html").read_text()
    assert shown.count("<caption>") == len(outcome.tables) + bool(outcome.claims) + 1  # the settings
    assert shown.count("<figure ") == len(outcome.figures)
    if name in RECORDED:
        again = Bench(tmp_path / "again", "small", 1, data_dir=where, rehearse=True)
        unpack(read(pack(bench, name)), again.folder)
        for place, what in ((jobs, "fit"), (Bench, "fit"), (Bench, "tune")):
            monkeypatch.setattr(place, what, lambda *args, **given: pytest.fail("trained again"))
        write(r, again, r.run(again))
        files = [p for p in again.folder.iterdir() if p.is_file()]
        assert again.folder / "outcome.md" in files
        assert all(p.read_bytes() == (tmp_path / p.name).read_bytes() for p in files)
