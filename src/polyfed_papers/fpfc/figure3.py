"""Figure 3: how far the devices' models are from one another as training goes on, on S1."""

from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from sklearn.metrics import adjusted_rand_score

from polyfed.runs.trainer import fit
from polyfed.runs.watching import Progress
from polyfed_papers.fpfc import SYNTHETIC, sizes, synthetic
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting

ROUNDS = (0, 5, 50, 600)


def settings(scale: Size):
    lam = Setting("lambda", "0.7", "ours") if scale == "small" else Setting("lambda", "0.6", "paper")
    tsne = Setting("t-SNE", "of the models, exact, perplexity 30 or a third of the devices, random start", "ours")
    return (sizes(scale), Setting("rounds shown", ", ".join(map(str, ROUNDS)), "paper"), lam, tsne, *SYNTHETIC)


def train(bench: Bench, seed: int) -> dict[str, Any]:
    """distances [round][m][m], places [round][m][2], clusters found and true [m]."""
    from sklearn.manifold import TSNE

    problem, seen = synthetic(bench), {}
    data, model = problem.federation(seed), problem.model(seed)
    rounds = bench.rounds(ROUNDS[-1], ROUNDS[-1])
    start = np.concatenate([q.detach().numpy().ravel() for q in model.parameters()])
    seen[0] = np.tile(start, (data.n, 1))

    def look(progress: Progress) -> None:
        if progress.round in (*ROUNDS, rounds):
            seen[progress.round] = progress.run.trained.server["w"].cpu().numpy().copy()

    fpfc = replace(problem.fpfc, lam=bench.pick(0.7, 0.6))
    run = fit(model, data, fpfc, rounds=rounds, seed=seed, evaluate_every=0, device=bench.device, callbacks=[look],
              **problem.work)  # fmt: skip
    place = TSNE(perplexity=min(30, data.n / 3), init="random", method="exact", random_state=seed)
    assert run.clusters is not None
    return {
        "rounds": list(seen),
        "distances": [np.linalg.norm(w[:, None] - w[None], axis=2) for w in seen.values()],
        "places": [place.fit_transform(w.astype(float)) for w in seen.values()],
        "found": run.clusters,
        "true": data.clusters,
    }


@recipe("fpfc/figure3", "Figure 3: distances and t-SNE of the devices' models on S1", minutes=(1, 20),
        settings=settings, seeds=1)  # fmt: skip
def figure3(bench: Bench) -> Outcome:
    """Do the devices' models come together in their clusters, and only there?"""
    seed = bench.seeds[0]
    found = bench.once(f"seed{seed}", lambda: train(bench, seed))
    true, last = np.array(found["true"]), np.array(found["distances"][-1])
    same = (true[:, None] == true[None]) & ~np.eye(len(true), dtype=bool)
    across = true[:, None] != true[None]
    number, score = len(set(found["found"])), adjusted_rand_score(true, found["found"])
    within, apart = last[same].max(), last[across].min()
    claims = [
        Claim(f"four groups at round {found['rounds'][-1]}", bool(number == 4 and score == 1),
              f"clusters {number}, ARI {score:.2f}"),
        Claim("devices of one cluster are nearer to each other than to any other", bool(within < apart),
              f"farthest two of a cluster {within:.3g}, nearest two of different ones {apart:.3g}"),
    ]  # fmt: skip
    notes = ["at round 0 all models are one: their places by t-SNE are noise, as any t-SNE of equal points"]
    return Outcome(figures={"figure3": panels(found)}, claims=claims, notes=notes)


def panels(found: dict[str, Any]) -> Figure:
    """Above the distances of the devices' models, below their places by t-SNE, coloured by true cluster."""
    from polyfed.report.style import categories, styled

    true = np.array(found["true"])
    colours = np.array(categories(true.max() + 1))[true]
    with styled():
        figure = Figure(figsize=(9.2, 4.8), layout="constrained")
        axes = figure.subplots(2, len(found["rounds"]), squeeze=False)
        most = max(np.max(d) for d in found["distances"])
        for (top, low), t, d, place in zip(axes.T, found["rounds"], found["distances"], found["places"], strict=True):
            top.imshow(d, cmap="viridis", vmin=0, vmax=most)
            xy = np.array(place)
            low.scatter(xy[:, 0], xy[:, 1], c=colours, s=14)
            top.set_title(f"round {t}")
            top.grid(False)
            low.set(xticks=[], yticks=[], xlabel="t-SNE")
        axes[0, 0].set_ylabel("device")
        figure.colorbar(axes[0, -1].images[0], ax=axes[0, -1], label="distance of two models")
    return figure
