"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022."""

from dataclasses import dataclass

from polyfed.algorithms._shared.prototypes import Pulled, renewed


@dataclass(frozen=True)
class FedProto(Pulled):
    """Models that stay with the clients, pulled to common prototypes M_c, vectors of d features for every class c.

        w_i <- local SGD from the client's own w_i on f_i + lam R_i
        M_c <- mean over clients with class c of m_ic,     m_ic the mean features of w_i over their samples of c
        R_i = mean_j ||f_j - M_y||^2 / d  (code)   or   sum_c ||m_c - M_c||^2 over a batch's classes  (paper)

    Client i deploys its own body with the nearest prototype, or its own head.

    Notes
    -----
    A class without a prototype pulls at nothing. m_ic is of the trained model; the released code takes the features
    seen on the way, of weights that still move. Equation (6) of the paper divides twice, which shrinks M_c.
    """

    def aggregate(self, server, up, round):
        return renewed(server, up)
