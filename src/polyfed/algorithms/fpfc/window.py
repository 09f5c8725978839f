"""The range of FPFC's lambda for which a grouping is a stationary point: bounds from models and gradients.
`polyfed_papers/window.py` trains the groups' models for it."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """Bounds on lambda for a proposed grouping, see `lambda_window`."""

    necessary: float  # below, the groups' models are not stationary
    sufficient: float  # from here on, they are
    unbiased: float  # above, the penalty pulls the groups' models towards each other
    excluded: float  # below, one common model is not stationary, as a common start needs

    def lines(self) -> list[str]:
        """Each bound with its meaning."""
        held = [
            f"lam >= {self.necessary:.4g} is necessary for the groups' models to be stationary",
            f"lam >= {self.sufficient:.4g} is sufficient for it",
        ]
        if self.excluded == inf:
            return [*held, "one group: nothing bounds lam from above"]
        free = f"lam < {self.unbiased:.4g} leaves them unbiased: the penalty is flat at the distance of the closest two"
        if not self.unbiased:
            free = "no lam leaves them unbiased: this penalty pulls at every distance"
        return [*held, free, f"lam < {self.excluded:.4g} excludes one common model, where all clients start alike"]


def lambda_window(gradients: Tensor, merged: Tensor, models: Tensor, groups: Tensor, a: float = 3.7) -> Window:
    """The range of lambda for which a proposed grouping is a stationary point of (1).

    With alpha_G the minimiser of sum_{i in G} f_i and g = |G|, among m clients:

        necessary    lam >= m/(g-1) max_i ||grad f_i(alpha_G)||                 (a client's pairs can hold its gradient)
        sufficient   lam >= m/g max_{i,j in G} ||grad f_i - grad f_j||           (v_ij = (m/g) (grad f_j - grad f_i))
        unbiased     a lam < min_{G,H} ||alpha_G - alpha_H||
        excluded     lam < m/(m-g) ||mean_{i in G} grad f_i(alpha_all)||         for some G

    The first two take the groups' models to be unbiased, and coincide for groups of two. `gradients` and `models` [m,
    p] are grad f_i at alpha of i's own group and that alpha, `merged` [m, p] grad f_i at the common minimiser, groups
    [m] labels; a is infinite for the group norm. A bound that does not apply (one group) is infinite; that of single
    clients is 0.
    """
    m, labels = len(groups), groups.unique()
    members = [(groups == k).nonzero()[:, 0] for k in labels]
    necessary = sufficient = 0.0
    excluded = 0.0 if len(labels) > 1 else inf
    for at in members:
        own, g = gradients[at], len(at)
        if g > 1:
            necessary = max(necessary, m / (g - 1) * float(own.norm(dim=1).max()))
            sufficient = max(sufficient, m / g * float(torch.pdist(own).max()))
        if g < m:
            excluded = max(excluded, m / (m - g) * float(merged[at].mean(0).norm()))
    apart = torch.pdist(models[torch.stack([at[0] for at in members])])
    return Window(necessary, sufficient, float(apart.min()) / a if len(apart) else inf, excluded)
