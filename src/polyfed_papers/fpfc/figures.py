"""Figure 1, the path over lambda on a toy of two clusters; Figure 3, how far models are from one another on S1."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.metrics import adjusted_rand_score
from torch import nn

import polyfed as pf
from polyfed.algorithms.fpfc import FPFC
from polyfed.report.style import BLUE, VERMILLION, categories
from polyfed.report.table import Cell
from polyfed.runs.trainer import fit
from polyfed.runs.watching import Progress
from polyfed_papers.fpfc import synthetic
from polyfed_papers.fpfc.stated import SYNTHETIC, sizes
from polyfed_papers.recipes.drawing import panes
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting, told_by

DEVICES, SAMPLES = 50, 50
GRIDS = {  # the figure's scale, and that of (1)
    "figure": (
        0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.075, 0.08, 0.085, 0.09, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6,
    ),
    "equation": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 3.8, 4.0, 4.2, 4.5, 5.0),
}  # fmt: skip
PENALTIES = {"squared": "squared l2", "l1": "group norm (l1)", "scad": "SCAD", "smoothed": "smoothed SCAD"}
NAMES = {"figure": "sum_i f_i + sum_(i<j) g", "equation": "sum_i f_i + (1/m) sum_(i<j) g, equation (1)"}


SETTINGS = (
    Setting("devices", f"{DEVICES} in two clusters, true models -1 and 1, {SAMPLES} samples each, noise 0.1", "ours"),
    Setting("f_i", "mean squared error of y = w x, x ~ N(0, 1)", "ours"),
    Setting("scale", "sum_i f_i + sum_(i<j) g: under (1), with 1/m, the printed lambdas cannot be had", "ours"),
    Setting("path", "lambda rising, each from the solution before; 400 rounds each, all devices", "ours"),
    Setting("squared l2", "g = lam ||w_i - w_j||^2, solved as a linear system", "ours"),
    Setting("rho, a", "1, 3.7", "paper"),
    Setting("xi", "1e-4; 0 for plain SCAD", "paper"),
)


def toy(seed: int, scale: str) -> pf.Federation:
    """Two clusters; on the figure's scale data are shrunk by sqrt(m), which divides every f_i by m."""
    rng, data = np.random.default_rng(seed), []
    shrink = DEVICES**-0.5 if scale == "figure" else 1.0
    for i in range(DEVICES):
        x = rng.standard_normal((SAMPLES, 1))
        y = (1 if i % 2 else -1) * x[:, 0] + 0.1 * rng.standard_normal(SAMPLES)
        data.append((shrink * x, shrink * y))
    return pf.Federation.from_arrays(data, test=data)


def path(bench: Bench, scale: str, penalty: str, seed: int) -> dict[str, Any]:
    """lambda, models [lambda][device], clusters [lambda] along the path."""
    data, run = toy(seed, scale), None
    grid = GRIDS[scale][:3] if bench.rehearse else GRIDS[scale]
    if penalty == "squared":
        models = [ridge(data, lam).tolist() for lam in grid]
        return {"lam": list(grid), "models": models, "clusters": [len(set(np.round(w, 6))) for w in models]}
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    models, clusters = [], []
    for lam in grid:
        kind, xi = ("l1" if penalty == "l1" else "scad"), (0.0 if penalty == "scad" else 1e-4)
        run = pf.fit(
            model, data, FPFC(0.3, lam=lam, penalty=kind, xi=xi, merge=False, nu=0.01), rounds=bench.rounds(400, 400),
            local_steps=5, batch_size=None, loss="mse", evaluate_every=0, start=run, seed=seed, device="cpu",
        )  # fmt: skip
        models.append(run.personal[:, 0].tolist())
        clusters.append(len(set(np.asarray(run.clusters).tolist())))
    return {"lam": list(grid), "models": models, "clusters": clusters}


def ridge(data: pf.Federation, lam: float) -> np.ndarray:
    """[m] minimiser of sum_i mean (y - w_i x)^2 + (lam/m) sum_(i<j) (w_i - w_j)^2."""
    clients = [data.train.client(i) for i in range(data.n)]
    x, y = (np.array([part.numpy().ravel() for part in parts]) for parts in zip(*clients, strict=True))
    pull = lam * (np.eye(data.n) - 1 / data.n)
    return np.linalg.solve(np.diag((x * x).mean(1)) + pull, (x * y).mean(1))


