"""The penalty of FPFC on the distance of two clients, equations (2) and (3), and its proximal step, rule (6)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Fusion(NamedTuple):
    """The settings of the server's steps."""

    lam: float
    rho: float = 1.0
    a: float = 3.7
    xi: float = 1e-4
    penalty: str = "scad"  # "scad" (2), (3), or "l1", lam t; both smoothed below xi
    delta: float = 0.05  # distance of z below which clients may share a node; xi: exact

    def weight(self, D: Tensor) -> Tensor:
        """g'(D) / D."""
        W = self.lam / D.clamp(min=self.xi)
        if self.penalty == "l1":
            return W
        taper = (self.a * self.lam / D.clamp(min=self.xi) - 1) / (self.a - 1)
        return torch.where(D > self.lam, taper.clamp(min=0), W)

    def numbers(self, device: torch.device) -> Tensor:
        """[6] these settings, for comparison."""
        values = [*self[:4], self.penalty == "l1", self.delta]
        return torch.tensor(values, dtype=torch.float64, device=device)

    @property
    def radius(self) -> float:
        """delta, where a node's factor f is known in closed form: from xi to lam."""
        return max(self.xi, self.delta if self.penalty == "l1" or self.lam == 0 else min(self.delta, self.lam))


def shrinkage(t: Tensor, lam: float, rho: float, a: float, xi: float, penalty: str) -> Tensor:
    """c(t) of rule (6): theta = c(||delta||) delta is the proximal step of the penalty, for norms t = ||delta||."""
    if lam == 0:
        return torch.ones_like(t)
    safe = t.clamp(min=torch.finfo(t.dtype).tiny)
    soft = 1 - lam / (rho * safe)
    if penalty == "l1":
        return soft.clamp(min=0)
    k = 1 / ((a - 1) * rho)
    fused = torch.full_like(t, xi * rho / (lam + xi * rho))
    tapered = (1 - a * lam * k / safe) / (1 - k)
    c = torch.where(t <= xi + lam / rho, fused, soft)
    c = torch.where(t > lam + lam / rho, tapered, c)
    return torch.where(t > a * lam, torch.ones_like(t), c)
