"""The pooled likelihood as a sum of the sites' messages, with one intercept for all sites or one for each."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyfed.base.errors import DataError
from polyfed_clinical.inference import LikelihoodRatio
from polyfed_clinical.models import Model
from polyfed_clinical.newton import FINE, INTERCEPT, Derivatives, Optimum, evaluated, newton, why
from polyfed_clinical.sites import Design, Wire


class Layout(NamedTuple):
    """Places of the sites' coefficients among all of them."""

    who: list[int]  # the sites that are asked
    at: Tensor  # [who, q] of a site's intercept and slopes
    intercepts: int  # in all

    @classmethod
    def common(cls, sites: int, q: int, intercept: bool) -> "Layout":
        """One model for all sites."""
        return cls([*range(sites)], torch.arange(q).expand(sites, q), int(intercept))

    @classmethod
    def apart(cls, who: list[int], q: int) -> "Layout":
        """An intercept for each site, before the slopes of all."""
        slopes = (len(who) + torch.arange(q - 1)).expand(len(who), -1)
        return cls(who, torch.cat([torch.arange(len(who))[:, None], slopes], 1), len(who))

    @property
    def size(self) -> int:
        """Number of coefficients."""
        return self.intercepts + self.at.shape[1] - bool(self.intercepts)

    def spread(self, beta: Tensor) -> Tensor:
        """[size]: coefficients of one model for all, as those of this one."""
        return torch.cat([beta[:1].expand(self.intercepts), beta[int(self.intercepts > 0) :]])

    def added(self, sent: Tensor) -> Tensor:
        """[size, size]: the sum of the sites' symmetric matrices [who, q (q + 1) / 2]."""
        above = torch.triu_indices(self.at.shape[1], self.at.shape[1])
        places = self.at[:, above[0]] * self.size + self.at[:, above[1]]
        whole = sent.new_zeros(self.size**2).index_add(0, places.flatten(), sent.flatten())
        whole = whole.view(self.size, self.size)
        return whole + whole.triu(1).T


class Best(NamedTuple):
    """The fit that was asked for, and the test against the other one."""

    layout: Layout
    optimum: Optimum  # at the maximum, or where Newton's next step leads
    beta: Tensor  # [layout.size]
    start: Tensor  # [q] coefficients of one model for all
    test: LikelihoodRatio | None = None  # of one intercept for all
    untested: str = ""  # the reason for having no test

    def each(self, sites: int) -> Tensor:
        """[sites, q] the coefficients that each of so many sites has."""
        beta = self.start.expand(sites, -1).clone()
        beta[self.layout.who] = self.beta[self.layout.at]
        return beta


def maximum(
    wire: Wire,
    kind: Model,
    design: Design,
    labels: Sequence[str],
    start: Tensor,
    speak: list[int],
    intercepts: str | None,
    given: bool,
) -> Best:
    """Fit one model for all sites, and one with an intercept for each site of `speak`, whose outcomes differ.

    Returns the one asked for. If `given`, another method ended at `start`.
    """
    sites = len(wire.sites)
    common, apart = Layout.common(sites, len(start), kind.intercept), Layout.apart(speak, len(start))
    optimum = (evaluated if given else newton)(_summed(wire, kind, design, common), start)
    _refuse(optimum, kind, labels, common)
    one = Best(common, optimum, start if given else optimum.beta, start if given else optimum.beta)
    if given or not kind.intercept or sites < 2:
        return one
    if not speak:
        why_not = "every site's outcomes are all alike"
        if intercepts == "common":
            return one._replace(untested=why_not)
        raise DataError(f"{why_not}, so that intercepts of their own leave nothing to fit; intercepts = 'common' does")
    other = newton(_summed(wire, kind, design, apart), apart.spread(one.beta))
    if intercepts == "common" and other.outcome != FINE:
        return one._replace(untested=why(other, kind, [INTERCEPT] * len(speak) + [*labels], "an intercept per site"))
    _refuse(other, kind, labels, apart)
    rows = sum(len(site.x) for site in wire.sites)
    test = LikelihoodRatio.of(kind, optimum.value, other.value, rows, sites - 1)
    return one._replace(test=test) if intercepts == "common" else Best(apart, other, other.beta, one.beta, test)


def _refuse(optimum: Optimum, kind: Model, labels: Sequence[str], layout: Layout) -> None:
    if optimum.outcome != FINE:
        reason = why(optimum, kind, [INTERCEPT] * layout.intercepts + [*labels], "all sites together")
        within = layout.intercepts > 1 and "constant within" in reason
        raise DataError(reason + "; intercepts = 'common' has one for all sites" * within)


def _summed(wire: Wire, kind: Model, design: Design, layout: Layout) -> Callable[[Tensor], Derivatives]:
    """The derivatives of the pooled likelihood, summed over the sites' messages."""

    def ask(beta: Tensor) -> Derivatives:
        tensors = [t for t in design if len(t)]
        sums = wire.ask(lambda site, b: site.derivatives(kind, design, b), beta[layout.at], layout.who, tensors)
        gradient = beta.new_zeros(layout.size).index_add(0, layout.at.flatten(), sums["gradient"].flatten())
        return sums["value"].sum(), gradient, layout.added(sums["information"])

    return ask
