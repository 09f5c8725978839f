"""FedTGP: Zhang, Liu, Hua, Cao, AAAI 2024."""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from polyfed.algorithms._shared.prototypes import Pulled, pairs, renewed, unseen
from polyfed.base.randomness import key_of, mix
from polyfed.base.settings import setting


@dataclass(frozen=True)
class FedTGP(Pulled):
    """Clients as in FedProto, from whose class means m_ic the server trains prototypes P_c = V relu(U e_c + u) + v:

        e, U, u, V, v <- server_steps of gradient descent on the mean over pairs (i, c) of
                         CE(-(||m_ic - P_k|| + margin 1{k = c})_k, c)
        margin = min(max_c min_k ||M_c - M_k||, tau),     M_c the mean of this round's m_ic

    `weighted` weighs the pairs, and the means M_c, by samples.

    Notes
    -----
    The margin moves a prototype's own class away, so that it must be nearer than the others by as much. The released
    code takes the root of a^2 - 2ab + b^2, which rounding can make negative; here differences are squared. It passes
    1000 times over the pairs in batches of 10, where these steps are of all pairs at once.
    """

    tau: float = setting(100.0, ge=0, source="code", doc="The largest margin.")
    server_lr: float = setting(0.01, source="code", doc="Step size of the server's gradient descent.")
    server_steps: int = setting(100, ge=0, source="ours", doc="Its steps in a round.")
    seed: int = setting(0, ge=0, source="ours", doc="Seed of what the prototypes are made from.")

    def init_server(self, task, w0, n):
        """e: [C, d]; U, V: [d, d]; u, v: [d]."""
        C, d = task.classes, task.width
        net = {
            name: w0.new_zeros(shape) for name, shape in {"e": (C, d), "U": (d, d), "u": d, "V": (d, d), "v": d}.items()
        }
        if not w0.is_meta:
            draws = torch.Generator().manual_seed(int(mix(self.seed, key_of("fedtgp"))) % 2**63)
            for name, q in net.items():
                as_q = {"generator": draws, "dtype": torch.float32}  # the same in both precisions
                uniform = (2 * torch.rand(q.shape, **as_q) - 1) / d**0.5
                q.copy_(torch.randn(q.shape, **as_q) if name == "e" else uniform)
        return net | unseen(task, w0)

    def aggregate(self, server, up, round):
        (m, c, share), means = pairs(up), renewed(server, up)
        M = means["prototypes"][c.unique()]
        apart = torch.cdist(M, M, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
        margin, own = apart.amin(1).max().clamp(max=self.tau), one_hot(c, len(server["seen"]))
        e, U, u, V, v = (server[name] for name in ("e", "U", "u", "V", "v"))
        for _ in range(self.server_steps):
            inner = e @ U.T + u
            P = inner.relu() @ V.T + v
            far = (m[:, None] - P).square().sum(2).clamp_min(1e-12).sqrt()  # a divisor below
            slope = share[:, None] * (own - (-far - margin * own).softmax(1)) / far  # of the loss by far, over far
            by_P = slope.sum(0)[:, None] * P - slope.T @ m
            by_inner = by_P @ V * (inner > 0)
            steps = by_inner @ U, by_inner.T @ e, by_inner.sum(0), by_P.T @ inner.relu(), by_P.sum(0)
            e, U, u, V, v = (q - self.server_lr * g for q, g in zip((e, U, u, V, v), steps, strict=True))
        net = {"e": e, "U": U, "u": u, "V": V, "v": v}
        return net | {"prototypes": made(net), "seen": means["seen"]}


def made(net):
    """[C, d]: the prototypes."""
    return (net["e"] @ net["U"].T + net["u"]).relu() @ net["V"].T + net["v"]
