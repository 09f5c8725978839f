"""pFedGraph: Ye et al., ICML 2023, PMLR 202, 39801-39817."""

from dataclasses import dataclass

import torch
from torch import Tensor, zeros_like

from polyfed.algorithms._shared.similarity import mixed, similarity, simplex, unit
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Personal, Portrait, Server


def collaboration(dw: Tensor, p: Tensor, alpha: float) -> Tensor:
    """[m, m] float64: row i is the a in the simplex with the least alpha ||a - p||^2 + D_i a, D the negative cosines of
    the updates dw [m, d], -1 below -0.9."""
    D = -similarity(dw)
    return simplex(p - torch.where(D < -0.9, -1.0, D) / (2 * alpha))


@dataclass(frozen=True)
class PFedGraph(Personal):
    """A collaboration graph by a small quadratic programme: who is alike, and who has many samples.

        D_ij = -cos(w_i - w_0, w_j - w_0),  -1 below -0.9          w_0 the common start
        a_i = argmin over the simplex of alpha ||a - p||^2 + D_i a,   p_j = n_j / sum n:
        the point of the simplex nearest to p - D_i / (2 alpha)
        u_i = sum_j a_ij w_j          m_i = sum_j a_ij w_j / ||w_j||
        w_i = local SGD from u_i on f_i(w) - lam <m_i, w> / ||w||,   without lam in a client's first round

    Sums run over the round's clients. Client i deploys w_i.

    Notes
    -----
    A client that was away goes on from the u_i and m_i of its last one. The released code adds lam <m_i, w> / ||w||
    to f_i, which pushes a model away from its collaborators; here its sign is the paper's, which pulls. It deploys the
    round that is best on validation samples, and may take cosines of the head alone: both are left out.
    """

    linear_claims = "its cosines between updates, and so its graph,"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    alpha: float = setting(0.8, gt=0, source="code", doc="Weight of shares of samples against likeness; large: FedAvg.")
    lam: float = setting(0.01, ge=0, source="code", doc="Pull of a model's direction towards its collaborators'.")

    def init_server(self, task, w0, n):
        each = {"u": w0.expand(n, -1).clone()} | ({"m": w0.new_zeros(n, len(w0))} if self.lam else {})
        return Server({"start": w0}, each, pairs={"graph": w0.new_zeros(n, n)})

    def downlink(self, server, round):
        return Down(each={name: server[name][round.ids] for name in ("u", "m") if name in server})

    def local_update(self, task, client, down, data, round):
        m = down.get("m")

        def pulled(w, g):
            length = w.norm(dim=1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
            along = (m * w).sum(1, keepdim=True) / length
            return g - self.lam / length * (m - along * w / length)

        w = local_sgd(task, down["u"], data, self.lr, correct=None if m is None else pulled)
        return {"w": w}, {"w": w}

    def aggregate(self, server, up, round):
        W, ids, samples = up["w"], round.ids, round.samples.double()
        a = collaboration(W - server["start"], samples / samples.sum(), self.alpha)
        graph = zeros_like(server["graph"][ids]).index_copy(1, ids, a.to(W.dtype))
        new = {"u": mixed(a, W), "m": mixed(a, unit(W).to(W.dtype)), "graph": graph}
        return {name: old.index_copy(0, ids, new[name]) if name in new else old for name, old in server.items()}

    def describe(self, server):
        return Portrait(findings={"mixing": server["graph"]})