@recipe("fpfc/figure1", "Figure 1: the path over lambda on a toy", minutes=(1, 1), settings=SETTINGS, seeds=1)
def figure1(bench: Bench) -> Outcome:
    """Why a nonconvex penalty: which finds the clusters without pulling their models together?"""
    seed = bench.seeds[0]
    paths = {
        (scale, penalty): bench.once(
            f"{scale}-{penalty}", lambda scale=scale, penalty=penalty: path(bench, scale, penalty, seed)
        )
        for scale in GRIDS
        for penalty in PENALTIES
    }
    rows, claims = [], []
    for (scale, penalty), p in paths.items():
        two, one = ([v for v, c in zip(p["lam"], p["clusters"], strict=True) if c == n] for n in (2, 1))
        bias = [np.abs(np.abs(w) - 1).mean() for w, c in zip(p["models"], p["clusters"], strict=True) if c == 2]
        rows.append(
            (
                Cell(NAMES[scale]), Cell(PENALTIES[penalty]),
                Cell(f"{min(two):g} to {max(two):g}" if two else "none"), Cell(f"{min(one):g}" if one else "none"),
                Cell(f"{min(bias):.3f} to {max(bias):.3f}" if bias else "–"),
            )
        )  # fmt: skip
    squared, l1, scad, smooth = (paths["figure", penalty] for penalty in PENALTIES)
    merged = next((v for v, c in zip(l1["lam"], l1["clusters"], strict=True) if c == 1), None)
    at = {v: (c, w) for v, c, w in zip(scad["lam"], scad["clusters"], scad["models"], strict=True)}
    if not bench.rehearse:
        clusters, models = at[0.4]
        off = float(np.abs(np.abs(models) - 1).mean())
        apart = float(np.abs(np.array(scad["models"]) - np.array(smooth["models"])).max())
        claims = [
            Claim("the group norm merges everything at about 0.08", merged is not None and 0.06 <= merged <= 0.1,
                  f"one cluster from {merged}"),
            Claim("SCAD has the two clusters at 0.4", clusters == 2, f"{clusters} clusters"),
            Claim("SCAD's models are unbiased there", clusters == 2 and off < 0.05,
                  f"mean distance from ±1: {off:.3f}"),
            Claim("the squared l2 norm pulls the models together and merges none", min(squared["clusters"]) == DEVICES
                  and np.ptp(squared["models"][-1]) < np.ptp(squared["models"][0]), "distance of the farthest two: "
                  f"{np.ptp(squared['models'][0]):.2f} to {np.ptp(squared['models'][-1]):.2f}"),
            Claim("smoothing SCAD changes nothing that can be seen", apart < 0.01,
                  f"largest difference of a device's model at any lambda: {apart:.1e}"),
        ]  # fmt: skip
    figures = {"figure1": panels(paths, "figure"), "figure1-equation": panels(paths, "equation")}
    heads = ("cost<", "penalty<", "two clusters at", "one cluster from", "distance from ±1 with two")
    notes = [
        "the scale of the figure is not that of (1): with 1/m the group norm merges everything at 4, and SCAD leaves "
        "the clusters where they are only while a lambda is below their distance 2, that is lambda below 0.54",
        "devices and noise are ours: the paper gives none; with 50 devices the group norm merges at 4/50 = 0.08",
    ]
    return Outcome([told_by("Paths over lambda", heads, rows)], figures, claims, notes)


def panels(paths: dict[tuple[str, str], dict[str, Any]], scale: str) -> Figure:
    """Every device's model against lambda, a panel per penalty."""
    with panes(7.2, 5.2, 2, 2, sharey=True, sharex=True) as (figure, axes):
        for ax, (penalty, name) in zip(axes.flat, PENALTIES.items(), strict=True):
            p = paths[scale, penalty]
            w = np.array(p["models"])
            for i in range(w.shape[1]):
                ax.plot(p["lam"], w[:, i], color=VERMILLION if i % 2 else BLUE, linewidth=0.6, alpha=0.5)
            ax.set_title(name)
        for ax in axes[1]:
            ax.set_xlabel("lambda")
        for ax in axes[:, 0]:
            ax.set_ylabel("devices' models")
    return figure


