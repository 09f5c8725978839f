"""LG-FedAvg: every client has its own representation, the top layers are common.
Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations"
(arXiv 2001.01523), Algorithm 1.
"""

from dataclasses import dataclass

from polyfed.algorithms._shared.parts import Partial, part
from polyfed.base.settings import setting
from polyfed.compute.solvers import local_sgd


@dataclass(frozen=True)
class LGFedAvg(Partial):
    """Lower layers stay with the client, the top layers are shared: the mirror image of FedPer.

        (B_i, h_i) <- local SGD on f_i from (B_i, h)        h <- mean_S h_i

    Client i deploys its own body with the common head.

    Notes
    -----
    The paper starts from a model already trained by FedAvg. From a random start, comparisons published since find it
    no better than training alone.
    """

    lr: float = setting(0.1, source="ours", doc="Step size of local SGD.")
    top: str = setting(
        "head", source="ours", doc='The layers that are shared: "head" is the last one; or names, separated by spaces.'
    )

    name = "lg-fedavg"
    certificates = (
        "tests/algorithms/test_partial.py::test_with_all_layers_shared_lg_is_fedavg: identity",
        "tests/algorithms/test_partial.py::test_lg_shares_the_top_layer: which end is common",
        "tests/algorithms/test_partial.py::test_only_the_shared_part_is_billed: bytes from the layer's sizes",
    )
    citation = """@article{liang2020think,
  title   = {Think Locally, Act Globally: Federated Learning with Local and Global Representations},
  author  = {Liang, Paul Pu and Liu, Terrance and Ziyin, Liu and Allen, Nicholas B. and Auerbach, Randy P.
             and Brent, David and Salakhutdinov, Ruslan and Morency, Louis-Philippe},
  journal = {arXiv:2001.01523},
  year    = {2020}
}"""

    def shared(self, layout):
        return part(layout, self.top)

    def train(self, task, w, shared, data):
        return local_sgd(task, w, data, self.lr)
