"""The pooled model: what the same model and work would give if everybody gave their data. An oracle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyfed.base.settings import setting
from polyfed.compute.split import Split
from polyfed.yardsticks.yardstick import Outputs, Yardstick


@dataclass(frozen=True)
class PooledOracle(Yardstick):
    """One model trained on all clients' samples together, as one client would train it. Not available in practice.

        w <- w - lr * grad f(w),    f the mean loss over everybody's samples

    Notes
    -----
    It trains for the run's rounds, with the run's epochs or local steps, its batch size and its optimiser; every client
    takes part in every round, and attacks, robust rules and schedules do not apply. No bytes are counted: no protocol
    would move the data themselves.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of SGD.")

    name = "pooled-oracle"
    role = "oracle"

    def fit(self, train: Split, classes: int | None, pooled: Callable[[float], Outputs]) -> Sequence[Outputs]:
        return [pooled(self.lr)] * train.n
