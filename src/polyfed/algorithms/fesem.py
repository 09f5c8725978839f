"""FeSEM: Long et al., World Wide Web 26 (2023)."""

from dataclasses import dataclass

import torch

from polyfed.algorithms._shared.clusters import Clustered, distances, kmeans
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Server


@dataclass(frozen=True)
class FeSEM(Clustered):
    """Stochastic expectation maximisation on models: one step of k-means a round, all of it at the server.

        w_i = local SGD from c_{r_i} on f_i
        E:  r_i = argmin_k ||w_i - c_k||^2           M:  c_k <- mean of the w_i with r_i = k

    A client deploys the centre that it was last assigned to.

    Notes
    -----
    Only the cohort is assigned anew, and a centre without a client stays. A client that the server has not met trains
    from the mean of the centres, in the first round the common start, so that the direction of its move decides; one
    that was never asked deploys the centre with the most samples. The first centres are found among the first clients'
    trained models, each the farthest from those before. The released code clusters on one chosen layer.
    """

    linear_claims = "its distances between models, and so its clusters,"
    linear_only = True

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    k: int = setting(
        2, ge=1, le=10000, source="of the problem", doc="Number of centres, which the method does not find."
    )
    first_iterations: int = setting(
        5, ge=0, source="code", doc="Iterations of k-means in rounds in which centres are made."
    )
    weighted: bool = setting(False, source="paper", doc="Weigh clients by their number of samples; False: plain mean.")

    def init_server(self, task, w0, n):
        each = {"cluster": torch.zeros(n, dtype=torch.long, device=w0.device)}
        return Server(
            {"w": w0.expand(self.k, -1).clone(), "made": torch.zeros((), dtype=torch.long, device=w0.device)}, each
        )

    def downlink(self, server, round):
        met = (server["known"] > 0)[round.ids, None]
        common = server["w"][: max(1, int(server["made"]))].mean(0)
        return Down(each={"w": torch.where(met, server["w"][server["cluster"][round.ids]], common)})

    def local_update(self, task, client, down, data, round):
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        models, w, made = up["w"], server["w"], int(server["made"])
        if made < self.k:
            centres, label = kmeans(models, w[:made], self.k, self.first_iterations)
            made, w = len(centres), torch.cat([centres, w[len(centres) :]])
        else:
            label = distances(models, w).argmin(1)
        w = up.mean("w", round.samples if self.weighted else None, within=label, out=w.clone())
        cluster = server["cluster"].index_copy(0, round.ids, label)
        return server | {"w": w, "cluster": cluster, "made": torch.full_like(server["made"], made)}
