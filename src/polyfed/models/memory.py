"""A net beside a memory of a client's own samples, which kNN-Per deploys."""

import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ModelError
from polyfed.base.values import COUNT
from polyfed.models.mlp import WIDTH, mlp

FAR = 1e30  # the squared distance to a place that holds no sample


class Memory(nn.Module):
    """p(y | x) = lam sum_j a_j 1{y_j = y} / sum_j a_j + (1 - lam) softmax(net(x))_y; it returns the logarithm.

    j runs over the k stored samples, `rows` at most, whose features f_j, the inputs of net's last layer, are nearest to
    x's, a_j = exp(-||f - f_j||^2 / (d sigma)). Until kNN-Per stores samples there are none, and lam is 0.
    """

    def __init__(self, net: nn.Sequential, rows: int, k: int = 10, sigma: float = 1.0):
        super().__init__()
        last = net[-1]
        if not isinstance(last, nn.Linear):
            raise ModelError(f"memory: found a net that ends in {type(last).__name__}, expected Linear")
        self.k, self.sigma = min(k, rows), sigma
        self.features = nn.Parameter(torch.zeros(rows, last.in_features))
        self.shares = nn.Parameter(torch.zeros(rows, last.out_features))  # of a stored sample 1 at its class
        self.lam = nn.Parameter(torch.zeros(1))
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """[b, ...] -> [b, C] logarithms of probabilities, which cross-entropy takes as they are."""
        f = self.net[:-1](x)
        gap = f.square().sum(-1, keepdim=True) + self.features.square().sum(-1) - 2 * f @ self.features.T
        near = (gap.clamp(min=0) + FAR * (1 - self.shares.sum(-1))).topk(self.k, largest=False)
        weight = (-near.values / (f.shape[-1] * self.sigma)).softmax(-1)
        stored = (weight[..., None] * self.shares[near.indices]).sum(-2)
        p = self.lam * stored + (1 - self.lam) * self.net[-1](f).softmax(-1)
        return p.clamp(min=torch.finfo(p.dtype).tiny).log()


@checked
def memory(
    input_shape: tuple[int, ...], outputs: COUNT, rows: COUNT = 500, k: COUNT = 10, hidden: WIDTH = 32
) -> nn.Module:
    """A perceptron with one hidden layer beside the features of at most `rows` of a client's samples, for kNN-Per."""
    net = mlp(input_shape, outputs, hidden)
    assert isinstance(net, nn.Sequential)
    return Memory(net, rows, k)
