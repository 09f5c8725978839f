"""What FPFC's authors' code computes under the names of others, transcribed in numpy from docs/released.md: the same
models to 1e-10 over rounds in which half of the clients take part."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from certify import certifies
from scipy.special import log_softmax, softmax
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.core.schedule import Uniform

N, D, K, LR, STEPS = 9, 5, 3, 0.4, 3


def clients():
    """[(x, y)]: softmax regression in two groups of clients, of unequal sizes."""
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(2, K, D)) * 3
    found = []
    for i in range(N):
        x = rng.uniform(size=(int(rng.integers(12, 40)), D))
        found.append((x, (x @ truth[i % 2].T + rng.normal(size=(len(x), K))).argmax(1)))
    return found


DATA = clients()
SIZES = np.array([len(y) for _, y in DATA])


@dataclass(frozen=True)
class Finally(Uniform):
    """Uniform, and everyone in the last round."""

    rounds: int = 1

    def cohort(self, seed, t, keys):
        return np.arange(len(keys)) if t == self.rounds - 1 else super().cohort(seed, t, keys)


class Gaussian(torch.nn.Linear):
    """A layer whose every start is N(0, 1)."""

    def reset_parameters(self):
        for q in self.parameters():
            torch.nn.init.normal_(q)


def fit(method, rounds, **settings):
    """A run at half participation, its start [K * D + K], and who took part in every round."""
    torch.manual_seed(2)
    model = Gaussian(D, K, dtype=torch.float64)
    fed = pf.Federation.from_arrays(DATA, test=DATA, classes=K)
    given = {
        "schedule": Uniform(0.5),
        "local_steps": STEPS,
        "batch_size": None,
        "evaluate_every": 0,
        "seed": 1,
    } | settings
    run = pf.fit(model, fed, method, rounds=rounds, **given)
    trained = run.ledger[run.ledger["down_bytes"] > 0]  # not those of whom only a signature is asked
    cohorts = [frame["client"].to_numpy() for _, frame in trained.groupby("round")]
    return run, run.trained.task.w0.numpy(), cohorts


def steps(w, i, count=STEPS, lr=LR):
    """w after gradient steps on client i's mean cross-entropy."""
    x, y = DATA[i]
    x = np.c_[x, np.ones(len(x))]
    for _ in range(count):
        W = np.c_[w[: K * D].reshape(K, D), w[K * D :]]
        G = (softmax(x @ W.T, 1) - np.eye(K)[y]).T @ x / len(x)
        w = w - lr * np.r_[G[:, :D].ravel(), G[:, D]]
    return w


def loss(w, i):
    x, y = DATA[i]
    return -log_softmax(x @ w[: K * D].reshape(K, D).T + w[K * D :], 1)[np.arange(len(y)), y].mean()


def mean(models, ids):
    return np.average([models[i] for i in ids], axis=0, weights=SIZES[list(ids)])


def pacfl(w0, bases, cohorts, threshold):
    """Clustered before round 1 by the smallest entry of arccos(U_i' U_j), averaged two and two."""
    A = [[np.rad2deg(np.arccos(np.clip(U.T @ V, -1, 1)).min()) for V in bases] for U in bases]
    members, A = [[i] for i in range(N)], np.array(A)
    while True:
        np.fill_diagonal(A, np.inf)
        i, j = np.unravel_index(A.argmin(), A.shape)
        if A[i, j] > threshold:
            break
        A[i] = A[:, i] = (A[i] + A[j]) / 2
        members[i] += members.pop(j)
        A = np.delete(np.delete(A, j, 0), j, 1)
    cluster = {i: c for c, inside in enumerate(members) for i in inside}
    common, own = [w0] * len(members), [w0] * N
    for cohort in cohorts:
        for i in cohort:
            own[i] = steps(common[cluster[i]], i)
        for c in range(len(members)):
            if here := [i for i in cohort if cluster[i] == c]:
                common[c] = mean(own, here)
    return np.stack(own), [cluster[i] for i in range(N)]


@certifies(pf.PACFL, by="a transcription of what FPFC's authors' code computes")
def test_pacfl_clusters_everyone_first_and_is_scored_on_own_models():
    method = pf.PACFL(LR, 2, 7.0, angle="entries", linkage="weighted", everyone_first=True, deployed="own")
    run, w0, cohorts = fit(method, 6)
    bases = [U[:, (U != 0).any(0)] for U in run.server["signature"].numpy()]
    for U, (x, y) in zip(bases, DATA, strict=True):  # a singular vector's sign is the library's
        left = np.hstack([np.linalg.svd(x[y == c].T)[0][:, : min(2, (y == c).sum())] for c in np.unique(y)])
        assert np.allclose(np.abs((left * U).sum(0)), 1, atol=1e-9)
    models, cluster = pacfl(w0, bases, cohorts, 7.0)
    assert 1 < len(set(cluster)) < N
    assert adjusted_rand_score(cluster, run.clusters) == 1
    assert np.allclose(run.personal, models, rtol=0, atol=1e-10)
    shared, _, _ = fit(replace(method, deployed="cluster"), 6)
    assert not np.allclose(shared.personal, models, atol=1e-2)  # what the method deploys


