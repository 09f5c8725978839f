"""Verdicts on constructed numbers: what must count as a gain, a loss, noise, or as undecided."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from report_folders import noisy, write_comparison, write_run
from safetensors.numpy import save, save_file

from polyfed import report
from polyfed.base.errors import RunError
from polyfed.metrics import terms
from polyfed.report import intervals, pairs, summary
from polyfed.report.intervals import Spread
from polyfed.report.pairs import FEW, ONE_SEED, UNCLEAR, UNTESTED, Evidence, mean_of, sample_std
from polyfed.report.verdicts import _apart as apart
from polyfed.runs.numbers import Numbers

ROLES = {"local": "own", "fedavg": "common", "ditto": "personalised"}


def interval(differences, comparisons=1, floor=0.0):
    """Without samples, and with a tested share of 0, splits are independent: Student's t."""
    return Evidence(Spread(np.array(differences), floor=floor)).interval(comparisons)


def verdict(values, sign=1.0):
    """The verdict on {method: values by seed}, splits independent."""
    values = {k: v if isinstance(v, dict) else dict(enumerate(v)) for k, v in values.items()}

    def against(one, other):
        shared = [s for s in values[one] if s in values[other]]
        return Evidence(Spread(np.array([sign * (values[one][s] - values[other][s]) for s in shared])))

    return pairs.verdict({k: sign * mean_of(v.values()) for k, v in values.items()}, ROLES, against)


