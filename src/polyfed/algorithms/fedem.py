"""FedEM: Marfoq et al., NeurIPS 2021, Algorithm 1."""

from dataclasses import dataclass

from polyfed.algorithms._shared.mixing import Mixed, explained, renewed


@dataclass(frozen=True)
class FedEM(Mixed):
    """Expectation and maximisation over K common models theta_k, with private weights pi_i.

        E   q_ij(k) = pi_ik exp(-l(theta_k; x_ij, y_ij)) / sum_l pi_il exp(-l(theta_l; x_ij, y_ij))
            pi_ik <- mean_j q_ij(k)                                      before training, at the received models
        M   theta_i <- local SGD on sum_k q_ij(k) l(theta_k; x_ij, y_ij)         theta_k <- sum_i p_i theta_ik
            with q as of the E step ("fixed"), or at the renewed pi_i and the present theta_i ("following")

    Client i deploys sum_k pi_ik softmax(theta_k). The model is a mixture (`polyfed.models.mixture`), whose parts have
    starts of their own.

    Notes
    -----
    "following" goes down -log sum_k pi_ik exp(-l(theta_k)). A client that has not taken part deploys equal weights; the
    weights of one that has are those of its last round, as in the released code. The code averages the last models of
    all clients, absent ones too; here it is those of the round.
    """

    def train(self, task, w, shared, data):
        mixing, every = (shared <= 0).nonzero()[:, 0], data.whole()
        q = explained(task, w, mixing, w[:, mixing].log_softmax(1), every)
        return self.trained(task, w.index_copy(1, mixing, renewed(q, every)), shared, data, q, None)
