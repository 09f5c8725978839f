"""Which exact method? Problems whose conditioning is set, and how near a method comes within a number of bytes."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from polyfed import Algorithm, Federation, Progress
from polyfed.base.errors import Diverged
from polyfed.base.values import Limits
from polyfed.runs.trainer import fit
from polyfed_papers.fedcet import FLOOR, UNCOUNTED, Problem, softmax_optimum, zeros
from polyfed_papers.recipes.recipe import Bench
from polyfed_tuning.ladder import At, Ladder

STEPS, TRIALS, TUNERS = (1 / 8, 1 / 2, 1.0, 1.6), 6, 2  # a L to begin with; their number; seeds that do not count
KINDS = {"shared": "one weak direction", "rotated": "own directions"}


@cache
def problem(loss: str, kind: str, kappa: float, seed: int, clients: int = 8, dim: int = 8) -> Problem:
    """Clients whose losses have L = 1 and mu = 1/kappa, with directions in common ("shared") or their own ("rotated").

    The second moments of client i's inputs are Q_i diag(e_i) Q_i', e_i from 1/kappa to 1 at equal ratios, in between
    times a factor in [1/2, 1] and at least 1/kappa; its own solution is N(0, I) from a common one. Least squares, or
    logistic regression with l2 = 1/kappa, as a softmax over two classes.
    """
    rng, samples = np.random.default_rng([seed, clients, dim]), 2 * dim
    spectrum = np.geomspace(1 / kappa, 1, dim)
    common, base, train = _rotation(rng, dim), rng.standard_normal(dim), []
    for _ in range(clients):
        e = np.maximum(spectrum * np.r_[1, rng.uniform(0.5, 1, dim - 2), 1], 1 / kappa)
        Q = common if kind == "shared" else _rotation(rng, dim)
        U = np.linalg.qr(rng.standard_normal((samples, dim)))[0] * np.sqrt(samples)
        x, w = U * np.sqrt(e / 2) @ Q.T, base + rng.standard_normal(dim)
        if loss == "logistic":
            x = 2 * x
            train.append((x, (rng.random(samples) < 1 / (1 + np.exp(-x @ w))).astype(int)))
        else:
            train.append((x, x @ w + 0.1 * rng.standard_normal(samples)))
    if loss == "logistic":
        optimum = softmax_optimum([x for x, _ in train], [y for _, y in train], 1 / kappa).ravel()
        federation = Federation.from_arrays(train, classes=2, test_fraction=0.0)
        return Problem(
            federation, zeros(dim, 2, bias=False), "cross-entropy", 1 / kappa, optimum, 1 + 1 / kappa, 1 / kappa
        )
    federation = Federation.from_arrays(train, test_fraction=0.0)
    optimum = np.linalg.lstsq(np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]))[0]
    return Problem(federation, zeros(dim, 1, bias=False), "mse", 0.0, optimum, 1.0, 1 / kappa)


def _rotation(rng: np.random.Generator, dim: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0]


class Work(NamedTuple):
    """What every method of a case is given."""

    tau: int
    vectors: int  # sent per client, in both directions
    fraction: float = 1.0
    batch: int | None = None
    last: float = 0.0  # share of the budget over whose rounds the error is taken, root mean square
    uploads: bool = False  # half as many vectors, and only what goes up counts


def end(problem: Problem, method: Algorithm, work: Work, seed: int) -> float | None:
    """log10 of ||mean_i x_i - x*|| / ||x*|| when the budget is spent; None: diverged."""
    optimum, spent, errors = torch.as_tensor(problem.optimum), [0.0], list[float]()
    vectors = work.vectors / 2 if work.uploads else work.vectors
    budget = vectors * 8 * len(optimum) * problem.federation.n

    def note(progress: Progress) -> bool:
        down, up = progress.run.trained.ledger.totals()
        spent.append(up if work.uploads else up + down)
        over = spent[-1] + (spent[-1] - spent[-2]) > budget
        if over or (work.last and spent[-1] > (1 - work.last) * budget):
            errors.append(float((progress.run.personal.mean(0) - optimum).norm() / optimum.norm()))
        return over

    try:
        fit(
            problem.model, problem.federation, method, rounds=100 * work.vectors, loss=problem.loss,
            local_steps=work.tau, batch_size=work.batch, weight_decay=problem.weight_decay, seed=seed,
            fraction=work.fraction, workers=1, device="cpu", dtype=torch.float64, evaluate_every=0, callbacks=[note],
        )  # fmt: skip
    except Diverged:
        return None
    error = float(np.sqrt(np.mean(np.square(errors))))
    return float(np.log10(max(error, FLOOR))) if error < 1e6 else None


Make = Callable[[Problem, float], Algorithm]  # at a L; of provable settings it plays no part


class Ends(NamedTuple):
    """A method's step a L, None where its settings are provable, and its log10 errors by seed; infinite: diverged."""

    step: float | None
    errors: np.ndarray


def ends(bench: Bench, key: str, make: Make, tuned: bool, of: Callable[[int], Problem], work: Work) -> Ends:
    """One method, at the step that ends nearest under seeds that do not count, or at its provable settings."""
    if bench.rehearse:
        work = work._replace(vectors=8)

    def run(seed: int, step: float) -> float | None:
        own = of(seed)
        return end(own, make(own, step), work, seed)

    def score(at: At) -> float:
        found = [run(seed, at[0]) for seed in range(UNCOUNTED, UNCOUNTED + (1 if bench.rehearse else TUNERS))]
        return -float(np.mean([np.inf if e is None else e for e in found]))

    step, ladders = 1.0, [Ladder(STEPS, Limits(gt=0))]
    if tuned:
        (step,) = bench.choose(f"{key}-choice{TRIALS}", score, ladders, TRIALS, 2 * TRIALS, 4 * TRIALS)
    found = [bench.once(f"{key}-seed{seed}", partial(run, seed, step)) for seed in bench.seeds]
    return Ends(step if tuned else None, np.array([np.inf if e is None else e for e in found]))


class Case(NamedTuple):
    """One cell: its problem by seed, what each method may spend, and the methods, tuned and provable."""

    of: Callable[[int], Problem]
    work: Work
    tuned: Mapping[str, Make]
    provable: Mapping[str, Make] = {}


def all_ends(bench: Bench, cases: Mapping[str, Case]) -> dict[str, dict[str, Ends]]:
    """case -> method -> `ends`; provable settings carry ", provable" behind the method."""
    tasks: list[Any] = []
    for key, case in cases.items():
        for label, make in case.tuned.items():
            tasks.append((key, label, make, True))
        for label, make in case.provable.items():
            tasks.append((key, f"{label}, provable", make, False))
    work = [
        (key, k, partial(ends, bench, f"{_slug(key)}-{_slug(label)}", make, tuned, cases[key].of, cases[key].work))
        for k, (key, label, make, tuned) in enumerate(tasks)
    ]
    found: dict[str, dict[str, Ends]] = {key: {} for key in cases}
    for (key, label, *_), mine in zip(tasks, bench.all_of(work), strict=True):
        found[key][label] = mine
    return found


def _slug(label: str) -> str:
    return label.lower().replace(",", "").replace(" ", "-")
