"""FedSLR: Huang et al., "Fusion of Global and Local Knowledge ...", Algorithms 1, 2 and 3; equations (4) to (7)."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, zeros_like

from polyfed.algorithms._shared.bits import pack, unpack
from polyfed.algorithms._shared.lowrank import LowRank, Sheet, gkr_parameters, places, received, sheets, shrink_layers
from polyfed.algorithms._shared.topk import dense, misplaced, top_k
from polyfed.base.settings import setting
from polyfed.compute.gradients import bare
from polyfed.compute.solvers import local_sgd, soft_threshold
from polyfed.core.algorithm import Down, Needs, Portrait, State


@dataclass(frozen=True)
class FedSLR(LowRank):
    """Low-rank common knowledge w, sparse personal knowledge p_i; client i deploys w + p_i.

        min_w    (1/n) sum_i f_i(w) + lam sum_l ||w_l||_*           over all clients               (P1)
        min_p    f_i(w + p) + mu ||p||_1                            each client, w as received     (P2)

        w_i = argmin_x f_i(x) - <g_i, x> + ||x - w||^2 / (2 eta_g), by local SGD from w            (4)
        g_i <- g_i + (w - w_i) / eta_g                                                             (5)
        w   <- prox( mean_S w_i - eta_g mean_n g_i ),  singular values shrunk by lam eta_g         (6)
        p_i <- soft( p_i - lr grad f_i(w + p_i), lr mu ), from its last value                      (7)

    The mean of the duals runs over all n clients. Layers of two or more axes are matrices (a convolution (o kh) x (i
    kw)) and go down as two factors wherever these are smaller; both sides compute with the product of what was sent.
    Biases and norms take part in everything but the proximal step (6).

    Notes
    -----
    Algorithm 2 prints gamma / eta_g in its line 10; (6), Algorithms 1, 3 and the proof multiply, as is done here. The
    run's weight decay is part of f_i in (P1), but not of (P2), as (7) has none. A sparse common part is one of the
    layers too, and goes down as its nonzeros and one bit per parameter. What `keep` leaves unsent comes again in the
    next round, as neither w nor g_i has moved there: (P1) is solved exactly at every share, where error feedback, which
    adds it once more, diverges.
    """

    lr: float = setting(0.1, source="paper", doc="Step size of both local solves.")
    lam: float = setting(
        1e-4, ge=0, source="paper", doc="Weight of the nuclear norm; 0 is FedDyn with alpha = 1 / eta_g."
    )
    mu: float = setting(1e-3, ge=0, source="paper", doc="Weight of the l1 norm of the personal part.")
    eta_g: float = setting(
        10.0, gt=0, source="paper", doc="Global step size: reach of the proximal terms and scale of the thresholds."
    )
    personal_epochs: int | None = setting(
        1,
        ge=0,
        source="paper",
        doc="Passes over the local data for the personal part, each round; 0: the common model only; None: the run's "
        "local work.",
    )
    structure: Literal["LR+S", "S+S", "S+LR", "LR+LR"] = setting(
        "LR+S",
        source="paper",
        doc='Common and personal part: "LR+S", or the variants of A.3, "S+S", "S+LR", "LR+LR". S is the l1 norm, LR '
        "the nuclear norm of the layers; the norms change place in (6) and (7), with the same thresholds.",
    )
    form: Literal["mean-dual", "all-duals"] = setting(
        "mean-dual",
        source="ours",
        doc='"mean-dual": the server keeps the mean of the duals only (Algorithm 3), and needs no more than the '
        'mean of the uploads; "all-duals": it keeps every client\'s dual (Algorithms 1, 2). The same iterates.',
    )
    deploy: Literal["mixed", "gkr"] = setting(
        "mixed", source="paper", doc='"mixed": w + p_i; "gkr": w alone, the paper\'s global knowledge representation.'
    )

    linear_claims = "the singular values that it shrinks, and so its ranks,"
    linear_only = True
    p_init: Literal["zeros", "weights"] = setting(
        "zeros",
        source="ours",
        doc='"zeros", or "weights": the personal part starts at the initial weights of the layers, as in the '
        "released code.",
    )
    p_weight_decay: float = setting(
        0.0,
        ge=0,
        source="paper",
        doc="Adds p_weight_decay/2 ||p||^2 to (P2), as the released code does with the run's weight decay.",
    )

    keep: float | None = setting(
        None,
        gt=0,
        le=1,
        source="paper",
        doc="Share of the entries of w_i - w that go up, the largest first, with their positions (the paper's footnote "
        "2, for later work); None: w_i, whole.",
    )

    needs = Needs(synchronous=True, plain_sgd="its proximal steps (7) belong to gradient steps of length lr")

    @property
    def sparse_common(self) -> bool:
        return self.structure.startswith("S+")

    @property
    def sparse_personal(self) -> bool:
        return self.structure.endswith("+S")

    def init_server(self, task, w0, n):
        server = super().init_server(task, w0, n)
        if self.form == "all-duals":
            return server._replace(each={"g": w0.new_zeros(n, len(w0))})
        return server._replace(shared=server.shared | {"g": zeros_like(w0)})

    def init_client(self, task, w0):
        p = zeros_like(w0)
        if self.p_init == "weights":
            for sheet in sheets(task.layout).values():
                p[sheet.span] = w0[sheet.span]
        return {"g": zeros_like(w0), "p": p}

    def downlink(self, server, round):
        if self.sparse_common:
            w, kept = server["w"], server["w"] != 0
            message = {"values": w[kept], "kept": pack(kept[None])[0]}
            size = sum(t.numel() * t.element_size() for t in message.values())
            return Down(shared=message if size < w.numel() * w.element_size() else {"rest": w})
        return super().downlink(server, round)

    def local_update(self, task, client, down, data, round):
        w, layers = arrived(down, task.layout), sheets(task.layout)
        g, p, shrink = client["g"], client["p"], self.lr * self.mu
        wi = local_sgd(task, w, data, self.lr, pull=(1 / self.eta_g, w), minus=g)  # (4)
        up = {"w": wi}
        if self.keep is not None:
            up = top_k(wi - w, self.keep)
            wi = w + dense(up, task.p)  # for (5) too, so that the duals' mean is the server's
        mixed = local_sgd(
            task,
            w + p,
            data.again("personal", epochs=self.personal_epochs),
            self.lr,
            pull=(self.p_weight_decay, w) if self.p_weight_decay else None,
            correct=(lambda x, g: g - task.net.weight_decay * x) if task.net.weight_decay else None,
            prox=lambda x: self._personal_prox(x.sub_(w), layers, shrink).add_(w),
        )  # (7)
        return {"g": g + (w - wi) / self.eta_g, "p": bare(task.net, mixed - w)}, up  # (5)

    def _personal_prox(self, p, layers, amount):
        return soft_threshold(p, amount) if self.sparse_personal else shrink_layers(p, layers, amount)

    def accepts(self, task, up):
        return misplaced(up.get("at"), task.p)

    def aggregate(self, server, up, round):
        w, eta = server["w"], self.eta_g
        sent = None if self.keep is None else w + dense(up, len(w))
        mean = up.mean("w") if sent is None else sent.mean(0)
        if self.form == "mean-dual":  # those who were absent did not change their dual
            g = server["g"] + len(round.ids) / (round.n * eta) * (w - mean)
            new = mean - eta * g
        else:
            g = server["g"].index_add(0, round.ids, (w - (up["w"] if sent is None else sent)) / eta)
            new = mean - eta * g.mean(0)
        if not self.sparse_common:
            return self.shrunk(server, new, self.lam * eta) | {"g": g}  # (6)
        for sheet in places(server).values():
            new[sheet.span] = soft_threshold(new[sheet.span], self.lam * eta)
        return server | {"w": new, "g": g}

    def conserved(self, server, clients):
        g = clients["g"]
        return {"g = mean g_i": server["g"] - g.mean(0)} if self.form == "mean-dual" else {"g_i": server["g"] - g}

    def personal(self, task, client, down):
        return down["w"] + client["p"] if self.deploy == "mixed" else down["w"]

    def parameters(self, task, client, down):
        server = {name: t[0] for name, t in down.items()}
        layers = sheets(task.layout)
        common = self._common_parameters(server, layers)
        if self.deploy == "gkr":
            return common
        p = client["p"]
        if self.sparse_personal:
            return common + (p != 0).sum(1)
        return common + _low_rank_parameters(p, p + server["w"], layers)

    def describe(self, server):
        if not self.sparse_common:
            return super().describe(server)
        return Portrait(
            common=server["w"], findings={"gkr_parameters": self._common_parameters(server, places(server))}
        )

    def _common_parameters(self, server, layers):
        return int((server["w"] != 0).sum()) if self.sparse_common else gkr_parameters(server, layers)


def arrived(down: State, layout) -> Tensor:
    """[s, p]: the common model as it was sent, as factors and the rest, or as nonzeros and their positions."""
    if "kept" not in down:
        return received(down, layout)
    w = down["values"].new_zeros(layout.p)
    w[unpack(down["kept"][:1], layout.p)[0]] = down["values"][0]
    return w.expand(len(down["kept"]), -1)


def _low_rank_parameters(p: Tensor, mixed: Tensor, layers: dict[str, Sheet]) -> Tensor:
    """[s]: numbers that describe low-rank parts `p: [s, p]`, known as mixed - w and therefore to mixed's rounding."""
    count, eps = torch.full((len(p),), p.shape[1]), torch.finfo(p.dtype).eps
    for sheet in layers.values():
        d1, d2 = sheet.shape
        rounding = eps * sheet.unfold(mixed).flatten(1).norm(dim=1)
        rank = torch.linalg.matrix_rank(sheet.unfold(p), atol=rounding).cpu()
        count += torch.clamp(rank * (d1 + d2) - d1 * d2, max=0)
    return count
