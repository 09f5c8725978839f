"""Closed-form gradients of s small networks at once: chains of linear layers and element-wise activations. Each
weight gradient is one batched matrix product straight into the flat vector, and no graph is recorded."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyfed.compute.batches import Batch
from polyfed.compute.layout import Layout
from polyfed.compute.losses import Criterion
from polyfed.compute.terms import Also

ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.Sigmoid)
BLOCK = 8192  # samples per forward pass when evaluating
Slope = Callable[[Tensor], Tensor]
Beyond = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Drift(NamedTuple):
    """The part of a step besides descending the loss: w <- keep * w + add - lr * gradient."""

    keep: float | Tensor = 1.0  # a tensor broadcasts to [s, p]
    add: Tensor | None = None  # [s, p]

    def first(self, m: int) -> "Drift":
        """The drift of the first m clients."""
        return Drift(first(self.keep, m), None if self.add is None else self.add[:m])

    def row(self, i: int) -> "Drift":
        """The drift of client i, for w: [p]."""
        keep = self.keep[i] if isinstance(self.keep, Tensor) and self.keep.dim() == 2 else self.keep
        return Drift(keep, None if self.add is None else self.add[i])

    def __call__(self, w: Tensor) -> Tensor:
        """Apply it to w, in place."""
        if isinstance(self.keep, Tensor) or self.keep != 1:
            w.mul_(self.keep)
        return w if self.add is None else w.add_(self.add)


class Affine(NamedTuple):
    """A drift whose `add` is a sum of factors (numbers, or tensors that broadcast to [s, p]) times [s, p] vectors."""

    keep: float | Tensor
    terms: list[tuple[float | Tensor, Tensor]]

    def summed(self) -> Drift:
        """The drift, its sum worked out."""
        total: Tensor | None = None
        for by, vector in self.terms:
            if total is None:
                total = by * vector
            else:
                total = total + by * vector if isinstance(by, Tensor) else torch.add(total, vector, alpha=by)
        return Drift(self.keep, total)


def first(value: float | Tensor, m: int) -> float | Tensor:
    """The first m clients' part of a number, or of a tensor that broadcasts to [s, p]."""
    return value[:m] if isinstance(value, Tensor) and value.dim() == 2 else value


class Signal(NamedTuple):
    """One linear layer's gradient in factored form: `d_weight = delta @ inputs^T`, `d_bias = delta.sum(-1)`."""

    layer: int  # index of its weight among the module's parameters
    bias: bool
    delta: Tensor  # [s, out, b]
    inputs: Tensor  # [s, b, in]


def flat(module: nn.Module) -> list[nn.Module]:
    """The modules of a sequence and of the sequences in it, with repeats."""
    if type(module) is not nn.Sequential:
        return [module]
    return [m for part in module for m in flat(part)]


def chain(module: nn.Module) -> list[nn.Module] | None:
    """The module as a list of Linear and activation layers; None: it is no such chain."""
    layers: list[nn.Module] = []
    for m in flat(module):
        if (type(m) in ACTIVATIONS and layers) or (
            type(m) is nn.Linear and all(q.requires_grad for q in m.parameters())
        ):
            layers.append(m)
        elif type(m) is not nn.Identity and (layers or not flattens(m)):
            return None
    if not layers or not isinstance(layers[-1], nn.Linear):
        return None
    parameters = [q for m in layers for q in m.parameters()]  # tied ones have one place in the vector for two layers
    return layers if len({id(q) for q in parameters}) == len(parameters) else None


def flattens(m: nn.Module) -> bool:
    """True for a module that makes a row of every sample."""
    return type(m) is nn.Flatten and (m.start_dim, m.end_dim) == (1, -1)


