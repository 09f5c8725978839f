"""Local: every client trains alone. The yardstick of personalisation; nothing is ever sent."""

from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd
from polyfed.core.algorithm import Down, Personal, State


@dataclass(frozen=True)
class Local(Personal):
    """Each client minimises its own loss, w_i <- w_i - lr * grad f_i(w_i), and sends nothing.

    Notes
    -----
    The result of not federating: a method that does not beat it does not pay.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")

    def init_server(self, task, w0, n):
        return {}

    def downlink(self, server, round):
        return Down()

    def local_update(self, task, client, down, data, round):
        return {"w": local_sgd(task, client["w"], data, self.lr)}, {}

    def aggregate(self, server, up, round) -> State:
        return server
