"""FPFC's recipes: every figure and table of the paper under its own number, and what is decided in seconds."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.algorithms.fpfc import FPFC
from polyfed.base.randomness import client_keys
from polyfed.studies.compare import Comparison
from polyfed_papers import fpfc as problems
from polyfed_papers.fpfc import Problem, attacks, figures, methods, progress, stated
from polyfed_papers.fpfc.asynchronous import Blended
from polyfed_papers.fpfc.faster import arrived
from polyfed_papers.fpfc.methods import ANGLES, by_validation, choices, nine
from polyfed_papers.fpfc.sensitivity import Uneven
from polyfed_papers.recipes import Bench
from polyfed_papers.recipes.recipe import grouping_of, joined


def problem(fpfc, model=None, federation=None, **work):
    return Problem("planted", model, federation, fpfc, rounds=20, work=work, clusters=4)


def test_the_better_candidate_is_chosen_on_validation_data(tmp_path):
    """A step of zero learns nothing; one that diverges is never chosen; test data have no say."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 60, 4))
    y = x @ rng.normal(size=4)[:, None]
    part = [(a[:30], b[:30]) for a, b in zip(x, y, strict=True)]
    held = [(a[30:], b[30:]) for a, b in zip(x, y, strict=True)]
    false = [(a, -b) for a, b in held]
    data = pf.Federation.from_arrays(part, validation=held, test=false)
    model = lambda seed: pf.models.build("linear", (4,), 1, init="zeros")  # noqa: E731
    planted = problem(FPFC(0.1), model, local_steps=5, batch_size=None, loss="mse")
    bench = Bench(tmp_path)
    still, good, wild = (
        by_validation(bench, "choice", planted, data, lambda at: pf.FedAvg(at[0]), 1000, (lr,))
        for lr in (1e-9, 0.1, 1e6)
    )
    assert good > still > wild == -np.inf


def test_attacked_runs_are_scored_and_chosen_on_the_benign_devices_alone(tmp_path):
    """By validation data, by no test data; Local under attack has the benign devices' accuracies without."""
    bench = Bench(tmp_path, seeds=2)
    small = replace(problems.synthetic(bench), rounds=2)
    runs = {lam: attacks.attacked(small, "sign flip", 0.4, replace(small.fpfc, lam=lam)) for lam in (0.5, 9)}
    found = {lam: [run(bench, seed) for seed in (0, 1)] for lam, run in runs.items()}
    numbers, scores = grouping_of(attacks.honest(joined(found[9]), 0.4), "FPFC")
    for seed in (0, 1):
        frame = found[9][seed].results[0].clients
        honest = frame[frame["test_accuracy"].notna()]
        assert len(honest) < len(frame) == 20
        assert numbers[seed] == honest["assigned"].nunique() <= len(honest)
        assert scores[seed] == adjusted_rand_score(honest["cluster"], honest["assigned"])

    def told(lam, seed, validation, test):
        run = found[lam][seed].results[0]
        values = {"validation_accuracy": validation, "test_accuracy": test}
        return replace(run, clients=run.clients.assign(**values))

    known = {lam: Comparison([told(lam, 0, lam, 1 / lam), told(lam, 1, 1 / lam, lam)]) for lam in runs}
    assert [attacks.best_validated(known, [seed]) for seed in (0, 1)] == [9, 0.5]

    plain = attacks.attacked(small, "local", 0.0, pf.Local(0.1))(bench, 0)
    forged = bench.compare("forged", small.model, small.federation, {"Local": pf.Local(0.1)}, seeds=[0], rounds=2,
                           evaluate_every=0, attack=pf.threats.SignFlip(10.0, ratio=0.4), **small.work)  # fmt: skip
    honest, everyone = (attacks.benign(of, [0]).item() for of in (attacks.honest(plain, 0.4), plain))
    assert honest == pytest.approx(attacks.benign(forged, [0]).item(), rel=1e-12) != everyone


def test_rows_as_released_have_the_released_codes_share_of_the_samples(tmp_path):
    """80 % of a device's samples, the same test samples as on 64 %, and lambda chosen on the very same trials."""
    bench = Bench(tmp_path)
    less, more = (problems.synthetic(bench, validation=share) for share in (None, 0.0))
    part, whole, tried = less.federation(0), more.federation(0), methods.validated(more, 0)
    share = whole.train.counts / (whole.train.counts + whole.test.counts)
    assert share == pytest.approx(np.full(20, 0.8), abs=0.01)
    assert torch.equal(part.test.x, whole.test.x)
    assert torch.equal(part.train.x, tried.train.x)


def test_a_choice_may_end_at_one_cluster_or_at_every_device_alone():
    """PACFL's smallest and largest quantile and a CFL that never splits: where a search ends, and is at no edge."""
    usual = nine(problem(FPFC(0.1)))
    angles = {kind: np.linspace(10.0, 80.0, 45).tolist() for kind in ANGLES}
    found = choices(usual, angles, (0.5, 1.0), (0.0, 0.5))
    matrix = torch.zeros(10, 10)
    matrix[tuple(np.triu_indices(10, 1))] = torch.tensor(angles["sum"], dtype=matrix.dtype)
    for kind in range(len(ANGLES)):
        groups = [len(found["PACFL"].make((q, kind))._clusters(matrix + matrix.T).unique()) for q in (0.0, 1.0)]
        assert groups == [10, 1]
    assert (found["CFL"].make((0.0, 2.0)).eps1, found["CFL"].ladders[0].limits.ge) == (0.0, 0)
    for label, (ladders, _) in found.items():
        ends = [(ladder.limits.ge, ladder.limits.le) for ladder in ladders]
        assert all(low is not None for low, _ in ends), label


