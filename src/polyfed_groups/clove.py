"""CLoVE: Bhatia et al., ICML 2026 (arXiv 2506.22427)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import Choosing, Clustered, kmeans, losses, starts
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, Server, by_settings


def matched(loss: Tensor, label: Tensor) -> Tensor:
    """[m] a model for each client: clusters of the rows of loss [m, k], each with a model of its own, at least cost."""
    from scipy.optimize import linear_sum_assignment  # slow to import

    cost = loss.new_zeros(int(label.max()) + 1, loss.shape[1]).index_add_(0, label, loss)
    model = torch.from_numpy(linear_sum_assignment(cost.cpu().numpy())[1])
    return model.to(label.device)[label]


@dataclass(frozen=True)
class CLoVE(Clustered):
    """Clusters of loss vectors: clients are alike whose losses under all k models are, however bad the models.

        l_i = (F_i(theta_1), ..., F_i(theta_k))               on all of client i's training samples
        c_1, c_2, ... = k-means on the l_i of the round,      each c with a model j(c) of its own:
        the Hungarian method on cost(c, j) = sum_{i in c} l_ij
        theta_{j(c)} <- sum_{i in c} n_i w_i / sum_{i in c} n_i,    w_i = local SGD from theta_{j(c)} on F_i

    A model without a cluster stays as it is. Once all clients have a model and none has changed for `stable` rounds, no
    more losses are asked for: each group is FedAvg.

    Notes
    -----
    k-means starts from the rows that are farthest apart; the released code draws one start of k-means++. A client
    downloads its model once more rather than hold k of them while the server sorts. The released code compares the
    newest models with the oldest of the last three alone, and has none for a client that it meets after its stop. Its
    search for k by silhouettes is left out.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    k: int = setting(2, ge=1, le=10000, source="of the problem", doc="Number of models, at most that of clients.")
    stable: int = setting(3, ge=1, source="code", doc="Rounds without a change after which no losses are asked for.")
    init_scale: float | None = setting(
        None, gt=0, source="ours", doc="s: starts w0 + s N(0, I); none: drawn as w0 was."
    )
    seed: int = setting(0, ge=0, source="ours", doc="Seed of the k initial models.")

    @by_settings
    def needs(self):
        return Needs(exchanges=2, clients=self.k)

    def init_server(self, task, w0, n):
        still = torch.zeros((), dtype=torch.long, device=w0.device)
        each = {"cluster": torch.zeros(n, dtype=torch.long, device=w0.device)}
        return Server({"w": starts(task, w0, self.k, self.seed, self.init_scale), "still": still}, each)

    def admit(self, task, server, samples):
        return Choosing(self, task, server, samples)

    def _asks(self, server):
        return int(server["still"]) < self.stable or not server["known"].all()

    def downlink(self, server, round):
        if round.phase == 0:
            return Down(shared={"models": server["w"]} if self._asks(server) else {})
        return Down(each={"w": server["w"][server["cluster"][round.ids]]})

    def local_update(self, task, client, down, data, round):
        if round.phase == 0:
            return {}, {"loss": losses(task, down["models"], data)} if "models" in down else {}
        return {}, {"w": local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        before = server["cluster"][round.ids]
        if round.phase == 1:
            return server | {"w": up.mean("w", round.samples, within=before, out=server["w"].clone())}
        if not self._asks(server):
            return server
        loss = up["loss"].double()
        label = matched(loss, kmeans(loss, loss[:0], self.k, 100)[1].unique(return_inverse=True)[1])
        same = bool(((label == before) & (server["known"][round.ids] > 0)).all())
        cluster = server["cluster"].index_copy(0, round.ids, label)
        return server | {"cluster": cluster, "still": server["still"] * same + same}
