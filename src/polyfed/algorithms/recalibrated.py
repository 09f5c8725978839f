"""FedAvg with recalibration: Janssen et al., Journal of Clinical Epidemiology 61 (2008), methods 1 and 2."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyfed.algorithms._shared.recalibration import fitted
from polyfed.base.errors import ModelError
from polyfed.base.settings import setting
from polyfed.compute.layout import Layout
from polyfed.compute.solvers import local_sgd
from polyfed.compute.task import Task
from polyfed.core.algorithm import Personal


@dataclass(frozen=True)
class Recalibrated(Personal):
    """FedAvg with local recalibration: one number per class and client, fitted at the client, without a message.

        w_i = local SGD from w on f_i        w <- sum_i n_i w_i / sum_i n_i
        c_i = argmin_c sum_j loss(z_j + c, y_j),    z_j the outputs of w;  client i deploys w with outputs z + c_i

    Afterwards the mean predicted probability of every class is its share in the client's training data, and for numbers
    the mean error is zero.

    Notes
    -----
    The cheapest personalisation there is: clients may differ in no more than how common an outcome is. A personalised
    method that is not better has found nothing else. A class that a client has no sample of counts as half a sample.
    The result is written into the model's last layer, which needs a bias; losses are cross-entropy and mse. A client
    recalibrates the model it receives whenever it takes part, one round before the server's latest at best. Until then
    it deploys the initial model.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    slope: bool = setting(
        False,
        source="ours",
        doc="Fit a z_j + c, one a >= 0 for all outputs, with the penalty (a - 1)^2/2 beside the sum of losses. Of "
        "classes, 1/a is the temperature.",
    )
    weighted: bool = setting(True, source="ours", doc="Weigh clients by their number of samples; False: plain mean.")

    def init_server(self, task, w0, n):
        _last_layer(task)
        return {"w": w0}

    def local_update(self, task, client, down, data, round):
        w, own = local_sgd(task, down["w"], data, self.lr), down["w"].clone()
        weight, bias = (at.to(own.device) for at in _last_layer(task))
        every, clients = data.whole(), list[tuple[int, Tensor, np.ndarray, np.ndarray]]()
        for i, mine in enumerate(own):
            b = every.x.shape[1] if every.sizes is None else every.sizes[i]
            z, u = task.outputs(mine, every.x[i, :b]), np.ones(b)
            if every.weighted and every.weight is not None:
                u = b * every.weight[i, :b].double().cpu().numpy()
            if b and z.isfinite().all():
                clients.append((i, z, every.y[i, :b].cpu().numpy(), u))
        outputs = [z.double().cpu().numpy().reshape(len(z), -1) for _, z, _, _ in clients]
        fits = fitted(outputs, [y for *_, y, _ in clients], [u for *_, u in clients], self.slope)
        for (i, z, _, _), (a, c) in zip(clients, fits, strict=True):
            mine = own[i]
            if self.slope:
                mine[weight] *= a
            mine[bias] = a * mine[bias] + torch.as_tensor(c).to(mine)
            if i == clients[0][0]:  # a fact about the model, the same for every client
                expected = a * z[:2] + torch.as_tensor(c).to(z).reshape(z.shape[1:])
                _check(expected, task.outputs(mine, every.x[i, : len(expected)]))
        return {"w": own}, {"w": w}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples if self.weighted else None)}


def _last_layer(task: Task) -> tuple[Tensor, Tensor]:
    """Places of the output layer's weights, and of its bias. Raises ModelError for none."""
    layout: Layout = task.layout
    if callable(task.loss):
        name = getattr(task.loss, "__name__", "a function")
        raise ModelError(f"recalibrated: knows the losses cross-entropy and mse, found {name}")
    ends = np.cumsum(layout.sizes)
    head = [k for k, e in enumerate(layout.entries) if layout.mask("head")[ends[k] - e.size]]
    bias = [k for k in head if layout.entries[k].name.split(".")[-1] == "bias"]
    if not bias:
        raise ModelError("recalibrated: the model's last layer has no bias, which an intercept needs")
    places = torch.arange(layout.p).split_with_sizes(layout.sizes)
    return torch.cat([places[k] for k in head if k not in bias]), torch.cat([places[k] for k in bias])


def _check(expected: Tensor, outputs: Tensor) -> None:
    if not torch.allclose(expected, outputs, rtol=1e-3, atol=1e-3 * float(expected.abs().max() + 1)):
        raise ModelError(
            "recalibrated: the outputs do not move with the bias of the model's last layer; it must be last"
        )
