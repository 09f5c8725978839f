"""The plain loop that federated libraries run: one client after another, a module, an optimiser, a backward pass.

The data are tensors already, a batch is one indexing, one module and one optimiser serve all clients. With `best` it is
as fast as the idiom allows: one indexing per epoch, gradients from autograd.grad, and no optimiser.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.compute.split import Split


def fedavg_round(
    model: nn.Module,
    start: list[Tensor],
    train: Split,
    clients: list[int],
    lr: float,
    epochs: int,
    batch_size: int,
    best: bool = False,
) -> list[Tensor]:
    """One round of FedAvg from the parameters `start`; returns the mean of the clients' models by samples."""
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(parameters, lr=lr)
    total = [torch.zeros_like(q) for q in start]
    samples = sum(len(train.client(c)[1]) for c in clients)
    for c in clients:
        with torch.no_grad():
            for q, value in zip(parameters, start, strict=True):
                q.copy_(value)
        x, y = train.client(c)
        for _ in range(epochs if best else 0):
            order = torch.randperm(len(y))
            for xb, yb in zip(x[order].split(batch_size), y[order].split(batch_size), strict=True):
                step(parameters, F.cross_entropy(model(xb), yb), lr)
        for _ in range(0 if best else epochs):
            for index in torch.randperm(len(y)).split(batch_size):
                optimiser.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimiser.step()
        with torch.no_grad():
            for sum_, q in zip(total, parameters, strict=True):
                sum_.add_(q, alpha=len(y) / samples)
    return total


def step(
    parameters: list[nn.Parameter], loss: Tensor, lr: float, pull: list[Tensor] | None = None, rho: float = 0
) -> None:
    """One step of plain SGD, on the loss plus rho/2 ||w - pull||^2."""
    grads = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        if pull is not None:
            torch._foreach_mul_(parameters, 1 - lr * rho)
            torch._foreach_add_(parameters, pull, alpha=lr * rho)
        torch._foreach_add_(parameters, grads, alpha=-lr)


def fpfc_clients(
    model: nn.Module,
    start: list[Tensor],
    train: Split,
    clients: list[int],
    lr: float,
    steps: int,
    rho: float,
    best: bool = False,
) -> list[list[Tensor]]:
    """FPFC's local part: full-batch steps on the loss plus rho/2 ||w - zeta||^2, here with zeta = start."""
    parameters = list(model.parameters())
    optimiser = torch.optim.SGD(parameters, lr=lr)
    trained = []
    for c in clients:
        with torch.no_grad():
            for q, value in zip(parameters, start, strict=True):
                q.copy_(value)
        x, y = train.client(c)
        for _ in range(steps if best else 0):
            step(parameters, F.cross_entropy(model(x), y), lr, start, rho)
        for _ in range(0 if best else steps):
            optimiser.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for q, zeta in zip(parameters, start, strict=True):
                    assert q.grad is not None
                    q.grad.add_(q - zeta, alpha=rho)
            optimiser.step()
        trained.append([q.detach().clone() for q in parameters])
    return trained
