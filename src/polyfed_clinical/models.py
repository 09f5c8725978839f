"""Log-likelihoods as functions of the linear predictor eta = x @ beta, with gradient and information: McCullagh and
Nelder, "Generalized Linear Models" (1989); Cox (1972), with the ties of Breslow (1974) and Efron (1977).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, DataError, closest

TIES = ("efron", "breslow")


class Parts(NamedTuple):
    """A log-likelihood and its derivatives by eta."""

    value: Tensor
    slope: Tensor  # [N] dl/deta
    weight: Tensor  # [N]; the negative Hessian by beta is x' diag(weight) x, less centres(x)' centres(x)
    centres: Callable[[Tensor], Tensor] | None = None  # x [N, p] -> [k, p]
    # x [N, p] -> [N, p]: a row's part of the gradient less slope x, owed to the rows that it is compared to; sums to 0
    others: Callable[[Tensor], Tensor] | None = None


def logistic(eta: Tensor, target: Tensor) -> Parts:
    """target: [N, 2], the first column 0 or 1."""
    y, mean = target[:, 0], eta.sigmoid()
    return Parts((y * eta - softplus(eta)).sum(), y - mean, mean * (1 - mean))


def poisson(eta: Tensor, target: Tensor) -> Parts:
    """target: [N, 2] counts and exposures."""
    y, log_mean = target[:, 0], eta + target[:, 1].log()
    mean = log_mean.exp()
    return Parts((y * log_mean - mean - torch.lgamma(y + 1)).sum(), y - mean, mean)


def linear(eta: Tensor, target: Tensor) -> Parts:
    """target: [N, 2], the first column a number. With unit variance and without its constant: -||y - eta||^2 / 2."""
    gap = target[:, 0] - eta
    return Parts(-gap.square().sum() / 2, gap, torch.ones_like(gap))


def cox(eta: Tensor, target: Tensor, ties: str = "efron") -> Parts:
    """The log partial likelihood of targets [N, 2]: times and events (1: died, 0: censored, then still at risk).

    In O(N p^2), no matrix per step: sum_k S2_k / S0_k = sum_j risk_j (sum_{k: t_k <= t_j} 1/S0_k) x_j x_j'.
    """
    dead = target[:, 1] > 0
    times, group = target[:, 0].unique(return_inverse=True)  # rising
    step = group[dead].sort().values  # the time of every step
    tied = step.bincount(minlength=len(times))
    # each death is a step; of d deaths at one time, step l = 0, ..., d-1 has the risk set less l/d of the dead (Efron)
    share = torch.zeros(len(step), dtype=eta.dtype)
    if ties == "efron":
        share = (torch.arange(len(step)) - (tied.cumsum(0) - tied)[step]).to(eta.dtype) / tied[step]
    shift = eta.detach().max()
    risk = (eta - shift).exp()

    def by_time(v: Tensor, at: Tensor) -> Tensor:
        return v.new_zeros(len(times), *v.shape[1:]).index_add(0, at, v)

    def over_sets(v: Tensor) -> Tensor:
        """[N, ...] -> [k, ...] its sum over the risk set of each step."""
        whole = by_time(v, group).flip(0).cumsum(0).flip(0)[step]
        return whole - share.view(-1, *[1] * (v.dim() - 1)) * by_time(v[dead], group[dead])[step]

    mass = over_sets(risk)
    value = eta[dead].sum() - mass.log().sum() - shift * len(step)
    with torch.no_grad():
        risk, mass = risk.detach(), mass.detach()

        def at_risk(v: Tensor) -> Tensor:
            """[k, c] -> [N, c]: v of every step, times the share that a row has in its risk set; summed over steps."""
            before, late = by_time(v / mass[:, None], step).cumsum(0), by_time((share / mass)[:, None] * v, step)
            return risk[:, None] * (before[group] - dead[:, None] * late[group])

        def centres(x: Tensor) -> Tensor:
            return over_sets(risk[:, None] * x) / mass[:, None]

        def others(x: Tensor) -> Tensor:
            """Lin and Wei (JASA 84, 1989); of tied deaths each is held against the mean over their steps."""
            means = centres(x)
            tied_means = by_time(means, step) / tied.clamp(min=1)[:, None]
            return dead[:, None] * tied_means[group] - at_risk(means)

        weight = at_risk(torch.ones(len(step), 1, dtype=eta.dtype))[:, 0]
        return Parts(value, dead.to(weight.dtype) - weight, weight, centres, others)


@dataclass(frozen=True)
class Model:
    """A named likelihood."""

    name: str
    parts: Callable[[Tensor, Tensor], Parts]  # of eta [N] and target [N, 2]
    intercept: bool  # comes first in beta
    ratio: str  # name of exp(beta), "" without one
    takes: str  # the columns of a target

    def mean(self, eta: Tensor) -> Tensor:
        """The expected target where the linear predictor is eta: a probability, a rate or a number."""
        return eta.sigmoid() if self.name == "logistic" else eta.exp() if self.name == "poisson" else eta

    def derivatives(self, beta: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-likelihood, gradient [p] and information [p, p] (the negative Hessian) of rows x: [N, p]."""
        parts = self.parts(x @ beta, target)
        information = (x.T * parts.weight) @ x
        if parts.centres is not None:
            centres = parts.centres(x)
            information = information - centres.T @ centres
        return parts.value, x.T @ parts.slope, information

    def scores(self, beta: Tensor, x: Tensor, target: Tensor) -> Tensor:
        """[N, p]: what each row adds to the gradient; for Cox, Lin and Wei's residuals."""
        parts = self.parts(x @ beta, target)
        scores = x * parts.slope[:, None]
        return scores if parts.others is None else scores - parts.others(x)


