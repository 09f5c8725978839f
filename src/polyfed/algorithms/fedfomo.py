"""FedFomo: Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021."""

from dataclasses import dataclass

import numpy as np
import torch

from polyfed.base.randomness import key_of, uniform
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Needs, Personal, Portrait, Server, by_settings


@dataclass(frozen=True)
class FedFomo(Personal):
    """First-order model optimisation: theta_i moves towards the models theta_n, by what each would gain per distance.

        v_n = (F_i(theta_i) - F_i(theta_n)) / ||theta_n - theta_i||,   F_i the loss on client i's validation samples
        theta_i <- theta_i + sum_n w_n (theta_n - theta_i) / sum_n w_n,   w_n = max(0, v_n);  as it is where all are 0
        theta_i <- local SGD from theta_i on the rest of its samples
        P_in <- P_in + v_n at the server, which sends client i the models of the others with the largest P_in, each
        replaced by one that is drawn with probability epsilon - decay t

    Client i deploys its last theta_i, from which it starts again.

    Notes
    -----
    A model at theta_i itself has v_n = 0. Before anything is known of two models the order is drawn, by the clients'
    names.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    models: int = setting(5, ge=0, source="PFLlib", doc="Most models that a client downloads.")
    validation: float = setting(
        0.2,
        ge=0,
        lt=1,
        source="ours",
        doc="Share of the training samples that weigh the models and do not train. 0: all of them do both, a variant.",
    )
    epsilon: float = setting(0.3, ge=0, le=1, source="ours", doc="First probability of a model that is drawn.")
    decay: float = setting(0.05, ge=0, source="ours", doc="What that probability loses in a round.")
    seed: int = setting(0, ge=0, source="ours", doc="Seed of these draws.")

    @by_settings
    def needs(self):
        return Needs(synchronous="its weights answer the models sent in their round", apart=self.validation > 0)

    def init_server(self, task, w0, n):
        def keys(of):
            return torch.from_numpy(of.astype("int64")).to(w0.device)

        return Server(each={"model": w0.expand(n, -1).clone()}, pairs={"P": w0.new_zeros(n, n)}, drawn={"key": keys})

    def _sent(self, server, round):
        """[s, M] the clients whose models each client is sent, the same for the downlink and for the replies to it."""
        P, key, mine = server["P"][round.ids].cpu().numpy(), server["key"].cpu().numpy(), round.ids.cpu().numpy()
        order, kept = (
            uniform(self.seed, key_of(purpose), round.t, key[mine, None].view("uint64"), key.view("uint64"))
            for purpose in ("fedfomo order", "fedfomo epsilon")
        )
        own = mine[:, None] == np.arange(len(key))
        rank = np.lexsort((order, -np.where(own, -np.inf, P)), axis=1).argsort(1)
        M = min(self.models, len(key) - 1)
        best = rank < M
        stays = best & (kept >= self.epsilon - self.decay * round.t)
        score = np.where(own, 9.0, np.where(stays, 0.0, np.where(best, 4.0, 2.0)) + order)
        return torch.from_numpy(score.argsort(1)[:, :M]).to(round.ids.device)

    def downlink(self, server, round):
        return Down(each={"models": server["model"][self._sent(server, round)]})

    def local_update(self, task, client, down, data, round):
        rest, own = data.apart(self.validation) if self.validation else (data, data)
        theta, models = client["w"], down["models"]
        loss = task.loss_of(torch.cat([theta[:, None], models], 1), own.whole())
        gap = models - theta[:, None]
        length = gap.norm(dim=2)
        v = torch.where(length > 0, (loss[:, :1] - loss[:, 1:]) / length.clamp(min=torch.finfo(gap.dtype).tiny), 0)
        w = v.clamp(min=0)
        w = w / w.sum(1, keepdim=True).clamp(min=torch.finfo(gap.dtype).tiny)
        theta = local_sgd(task, theta + (w[:, None] @ gap)[:, 0], rest, self.lr)
        return {"w": theta}, {"w": theta, "v": v}

    def aggregate(self, server, up, round):
        P = server["P"].clone()
        P[round.ids[:, None], self._sent(server, round)] += up["v"]
        return server | {"model": server["model"].index_copy(0, round.ids, up["w"]), "P": P}

    def describe(self, server):
        return Portrait(findings={"preferences": server["P"]})
