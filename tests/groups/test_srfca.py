"""SR-FCA: its box in numpy, planted groups at once, and its ends."""

import numpy as np
import pytest
from certify import certifies
from problems import Given, centres, fit_points
from test_ifca import of_sizes, two_groups

import polyfed as pf
from polyfed.base.errors import ConfigError


def far(a, b):
    return np.sqrt(((a[:, None] - b) ** 2).sum(2))


def pivots(apart, reach):
    left, found = {*range(len(apart))}, []
    while left:
        near = {i: [j for j in sorted(left) if apart[i, j] <= reach] for i in sorted(left)}
        found.append(near[max(left, key=lambda i: (len(near[i]), -apart[i, near[i]].sum()))])
        left -= {*found[-1]}
    return found


def middle(rows, share):
    low, high = int(share * len(rows)), int((1 - share) * len(rows))
    return np.sort(rows, 0)[low:high].mean(0) if high - low > 1 else rows.mean(0)


WHOLE, SOME = (tuple(range(14)),), ((*range(10),), (2, 5, 11, 13, 7), (1, 10, 4, 12, 0, 8))


@certifies(pf.SRFCA, by="its box in numpy: pivots, trimmed means, refinements that move, dissolve and merge, newcomers")
@pytest.mark.parametrize(
    ("seed", "q", "size", "refine", "cohorts", "expected"),
    [
        (6, 0.08, 1, 3, WHOLE, {"moved", "dissolved", "merged"}),
        (80, 0.12, 2, 3, WHOLE, {"alone", "moved", "merged"}),
        (1, 0.12, 2, 1, WHOLE, {"alone", "moved", "dissolved"}),
        (1, 0.1, 2, 3, SOME, {"alone", "moved", "dissolved", "newcomer"}),
    ],
)
def test_rounds_by_hand(seed, q, size, refine, cohorts, expected):
    rng = np.random.default_rng(seed)
    points = (
        rng.uniform(0.5, 3) * rng.normal(size=(14, 2)) + 3 * np.array([[1, 1], [1, -1], [-1, 1]])[np.arange(14) % 3]
    )
    lr, rounds, share, how = 0.2, 9, 0.3, {"local_steps": 2, "schedule": Given(cohorts), "dim": 2}
    method = pf.SRFCA(lr, quantile=q, trim=share, size=size, refine=refine, refinements=2)
    run = fit_points(of_sizes(points, rng.integers(1, 5, 14)), method, rounds, **how)
    own, models, where, seen, happened = points * (1 - (1 - lr) ** (2 * refine)), {}, {}, set(), set()

    def nearest(i, names):
        return min(names, key=lambda c: ((own[i] - models[c]) ** 2).sum())

    for t in range(rounds):
        who = cohorts[t % len(cohorts)]
        if not seen:
            apart = far(own[[*who]], own[[*who]])
            reach = np.sort(apart[np.triu_indices(len(who), 1)])[int(q * (len(who) * (len(who) - 1) / 2 - 1))]
            some = [[who[i] for i in c] for c in pivots(apart, reach) if len(c) >= size]
            models = {c[0]: own[c].mean(0) for c in some}
            where = {i: c[0] for c in some for i in c}
            happened |= {"alone"} if len(where) < len(who) else set()
        for i in [i for i in who if i not in where]:
            where[i] = nearest(i, {*where.values()} if seen else models)
            happened |= {"newcomer"} if seen else set()
        seen |= {*who}
        trained = {i: points[i] + (1 - lr) ** 2 * (models[where[i]] - points[i]) for i in who}
        for c in {where[i] for i in who}:
            models[c] = middle(np.stack([trained[i] for i in who if where[i] == c]), share)
        if (t + 1) % refine == 0 and (t + 1) // refine <= 2:
            names, before = sorted({*where.values()}), where
            where = {i: nearest(i, names) for i in seen}
            happened |= {"moved"} if where != before else set()
            large = [c for c in names if sum(where[i] == c for i in seen) >= size] or names
            happened |= {"dissolved"} if large != names else set()
            where = {i: nearest(i, large) for i in seen}
            theta = np.stack([models[c] for c in large])
            for one, *others in pivots(far(theta, theta), reach):
                happened |= {"merged"} if others else set()
                models[large[one]] = theta[[one, *others]].mean(0)
                where = {i: large[one] if large.index(c) in others else c for i, c in where.items()}
    assert happened == expected
    assert np.allclose(run.personal, np.stack([models[where[i]] for i in range(14)]), rtol=0, atol=1e-12)


@certifies(pf.SRFCA, by="separated groups, each larger than its smallest cluster, from the first round on")
def test_separated_groups_are_found_at_once():
    points, group = two_groups()
    pairs = (group[:, None] == group)[np.triu_indices(len(group), 1)]
    within = (pairs.sum() - 1) / (len(pairs) - 1)  # the largest distance inside a group
    run = fit_points(centres(points), pf.SRFCA(1.0, quantile=within, trim=0), 1, 4)
    assert np.allclose(run.personal, np.stack([points[group == g].mean(0) for g in group]), rtol=0, atol=1e-12)


@certifies(pf.SRFCA, by="one cluster at a reach of all distances, whose models are FedAvg's without trimming")
def test_at_the_largest_distance_it_is_fedavg_from_the_mean_of_models_trained_alone():
    points = np.random.default_rng(1).normal(size=(6, 2))
    run = fit_points(centres(points), pf.SRFCA(0.3, quantile=1, trim=0, refine=1, refinements=0), 5, 2)
    assert set(run.clusters.tolist()) == {0}
    same = fit_points(centres(points), pf.FedAvg(0.3), 6, 2)  # its first round is one step from the common start
    assert np.allclose(run.personal, same.personal, rtol=0, atol=1e-12)


def test_a_model_far_from_the_others_in_its_cluster_is_trimmed():
    points = np.array([[0.0], [1.0], [2.0], [3.0], [500.0]])
    run = fit_points(centres(points), pf.SRFCA(1.0, quantile=1, trim=0.2, refinements=0), 1, 1)
    assert np.allclose(run.personal, 2.0, rtol=0, atol=1e-12)


def test_where_no_cluster_is_large_enough_a_line_says_so():
    with pytest.raises(ConfigError, match=r"^algorithm.size: no cluster has 5 clients within the reach of \S+$"):
        fit_points(centres(np.eye(6) * np.arange(1, 7)[:, None]), pf.SRFCA(quantile=0.01, size=5), 1, 6)


def test_a_client_that_is_met_later_joins_a_cluster_that_somebody_is_in():
    """Though its own model is nearer to the start, which the rows of clients that nobody has met still have."""
    points = np.array([[0.0], [9.0], [9.1], [-9.0], [-9.1], [0.2], [0.0]])
    cohorts = (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 5)
    method = pf.SRFCA(1.0, quantile=0.3, trim=0, refinements=0)
    run = fit_points(centres(points), method, 3, 1, schedule=Given(cohorts))
    assert run.clusters[5] == run.clusters[1] != run.clusters[3] == run.clusters[4]
