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


def call(m: nn.Module, p: dict[str, Any], at: str, x: Any) -> Any:
    """The outputs of torch's module `m` for x, with parameters `p[at + name]`; other modules have a method for it."""
    import jax
    import jax.numpy as jnp

    def one(c: Any) -> Any:
        return (1,) * (x.ndim - len(c)) + tuple(c)

    def shifted(y: Any) -> Any:
        bias = p.get(at + "bias")
        return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))

    match m:
        case nn.Sequential():
            for name, part in m.named_children():
                x = call(part, p, f"{at}{name}.", x)
            return x
        case nn.Linear():
            y = x @ p[at + "weight"].T
            return y + p[at + "bias"] if at + "bias" in p else y
        case nn.Conv1d() | nn.Conv2d():
            pads = [(int(k), int(k)) for k in m.padding]
            w = p[at + "weight"]
            return shifted(jax.lax.conv_general_dilated(x, w, m.stride, pads, feature_group_count=m.groups))
        case nn.GroupNorm() | nn.LayerNorm():
            groups = m.num_groups if isinstance(m, nn.GroupNorm) else 0
            y = x.reshape(len(x), groups, -1) if groups else x
            y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + m.eps)
            scale = p[at + "weight"]
            return (
                shifted(y.reshape(x.shape) * scale.reshape(-1, *(1,) * (x.ndim - 2)))
                if groups
                else (y * scale + p[at + "bias"])
            )
        case nn.MaxPool2d():
            assert isinstance(m.kernel_size, int)
            return jax.lax.reduce_window(
                x, -jnp.inf, jax.lax.max, one([m.kernel_size] * 2), one([m.kernel_size] * 2), "VALID"
            )
        case nn.AdaptiveAvgPool1d() | nn.AdaptiveAvgPool2d():  # to a single place
            return x.mean(tuple(range(2, x.ndim)), keepdims=True)
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.GELU():
            return jax.nn.gelu(x, approximate=False)
        case nn.Flatten():
            return x.reshape(len(x), -1)
        case nn.Embedding():
            return p[at + "weight"][x]
        case nn.GRU() | nn.LSTM():
            for k in range(m.num_layers):
                x = recurrent(isinstance(m, nn.LSTM), p, f"{at}%s_l{k}", x)
            return x
    return m.in_jax(lambda name, x: call(getattr(m, name), p, f"{at}{name}.", x), p, at, x)  # ty: ignore


def recurrent(lstm: bool, p: dict[str, Any], at: str, x: Any) -> Any:
    """The states of a layer after every step, [samples, steps, width]; gates as torch has them."""
    import jax
    import jax.numpy as jnp

    w, b = p[at % "weight_hh"].T, p[at % "bias_hh"]
    made = jnp.swapaxes(x @ p[at % "weight_ih"].T + p[at % "bias_ih"], 0, 1)  # of all steps at once
    zero = jnp.zeros((len(x), len(w)), x.dtype if x.dtype != jnp.int32 else jnp.float32)

    def step(state: Any, a: Any) -> Any:
        h, c = state
        z = h @ w + b
        if lstm:
            i, f, g, o = jnp.split(a + z, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        else:
            (ar, au, an), (zr, zu, zn) = jnp.split(a, 3, -1), jnp.split(z, 3, -1)
            new = jnp.tanh(an + jax.nn.sigmoid(ar + zr) * zn)
            h = new + jax.nn.sigmoid(au + zu) * (h - new)
        return (h, c), h

    return jnp.swapaxes(jax.lax.scan(step, (zero, zero), made)[1], 0, 1)


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
        self.model, self.start = model, {k: jnp.asarray(q.detach().numpy().copy()) for k, q in model.named_parameters()}
        self.x, self.y = jnp.asarray(train.x.numpy()), jnp.asarray(train.y.numpy())
        self.offsets = train.offsets
        self.programs: dict[Any, Callable[..., Any]] = {}
        self.rng = np.random.default_rng(0)

    def loss(self, params: Any, x: Any, y: Any, weight: Any) -> Any:
        jax, jnp = self.jax, self.jnp
        outputs = jax.nn.log_softmax(call(self.model, params, "", x))
        return -(jnp.take_along_axis(outputs, y[:, None], 1)[:, 0] * weight).sum()

    def step(self, params: Any, x: Any, y: Any, weight: Any, lr: float, rho: float = 0.0) -> Any:
        g = self.jax.grad(self.loss)(params, x, y, weight)
        return self.jax.tree.map(lambda w, d, z: w - lr * (d + rho * (w - z)), params, g, self.start)

    def outputs(self, n: int) -> Any:
        """Of the first n samples at the first parameters."""
        return call(self.model, self.start, "", self.x[:n])

    def fedavg(self, lr: float, epochs: int, batch_size: int) -> Any:
        """One round; the mean of the clients' models by samples. XLA's own loops slow convolutions down on a processor
        (to a twelfth), so where there are some, Python calls one compiled step after another."""
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

        share = (counts / counts.sum()).astype(np.float32)
        if any(isinstance(m, (nn.Conv1d, nn.Conv2d)) for m in self.model.modules()):
            step = self.programs.setdefault("step", jax.jit(lambda p, x, y, at, by: self.step(p, x[at], y[at], by, lr)))
            total = jax.tree.map(jnp.zeros_like, self.start)
            for i, steps in enumerate(per_epoch * epochs):
                params = self.start
                for k in range(steps):
                    params = step(params, self.x, self.y, index[i, k], weight[i, k])
                total = jax.tree.map(lambda t, w, by=share[i]: t + by * w, total, params)
            return jax.block_until_ready(total)
        run = self.programs.setdefault("fedavg", jax.jit(train))
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
