"""MOON: Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, without a projection head."""

from dataclasses import dataclass

from torch.nn.functional import cosine_similarity, softplus

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Algorithm


@dataclass(frozen=True)
class MOON(Algorithm):
    """Model-contrastive learning: features z of w, z_glob of the received model x, z_prev of the client's last model.

        w_i = local SGD from x on f_i + mu mean_j -log( e^(g_j / tau) / (e^(g_j / tau) + e^(p_j / tau)) )
              g_j = cos(z_j, z_glob_j),   p_j = cos(z_j, z_prev_j),   x and the last model frozen
        x <- sum_i n_i w_i / sum_i n_i

    Notes
    -----
    z are the inputs of the last layer; the paper's projection head of two layers before it may be part of the model. At
    first contact a client's last model is the common start; in the released code it is another random network.
    """

    lr: float = setting(0.01, source="paper", doc="Step size of local SGD.")
    mu: float = setting(1.0, ge=0, source="paper", doc="Weight of the contrast, tuned over 0.1 to 10; 0 is FedAvg.")
    tau: float = setting(0.5, gt=0, source="paper", doc="Temperature of the contrast.")

    def init_server(self, task, w0, n):
        assert task.width > 0  # which refuses a model whose last layer is not linear
        return {"w": w0}

    def init_client(self, task, w0):
        return {"last": w0}

    def local_update(self, task, client, down, data, round):
        x, last = down["w"], client["last"]

        def contrast(features, outputs, batch, rows):
            near, far = (cosine_similarity(features, task.features(v[rows], batch.x), dim=2) for v in (x, last))
            return self.mu * batch.mean(softplus((far - near) / self.tau))

        w = local_sgd(task, x, data, self.lr, also=contrast if self.mu else None)
        return {"last": w}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}
