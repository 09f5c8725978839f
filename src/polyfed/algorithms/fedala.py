"""FedALA: Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023."""

from dataclasses import dataclass
from itertools import islice

import torch

from polyfed.algorithms._shared.parts import part
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Needs, Personal


@dataclass(frozen=True)
class FedALA(Personal):
    """Adaptive local aggregation: each client starts from its own mixture with the common model x, number by number.

        s_i = w_i + (x - w_i) * A_i on the top layers, x below       A_i in [0, 1], at first 1
        A_i <- clip(A_i - eta grad f_i(s_i) * (x - w_i), 0, 1)       on part of the samples, w_i and x as they are
        w_i <- local SGD from s_i on f_i                             x <- sum_i n_i w_i / sum_i n_i

    Client i deploys the w_i that it trained last; w_i and A_i never leave it, but for w_i as it is sent.

    Notes
    -----
    A_i trains from a client's second contact on (at the first, x = w_i): the first time until more than ten passes are
    done and the losses of the last batch of the latest ten have a standard deviation below `settled`, then one pass a
    round. The released code evaluates s_i before local training, runs this step at absent clients too, and takes a
    contiguous stretch of the samples, where here the first batches of a new order are taken.
    """

    lr: float = setting(0.005, source="paper", doc="Step size of local SGD.")
    eta: float = setting(1.0, ge=0, source="paper", doc="Step size of the weights A; 0 is FedAvg.")
    share: float = setting(0.8, gt=0, le=1, source="paper", doc="Share of the batches of a pass that train A.")
    layers: str = setting(
        "head", source="paper", doc='Layers with weights: "head" is the last one; or names, separated by spaces.'
    )
    settled: float = setting(
        0.1, ge=0, source="code", doc="Standard deviation of ten losses at which the first training ends."
    )
    passes: int = setting(50, ge=1, source="ours", doc="Most passes of the first training.")

    needs = Needs(plain_sgd="its weights take gradient steps of their own")

    def init_client(self, task, w0):
        top = part(task.layout, self.layers)
        return {"w": w0, "A": w0.new_ones(int(top.sum())), "contacts": w0.new_zeros(1)}

    def init_server(self, task, w0, n):
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        x, met = down["w"], client["contacts"]
        apart = (x != client["w"]).any(1, keepdim=True)  # else no A is any better than another
        training = (met > 0) & apart if self.eta else torch.zeros_like(apart)
        start, A = self._mixed(task, x, client, data, training.to(x))
        w = local_sgd(task, start, data, self.lr)
        return {"w": w, "A": A, "contacts": met + ((met == 0) | apart)}, {"w": w}

    def _mixed(self, task, x, client, data, training):
        """The starts s_i and the weights A_i, trained where `training: [s, 1]` is 1."""
        at = part(task.layout, self.layers).nonzero()[:, 0].to(x.device)
        start, A, own, met = x.clone(), client["A"].clone(), client["w"].index_select(1, at), client["contacts"]
        apart, losses = x.index_select(1, at) - own, x.new_zeros(0, len(x))
        data.together[0] = True  # as A will be trained; a first round without it must cut the cohort alike
        for k in range(self.passes):
            if not training.any() or not len(at):
                break
            batches = data.again(f"weights {k}", epochs=1)
            steps, last = (self.share * batches.steps.double()).ceil() * training[:, 0], x.new_zeros(len(x))
            for step, batch in enumerate(islice(batches, int(steps.max()))):
                m = batch.rows
                live = step < steps[:m, None]
                start[:m].index_copy_(1, at, torch.addcmul(own[:m], apart[:m], A[:m]))
                g, loss = task.gradient(start[:m], batch)
                new = A[:m] - self.eta * g.index_select(1, at) * apart[:m]
                A[:m] = torch.where(live, new.clamp(0, 1), A[:m])
                last[:m] = torch.where(live[:, 0], loss, last[:m])
            batches.left_out(batches.steps - steps)
            losses = torch.cat([losses, last[None]])[-10:]
            calm = losses.std(0, correction=0) < self.settled
            first = met[:, 0] == 1
            training *= (first & ~(calm & (k >= 10)))[:, None]
        return start.index_copy_(1, at, torch.addcmul(own, apart, A)), A

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