MODELS = {
    "logistic": Model("logistic", logistic, True, "odds ratio", "0 or 1"),
    "poisson": Model("poisson", poisson, True, "rate ratio", "counts, and exposures where they differ"),
    "linear": Model("linear", linear, True, "", "numbers"),
    "cox": Model("cox", cox, False, "hazard ratio", "times and events"),
}


def named(model: str, ties: str = "efron") -> Model:
    """The model of a name. Raises ConfigError for another one."""
    for key, value, names in (("model", model, MODELS), ("ties", ties, TIES)):
        if value not in names:
            raise ConfigError(f"{key}: found {value!r}{closest(str(value), names)}, expected {', '.join(names)}")
    kind = MODELS[model]
    if model != "cox":
        return kind
    return Model(f"cox ({ties})", lambda eta, target: cox(eta, target, ties), *(kind.intercept, kind.ratio, kind.takes))


@dataclass(frozen=True)
class Loss:
    """A loss for `polyfed.fit`: minus the log-likelihood, over the number of samples. See `loss`."""

    model: Model
    whole: bool  # whether it needs all samples of a client at once

    @property
    def __name__(self) -> str:
        return self.model.name

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Loss of an output [b] or [b, 1] and a target [b], [b, 2], or [b, 3] with the client's weight last."""
        both = target.to(output.dtype).view(len(target), -1)
        if both.shape[1] < 2:
            both = torch.cat([both, torch.ones_like(both)], 1)
        eta = output.reshape(len(both))
        weight = both[:, 2].mean() if both.shape[1] > 2 else 1.0  # of one client, whose samples weigh the same
        return -weight * self.model.parts(eta, both[:, :2]).value / len(both)


@checked
def loss(model: str, ties: str = "efron") -> Loss:
    """A named loss for `polyfed.fit(..., loss=...)` and a model with one output.

    Parameters
    ----------
    model : str
        "logistic", "poisson", "linear" or "cox". Targets are [N] numbers; for Poisson [N, 2] counts and exposures where
        these differ; for Cox [N, 2] times and events, with ``batch_size=None``, since a risk set is no mean.
    ties : str
        "efron" or "breslow", for Cox.

    Returns
    -------
    Loss
        (output, target) -> minus the log-likelihood, over the number of samples.
    """
    return Loss(named(model, ties), model == "cox")


@checked
def concordance(time: Any, event: Any, risk: Any) -> float:
    """Harrell's concordance index: of the pairs that can be ordered, the share that `risk` orders rightly.

    A pair counts if one died while the other was at risk, also if censored at the same time. Equal risks count half.

    Parameters
    ----------
    time : array [N]
        Times.
    event : array [N]
        1: died, 0: censored.
    risk : array [N]
        Risks, such as ``x @ coefficients``: higher dies earlier.

    Returns
    -------
    float
        0 to 1, 0.5 by chance.
    """
    try:
        t, died, score = (np.asarray(values, float) for values in (time, event, risk))
    except (TypeError, ValueError):
        raise DataError("concordance: not all values are numbers") from None
    if not t.shape == died.shape == score.shape or t.ndim != 1:
        raise DataError(f"concordance: found shapes {t.shape}, {died.shape} and {score.shape}, expected one length")
    for name, values in (("time", t), ("event", died), ("risk", score)):
        good, expected = (np.isin(values, (0, 1)), "0 or 1") if name == "event" else (np.isfinite(values), "a number")
        if not good.all():
            row = int(np.argmin(good))
            raise DataError(f"concordance: {name} of row {row + 1}: found {values[row]:g}, expected {expected}")
    dead = died == 1
    right, pairs = 0.0, 0
    for i in np.flatnonzero(dead):
        others = score[(t > t[i]) | ((t == t[i]) & ~dead)]
        right += np.count_nonzero(score[i] > others) + 0.5 * np.count_nonzero(score[i] == others)
        pairs += len(others)
    if not pairs:
        raise DataError("concordance: no pair can be ordered; expected a death while another is at risk")
    return right / pairs
