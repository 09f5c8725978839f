"""Shared parts of the experiments of FedCET, "Communication Efficient Federated Learning with Linear Convergence on
Heterogeneous Data".
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import nn

from polyfed import Algorithm, Federation, Progress
from polyfed.base.errors import Diverged
from polyfed.data import load
from polyfed.data.synthetic import least_squares
from polyfed.models import build
from polyfed.runs.trainer import fit
from polyfed_papers.recipes.drawing import curve_figure
from polyfed_papers.recipes.recipe import Bench
from polyfed_tuning.ladder import At, Ladder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FLOOR = 1e-14  # relative errors below are rounding


class Problem(NamedTuple):
    """min_w (1/n) sum_i f_i(w) with the known `optimum` [p]; every f_i is L-smooth and mu-strongly convex."""

    federation: Federation
    model: nn.Module
    loss: str
    weight_decay: float
    optimum: np.ndarray
    smoothness: float
    convexity: float


def linear_regression(seed: int, dim: int = 20, samples: int = 50) -> Problem:
    """Ten clients with solutions and input scales of their own."""
    federation = least_squares(10, samples, dim, heterogeneity=1.0, curvature=0.3, seed=seed)
    inputs = [federation.train.client(i)[0].numpy() for i in range(federation.n)]
    spectra = [np.linalg.eigvalsh(2 * x.T @ x / len(x)) for x in inputs]
    smoothness, convexity = max(e[-1] for e in spectra), min(e[0] for e in spectra)
    return Problem(
        federation, zeros(dim, 1, bias=False), "mse", 0.0, federation.meta["optimum"].ravel(), smoothness, convexity
    )


def hospitals(seed: int, l2: float = 0.01) -> Problem:
    """Logistic regression with an l2 term on the four hospitals of Heart Disease; the optimum by a trust region."""
    federation = load("heart-disease").partition(seed=seed)
    inputs = [np.c_[x.numpy(), np.ones(len(x))].astype(float) for x, _ in map(federation.train.client, range(4))]
    W = softmax_optimum(inputs, [federation.train.client(i)[1].numpy() for i in range(4)], l2)
    smoothness = l2 + 0.5 * max(np.linalg.eigvalsh(x.T @ x / len(x))[-1] for x in inputs)
    optimum = np.r_[W[:, :-1].ravel(), W[:, -1]]  # the layer's order: weights, then biases
    return Problem(federation, zeros(len(W[0]) - 1, 2), "cross-entropy", l2, optimum, float(smoothness), l2)


def softmax_optimum(inputs: Sequence[np.ndarray], classes: Sequence[np.ndarray], l2: float) -> np.ndarray:
    """[2, d] where the clients' mean of logistic losses and l2/2 |w|^2 is least, as a softmax over two classes."""
    labels, d = [np.eye(2)[y] for y in classes], inputs[0].shape[1]

    def parts(w: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Value, gradient and Hessian for w: [2 d], the rows of the weight matrix with their bias last."""
        W, value, slope, bend = w.reshape(2, d), l2 / 2 * w @ w, l2 * w, l2 * np.eye(2 * d)
        for x, y in zip(inputs, labels, strict=True):
            z = x @ W.T
            z = z - z.max(1, keepdims=True)
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            m = len(x) * len(inputs)
            value += (np.log(np.exp(z).sum(1)) - (y * z).sum(1)).sum() / m
            slope = slope + ((p - y).T @ x).ravel() / m
            spread = np.einsum("jc,ce->jce", p, np.eye(2)) - p[:, :, None] * p[:, None, :]
            bend = bend + np.einsum("jce,ja,jb->caeb", spread, x, x).reshape(2 * d, 2 * d) / m
        return float(value), slope, bend

    solution = minimize(
        lambda w: parts(w)[0], np.zeros(2 * d), jac=lambda w: parts(w)[1], hess=lambda w: parts(w)[2],
        method="trust-exact", options={"gtol": 1e-12},
    ).x  # fmt: skip
    solution = solution - np.linalg.solve(parts(solution)[2], parts(solution)[1])  # one last Newton step
    return solution.reshape(2, d)


def zeros(inputs: int, outputs: int, **settings: Any) -> nn.Module:
    """A linear model in float64 that starts from zero."""
    return build("linear", (inputs,), outputs, init="zeros", **settings).double()


def distances(
    problem: Problem,
    algorithm: Algorithm,
    tau: int,
    rounds: int,
    budget: float = np.inf,
    batch_size: int | None = None,
    seed: int = 0,
    fraction: float = 1.0,
) -> dict[str, Any]:
    """{"bytes": per client, both ways, "error": ||mean_i x_i - x*||} at the start and by round, within `budget` bytes.

    "diverged": True if it ran away; its error then ends early.
    """
    optimum, spent = torch.as_tensor(problem.optimum), [0.0]
    start = float(optimum.norm())
    error = [start]

    def note(progress: Progress) -> bool:
        spent.append(sum(progress.run.trained.ledger.totals()) / problem.federation.n)
        error.append(float((progress.run.personal.mean(0) - optimum).norm()))
        away = not error[-1] < 1e6 * start
        return away or spent[-1] + (spent[-1] - spent[-2]) > budget or error[-1] < FLOOR * start

    diverged = False
    try:
        fit(
            problem.model, problem.federation, algorithm, rounds=rounds, loss=problem.loss, local_steps=tau,
            batch_size=batch_size, weight_decay=problem.weight_decay, seed=seed, fraction=fraction,
            device="cpu", dtype=torch.float64, evaluate_every=0, callbacks=[note],
        )  # fmt: skip
    except Diverged:
        diverged = True
    diverged = diverged or not error[-1] < 1e6 * start
    return {"bytes": spent, "error": error, "diverged": diverged}


def final(run: Mapping[str, Any], last: float = 0.0) -> float:
    """log10 of the relative error at the end, over the last share of the rounds (root mean square); inf: diverged."""
    error = np.array(run["error"])
    tail = error[min(int((1 - last) * len(error)), len(error) - 1) :]
    if run["diverged"]:
        return float("inf")
    return float(np.log10(max(np.sqrt((tail**2).mean()) / error[0], FLOOR)))


TRIALS = 18  # values, of every method that has a step
UNCOUNTED = 1000  # the first of the seeds that settings are chosen under


class Rule(NamedTuple):
    """Tuned settings of a method, and the method at their values; without ladders nothing is tuned."""

    ladders: tuple[Ladder, ...]
    make: Callable[[Problem, At], Algorithm]


class Tuned(NamedTuple):
    """A method at the values that it was given: one run per seed that counts, and log10 of their errors."""

    at: At
    runs: list[dict[str, Any]]
    ends: np.ndarray


def tuned(
    bench: Bench,
    key: str,
    rule: Rule,
    problem: Callable[[int], Problem],
    last: float = 0.0,
    *,
    budget: int,
    **work: Any,
) -> Tuned:
    """The method, run at the values that end nearest on average over seeds that do not count.

    `last` is the share of rounds that the error is taken over, `budget` a number of vectors, `work` more of
    `distances`.
    """

    def run(at: At, seed: int) -> dict[str, Any]:
        own = problem(seed)
        return distances(own, rule.make(own, at), budget=budget * 8 * len(own.optimum), seed=seed, **work)

    def score(at: At) -> float:
        seeds = range(UNCOUNTED, UNCOUNTED + (1 if bench.rehearse else 3))
        return -float(np.mean([final(run(at, seed), last) for seed in seeds]))

    at = bench.choose(f"{key}-choice", score, rule.ladders, TRIALS) if rule.ladders else ()
    runs = [bench.once(f"{key}-seed{seed}", partial(run, at, seed)) for seed in bench.seeds]
    return Tuned(at, runs, np.array([final(r, last) for r in runs]))


def all_tuned(
    bench: Bench, key: str, rules: Mapping[str, Rule], problem: Callable[[int], Problem], last: float = 0.0, **work: Any
) -> dict[str, Tuned]:
    """`tuned` of every method."""
    tasks = [(key, k, partial(tuned, bench, f"{key}-{k}", rule, problem, last, **work))
             for k, rule in enumerate(rules.values())]  # fmt: skip
    return dict(zip(rules, bench.all_of(tasks), strict=True))


def series(runs: Sequence[Mapping[str, Any]], unit: float, thin: int = 60) -> tuple[list[float], list[list[float]]]:
    """Bytes in `unit` and relative errors of one method's runs, at most ~`thin` points, for `curve_figure`."""
    longest = max(runs, key=lambda run: len(run["bytes"]))
    at = list(range(0, len(longest["bytes"]), max(1, len(longest["bytes"]) // thin)))
    errors = [[run["error"][min(k, len(run["error"]) - 1)] / run["error"][0] for k in at] for run in runs]
    return [longest["bytes"][k] / unit for k in at], [[max(e, FLOOR) for e in row] for row in errors]


def error_figure(
    lines: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]], x: str, dotted: Sequence[str] = ()
) -> "Figure":
    """`curve_figure` of relative errors with ticks as powers of ten; lines of `dotted` labels lie on others'."""
    figure = curve_figure(lines, x, "relative error", log=True, width=5.6, height=4.0)
    ax, legend = figure.axes[0], figure.legends[0]
    ax.yaxis.set_major_formatter(lambda value, _: f"1e{round(np.log10(value)):d}")
    for line in (*ax.lines, *legend.get_lines()):
        if line.get_label() in dotted:
            line.set(linestyle=(0, (1, 2)), linewidth=2.4)
    return figure