def test_no_trial_has_a_counted_seed_and_all_methods_have_as_many(tmp_path, monkeypatch):
    """Six searches on the validation data of a seed; every trial's own seed lies beyond all that count."""
    trials = []

    def asked(bench, key, problem, data, make, seed, at):
        trials.append((key, seed))
        return -sum(at)

    monkeypatch.setattr(methods, "by_validation", asked)
    monkeypatch.setattr(methods, "angles_of", lambda *_: {kind: [1.0, 2.0, 3.0] for kind in ANGLES})
    bench = Bench(tmp_path)
    monkeypatch.setattr(bench, "all_of", lambda tasks: [task() for _, _, task in tasks])  # here, where they are counted
    methods.tuned_nine(bench, "choice", problems.synthetic(bench), (0.5, 0.6, 0.7), seed=2)
    assert {count for _, count in Counter(key for key, _ in trials).items()} == {methods.TRIALS}
    assert len({key for key, _ in trials}) == 6
    assert {seed for _, seed in trials} == {2 + methods.UNCOUNTED}
    assert bench.tuning() == ["tuned by validation: 6 choices of 12 trials; edges left: 0"]


def test_squared_l2_pulls_together_and_never_merges():
    """The linear system's solution has a zero gradient; the mean of the models is pulled by none."""
    data = figures.toy(0, "figure")
    w = figures.ridge(data, 0.1)
    x, y = (np.stack([data.train.client(i)[k].numpy().ravel() for i in range(data.n)]) for k in (0, 1))
    slope = (x * (x * w[:, None] - y)).mean(1) + 0.1 * (w - w.mean())
    assert np.abs(slope).max() < 1e-12
    assert len(set(w)) == data.n


@pytest.mark.parametrize(
    ("scale", "shared", "own"), [("small", 197 * stated.HIDDEN, 10 * stated.HIDDEN + 10), ("middle", 2572, 4010)]
)
def test_all_layers_but_the_last_are_shared_on_images(scale, shared, own, data_dir, tmp_path):
    """At every size; the small one's perceptron is trained by the compiled kernel or in closed form."""
    bench = Bench(tmp_path, scale, 1, data_dir("mnist"), rehearse=True)
    images = problems.images(bench, "MNIST")
    run = bench.fit(images.model(0), images.federation(0), images.fpfc, rounds=1, evaluate_every=0, **images.work)
    assert run.trained.server["w"].shape == (20, own)
    assert (run.trained.server["common"].numel(), run.clusters.shape) == (shared, (20,))


def test_newcomers_are_kept_out_of_training_and_of_the_choice_of_settings():
    data = pf.Federation.from_arrays([(np.full((4, 1), float(k)), np.arange(4) % 2) for k in range(20)])
    old, new = progress.parted(data)
    first = [[float(part.train.client(i)[0][0, 0]) for i in range(part.n)] for part in (old, new)]
    assert first[1] == [4, 9, 14, 19]
    assert sorted(first[0] + first[1]) == list(range(20))


def test_shared_layers_are_moved_part_of_the_way():
    """After one round from a common start: start + part (mean - start); the fused layers as FPFC has them."""
    rng = np.random.default_rng(0)
    data = pf.Federation.from_arrays([(rng.normal(size=(12, 5)), rng.integers(0, 3, 12)) for _ in range(4)])
    model = pf.models.build("mlp", (5,), 3, hidden=4)
    start = torch.cat([q.detach().flatten() for q in model.parameters()])[: 5 * 4 + 4]
    work = {"rounds": 1, "local_steps": 3, "batch_size": None, "evaluate_every": 0}
    usual, blended = (
        pf.fit(model, data, method, **work).trained.server
        for method in (FPFC(0.1, shared_layers="body"), Blended(0.1, shared_layers="body", part=0.2))
    )
    assert torch.allclose(blended["common"], start + 0.2 * (usual["common"] - start), atol=1e-7)
    assert torch.equal(blended["w"], usual["w"])


@pytest.mark.parametrize("most", [2, 10])
def test_drawn_steps_are_uniform_over_clients_and_over_rounds(most):
    rule = Uneven(1, most)
    keys = client_keys([f"client-{i}" for i in range(2000)])
    over_clients = rule(3, 5, keys)
    over_rounds = np.concatenate([rule(3, t, keys[:1]) for t in range(2000)])
    for drawn in (over_clients, over_rounds):
        counts = np.bincount(drawn, minlength=most + 1)
        assert counts[0] == 0
        assert len(counts) == most + 1
        assert chisquare(counts[1:]).pvalue > 1e-3
    assert not np.array_equal(over_clients, rule(4, 5, keys))
    # neighbouring rounds and clients are independent: the pairs are uniform too
    pairs = np.bincount((over_rounds[1:] - 1) * most + over_rounds[:-1] - 1, minlength=most**2)
    assert chisquare(pairs).pvalue > 1e-3
    assert np.array_equal(Uneven(24, most)(3, 5, keys), 24 * over_clients)


@pytest.mark.parametrize(
    ("scores", "rounds"), [([1, 1, 1], 25), ([0.5, 1, 1], 45), ([1, 0.5, 1], 65), ([0.5, 1, 0.9], 65)]
)
def test_a_run_has_arrived_where_its_clusters_stay_right(scores, rounds):
    """In rounds, those before it counted; its last round where they never do."""
    assert arrived({"ari": scores, "every": 20, "before": 5}) == rounds
