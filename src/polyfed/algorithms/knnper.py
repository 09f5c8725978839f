"""kNN-Per: Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022."""

from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import part_of
from polyfed.core.algorithm import Needs, Personal, Portrait

STORED = ("features", "shares", "lam")  # of a memory, before its net


@dataclass(frozen=True)
class KNNPer(Personal):
    """FedAvg of a net w, and at every client a memory of its own training samples' features.

        w_i = local SGD from w on f_i        w <- sum_i n_i w_i / sum_i n_i
        p_i(y | x) = lam_i sum_j a_j 1{y_j = y} / sum_j a_j + (1 - lam_i) softmax(w(x))_y,
        a_j = exp(-||f - f_j||^2 / (d sigma)),    j over the k nearest of client i's features at w

    lam_i of 0, 0.1, ..., 1 has the least loss on samples of its own that neither train nor are stored. Client i deploys
    p_i. The model has a memory (`polyfed.models.memory`), with k, sigma and room for so many samples, which never
    leaves the client while it trains.

    Notes
    -----
    A client stores features of the net that it receives whenever it takes part, and deploys both: one round before the
    server's latest at best. Until then it deploys the initial net. Of more samples than there is room for, every so
    many are stored. A class that no neighbour has gets the smallest probability there is where lam is 1. An exported
    model holds features of its client's samples, and is as private as they are.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    validation: float = setting(
        0.2, gt=0, lt=1, source="ours", doc="Share of the training samples that choose lam and do not train."
    )

    name = "knn-per"
    needs = Needs(apart=True)

    def init_server(self, task, w0, n):
        if tuple(e.name for e in task.layout.entries[:3]) != STORED:
            raise ModelError("model: found no memory, expected one for knn-per to fill: polyfed.models.memory")
        if task.loss != "cross-entropy":
            raise ModelError("loss: found no cross-entropy, which knn-per expects: it mixes probabilities of classes")
        return {"w": w0[sum(e.size for e in task.layout.entries[:3]) :]}

    def local_update(self, task, client, down, data, round):
        net, part = down["w"], part_of(task, task.model.get_submodule("net"))
        rest, own = data.apart(self.validation)
        every, (rows, d), (_, classes) = part.net.cast(rest.whole(), net), *(e.shape for e in task.layout.entries[:2])
        b, r = every.y.shape[1], torch.arange(rows, device=net.device)
        count = rest.samples[:, None]
        at = torch.where(count > rows, r * count // rows, r.clamp(max=b - 1))
        features = part.features(net, every.x).gather(1, at[..., None].expand(-1, -1, d))
        shares = one_hot(every.y.gather(1, at), classes) * (r < count)[..., None]
        filled = [features * (r < count)[..., None], shares.to(net)]
        stored, held, lam = torch.cat([t.flatten(1) for t in filled], 1), own.whole(), net.new_zeros(len(net), 1)
        ends = torch.stack([torch.cat([stored, lam + end, net], 1) for end in (0, 1)], 1)
        alone, near = (-task.losses(ends, held)).exp()[..., None].unbind(1)  # of the sample's class
        grid = torch.linspace(0, 1, 11, dtype=net.dtype, device=net.device)
        mixed = (alone + grid * (near - alone)).clamp(min=torch.finfo(net.dtype).tiny)
        lam = grid[held.mean(-mixed.log()).argmin(1)][:, None]
        return {"w": torch.cat([stored, lam, net], 1)}, {"w": local_sgd(part, net, rest, self.lr)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}

    def describe(self, server):
        return Portrait()