SHOWN = (0, 5, 50, 600)


def settings_of_figure3(scale: Size):
    lam = Setting("lambda", "0.7", "ours") if scale == "small" else Setting("lambda", "0.6", "paper")
    tsne = Setting("t-SNE", "of the models, exact, perplexity 30 or a third of the devices, random start", "ours")
    return (sizes(scale), Setting("rounds shown", ", ".join(map(str, SHOWN)), "paper"), lam, tsne, *SYNTHETIC)


def train(bench: Bench, seed: int) -> dict[str, Any]:
    """distances [round][m][m], places [round][m][2], clusters found and true [m]."""
    from sklearn.manifold import TSNE

    problem, weights = synthetic(bench), {}
    data, model = problem.federation(seed), problem.model(seed)
    rounds = bench.rounds(SHOWN[-1], SHOWN[-1])
    start = np.concatenate([q.detach().numpy().ravel() for q in model.parameters()])
    weights[0] = np.tile(start, (data.n, 1))

    def look(progress: Progress) -> None:
        if progress.round in (*SHOWN, rounds):
            weights[progress.round] = progress.run.trained.server["w"].cpu().numpy().copy()

    fpfc = replace(problem.fpfc, lam=bench.pick(0.7, 0.6))
    run = fit(model, data, fpfc, rounds=rounds, seed=seed, evaluate_every=0, device=bench.device, callbacks=[look],
              **problem.work)  # fmt: skip
    place = TSNE(perplexity=min(30, data.n / 3), init="random", method="exact", random_state=seed)
    assert run.clusters is not None
    return {
        "rounds": list(weights),
        "distances": [np.linalg.norm(w[:, None] - w[None], axis=2) for w in weights.values()],
        "places": [place.fit_transform(w.astype(float)) for w in weights.values()],
        "found": run.clusters,
        "true": data.clusters,
    }


@recipe("fpfc/figure3", "Figure 3: distances and t-SNE of the devices' models on S1", minutes=(1, 20),
        settings=settings_of_figure3, seeds=1)  # fmt: skip
def figure3(bench: Bench) -> Outcome:
    """Do the devices' models come together in their clusters, and only there?"""
    seed = bench.seeds[0]
    run = bench.once(f"seed{seed}", lambda: train(bench, seed))
    true, last = np.array(run["true"]), np.array(run["distances"][-1])
    same = (true[:, None] == true[None]) & ~np.eye(len(true), dtype=bool)
    across = true[:, None] != true[None]
    number, score = len(set(run["found"])), adjusted_rand_score(true, run["found"])
    within, apart = last[same].max(), last[across].min()
    claims = [
        Claim(f"four groups at round {run['rounds'][-1]}", bool(number == 4 and score == 1),
              f"clusters {number}, ARI {score:.2f}"),
        Claim("devices of one cluster are nearer to each other than to any other", bool(within < apart),
              f"farthest two of a cluster {within:.3g}, nearest two of different ones {apart:.3g}"),
    ]  # fmt: skip
    notes = ["at round 0 all models are one: their places by t-SNE are noise, as any t-SNE of equal points"]
    return Outcome(figures={"figure3": distances(run)}, claims=claims, notes=notes)


def distances(run: dict[str, Any]) -> Figure:
    """Above the distances of the devices' models, below their places by t-SNE, coloured by true cluster."""
    true = np.array(run["true"])
    colours = np.array(categories(true.max() + 1))[true]
    with panes(9.2, 4.8, 2, len(run["rounds"])) as (figure, axes):
        most = max(np.max(d) for d in run["distances"])
        for (top, low), t, d, place in zip(axes.T, run["rounds"], run["distances"], run["places"], strict=True):
            top.imshow(d, cmap="viridis", vmin=0, vmax=most)
            xy = np.array(place)
            low.scatter(xy[:, 0], xy[:, 1], c=colours, s=14)
            top.set_title(f"round {t}")
            top.grid(False)
            low.set(xticks=[], yticks=[], xlabel="t-SNE")
        axes[0, 0].set_ylabel("device")
        figure.colorbar(axes[0, -1].images[0], ax=axes[0, -1], label="distance of two models")
    return figure