def rows(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """A hook on a chain: inputs [b, ...] as rows [b, numbers]."""
    (x,) = inputs
    return (x.flatten(1) if x.dim() > 2 else x,)


class Stacked:
    """Forward and backward passes of a `chain` for s weight vectors at once."""

    def __init__(self, layers: list[nn.Module], layout: Layout, criterion: Criterion):
        self.layers, self.layout, self.criterion = layers, layout, criterion
        self._sizes = [len([*layer.parameters()]) for layer in layers]  # 0, or 1 for a linear layer without bias, or 2

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """w: [s, p], x: [s, b, ...] -> [s, b, out]."""
        *_, (_, _, z) = self._forward(self.layout.views(w), _entering(x))
        return z.transpose(1, 2)

    def losses(self, w: Tensor, batch: Batch) -> Tensor:
        """Every client's weighted mean loss [s, c] at each of `w: [s, c, p]`; 0 without samples."""
        s, b = batch.x.shape[:2]
        weight = batch.x.new_full((s, b), 1 / max(1, b)) if batch.weight is None else batch.weight
        losses, size = w.new_zeros(w.shape[:2]), max(1, BLOCK // s)
        for k in range(0, b, size):
            at = slice(k, k + size)
            part = batch._replace(x=batch.x[:, at], y=batch.y[:, at], weight=weight[:, at])
            for j in range(w.shape[1]):
                losses[:, j] += self.criterion.of_models(self.outputs(w[:, j], part.x), part)
        return losses

    def _forward(self, views: list[Tensor], a: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Per layer (index of its first parameter, input [s, in, b], output [s, out, b])."""
        k = 0
        for layer, size in zip(self.layers, self._sizes, strict=True):
            z = product(views[k], a, views[k + 1] if size == 2 else None) if size else layer(a)
            yield k, a, z
            k, a = k + size, z

    def features(self, w: Tensor, x: Tensor) -> Tensor:
        """The inputs of the last layer. w: [s, p], x: [s, b, ...] -> [s, b, d]."""
        *_, (_, a, _) = self._forward(self.layout.views(w), _entering(x))
        return a.transpose(1, 2)

    def _signals(
        self, views: list[Tensor], x: Tensor, slope: Slope, beyond: Beyond | None = None
    ) -> tuple[list[Signal], Tensor]:
        """A `Signal` per linear layer, the last one first, and the outputs [s, out, b]. x: [s, in, b]."""
        trace = list(self._forward(views, x))
        outputs, inside = trace[-1][2], None
        delta = slope(outputs)
        if beyond is not None:
            # gradients of the added term, by the last layer's input and by the outputs
            inside, more = beyond(trace[-1][1], outputs)
            delta = delta + more
        signals: list[Signal] = []
        first = trace[0][0]
        for layer, size, (k, a, z) in zip(reversed(self.layers), reversed(self._sizes), reversed(trace), strict=True):
            if size:
                signals.append(Signal(k, size == 2, delta, a.transpose(1, 2)))
                if k != first:
                    delta = product(views[k].transpose(1, 2), delta)
                    if inside is not None:
                        delta, inside = delta + inside, None
            elif isinstance(layer, nn.ReLU):
                delta = torch.ops.aten.threshold_backward(delta, z, 0)
            elif isinstance(layer, nn.Tanh):
                delta = delta.mul_(1 - z * z)
            else:
                delta = delta.mul_(z * (1 - z))
        return signals, outputs

    def _slope(self, batch: Batch) -> Slope:
        """Outputs [s, out, b] -> the gradient of every client's weighted mean loss with respect to them."""
        (s, b), x = batch.x.shape[:2], batch.x
        weight = batch.weight[:, None] if batch.weight is not None else x.new_full((1, 1, 1), 1 / b)
        if self.criterion.class_weights is not None:
            weight = weight * self.criterion.class_weights.to(x.dtype)[batch.y[:, None]]
        if self.criterion.loss == "cross-entropy":
            target, back = batch.y[:, None], -weight.expand(s, 1, b)
            return lambda z: torch.softmax(z, 1).mul_(weight).scatter_add_(1, target, back)
        y, scale = batch.y.reshape(s, b, -1).transpose(1, 2), weight * (2 * b * s / batch.y.numel())
        return lambda z: (z - y).mul_(scale)

    def gradient(
        self, w: Tensor, batch: Batch, need_loss: bool, also: Also | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """([s, p] gradient, [s] loss)."""
        added: list[Tensor] = []

        def beyond(a: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            f, out = (t.detach().transpose(1, 2).requires_grad_() for t in (a, z))
            with torch.enable_grad():
                added.append(also(f, out, batch, slice(0, len(w))))  # pyrefly: ignore[not-callable]
                slopes = torch.autograd.grad(added[0].sum(), (f, out), materialize_grads=True)
            return slopes[0].transpose(1, 2), slopes[1].transpose(1, 2)

        views, x, slope = self.layout.views(w), _entering(batch.x), self._slope(batch)
        signals, z = self._signals(views, x, slope, None if also is None else beyond)
        g = w.new_empty(w.shape)
        _write(signals, self.layout.views(g))
        loss = self.criterion.of_models(z.transpose(1, 2), batch) if need_loss else None
        return g, loss + added[0].detach() if added and loss is not None else loss

    def clipped(self, w: Tensor, batch: Batch, clip: float) -> Tensor:
        """[s, p] float64: the sum of row gradients, each scaled down to length `clip`; see `clipped.clipped_sum`."""
        signals, _ = self._signals(self.layout.views(w), _entering(batch.x), self._slope(batch))
        b = batch.x.shape[1]
        by = b if batch.sizes is None else torch.as_tensor(batch.sizes, device=w.device)[:, None, None]
        wide = [
            signal._replace(delta=signal.delta.double() * by, inputs=signal.inputs.double().nan_to_num(0, 0, 0))
            for signal in signals
        ]
        squares = sum(s.delta.square().sum(1) * (s.inputs.square().sum(2) + s.bias) for s in wide)
        assert isinstance(squares, Tensor)
        scale = shrink(squares.sqrt(), clip)[:, None]
        g = w.new_empty(w.shape, dtype=torch.float64)
        _write(
            [signal._replace(delta=signal.delta.nan_to_num(0, 0, 0) * scale) for signal in wide], self.layout.views(g)
        )
        return g

    def gradient_on(self, w: Tensor, batch: Batch) -> Callable[[], Tensor]:
        """A function that gives the gradient at what `w: [s, p]` then holds, in the same memory at every call."""
        views, x, slope = self.layout.views(w), _entering(batch.x), self._slope(batch)
        g = w.new_empty(w.shape)
        into = self.layout.views(g)

        def gradient() -> Tensor:
            _write(self._signals(views, x, slope)[0], into)
            return g

        return gradient

    def descent_on(self, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift) -> Callable[[], None]:
        """A function that does w <- drift(w) - lr * gradient in place, the gradient never written out. lr: or [s, 1]"""
        views, x, slope = self.layout.views(w), _entering(batch.x), self._slope(batch)
        rate: float = 1.0
        if isinstance(lr, Tensor):
            slope = _scaled(slope, lr.view(-1, 1, 1))
        else:
            rate = lr
        # a product scales what it is added to
        beta, scale = (1.0, drift.keep) if isinstance(drift.keep, Tensor) else (drift.keep, None)

        def descend() -> None:
            signals = self._signals(views, x, slope)[0]
            if scale is not None:
                w.mul_(scale)
            for layer, bias, delta, inputs in signals:
                views[layer].baddbmm_(delta, inputs, beta=beta, alpha=-rate)
                if bias:
                    if beta != 1:
                        views[layer + 1].mul_(beta)
                    views[layer + 1].sub_(delta.sum(-1), alpha=rate)
            if drift.add is not None:
                w.add_(drift.add)

        return descend


def shrink(lengths: Tensor, clip: float) -> Tensor:
    """Factors that bring vectors of these lengths to at most `clip`; 0 for one that is not finite."""
    return torch.where(lengths.isfinite(), (clip / lengths.clamp(min=1e-300)).clamp(max=1), 0)


def _entering(x: Tensor) -> Tensor:
    """Samples [s, b, ...] as the first layer's input [s, in, b]."""
    return x.flatten(2).transpose(1, 2)


def _scaled(slope: Slope, by: Tensor) -> Slope:
    return lambda z: slope(z).mul_(by)


@torch.no_grad()
def _write(signals: list[Signal], into: list[Tensor]) -> None:
    """Write the signals' gradient into its views."""
    for layer, bias, delta, inputs in signals:
        torch.bmm(delta, inputs, out=into[layer])
        if bias:
            torch.sum(delta, -1, out=into[layer + 1])


def product(weight: Tensor, a: Tensor, bias: Tensor | None = None) -> Tensor:
    """weight [s, out, in] @ a [s, in, b] + bias [s, out] -> [s, out, b], the longer of out and b contiguous."""
    # the other order takes up to a third longer on CPU for a wide layer, three times for many samples; and the softmax
    # of few classes runs along contiguous samples
    if weight.shape[1] < a.shape[2]:
        return torch.bmm(weight, a) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, a)
    weight, a = weight.transpose(1, 2), a.transpose(1, 2)
    return (torch.bmm(a, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), a, weight)).transpose(1, 2)
