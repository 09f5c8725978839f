"""The same rounds in compiled JAX, which is no dependency: `None` where it is not installed.

One program for the cohort, a `fori_loop` over its clients around a `fori_loop` over their steps; batches are taken by
index, the last one of an epoch weighted; the orders are drawn by NumPy inside the timed part, as everybody's are.
Full-batch steps are one program per number of samples, whose compilation is not timed: the best case for JAX.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.compute.split import Split

HERE = find_spec("jax") is not None


def arrays(model: nn.Module) -> list[tuple[np.ndarray, np.ndarray]]:
    """(weight, bias) of every linear layer, ReLU between them."""
    return [
        (m.weight.detach().numpy().copy(), m.bias.detach().numpy().copy())
        for m in model.modules()
        if isinstance(m, nn.Linear)
    ]


def one_core() -> None:
    """Before JAX is imported: no threads of its own."""
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


class Jax:
    """The rounds of one workload."""

    def __init__(self, model: nn.Module, train: Split, clients: list[int]):
        import jax
        import jax.numpy as jnp

        jax.config.update("jax_platforms", "cpu")
        self.jnp, self.jax, self.clients, self.counts = jnp, jax, clients, train.counts
        self.start = [(jnp.asarray(w), jnp.asarray(b)) for w, b in arrays(model)]
        self.x, self.y = jnp.asarray(train.x.flatten(1).numpy()), jnp.asarray(train.y.numpy())
        self.offsets = train.offsets
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.rng = np.random.default_rng(0)

    def loss(self, params: Any, x: Any, y: Any, weight: Any) -> Any:
        jax, jnp = self.jax, self.jnp
        for k, (w, b) in enumerate(params):
            x = x @ w.T + b
            x = jax.nn.relu(x) if k + 1 < len(params) else x
        return -(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1)[:, 0] * weight).sum()

    def step(self, params: Any, x: Any, y: Any, weight: Any, lr: float, rho: float = 0.0) -> Any:
        g = self.jax.grad(self.loss)(params, x, y, weight)
        return self.jax.tree.map(lambda w, d, z: w - lr * (d + rho * (w - z)), params, g, self.start)

    def fedavg(self, lr: float, epochs: int, batch_size: int) -> Any:
        """One round; the mean of the clients' models by samples."""
        jax, jnp = self.jax, self.jnp
        counts = self.counts[self.clients]
        per_epoch = -(-counts // batch_size)
        most = int(per_epoch.max()) * epochs
        index = np.zeros((len(counts), most, batch_size), dtype=np.int32)
        weight = np.zeros(index.shape, dtype=np.float32)
        for i, (c, n) in enumerate(zip(self.clients, counts, strict=True)):
            for epoch in range(epochs):
                flat, real = np.zeros((2, per_epoch[i] * batch_size))
                flat[:n] = self.rng.permutation(n) + self.offsets[c]
                sizes = np.minimum(batch_size, n - batch_size * np.arange(per_epoch[i]))
                real[:n] = np.repeat(1 / sizes, sizes)
                at = slice(epoch * per_epoch[i], (epoch + 1) * per_epoch[i])
                index[i, at], weight[i, at] = flat.reshape(-1, batch_size), real.reshape(-1, batch_size)

        def train(x: Any, y: Any, index: Any, weight: Any, steps: Any, share: Any) -> Any:
            def client(i: Any, total: Any) -> Any:
                def one(k: Any, params: Any) -> Any:
                    at = index[i, k]
                    return self.step(params, x[at], y[at], weight[i, k], lr)

                params = jax.lax.fori_loop(0, steps[i], one, self.start)
                return jax.tree.map(lambda t, w: t + share[i] * w, total, params)

            return jax.lax.fori_loop(0, len(counts), client, jax.tree.map(jnp.zeros_like, self.start))

        run = self.programs.setdefault("fedavg", jax.jit(train))
        share = (counts / counts.sum()).astype(np.float32)
        return jax.block_until_ready(run(self.x, self.y, index, weight, (per_epoch * epochs).astype(np.int32), share))

    def fpfc(self, lr: float, steps: int, rho: float) -> list[Any]:
        """The clients' part of a round."""
        jax, jnp = self.jax, self.jnp
        found = []
        for c in self.clients:
            n = int(self.counts[c])

            def train(x: Any, y: Any, first: Any, n: int = n) -> Any:
                x, y = jax.lax.dynamic_slice_in_dim(x, first, n), jax.lax.dynamic_slice_in_dim(y, first, n)
                weight = jnp.full(n, 1 / n, dtype=jnp.float32)
                return jax.lax.fori_loop(0, steps, lambda _, p: self.step(p, x, y, weight, lr, rho), self.start)

            run = self.programs.setdefault(n, jax.jit(train))
            found.append(run(self.x, self.y, int(self.offsets[c])))
        return jax.block_until_ready(found)

    def peak(self, size: int) -> Callable[[], None]:
        """One matrix product."""
        a = self.jnp.asarray(torch.randn(size, size).numpy())
        product = self.jax.jit(lambda a: a @ a)
        return lambda: self.jax.block_until_ready(product(a))
