"""FedGH: Yi et al., "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023."""

from dataclasses import dataclass
from typing import Literal

from torch.nn.functional import one_hot

from polyfed.algorithms._shared.prototypes import DISCLOSED, pairs, sent
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Needs, Portrait


@dataclass(frozen=True)
class FedGH(Algorithm):
    """Bodies that stay with the clients, and a common head (W, b) that has never seen a sample.

        (B_i, h_i) <- local SGD on f_i from the client's own B_i and the common (W, b)
        m_ic = mean features of B_i over the samples of class c: all that is sent
        (W, b) <- server_steps of gradient descent on the mean over pairs (i, c) of CE(W m_ic + b, c)

    Client i deploys B_i with its own h_i, or with the common head.

    Notes
    -----
    The server's steps are of all pairs at once; published code passes over them in batches, and trains the head object
    of client 0 in place.
    """

    lr: float = setting(0.01, source="ours", doc="Step size of local SGD.")
    server_lr: float = setting(0.1, source="ours", doc="Step size of the server's gradient descent.")
    server_steps: int = setting(10, ge=0, source="ours", doc="Its steps in a round; 0 keeps the head as it began.")
    deployed: Literal["own", "common"] = setting(
        "own", source="paper", doc='The head of a client\'s deployed model: its "own", trained, or the "common" one.'
    )

    needs = Needs(discloses=DISCLOSED)

    def init_server(self, task, w0, n):
        assert task.classes > 0  # which refuses a loss without classes
        weight, bias = task.layout.head(w0)
        return {"weight": weight.clone(), "bias": bias.clone()}

    def init_client(self, task, w0):
        return {"w": w0}

    def downlink(self, server, round):
        return Down(shared={"weight": server["weight"], "bias": server["bias"]})

    def local_update(self, task, client, down, data, round):
        w = local_sgd(task, self._joined(task, client, down), data, self.lr)
        return {"w": w}, sent(task.class_means(w, data), data.counts(task.classes) > 0)

    def aggregate(self, server, up, round):
        (m, c, _), W, b = pairs(up), server["weight"], server["bias"]
        for _ in range(self.server_steps):
            error = ((m @ W.T + b).softmax(1) - one_hot(c, len(b))) / len(c)
            W, b = W - self.server_lr * error.T @ m, b - self.server_lr * error.sum(0)
        return {"weight": W, "bias": b}

    def personal(self, task, client, down):
        return client["w"] if self.deployed == "own" else self._joined(task, client, down)

    def describe(self, server):
        return Portrait()

    @staticmethod
    def _joined(task, client, down):
        """The client's body under the common head."""
        w = client["w"].clone()
        weight, bias = task.layout.head(w)
        weight.copy_(down["weight"])
        bias.copy_(down["bias"])
        return w
