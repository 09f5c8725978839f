"""Newton's method on a log-likelihood known by its value, gradient and information; and why it found nothing."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.base.errors import Diverged
from polyfed_clinical.models import Model

STEP = 1e-9  # Newton's last step, in standardised columns (and targets, of a linear model)
STEPS = 30  # where a likelihood has no maximum, every step goes on by about one
DEPENDENT = 1e-9  # smallest eigenvalue of a correlation matrix, of columns that are not combinations of one another
FINE, ENDLESS, SINGULAR, CONSTANT, FEW = range(5)  # what became of a fit
INTERCEPT = "intercept"

Derivatives = tuple[Tensor, Tensor, Tensor]  # log-likelihood, gradient [p], information [p, p]


class Optimum(NamedTuple):
    """Result of Newton's method."""

    beta: Tensor  # [p]
    value: float  # log-likelihood
    covariance: Tensor  # [p, p] inverse information
    outcome: int  # FINE, or the failure
    columns: Tensor  # [p] bool, those to blame


def newton(ask: Callable[[Tensor], Derivatives], beta: Tensor) -> Optimum:
    """Newton's method with halved steps; `ask` gives log-likelihood, gradient and information at beta [p]."""
    # If the maximum is at infinity (separated classes, a group without events), gradient and information vanish alike,
    # and the steps do not: then, and only then, the last of `STEPS` steps is not small.
    value, gradient, information = ask(beta)
    none = torch.full_like(information, torch.nan)
    if (null := dependent(information)) is not None:
        return Optimum(beta, float(value), none, *null)
    step = torch.zeros_like(beta)
    for _ in range(STEPS):
        factor, failed = torch.linalg.cholesky_ex(information)
        if failed:
            break
        step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        if step.abs().max() <= STEP:
            return Optimum(
                beta + step,
                float(value),
                torch.cholesky_inverse(factor),
                FINE,
                torch.zeros_like(beta, dtype=torch.bool),
            )
        share = 1.0
        while True:
            there = ask(beta + share * step)
            worst = value - 1e-9 * (1 + value.abs())  # rounding is no descent
            if all(bool(t.isfinite().all()) for t in there) and there[0] >= worst:
                break
            if (share := share / 2) < 1e-9:
                return Optimum(beta, float(value), none, ENDLESS, step.abs() > 0.1 * step.abs().max())
        beta, (value, gradient, information) = beta + share * step, there
    return Optimum(beta, float(value), none, ENDLESS, step.abs() > 0.1 * step.abs().max())


def dependent(information: Tensor) -> tuple[int, Tensor] | None:
    """(CONSTANT, columns that tell nothing) or (SINGULAR, the first that are combinations of one another), [p] bool."""
    diagonal, p = information.diagonal(), len(information)
    if bool((idle := diagonal <= 1e-11 * diagonal.max()).any()):
        return CONSTANT, idle
    alike = information / torch.outer(diagonal.sqrt(), diagonal.sqrt())
    if torch.linalg.eigvalsh(alike)[0] > DEPENDENT:
        return None
    first = next(k for k in range(2, p + 1) if k == p or torch.linalg.eigvalsh(alike[:k, :k])[0] <= DEPENDENT)
    null = torch.linalg.eigh(alike[:first, :first]).eigenvectors[:, 0].abs()
    return SINGULAR, torch.cat([null > 1e-3 * null.max(), torch.zeros(p - first, dtype=torch.bool)])


def evaluated(ask: Callable[[Tensor], Derivatives], beta: Tensor) -> Optimum:
    """The likelihood at beta, with where Newton's next step would lead in place of beta."""
    value, gradient, information = ask(beta)
    if not bool(information.isfinite().all()):
        raise Diverged("the method ended where the likelihood is not finite; try a smaller lr")
    nan = torch.full_like(information, torch.nan)
    if (null := dependent(information)) is not None:
        return Optimum(beta, float(value), nan, *null)
    covariance = torch.linalg.inv(information)
    return Optimum(
        beta + covariance @ gradient, float(value), covariance, FINE, torch.zeros_like(beta, dtype=torch.bool)
    )


def why(optimum: Optimum, model: Model, names: Sequence[str], who: str = "") -> str:
    """In one line, why there is no estimate; nothing where there is one."""
    slopes = [n for n, blame in zip(names, optimum.columns, strict=True) if blame and n != INTERCEPT]
    listed, who = ", ".join(slopes), f"{who}: " if who else ""
    if optimum.outcome == FINE:
        return ""
    if optimum.outcome == FEW:
        return f"{who}no more clusters than coefficients"
    if optimum.outcome == ENDLESS and model.name == "linear":
        return f"{who}no estimate within rounding; {listed} too nearly a combination of other columns"
    if optimum.outcome == ENDLESS:
        verb = "separate" if len(slopes) > 1 else "separates"
        return f"{who}no finite estimate; {listed or 'nothing'} {verb} those with events from those without"
    if not slopes:
        return f"{who}as many rows as coefficients, or no variance left"
    if len(slopes) == 1 or optimum.outcome == CONSTANT:
        verb = "column {} is" if len(slopes) == 1 else "columns {} are"
        return f"{who}{verb.format(listed)} constant {'within every site' if who else 'there'}"
    return f"{who}the columns {listed} are combinations of one another{'; leave one out' if who else ''}"
