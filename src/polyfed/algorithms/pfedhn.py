"""pFedHN: Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import linear

from polyfed.algorithms._shared.parts import without_statistics
from polyfed.base.randomness import generator, key_of, mix
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm, Down, Server


@dataclass(frozen=True)
class PFedHN(Algorithm):
    """Personal models theta_i = h(v_i; phi), h a small multi-layer perceptron: only models and their moves are sent.

        D_i = theta_i - local SGD from theta_i on f_i
        phi <- phi - server_lr sum_S (d theta_i / d phi)' D_i        v_i <- v_i - server_lr (d theta_i / d v_i)' D_i

    Client i deploys h(v_i; phi), as of now; a newcomer trains its v_i with phi frozen.

    Notes
    -----
    In the paper one client takes part in a step, and 5000 steps are 5000 exchanges; the sum over a cohort is as long.
    phi has more than `hidden` times as many numbers as the model. The server's steps are plain SGD, where the released
    code has momentum, which moves the v_i of clients that did not take part, weight decay and clipping. The output's
    bias starts at the common start, so that a model's normalisation layers begin as they should.
    """

    lr: float = setting(5e-3, source="code", doc="Step size of local SGD.")
    server_lr: float = setting(
        1e-2, ge=0, source="code", doc="Step size of the hypernetwork and of the clients' vectors."
    )
    hidden: int = setting(100, ge=1, source="code", doc="Width of the hypernetwork's hidden layers.")
    layers: int = setting(3, ge=0, source="code", doc="Its hidden layers.")
    embedding: int = setting(
        13, ge=1, source="code", doc="Numbers of a client's vector; 1 + n/4 in the code, here of 50 clients."
    )
    seed: int = setting(0, ge=0, source="ours", doc="Seed of the hypernetwork and of the vectors.")

    def init_server(self, task, w0, n):
        """h0, h1, ...: the layers of h, [out, in + 1] with the bias as the last column; v: [n, e]."""
        without_statistics(task, self.name)  # which it makes by a network
        server, widths = {}, [self.embedding, *[self.hidden] * self.layers, task.p]
        for k, (a, b) in enumerate(pairwise(widths)):
            server[f"h{k}"] = w0.new_empty(b, a + 1)
            if not w0.is_meta:
                key = torch.Generator().manual_seed(int(mix(self.seed, key_of("pfedhn"), k)) % 2**63)
                server[f"h{k}"].copy_((2 * torch.rand(b, a + 1, generator=key, dtype=torch.float32) - 1) / a**0.5)
        server[f"h{self.layers}"][:, -1] = w0

        def vectors(keys):
            draws = [generator(self.seed, "pfedhn", 0, key).standard_normal(self.embedding) for key in keys.tolist()]
            return torch.tensor(np.array(draws)).to(w0)

        return Server(server, drawn={"v": vectors})

    def _signals(self, server, ids):
        """The inputs [s, in] of each layer of h for some clients, and their models [s, p]."""
        signals = [server["v"][ids]]
        for k in range(self.layers + 1):
            z = linear(signals[-1], server[f"h{k}"][:, :-1], server[f"h{k}"][:, -1])
            signals.append(z.relu() if k < self.layers else z)
        return signals

    def downlink(self, server, round):
        return Down(each={"w": self._signals(server, round.ids)[-1]})

    def local_update(self, task, client, down, data, round):
        return {}, {"dw": down["w"] - local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        """One pass backwards through h, with the clients' moves as the gradients of its outputs."""
        new, delta, signals = dict(server), up["dw"], self._signals(server, round.ids)
        for k in range(self.layers, -1, -1):
            layer, x = server[f"h{k}"], signals[k]
            new[f"h{k}"] = layer - self.server_lr * (delta.T @ torch.cat([x, torch.ones_like(x[:, :1])], 1))
            delta = delta @ layer[:, :-1] * ((x > 0) if k else 1)
        return new | {"v": server["v"].index_add(0, round.ids, delta, alpha=-self.server_lr)}
