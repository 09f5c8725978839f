"""HypCluster: Mansour et al. (arXiv 2002.10619), section 4."""

from dataclasses import dataclass

from polyfed.algorithms._shared.clusters import Alternating
from polyfed.base.settings import setting


@dataclass(frozen=True)
class HypCluster(Alternating):
    """HypCluster: k hypotheses; a client picks the one with the least training loss and trains it.

        j_i = argmin_j F_i(h_j),   w_i = local SGD from h_{j_i},   h_j <- sum_{j_i = j} n_i w_i / sum_{j_i = j} n_i

    The same alternation as IFCA with model averaging, published at the same time; its means are weighted by samples.
    """

    shared_layers: str | tuple[str, ...] = setting(
        "",
        source="ours",
        doc="Layers that all hypotheses have in common, averaged over all participants and sent once; a text has "
        "its names separated by spaces.",
    )
    weighted: bool = setting(
        True, source="paper", doc="Weigh clients by their number of samples, as in the paper; False: plain mean."
    )
