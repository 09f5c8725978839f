"""The window of FPFC's lambda for a grouping of real clients: advice before a run, and during one."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from scipy import optimize
from torch import nn

from polyfed.algorithms._shared.parts import part
from polyfed.algorithms.fpfc import FPFC, Window, lambda_window
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError
from polyfed.base.values import COUNT
from polyfed.compute.batches import padded
from polyfed.compute.check import check
from polyfed.compute.losses import Loss
from polyfed.compute.task import Task
from polyfed.data.federation import Federation
from polyfed.runs.watching import Progress

_scipy: Any = optimize  # which has no types


@checked
class WindowAdvice:
    """A callback of `fit` for FPFC: every `every` rounds, the window of lambda for the groups found so far.

        advice = WindowAdvice(every=200)
        fit(..., FPFC(lam=0.7), callbacks=[advice])
        advice.found                                  # [(round, clusters, Window)]

    It shows if the present groups can stay at the run's lambda: below `necessary` they fall apart, at or above
    `unbiased` the penalty pulls them towards each other. It minimises every group's loss again (`window_for`), which
    takes time.

    Parameters
    ----------
    every : int
        Rounds between two windows.

    Attributes
    ----------
    found : list of tuple
        (round, clusters, Window) of each window so far.
    theory : str
        A sentence on rho and condition (13) of the convergence theorem.
    """

    def __init__(self, every: int = 100):
        self.every = every
        self.found: list[tuple[int, int, Window]] = []
        self.theory = ""

    def __call__(self, progress: Progress) -> None:
        run = progress.run
        if not progress.round or progress.round % self.every or run.clusters is None:
            return
        method, task = run.algorithm, run.trained.task
        if not isinstance(method, FPFC):
            raise ConfigError(f"WindowAdvice: found method {method.name}, expected fpfc")
        window = window_for(
            run.model(0), run.federation, run.clusters, task.loss, method=method, weight_decay=task.net.weight_decay
        )
        self.found.append((progress.round, len(set(run.clusters.tolist())), window))
        self.theory = method.theory()

    def lines(self) -> list[str]:
        """The latest window in words, and whether the method's convergence is proven."""
        if not self.found:
            return []
        t, clusters, window = self.found[-1]
        return [f"round {t}, {clusters} clusters:", *window.lines(), self.theory]


@checked
def window_for(
    model: nn.Module,
    federation: Federation,
    groups: Sequence[int] | np.ndarray,
    loss: Loss = "cross-entropy",
    *,
    method: FPFC | None = None,
    weight_decay: float = 0.0,
    iterations: COUNT = 500,
) -> Window:
    """The window of lambda for a proposed grouping of a federation's clients, from their training data.

    Minimises the sum of the losses of every group, and of all clients, from the model's parameters (L-BFGS, float64);
    see `lambda_window` for the bounds. They say where a grouping can stay: to bring a group together from each client's
    own model usually takes a larger lambda.

    Parameters
    ----------
    model : nn.Module
        The model, whose parameters are the start.
    federation : Federation
        The clients.
    groups : sequence of int
        [n] group of each client.
    loss : str or callable
        As for `fit`.
    method : FPFC or None
        The method, with its a, penalty and shared layers, which are not fused; None: FPFC().
    weight_decay : float
        As for `fit`.
    iterations : int
        Largest number of steps of a minimisation.

    Returns
    -------
    Window
        The bounds on lambda.
    """
    method = method or FPFC()
    labels = np.unique(np.asarray(groups), return_inverse=True)[1]
    if len(labels) != federation.n:
        raise ConfigError(f"groups: found {len(labels)} labels, expected one for each of {federation.n} clients")
    task = Task(model, loss, weight_decay=weight_decay, device="cpu", dtype=torch.float64)
    check(task, federation.train, federation.classes, type(model).__name__)
    split = federation.train.to(task.device, task.dtype)
    batches = [padded(split, np.array([i])) for i in range(federation.n)]

    def gradients(w: np.ndarray, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        row = torch.as_tensor(w)[None]
        found = [task.gradient(row, batches[int(i)]) for i in members]
        values = [float(v) for _, v in found if v is not None]
        return np.array(values), np.stack([g[0].numpy() for g, _ in found])

    def minimiser(members: np.ndarray) -> np.ndarray:
        def sums(w: np.ndarray) -> tuple[float, np.ndarray]:
            value, g = gradients(w, members)
            return value.mean(), g.mean(0)

        options = {"maxiter": iterations, "ftol": 1e-15, "gtol": 1e-9}
        return _scipy.minimize(sums, task.w0.numpy(), jac=True, method="L-BFGS-B", options=options).x

    everyone = np.arange(federation.n)
    models, own = np.empty((2, federation.n, task.p))
    for k in range(labels.max() + 1):
        members = np.flatnonzero(labels == k)
        models[members] = minimiser(members)
        own[members] = gradients(models[members[0]], members)[1]
    merged = gradients(minimiser(everyone), everyone)[1]
    fused = np.ones(task.p, dtype=bool)
    if method.shared_layers:
        fused = ~part(task.layout, method.shared_layers).numpy()
    tensors = [torch.as_tensor(x) for x in (own[:, fused], merged[:, fused], models[:, fused], labels)]
    return lambda_window(*tensors, a=inf if method.penalty == "l1" else method.a)
