"""FedSoft: Ruan, Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022."""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.clusters import starts
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Personal, Portrait, Server, mean


@dataclass(frozen=True)
class FedSoft(Personal):
    """Soft clusters: one personal model per client, pulled towards all centres c_1, ..., c_k by their importance.

        u_is = max(sigma, share of client i's samples at which c_s has the least loss)         every tau rounds
        w_i <- local SGD on f_i + lam/2 sum_s u_is ||w - c_s||^2,   from the client's own last model
        c_s <- sum_S u_is n_i w_i / sum_S u_is n_i

    Client i deploys w_i.

    Notes
    -----
    The pulls to k centres are one pull of strength lam sum_s u_is to their weighted mean. In the paper every client
    counts in every count, and for every centre K clients are drawn with probabilities u_is n_i / sum_j u_js n_j. Here a
    client counts when it takes part, in rounds 0, tau, 2 tau, ... and at its first, and a centre is the mean over the
    round's clients with these weights, which the draws give on average.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    k: int = setting(
        2, ge=1, le=10000, source="of the problem", doc="Number of centres, which the method does not find."
    )
    lam: float = setting(0.1, ge=0, source="code", doc="Pull of a client's model towards the centres; 0 is Local.")
    tau: int = setting(2, ge=1, source="code", doc="Rounds from one count of the samples to the next.")
    sigma: float = setting(1e-4, gt=0, le=1, source="code", doc="Least importance of a centre.")
    init_scale: float | None = setting(
        None,
        gt=0,
        source="ours",
        doc="The first centre starts as the common start. None: the others are drawn as its modules draw theirs; a "
        "number s: w0 + s N(0, I).",
    )
    seed: int = setting(0, ge=0, source="ours", doc="Seed of the centres' starts.")

    def init_server(self, task, w0, n):
        w = starts(task, w0, self.k, self.seed, self.init_scale)
        return Server({"w": w}, {"importance": w0.new_zeros(n, self.k)})

    def init_client(self, task, w0):
        return {"w": w0, "u": w0.new_zeros(self.k)}

    def local_update(self, task, client, down, data, round):
        centres, u = down["w"], client["u"]
        if round.t % self.tau == 0 or not u.any(1).all():
            batch = data.whole()
            best = task.losses(centres, batch).argmin(1)
            weight = u.new_full(best.shape, 1 / best.shape[1]) if batch.weight is None else batch.weight.to(u)
            counted = torch.zeros_like(u).scatter_add_(1, best, weight).clamp(min=self.sigma)
            u = counted if round.t % self.tau == 0 else torch.where(u.any(1, keepdim=True), u, counted)
        total = u.sum(1, keepdim=True)
        pull = self.lam * total, ((u / total)[:, None] @ centres)[:, 0]
        w = local_sgd(task, client["w"], data, self.lr, pull=pull)
        return {"w": w, "u": u}, {"w": w, "importance": u.clone()}

    def aggregate(self, server, up, round):
        u, models = up["importance"], up["w"]
        w = torch.stack([mean(models, u[:, s] * round.samples) for s in range(self.k)])
        return server | {"w": w, "importance": server["importance"].index_copy(0, round.ids, u)}

    def describe(self, server):
        return Portrait(clusters=server["importance"].argmax(1), findings={"importance": server["importance"]})
