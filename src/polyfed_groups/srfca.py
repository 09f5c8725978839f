"""SR-FCA: Vardhan, Ghosh, Mazumdar (arXiv 2210.11538)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyfed.algorithms._shared.clusters import Clustered, distances
from polyfed.base.errors import ConfigError
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, Portrait, Server


def pivoted(apart: Tensor, reach: Tensor) -> Tensor:
    """[m] the pivot of each point's cluster: the one with the most neighbours within reach of those left takes them."""
    near, label = apart <= reach, torch.full_like(apart[0], -1).long()
    while (left := label < 0).any():
        mine = near & left
        near_by = mine.sum(1) - torch.where(mine, apart, 0).sum(1) / (2 * apart.sum() + 1)  # of as many, the nearest
        pivot = torch.where(left, near_by, -1).argmax()
        label = torch.where(mine[pivot], pivot, label)
    return label


def trimmed(rows: Tensor, share: float) -> Tensor:
    """[p]: mean of each coordinate without the share of rows [m, p] at either end; of all if one row would be left."""
    low, high = int(share * len(rows)), int((1 - share) * len(rows))
    return (rows.sort(0).values[low:high] if high - low > 1 else rows).mean(0)


@dataclass(frozen=True)
class SRFCA(Clustered):
    """Clusters that are found from models trained alone, then refined by models trained together.

        ONE_SHOT: u_i = local SGD from w_0 on f_i, once, of `refine` rounds' work;  edge (i, j): ||u_i - u_j|| <= reach
                  a pivot and its neighbours are a cluster, then one of the rest; theta_c = mean of its u_i
        a round:  theta_c <- trimmed mean of w_i = local SGD from theta_c on f_i, over the cluster's clients
        REFINE, after `refine` rounds: client i to the cluster of the least ||u_i - theta_c||;
                  pivots of the theta_c and those within reach of them become one, their mean

    Clusters of fewer than `size` clients are dissolved into the nearest ones. Client i deploys its cluster's model.

    Notes
    -----
    `reach` is a quantile of the distances between the first clients' u_i, as in the released code's experiments; on
    images that measures (f_i(u_j) + f_j(u_i)) / 2, for which every client would need all models. The paper drops the
    clients of small clusters until the next refinement, and draws its pivots; here each is the one with the most
    neighbours left, so that no draw and no order decides. A client that is met later joins the nearest cluster. Models
    that have trained for long are far from u_i of little work, whoever they are of: both get as much, as in the code.
    """

    name = "sr-fca"
    linear_claims = "its distances between models, and so its clusters,"

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    quantile: float = setting(
        0.3, ge=0, le=1, source="code", tune=True, doc="Quantile of the distances that is the reach."
    )
    trim: float = setting(0.15, ge=0, lt=0.5, source="code", doc="Share of a cluster's models left out at either end.")
    size: int = setting(2, ge=1, source="code", doc="Fewest clients of a cluster.")
    refine: int = setting(20, ge=1, source="ours", doc="Rounds before each refinement, and of work alone at first.")
    refinements: int = setting(1, ge=0, source="code", doc="Number of refinements.")

    needs = Needs(exchanges=2, unmet_first=True)

    def init_server(self, task, w0, n):
        """w: [n, p] the models of clusters, which have the name of one of their clients; own: the u_i."""
        each = {"w": w0.expand(n, -1).clone(), "own": w0.expand(n, -1).clone()}
        each["cluster"] = torch.zeros(n, dtype=torch.long, device=w0.device)
        return Server({"reach": w0.new_full((), -1.0)}, each)

    def downlink(self, server, round):
        return Down(each={"w": server["w"][server["cluster"][round.ids]]} if round.phase else {})

    def local_update(self, task, client, down, data, round):
        if round.phase:
            return {}, {"w": local_sgd(task, down["w"], data, self.lr)}
        own = task.w0.expand(len(round.ids), -1)
        for k in range(self.refine):
            own = local_sgd(task, own, data.again(f"alone {k}"), self.lr)
        return {}, {"own": own}

    def aggregate(self, server, up, round):
        ids, cluster = round.ids, server["cluster"]
        if round.phase == 0:
            new = server | {"own": server["own"].index_copy(0, ids, up["own"])}
            if server["reach"] < 0:
                return self._one_shot(new, ids)
            used = cluster[server["known"] > 0].unique()
            nearest = used[distances(up["own"], server["w"][used]).argmin(1)]
            return new | {"cluster": cluster.index_copy(0, ids, nearest)}
        mine, names = cluster[ids], cluster[ids].unique()
        theta = torch.stack([trimmed(up["w"][mine == c], self.trim) for c in names])
        new = server | {"w": server["w"].index_copy(0, names, theta)}
        count, over = divmod(round.t + 1, self.refine)
        return self._refined(new) if over == 0 and count <= self.refinements else new

    def _one_shot(self, server, ids):
        own = server["own"][ids]
        apart = distances(own, own).sqrt()
        pairs = apart[torch.ones_like(apart).triu(1) > 0]
        reach = pairs.kthvalue(1 + int(self.quantile * (len(pairs) - 1))).values if len(pairs) else apart[0, 0]
        label = pivoted(apart, reach)
        large = (label == label[:, None]).sum(1) >= min(self.size, len(ids))
        if not large.any():
            raise ConfigError(f"algorithm.size: no cluster has {self.size} clients within the reach of {reach:.3g}")
        names = label[large].unique()
        theta = torch.stack([own[label == c].mean(0) for c in names])
        label = torch.where(large, label, names[distances(own, theta).argmin(1)])
        cluster = server["cluster"].index_copy(0, ids, ids[label])
        return server | {"reach": reach, "w": server["w"].index_copy(0, ids[names], theta), "cluster": cluster}

    def _refined(self, server):
        w, cluster, met = server["w"], server["cluster"], torch.nonzero(server["known"] > 0)[:, 0]
        own, names = server["own"][met], cluster[met].unique()
        large = torch.bincount(distances(own, w[names]).argmin(1), minlength=len(names)) >= self.size
        names = names[large | ~large.any()]
        theta = w[names]
        label = pivoted(distances(theta, theta).sqrt(), server["reach"])
        pivots, nearest = label.unique(), label[distances(own, theta).argmin(1)]
        merged = torch.stack([theta[label == c].mean(0) for c in pivots])
        w = w.index_copy(0, names[pivots], merged)
        return server | {"w": w, "cluster": cluster.index_copy(0, met, names[nearest])}

    def deployment(self, server, round):
        return Down(each={"w": server["w"][self.labels(server)[round.ids]]})

    def personal(self, task, client, down):
        return down["w"]

    def describe(self, server):
        return Portrait(clusters=self.labels(server).unique(return_inverse=True)[1])
