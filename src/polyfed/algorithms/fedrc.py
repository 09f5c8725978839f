"""FedRC: Guo, Tang, Lin, ICML 2024."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from polyfed.algorithms._shared.mixing import MIXING, Mixed, explained, renewed
from polyfed.algorithms._shared.parts import assemble, split
from polyfed.base.settings import setting
from polyfed.compute.terms import members
from polyfed.core.algorithm import Down, Needs


@dataclass(frozen=True)
class FedRC(Mixed):
    """FedEM whose responsibilities are divided by the frequency of the sample's class among those of the model.

        E   q_ij(k) = pi_ik exp(-l(theta_k; x_ij, y_ij)) / C_yk, over its sum over k,    pi_ik <- mean_j q_ij(k)
            C_yk <- sum of q_ij(k) over samples of class y / sum of q_ij(k) over all     summed at the server
        M   theta_i <- local SGD on sum_k q_ij(k) l(theta_k; x_ij, y_ij)         theta_k <- sum_i p_i theta_ik
            with q as of the E step ("fixed"), or at the renewed pi_i and the present theta_i ("following")

    So models stand for different laws of y given x, and shifts of labels part none. Client i deploys sum_k pi_ik
    softmax(theta_k).

    Notes
    -----
    It takes a mixture by class (`polyfed.models.mixture`). "following" goes down -log sum_k pi_ik exp(-l(theta_k)) /
    C_yk. All C_yk are equal in the first round, and then those of the clients of the round before; a class that none of
    them had keeps its own.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD; the paper's is 0.06.")

    by_class: ClassVar[bool] = True
    needs = Needs(
        discloses={"mass": "the share of this site's samples that are of each class and explained by each model"}
    )

    def init_server(self, task, w0, n):
        server = super().init_server(task, w0, n)
        shape = next(e.shape for e in task.layout.entries if e.name == MIXING)
        return server | {"common": w0.new_zeros(shape)}  # [K, C] log C_yk, up to what all parts have in common

    def downlink(self, server, round):
        return Down(shared={"w": server["w"], "common": server["common"]})

    def local_update(self, task, client, down, data, round):
        shared, every = self.shared(task.layout), data.whole()
        w, common = assemble(shared, down["w"], client["own"]), down["common"]
        mixing, (s, k, classes) = (~shared).to(w.device).nonzero()[:, 0], common.shape
        prior = w[:, mixing].view(s, k, classes)[..., :1].log_softmax(1)
        q = explained(task, w, mixing, prior - common.gather(2, every.y[:, None].expand(-1, k, -1)), every)
        mass = every.mean(q.transpose(1, 2)[..., None] * members(every.y, classes)[:, :, None])
        own = renewed(q, every)[..., None].expand(s, k, classes)
        w = w.index_copy(1, mixing, (own - common).reshape(s, -1))

        def unnormalised(features, outputs, batch, rows):
            return -batch.mean(outputs.logsumexp(2))

        w = self.trained(task, w, shared, data, q, unnormalised)
        return {"own": own.reshape(s, -1)}, {"w": split(shared, w)[0], "mass": mass}

    def aggregate(self, server, up, round):
        mass = up.mean("mass", round.samples)
        fresh = (mass / mass.sum(1, keepdim=True).clamp(min=1e-30)).clamp(min=1e-30).log()
        common = torch.where(mass.sum(0) > 0, fresh, server["common"])
        return super().aggregate(server, up, round) | {"common": common}