def test_interval_is_students_t_jointly_over_comparisons():
    """t(0.975, 2) = 4.302653; of two comparisons t(0.9875, 2) = 6.205347, by Bonferroni. One pair has no interval."""
    for comparisons, t in ((1, 4.302652729749464), (2, 6.205346816570866)):
        found, half = interval([1.0, 2.0, 3.0], comparisons), t / math.sqrt(3)
        assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
        assert found.seeds == 3
    assert (interval([0.5]).mean, interval([0.5]).sign) == (0.5, None)
    assert sample_std([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert math.isnan(sample_std([1.0]))


def test_equal_differences_are_not_taken_for_certainty():
    """Three seeds differ by one of twenty samples: the floor keeps zero inside, also of the mean of four such sites."""
    assert interval([0.05] * 3, floor=0.5 / 20).sign == 0
    whole = intervals.mean_spread([Spread(np.full(3, 0.05), floor=0.5 / 20)] * 4)
    assert whole.floor == pytest.approx(0.5 / 20 / 2)
    assert Evidence(whole).interval().high - 0.05 == pytest.approx(4.302653 * 0.5 / 20 / 2 / math.sqrt(3))
    none = interval([0.3 - 0.1, 0.2, 0.2])  # the same but for rounding
    assert (none.sign, none.clear, none.why) == (None, False, pairs.SAME)


OWN, COMMON, NOTHING = (0.60, 0.61, 0.62), (0.80, 0.81, 0.83), (math.nan, math.nan)
VERDICTS = {
    "a clear gain": ({"local": (0.70, 0.72, 0.71), "ditto": (0.80, 0.83, 0.81)}, "personalised (ditto)"),
    "every shared method loses": (
        {"local": (0.80, 0.82, 0.81, 0.80), "fedavg": (0.60, 0.61, 0.62, 0.60), "ditto": (0.7, 0.71, 0.7, 0.71)}, "own"
    ),
    "one that may be as good forbids own": (
        {"local": (0.80, 0.82, 0.81), "fedavg": (0.6, 0.6, 0.6), "ditto": (0.60, 0.95, 0.80)},
        "own or ditto (fedavg loses)",
    ),
    "noise": ({"local": (0.7, 0.8, 0.75), "fedavg": (0.8, 0.7, 0.78)}, UNCLEAR),
    "a small steady gain under a large common variation": (
        {"local": (0.5, 0.6, 0.7, 0.8), "fedavg": (0.52, 0.621, 0.719, 0.82)}, "common"
    ),
    "only seeds that both have are paired": ({"local": {0: 0.5, 1: 0.6}, "fedavg": {1: 0.7, 2: 0.9}}, ONE_SEED),
    "a single seed": ({"local": (0.5,), "ditto": (0.9,)}, ONE_SEED),
    "personalising adds nothing clear": ({"local": OWN, "fedavg": COMMON, "ditto": (0.84, 0.78, 0.83)}, "common"),
    "personalising adds": ({"local": OWN, "fedavg": COMMON, "ditto": (0.90, 0.92, 0.92)}, "personalised (ditto)"),
    "no own model": ({"fedavg": (0.6, 0.61, 0.6), "ditto": (0.8, 0.8, 0.81)}, "personalised (ditto)"),
    "no test samples": ({"local": NOTHING, "fedavg": NOTHING}, UNTESTED),
}  # fmt: skip


@pytest.mark.parametrize(("values", "text"), VERDICTS.values(), ids=VERDICTS)
def test_a_clients_verdict(values, text):
    """The common model is the reference where there is no own one; lower may be better."""
    found = verdict(values)
    assert found.text == text
    assert found.reference == (None if text == UNTESTED else next(iter(values)))
    assert found.choice == {"own": "local", "common": "fedavg", "personalised (ditto)": "ditto"}.get(text)
    lower = {
        k: {s: -x for s, x in (v if isinstance(v, dict) else dict(enumerate(v))).items()} for k, v in values.items()
    }
    assert verdict(lower, sign=-1.0) == found or text == UNTESTED
    if text == ONE_SEED:
        assert [g.seeds for g in found.gains.values()] == [1]


# from run folders, with what every test sample adds

PATIENTS, TESTED, SEEDS = 60, 20, 5


def write_scores(folder, correct, seed, sites):
    """Run folders whose clients hold 60 patients, 20 of them tested, anew for every seed. correct: {method: [sites, 60]
    whether its model is right about each patient, whatever it was trained on}."""
    rng = np.random.default_rng(seed)
    tested = [[np.sort(rng.permutation(PATIENTS)[:TESTED]) for _ in range(sites)] for _ in range(SEEDS)]
    values = {k: [[float(c[i, t].mean()) for i, t in enumerate(row)] for row in tested] for k, c in correct.items()}
    write_comparison(folder, values, samples=[PATIENTS - TESTED] * sites, test=[TESTED] * sites)
    for k, c in correct.items():
        for s, row in enumerate(tested):
            right = np.concatenate([c[i, t] for i, t in enumerate(row)]).astype(np.float32)
            ids = np.concatenate([i * PATIENTS + t for i, t in enumerate(row)])
            counts = np.full(sites, TESTED)
            save_file({"counts": counts, "id": ids, "accuracy": right}, folder / f"runs/{k}-seed{s}/scores.safetensors")
    return report.read(folder)


def test_clients_are_judged_jointly(tmp_path):
    """Of 31 one gains 60 points and is clear, one 20, which is clear by itself and not among so many."""
    rng = np.random.default_rng(3)
    local, fedavg = rng.random((31, PATIENTS)) < 0.6, rng.random((31, PATIENTS)) < 0.6
    local[30], fedavg[30] = rng.random(PATIENTS) < 0.3, rng.random(PATIENTS) < 0.97
    fedavg[29] = local[29]
    fedavg[29, np.flatnonzero(~local[29])[:14]] = True
    study = write_scores(tmp_path, {"local": local, "fedavg": fedavg}, 0, 31)
    found = study.verdicts.gains("fedavg", "local")
    assert [n for n, g in found.items() if g.sign] == ["client-30"]
    assert found["client-29"].low > 0
    verdicts = study.verdicts.clients
    assert {v.choice for n, v in verdicts.items() if n != "client-30"} == {None}
    assert verdicts["client-30"].text == "common"


def test_intervals_end_at_what_is_possible_and_agreement_everywhere_is_no_equality(tmp_path):
    def gain(local, fedavg):
        study = write_scores(tmp_path, {"local": local, "fedavg": fedavg}, 0, len(local))
        return study.verdicts.gains("fedavg", "local")["client-0"]

    found = gain(np.zeros((2, PATIENTS), dtype=bool), np.ones((2, PATIENTS), dtype=bool))
    assert (found.mean, found.high, found.sign) == (1.0, 1.0, 1)
    assert 0.5 < found.low < 1
    found = gain(*[np.random.default_rng(0).random((1, PATIENTS)) < 0.7] * 2)
    assert (found.sign, found.high > 0.02) == (0, True)
    values = {"local": [[0.99], [0.7], [0.95]], "fedavg": [[0.01], [0.02], [0.01]]}
    study = report.read(write_comparison(tmp_path / "errors", values, metric="ece"))
    found = study.verdicts.gains("fedavg", "local")["client-0"]
    assert 0.85 < found.mean < found.high <= 1


@pytest.mark.parametrize("known", [True, False])
def test_seeds_of_one_test_set_say_nothing_of_its_samples(tmp_path, known):
    one, other = np.repeat([1.0, 0.0], [12, 8]), np.repeat([1.0, 0.0], [11, 9])
    write_comparison(tmp_path, {"local": [[0.55]] * 3, "fedavg": [[0.6]] * 3}, samples=[40], test=[20])
    for k, right in (("local", other), ("fedavg", one)):
        for s in range(3):
            table = {"counts": np.array([20]), "id": np.arange(20), "accuracy" if known else "auc": right}
            save_file(table, tmp_path / f"runs/{k}-seed{s}/scores.safetensors")
    study = report.read(tmp_path)
    for e in (study.verdicts.evidence("fedavg", "local")[0]["client-0"], study.verdicts.evidence("fedavg", "local")[1]):
        found = e.interval()
        assert (found.why == pairs.BLIND) is not known
        assert not found.clear
    if not known:
        assert study.verdicts.mean.text == pairs.BLIND


def write_added(folder, metric, added, classes=None, *, ids=None, **common):
    """Run folders from what every test sample adds. added: {method: [seed][client] arrays}; classes, ids: [client]"""
    sizes = [len(v) for v in next(iter(added.values()))[0]]
    ids = np.concatenate(ids) if ids is not None else np.arange(sum(sizes))
    values = {k: [[float(v.mean()) if np.isfinite(v.mean()) else None for v in row] for row in rows]
              for k, rows in added.items()}  # fmt: skip
    write_comparison(folder, values, metric=metric, test=sizes, **common)
    for k, rows in added.items():
        for seed, row in enumerate(rows):
            table = {"counts": np.array(sizes), "id": ids, metric: np.concatenate(row).astype(np.float32)}
            table |= {} if classes is None else {"class": np.concatenate(classes)}
            save_file(table, folder / f"runs/{k}-seed{seed}/scores.safetensors")
    return report.read(folder)


def one_ill_each(clients=4, seed=5):
    """({method: what each of 101 patients adds to AUC, one of them ill, under two equally good models}, classes)"""
    rng, y = np.random.default_rng(seed), np.arange(101) < 1
    common = rng.normal(size=(clients, 101))
    values = {k: [[terms.auc(0.7 * (c + rng.normal(size=101)) + y, y) for c in common]] for k in ("local", "fedavg")}
    return values, [y.astype(int)] * clients


def test_one_ill_patient_decides_nothing(tmp_path):
    """Without regard for classes: 0.130 worse (-0.184 to -0.076), two of four clients lose."""
    study = write_added(tmp_path, "auc", *one_ill_each())
    assert not any(g.clear for g in study.verdicts.gains("fedavg", "local").values())
    found = study.verdicts.mean_gain("fedavg", "local")
    assert (found.clear, found.enough) == (False, "more samples of the rarest class")
    assert "hint and no finding" in report.answer(study)
    older = write_added(tmp_path / "older", "auc", one_ill_each()[0])  # which does not say the classes: not used
    assert older.verdicts.mean_gain("fedavg", "local").why == pairs.ONE_SEED


def test_the_same_difference_under_every_seed_is_no_interval(tmp_path):
    values = {"local": [[0.60, 0.62]] * 5, "fedavg": [[0.61, 0.63]] * 5}
    study = report.read(write_comparison(tmp_path, values, metric="sensitivity"))
    assert study.verdicts.mean.text == pairs.SAME
    assert {v.text for v in study.verdicts.clients.values()} == {pairs.SAME}
    text = report.answer(study)
    assert text.startswith("The difference is the same under every seed and shows no spread")
    assert "A gain of" not in text


def test_scores_with_bounds_have_a_floor_in_every_client_and_in_the_mean(tmp_path):
    """50 test samples each: half a step is 0.01, over four clients 0.005; share 50/150, t(0.975, 2) = 4.302653."""
    values = {"local": [[0.80] * 4] * 3, "fedavg": [[0.805] * 4] * 3}
    study = report.read(write_comparison(tmp_path, values, metric="auc", samples=[100] * 4))
    found = study.verdicts.mean_gain("fedavg", "local")
    assert found.high - found.mean == pytest.approx(4.302653 * 0.005 * math.sqrt(1 / 3 + 1 / 2))
    assert (found.sign, study.verdicts.gains("fedavg", "local")["client-0"].sign) == (0, 0)


@pytest.mark.parametrize("told", [{"seed": 0}, {"test": "given"}])
def test_one_test_set_is_known_without_scores_per_sample(tmp_path, told):
    write_comparison(tmp_path, {"local": [[0.70], [0.71], [0.69]], "fedavg": [[0.72], [0.74], [0.72]]})
    for file in tmp_path.glob("runs/*/federation.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | told))
    study = report.read(tmp_path)
    assert study.verdicts.clients["client-0"].text == study.verdicts.mean.text == pairs.BLIND


def test_one_test_set_and_a_score_without_terms_is_not_called_one_seed(tmp_path):
    """Five seeds; nor is it said what seeds would show, as they do not show the chance."""
    added = {k: [[np.full(50, 1.0)] * 2] * 5 for k in ("local", "fedavg")}
    write_added(tmp_path, "loss", added)
    values = {"local": [[0.7 + 0.01 * s] * 2 for s in range(5)], "fedavg": [[0.95 + 0.01 * s] * 2 for s in range(5)]}
    kept = {f: f.read_bytes() for f in tmp_path.glob("runs/*/scores.safetensors")}
    study = report.read(write_comparison(tmp_path, values, metric="calibration-slope"))
    for file, data in kept.items():
        file.write_bytes(data)
    text = report.answer(study)
    assert text.startswith("All seeds test the same samples and do not show the chance in them")
    assert "one seed" not in text.lower()
    assert "A gain of" not in text
    assert study.verdicts.effort("fedavg", "local") is None


def test_a_client_with_one_test_sample_is_named(tmp_path):
    rng = np.random.default_rng(0)
    errors = [np.abs(rng.normal(size=n)) for n in (100, 100, 1)]
    added = {k: [[terms.rmse((q * e + rng.normal(0, 0.01, len(e))) ** 2) for e in errors] for _ in range(5)]
             for k, q in (("local", 2.0), ("fedavg", 1.0))}  # fmt: skip
    study = write_added(tmp_path, "rmse", added, samples=[400, 400, 4], classes=None)
    text = report.answer(study)
    assert text.startswith("Federating pays on average")
    assert "The mean is over 2 of 3 clients; fewer than 10 samples are tested at client-2 (1; " in text
    found = study.verdicts.clients
    assert (found["client-0"].choice, found["client-2"].text) == ("fedavg", pairs.LONE)


@pytest.mark.parametrize("lacking", [False, True])
def test_one_seed_is_said_beside_clients_that_lack_the_score(tmp_path, lacking):
    rng, y = np.random.default_rng(0), np.arange(200) < 80
    added = {k: [[terms.auc(rng.normal(size=200) + q * y, y) for _ in range(3)]]
             for k, q in (("local", 0.1), ("fedavg", 2.0))}  # fmt: skip
    for rows in added.values():
        rows[0][2] = rows[0][2] * (math.nan if lacking else 1.0)
    text = report.answer(write_added(tmp_path, "auc", added, [y.astype(int)] * 3))
    assert ("Means leave out client-2" in text) == lacking
    assert "One seed: the intervals are about these trained models" in text


def test_two_models_that_find_no_ill_patient_are_not_known_to_be_equal(tmp_path):
    """Four ill of 100 tested, none of them found by either: F1 is 0 twice, and one found would be 0.4."""
    y = (np.arange(100) < 4).astype(int)
    added = {k: [[terms.f1(np.zeros(100, dtype=int), y, np.ones(1))]] for k in ("local", "fedavg")}
    found = write_added(tmp_path, "f1", added, [y]).verdicts.gains("fedavg", "local")["client-0"]
    assert found.mean == 0
    assert found.high > 0.3


def test_all_clients_are_held_against_the_own_model_that_is_best_in_the_mean(tmp_path):
    values = {
        "local-a": noisy([0.60, 0.80, 0.70], 5, 0.01, 3),
        "local-b": noisy([0.80, 0.62, 0.70], 5, 0.01, 4),
        "fedavg": noisy([0.75, 0.75, 0.72], 5, 0.01, 5),
    }
    study = report.read(write_comparison(tmp_path, values, samples=[4000] * 3, test=[1000] * 3))
    verdicts = study.verdicts.clients
    assert {v.reference for v in verdicts.values()} == {study.verdicts.mean.reference} == {"local-b"}
    gains = study.verdicts.gains("fedavg", "local-b")
    assert {n: v.gains["fedavg"].mean for n, v in verdicts.items()} == {n: g.mean for n, g in gains.items()}
    said, each = summary.lines(study)
    assert "own model (local-b)" in said
    assert {line.name for line in each if line.verdict == "gains"} == {n for n, g in gains.items() if g.sign == 1}
    assert "client-1" in summary.headline(study)
    assert "local-b, of local-a and local-b the best in the mean" in report.client_table(study).to("markdown")


def test_levels_are_of_the_seeds_that_both_methods_have(tmp_path):
    """The first three splits are easy: 80 % and 82 % there, over all ten local has 73 %."""
    local = [[0.80 + 0.001 * s] if s < 3 else [0.70] for s in range(10)]
    fedavg = [[0.82 + 0.003 * s] for s in range(3)]
    text = report.answer(report.read(write_comparison(tmp_path, {"local": local, "fedavg": fedavg}, test=[1000])))
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    assert "fedavg reaches 82.3 % test accuracy against 80.1 %" in text
    assert "3 seeds in common (local has 10, fedavg 3)" in text
    assert "10 seeds" not in text


def test_methods_without_a_common_seed_are_not_compared(tmp_path):
    for label, first in (("local", 0), ("fedavg", 5)):
        for seed in range(first, first + 5):
            write_run(tmp_path / f"runs/{label}-seed{seed}", [0.7 + 0.01 * seed], algorithm=label, seed=seed)
    study = report.read(sorted(tmp_path.glob("runs/*")))
    text = report.answer(study)
    assert text.startswith("Nothing can be compared: no method has a seed in common with local.")
    assert "fedavg reaches 77.0 % test accuracy (5 seeds); local reaches 72.0 % test accuracy (5 seeds)" in text
    assert study.verdicts.clients["client-0"].text == pairs.UNPAIRED
    for seed in range(2):
        write_run(tmp_path / f"runs/ditto-seed{seed}", [0.9 - 0.02 * seed], algorithm="ditto", seed=seed)
    text = report.answer(report.read(sorted(tmp_path.glob("runs/*"))))
    assert "reaches 89.0 % test accuracy against 70.5 %" in text
    assert "fedavg has no seed in common with local: not compared." in text
    assert "– points" not in text


def test_a_combination_of_scores_without_terms_on_one_test_set_has_no_interval(tmp_path):
    """The runs say which samples they tested, though not what each adds."""
    write_run(tmp_path, [0.3], metric="calibration-slope")
    save_file({"counts": np.array([50]), "id": np.arange(50)}, tmp_path / "scores.safetensors")
    found = Numbers.of(tmp_path)
    parts, means = [found.added["client-0"]] * 5, [0.3, 0.31, 0.3, 0.32, 0.29]
    assert pairs.evidence(found.summary.leads, means, parts, (0.3, 100), 1.0).interval().why == pairs.BLIND
    anew = [(ids + np.array([s, 0]), none) for s, (ids, none) in enumerate(parts)]
    assert pairs.evidence(found.summary.leads, means, anew, (0.3, 100), 1.0).interval().sign == 1


def test_two_common_models_are_compared_in_the_mean_only(tmp_path):
    """At one site, splits do not show the luck of the training sets that both have in common."""
    rng = np.random.default_rng(2)
    correct = {"fedavg": rng.random((9, PATIENTS)) < 0.5, "scaffold": rng.random((9, PATIENTS)) < 0.9}
    study = write_scores(tmp_path, correct, 0, 9)
    assert study.verdicts.mean.choice == "scaffold"
    verdicts = study.verdicts.clients
    assert {v.text for v in verdicts.values()} == {pairs.BLIND}
    assert all(math.isnan(g.low) for v in verdicts.values() for g in v.gains.values())
    report.answer(study)


def test_what_would_be_enough_is_said_beside_an_absurd_interval(tmp_path):
    """-75 to +60: were such intervals hidden, those that are printed would be wrong more often than said."""
    values = {"local": [[30.0], [3.0], [20.0]], "fedavg": [[31.0], [2.0], [45.0]]}
    study = report.read(write_comparison(tmp_path, values, metric="rmse", classes=None))
    found = study.verdicts.clients["client-0"]
    assert found.text.startswith(FEW)
    assert found.text.endswith("not with such sites")
    gain = found.gains["fedavg"]
    assert (gain.sign, gain.clear) == (None, False)
    assert gain.low < -50 < 40 < gain.high
    _, (line,) = summary.lines(study) if len(study.names) > 1 else ("", [summary._each(study, "fedavg", "local")[0][1]])
    needs = f"); a verdict would take {gain.enough}"
    assert all(said in line.text for said in (needs, "to +", "a verdict would take more than a hundred times"))


@pytest.mark.parametrize("names", [("ditto", "fedavg"), ("fedavg", "ditto")])
def test_what_would_be_enough_is_that_of_the_method_shown(tmp_path, names):
    """RMSE of the own model 28 to 32: one method wavers, the other is better and wavers less."""
    wild, better = names
    values = {"local": [[30.0], [28.0], [32.0]], wild: [[38.0], [27.0], [24.0]], better: [[32.0], [27.0], [26.0]]}
    study = report.read(write_comparison(tmp_path, values, metric="rmse", classes=None))
    found = study.verdicts.clients["client-0"]
    needs = {method: g.enough for method, g in found.gains.items()}
    assert len(set(needs.values())) == 2
    assert found.shown == better
    assert found.text == f"{FEW}; it would take {needs[better]}"


def test_reading_scores_needs_no_torch_and_damaged_ones_are_refused_by_name(tmp_path):
    right = np.ones((1, PATIENTS), dtype=bool)
    write_scores(tmp_path, {"local": right, "fedavg": right}, 0, 1)
    code = f"from polyfed import report; report.answer(report.read({str(tmp_path)!r}))"
    code += "; import sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    file = tmp_path / "runs/fedavg-seed1/scores.safetensors"
    whole = file.read_bytes()
    short = {"counts": np.array([TESTED + 1]), "id": np.arange(TESTED), "accuracy": np.ones(TESTED)}
    for damage, told in ((whole[:-9], "not a readable safetensors"), (save(short), "one number per test sample")):
        file.write_bytes(damage)
        with pytest.raises(RunError, match=rf"fedavg-seed1/scores\.safetensors: .*{told}"):
            report.answer(report.read(tmp_path))


def test_the_effort_for_two_points_is_said(tmp_path):
    rng = np.random.default_rng(2)
    correct = {"local": rng.random((4, PATIENTS)) < 0.7, "fedavg": rng.random((4, PATIENTS)) < 0.7}
    text = report.answer(write_scores(tmp_path, correct, 0, 4))
    assert "A gain of 2 points in the mean" in text
    assert "with 5 seeds it would take about" in text
    assert "times as many samples" in text


# what the mean is over, what an interval is of, and what is too small or too chancy to be a verdict


def scored(folder, metric, sites, gains, seeds=4, fixed=False, own=0.3, spread=0.05, **more):
    """Own models and fedavg with scores per sample. sites: tested samples of each, a third of all; gains: of each"""
    rng, added = np.random.default_rng(5), {"local": [], "fedavg": []}
    for _ in range(seeds):
        ids = [i * 10**6 + (np.arange(n) if fixed else rng.permutation(3 * n)[:n]) for i, n in enumerate(sites)]
        rows = [np.clip(rng.normal(own, spread, n), 0.001, None) for n in sites]
        added["local"].append(rows)
        added["fedavg"].append([r - g + rng.normal(0, spread / 10, len(r)) for r, g in zip(rows, gains, strict=True)])
        more.setdefault("of", []).append(np.concatenate(ids))
    of = more.pop("of")
    write_added(folder, metric, added, samples=[2 * n for n in sites], classes=None, **more)
    for k in added:
        for s, row in enumerate(added[k]):
            table = {"counts": np.array(sites), "id": of[s], metric: np.concatenate(row).astype(np.float32)}
            save_file(table, folder / f"runs/{k}-seed{s}/scores.safetensors")
    return report.read(folder)


def test_the_mean_is_over_clients_that_test_ten_samples_whatever_the_others_score(tmp_path):
    whole = scored(tmp_path / "a", "brier", [90, 60, 40], [0.01] * 3)
    assert (whole.bearing, whole.needs) == (tuple(whole.names), {})
    sites, mean = whole.verdicts.evidence("fedavg", "local")
    same, found = pairs.together([*sites.values()]).interval(), mean.interval()
    assert (found.low, found.high) == pytest.approx((same.low, same.high), rel=1e-9)
    for tiny, name in ((-0.2, "b"), (0.2, "c")):
        study = scored(tmp_path / name, "brier", [90, 60, 40, 3], [0.01] * 3 + [tiny])
        gain, apart = study.verdicts.mean_gain("fedavg", "local"), study.verdicts.evidence("fedavg", "local")[0]
        rest = pairs.together([e for n, e in apart.items() if n != "client-3"]).interval()
        assert (gain.low, gain.high) == pytest.approx((rest.low, rest.high), rel=1e-9)
        assert gain.mean == pytest.approx(0.01, abs=0.003)
        assert study.verdicts.gains("fedavg", "local")["client-3"].mean == pytest.approx(tiny, abs=0.02)
        assert study.needs == {"client-3": (3, 30)}
        text, table = report.answer(study), report.compare_table(study)
        assert "over 3 of 4 clients; fewer than 10 samples are tested at client-3 (3; 30 samples in all" in text
        levels = {r[0].text: r[1].values["brier_mean"] for r in table.rows}
        assert levels["local"] - levels["fedavg"] == pytest.approx(gain.mean)
    few = scored(tmp_path / "d", "brier", [6, 5, 40], [0.01] * 3)
    assert few.bearing == tuple(few.names)
    assert "Too few clients test 10 samples" in report.answer(few)


def test_a_mean_over_clients_that_samples_contradict_is_said_in_the_headline(tmp_path):
    """Six small sites gain 0.02 and two that hold 95 % of the samples lose 0.002."""
    sites, gains = [15] * 6 + [800] * 2, [0.02] * 6 + [-0.004] * 2
    study = scored(tmp_path, "brier", sites, gains)
    assert study.verdicts.mean_gain("fedavg", "local").sign == 1
    assert study.verdicts.sample_gain("fedavg", "local").sign == -1
    said = summary.headline(study)
    assert "Weighted by samples it does not pay: 0.003 worse" in said
    assert "95 % of them are at clients that are worse off" in said
    exact = np.average([g.mean for g in study.verdicts.gains("fedavg", "local").values()], weights=sites)
    assert study.verdicts.sample_gain("fedavg", "local").mean == pytest.approx(exact)


@pytest.mark.parametrize(
    ("fixed", "seeds", "of", "said"),
    [(True, 3, "sets", "these training sets"), (False, 3, "procedure", "sets of this size"),
     (True, 1, "models", "these trained models")],
)  # fmt: skip
def test_every_page_says_what_an_interval_is_of(tmp_path, fixed, seeds, of, said):
    study = scored(tmp_path, "brier", [60, 60], [0.01] * 2, seeds, fixed)
    assert study.verdicts.of("fedavg", "local") == of
    assert said in report.client_table(study).to("markdown")
    assert (said in report.answer(study)) == (of != "procedure")


@pytest.mark.parametrize("gain", [1e-5, -1e-5, 1e-9])
def test_what_printed_figures_cannot_show_is_no_verdict(tmp_path, gain):
    rng = np.random.default_rng(0)
    own = [[rng.uniform(0.1, 0.4, 90) for _ in range(3)] for _ in range(4)]
    added = {"local": own, "fedavg": [[v.astype(np.float64) - gain for v in row] for row in own]}
    study = write_added(tmp_path, "brier", added, classes=None)
    for s, row in enumerate(added["fedavg"]):  # float32 would round the smallest one away
        table = {"counts": np.array([90] * 3), "id": np.arange(270), "brier": np.concatenate(row)}
        save_file(table, tmp_path / f"runs/fedavg-seed{s}/scores.safetensors")
    text = report.answer(study)
    assert study.verdicts.mean_gain("fedavg", "local").sign == 0
    assert {g.sign for g in study.verdicts.gains("fedavg", "local").values()} == {0}
    assert text.startswith("No clear difference on average")
    assert "the same to three decimals" in text
    assert study.verdicts.clients["client-0"].text == UNCLEAR


def test_heavy_tails_take_the_whole_term_and_advise_a_robust_loss(tmp_path):
    rng = np.random.default_rng(1)
    for metric, cure in (("rmse", False), ("mae", True)):
        for gross in (False, True):
            added = {"local": [], "fedavg": []}
            for _ in range(3):
                noise = [rng.normal(size=200) * np.where(rng.random(200) < 0.02 * gross, 20, 1) for _ in range(3)]
                for k, off in (("local", 0.4), ("fedavg", 0.1)):
                    errors = [np.abs(e + off * rng.normal(size=200)) for e in noise]
                    added[k].append(errors if cure else [terms.rmse(e**2) for e in errors])
            study = write_added(tmp_path / f"{metric}{gross}", metric, added, classes=None)
            sites, mean = study.verdicts.evidence("fedavg", "local")
            assert {e.spread.whole for e in (*sites.values(), mean)} == {gross}
            text = report.answer(study)
            assert ("a robust loss" in text, "of MAE they may be too short" in text) == (gross, gross and cure)
    plain = Spread(np.array([1.0, 2.0, 4.0]), 0.5, 20.0)
    whole = intervals.variance(Spread(plain.means, 0.5, 20.0, whole=True), 0.25)
    assert whole[0] == pytest.approx(0.5 + plain.means.var(ddof=1) * (1 / 3 + 1 / 3))
    assert intervals.variance(Spread(plain.means, 0.5, 20.0, whole=True), None) == intervals.variance(plain, None)


def test_sites_of_two_shared_methods_take_the_whole_term_and_their_mean_does_not(tmp_path):
    rng = np.random.default_rng(2)
    correct = {k: rng.random((3, PATIENTS)) < 0.7 for k in ("local", "fedavg", "ditto")}
    study = write_scores(tmp_path, correct, 0, 3)
    for other, whole in (("fedavg", True), ("local", False)):
        sites, mean = study.verdicts.evidence("ditto", other)
        assert ({e.spread.whole for e in sites.values()}, mean.spread.whole) == ({whole}, False)


def test_what_the_best_of_equal_methods_shows_by_chance_is_said_where_nothing_is_clear(tmp_path):
    """Five methods, each right about its own 70 % of 240 patients, of whom five splits test a third: the variance is
    v/n (1 + (1 - f)/(S f)), and the best of five is 1.163 deviations ahead."""
    rng = np.random.default_rng(3)
    correct = {k: rng.random((4, PATIENTS)) < 0.7 for k in ("local", *(f"fedavg-{i}" for i in range(5)))}
    study = write_scores(tmp_path, correct, 0, 4)
    assert study.verdicts.best_by_chance == pytest.approx(1.163 * math.sqrt(1.4 * 0.7 * 0.3 / 240), rel=0.2)
    assert "The best of 5 methods that are all worth the same would look" in report.answer(study)
    correct["fedavg-0"] = np.ones((4, PATIENTS), dtype=bool)
    assert "that are all worth the same" not in report.answer(write_scores(tmp_path, correct, 0, 4))


def test_re_splits_are_not_taken_for_other_data():
    """Rows that are split again by chance, with few rows and many classes; and a partition that is drawn again."""
    rng = np.random.default_rng(0)
    for sites, rows, classes in ((6, 20, 10), (5, 9, 5), (4, 200, 2)):
        for _ in range(60):
            y = rng.integers(classes, size=(sites, rows))
            one, other = (
                np.array([np.bincount(rng.permutation(r)[: 2 * rows // 3], minlength=classes) for r in y]) * 1.0
                for _ in range(2)
            )
            assert not apart(one, other)
    drawn = [rng.multinomial(60, rng.dirichlet([0.5] * 10, size=6)) * 1.0 for _ in range(2)]
    assert apart(*drawn)