def cfl(w0, cohorts, eps1, eps2, first):
    """Absent clients send zeros, which enter the norms, the cosines, the split by complete linkage and the means."""
    models, clusters = np.tile(w0, (N, 1)), [np.arange(N)]
    for t, cohort in enumerate(cohorts):
        update = np.zeros_like(models)
        for i in cohort:
            update[i] = steps(models[i], i) - models[i]
        length = np.linalg.norm(update, axis=1)
        S = update @ update.T / (np.outer(length, length) + 1e-12)
        after = []
        for c in clusters:
            middle = np.linalg.norm(np.average(update[c], axis=0, weights=SIZES[c]))
            if middle < eps1 and length[c].max() > eps2 and len(c) > 2 and t >= first:
                parts = AgglomerativeClustering(metric="precomputed", linkage="complete").fit(1 - S[c][:, c]).labels_
                after += [c[parts == 0], c[parts == 1]]
            else:
                after.append(c)
        clusters = after
        for c in clusters:
            models[c] += np.average(update[c], axis=0, weights=SIZES[c])
    return models, clusters


RELEASED_CFL = pf.CFL(LR, 0.12, 0.25, gamma_max=None, linkage="complete", min_size=3, first_round=4, absent="zero")


@certifies(pf.CFL, by="a transcription of what FPFC's authors' code computes")
def test_cfl_counts_absent_clients_as_updates_of_zero():
    run, w0, cohorts = fit(RELEASED_CFL, 30)
    models, clusters = cfl(w0, cohorts, 0.12, 0.25, 4)
    assert len(clusters) > 3
    assert all(len(set(run.clusters[c])) == 1 for c in clusters)
    assert len(set(run.clusters)) == len(clusters)
    assert np.allclose(run.personal, models, rtol=0, atol=1e-10)


@certifies(pf.LGFedAvg, by="a transcription of what FPFC's authors' code computes")
def test_lg_fedavg_of_one_layer_is_fedavg_scored_before_the_mean():
    """Only who has just been trained has a model of its own; the others hold the common one."""
    run, common, cohorts = fit(pf.LGFedAvg(LR, weighted=True, deployed="before"), 5)
    models = [common] * N
    for cohort in cohorts:
        models = [common] * N
        for i in cohort:
            models[i] = steps(common, i)
        common = mean(models, cohort)
    assert np.allclose(run.personal, models, rtol=0, atol=1e-10)
    assert np.allclose(run.server["w"], common, rtol=0, atol=1e-10)


@certifies(pf.PerFedAvg, by="a transcription of what FPFC's authors' code computes")
def test_per_fedavg_trains_on_from_the_personal_models():
    """After every mean all devices take one step, from where the next round's train on; scored after that step."""
    method = pf.PerFedAvg(LR, alpha=LR, start="personal", weighted=True)
    run, common, cohorts = fit(method, 6, schedule=Finally(0.5, 6))
    assert len(cohorts[-1]) == N
    models = [common] * N
    for cohort in cohorts[:-1]:  # in the last round everyone receives the common model, and takes its step
        for i in cohort:
            models[i] = steps(models[i], i)
        common = mean(models, cohort)
        models = [steps(common, i, 1) for i in range(N)]
    assert np.allclose(run.personal, models, rtol=0, atol=1e-10)


@certifies(pf.IFCA, by="a transcription of what FPFC's authors' code computes")
def test_ifca_shrinks_a_model_by_the_share_of_clients_that_pick_it():
    """theta_j <- (1/|S|) sum of the models of those that picked j; one that no client picks is zero."""
    method = pf.IFCA(LR, k=4, averaging="shrinking", seed=3)
    theta, picked = fit(method, 0)[0].server["w"].numpy(), np.zeros(N, dtype=int)
    run, w0, cohorts = fit(method, 8, local_steps=1)
    for cohort in cohorts:
        for i in cohort:
            picked[i] = np.argmin([loss(w, i) for w in theta])
        theta = np.stack([
            sum((steps(theta[j], i, 1) for i in cohort if picked[i] == j), 0 * w0) / len(cohort) for j in range(4)
        ])  # fmt: skip
    assert np.allclose(run.server["w"], theta, rtol=0, atol=1e-10)
    met = np.unique(np.concatenate(cohorts))
    assert run.server["cluster"].numpy()[met].tolist() == picked[met].tolist()
