"""Task: a model, a loss and its metrics, on flat vectors, for s clients at once.

Three ways to a gradient, the same numbers: closed form for chains of linear layers (`stacked.py`); on an accelerator
one vectorised forward pass with stacked weights and one backward pass of the summed losses (clients do not interact);
otherwise the module itself, one client after another, its parameters pointed at views of the vector.
"""

import copy
import hashlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.batches import Batch, alike, padded
from polyfed.core.errors import ConfigError, ModelError, closest
from polyfed.core.layout import Layout
from polyfed.core.split import Split
from polyfed.core.stacked import LOSSES, Stacked, chain

Loss = str | Callable[[Tensor, Tensor], Tensor]
BLOCK = 8192  # samples per forward pass when evaluating


class Task:
    """A model and a loss as functions of the flat parameter vector.

    model: nn.Module; its trainable parameters define the vector, its present values the start `w0: [p]`
    loss: "cross-entropy", "mse", or a callable (output [b, ...], target [b, ...]) -> mean loss, a scalar
    weight_decay: adds weight_decay/2 * ||w||^2 to every client's loss
    device, dtype: where and in what precision; None keeps the model's

    Raises ModelError for a model with no trainable parameter or with BatchNorm (its statistics mix samples and are
    no part of the vector), ConfigError for an unknown loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss = "cross-entropy",
        *,
        weight_decay: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if isinstance(loss, str) and loss not in LOSSES:
            raise ConfigError(
                f"unknown loss {loss!r}{closest(loss, LOSSES)}; known: {', '.join(LOSSES)}, or a callable"
            )
        _check(model)
        self.model = copy.deepcopy(model).to(device=device, dtype=dtype)
        self.loss, self.weight_decay = loss, weight_decay
        self.layout = Layout(self.model)
        self.p = self.layout.p
        self.w0 = self.layout.flatten(self.model)
        layers = chain(self.model)
        known = isinstance(loss, str)
        self.stacked = Stacked(layers, self.layout, loss) if known and layers else None
        self._dropout = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in self.model.modules())
        self.vectorised = known and self.stacked is None and not self._dropout and self.w0.device.type != "cpu"
        self._local = threading.local()

    @property
    def device(self) -> torch.device:
        return self.w0.device

    @property
    def dtype(self) -> torch.dtype:
        return self.w0.dtype

    @property
    def batched(self) -> bool:
        """Whether several clients in one call are computed together, and not one after another."""
        return self.stacked is not None or self.vectorised

    @property
    def fixed(self) -> dict[str, Tensor]:
        """What a model holds beside its trainable parameters: frozen ones and persistent buffers, by name."""
        return {k: t.detach() for k, t in self.model.state_dict(keep_vars=True).items() if not t.requires_grad}

    @property
    def fixed_digest(self) -> str:
        """A fingerprint of `fixed`; "" where there is nothing."""
        whole = hashlib.sha256()
        for name, t in sorted(self.fixed.items()):
            whole.update(f"{name} {list(t.shape)} {t.dtype}\n".encode())
            whole.update(t.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return whole.hexdigest() if self.fixed else ""

    def module(self, w: Tensor) -> nn.Module:
        """A copy of the model with parameters `w: [p]`."""
        return self.layout.load_(copy.deepcopy(self.model), w)

    # gradients

    def gradient(self, w: Tensor, batch: Batch, need_loss: bool = True) -> tuple[Tensor, Tensor | None]:
        """Each client's mean-loss gradient [s, p] and loss [s] on its own samples.

        w: [s, p]     batch: s rows     need_loss=False may skip the loss and return None for it.
        """
        batch = _cast(batch, w)
        if self.stacked is not None:
            g, loss = self.stacked.gradient(w, batch, need_loss)
        elif self.vectorised and len(w) > 1:
            g, loss = self._vectorised(w, batch)
        else:
            g, loss = self._one_by_one(w, batch)
        if self.weight_decay:
            g.add_(w, alpha=self.weight_decay)
            if loss is not None:
                loss = loss + self.weight_decay / 2 * w.square().sum(-1)
        return g, loss

    def gradient_on(self, w: Tensor, batch: Batch) -> Callable[[], Tensor] | None:
        """`gradient` as a function of what `w: [s, p]` holds at each call, for many steps on one batch.

        The returned tensor is overwritten by the next call. None where steps gain nothing by it.
        """
        if self.stacked is None:
            return None
        gradient = self.stacked.gradient_on(w, _cast(batch, w))
        decay = self.weight_decay
        return (lambda: gradient().add_(w, alpha=decay)) if decay else gradient

    def descent_on(self, w: Tensor, batch: Batch, lr: float | Tensor) -> Callable[[], None] | None:
        """`descend_` as a function, for many steps on one batch. None where steps gain nothing by it."""
        if self.stacked is None or batch.live is not None or self.weight_decay or isinstance(lr, Tensor):
            return None
        return self.stacked.descent_on(w, _cast(batch, w), lr)

    def descend_(self, w: Tensor, batch: Batch, lr: float | Tensor) -> None:
        """One plain gradient step in place: w [s, p] <- w - lr * gradient."""
        if (descend := self.descent_on(w, batch, lr)) is not None:
            descend()
            return
        if not self.batched and not self.weight_decay:
            for i, views, parameters, loss in self._losses(w, _cast(batch, w)):
                if batch.live is None or batch.live[i]:
                    rate = lr[i] if isinstance(lr, Tensor) and lr.dim() else lr
                    torch._foreach_add_(views, list(torch.autograd.grad(loss, parameters)), alpha=-float(rate))
            return
        step = self.gradient(w, batch, need_loss=False)[0].mul_(lr)
        w.sub_(step if batch.live is None else step.mul_(batch.live))

    def _one_by_one(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        g, losses = torch.zeros_like(w, memory_format=torch.contiguous_format), w.new_zeros(len(w))
        for i, _, parameters, loss in self._losses(w, batch):
            torch._foreach_copy_(self.layout.views(g[i]), list(torch.autograd.grad(loss, parameters)))
            losses[i] = loss.detach()
        return g, losses

    def _losses(self, w: Tensor, batch: Batch) -> Iterator[tuple[int, list[Tensor], list[nn.Parameter], Tensor]]:
        """Client by client through the module: (row, views of w[row], the parameters that see them, loss to derive).

        Rows without samples are left out.
        """
        module, parameters = self._workspace()
        module.train()
        for i in range(len(w)):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            if b == 0:
                continue
            if self._dropout and batch.seed is not None:
                _seed_dropout(module, batch.seed(i))
            views = self.layout.views(w[i])
            for q, view in zip(parameters, views, strict=True):
                q.data = view
            with torch.enable_grad():
                loss = self._mean_loss(module(_input(batch.x[i, :b])), batch.y[i, :b])
            yield i, views, parameters, loss

    def hvp(self, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Hessian of each client's mean loss times a vector, by two backward passes, one client after another.

        w, v: [s, p]     batch: s rows. Returns [s, p].
        """
        out = torch.zeros_like(w, memory_format=torch.contiguous_format)
        for i, _, parameters, loss in self._losses(w, _cast(batch, w)):
            with torch.enable_grad():
                grads = torch.autograd.grad(loss, parameters, create_graph=True)
                slope = torch.stack([(g * u).sum() for g, u in zip(grads, self.layout.views(v[i]), strict=True)]).sum()
                if slope.requires_grad:
                    second = torch.autograd.grad(slope, parameters, materialize_grads=True)
                    torch._foreach_copy_(self.layout.views(out[i]), list(second))
        return out.add_(v, alpha=self.weight_decay) if self.weight_decay else out

    def _vectorised(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        module, _ = self._workspace()
        module.train()
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            per_sample = self.per_sample_loss(self._stacked_outputs(module, w, batch.x), batch.y)
            loss = per_sample.mean(1) if batch.weight is None else (per_sample * batch.weight).sum(1)
            (g,) = torch.autograd.grad(loss.sum(), w)
        return g, loss.detach()

    def _stacked_outputs(self, module: nn.Module, w: Tensor, x: Tensor) -> Tensor:
        def forward(views: list[Tensor], x: Tensor) -> Tensor:
            named = {e.name: v for e, v in zip(self.layout.entries, views, strict=True)}
            return torch.func.functional_call(module, named, (x,))

        return torch.func.vmap(forward)(self.layout.views(w), x)

    def _workspace(self) -> tuple[nn.Module, list[nn.Parameter]]:
        """This thread's own copy of the module and its trainable parameters."""
        if not hasattr(self._local, "module"):
            module = copy.deepcopy(self.model)
            if self._dropout:
                _key_dropout(module)
            self._local.module = module
            self._local.parameters = [q for q in module.parameters() if q.requires_grad]
        return self._local.module, self._local.parameters

    # losses and metrics

    def _mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if callable(self.loss):
            return self.loss(output, target).mean()
        if self.loss == "cross-entropy":
            return F.cross_entropy(output, target)
        return F.mse_loss(output.reshape(target.shape), target)

    def per_sample_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """output: [s, b, out], target: [s, b, ...] -> [s, b] losses (named losses only)."""
        if self.loss == "cross-entropy":
            return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        gap = output.flatten(2) - target.reshape(output.flatten(2).shape)
        return gap.square().mean(2)

    @torch.no_grad()
    def loss_of(self, w: Tensor, batch: Batch) -> Tensor:
        """[s] mean losses, without weight decay: w [s, p] on the real samples of the batch's s rows."""
        batch = _cast(batch, w)
        out = []
        for i in range(len(w)):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            out.append(self._mean_loss(self.outputs(w[i], batch.x[i, :b]), batch.y[i, :b]))
        return torch.stack(out)

    @torch.no_grad()
    def metrics(self, w: Tensor, split: Split, clients: np.ndarray) -> dict[str, np.ndarray]:
        """Mean loss and accuracy (classes) or RMSE (numbers) of each client's model on its own samples.

        w: [s, p]     clients: [s] positions in `split`. Returns arrays [s]; NaN for a client without samples.
        """
        totals: dict[str, Tensor] = {}
        for rows, values in self._scored(w, split, clients):
            for name, v in values.items():
                if name not in totals:
                    totals[name] = torch.zeros(len(w), dtype=torch.float64, device=w.device)
                totals[name].index_add_(0, rows, v.double())
        counts = split.counts[clients]
        with np.errstate(invalid="ignore", divide="ignore"):
            means = {k: np.where(counts > 0, t.cpu().numpy() / counts, np.nan) for k, t in totals.items()}
        if "squared" in means:
            means["rmse"] = np.sqrt(means.pop("squared"))
        return means

    def _scored(self, w: Tensor, split: Split, clients: np.ndarray) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """What `metrics` adds up: (rows of w, values to add to those rows), together covering every sample once.

        One model for all clients (rows that are views of one vector) takes a few large passes over all samples; models
        that can be computed together go in chunks of similar clients; any other goes client by client.
        """
        counts = split.counts[clients]
        if callable(self.loss):
            for i, c in enumerate(clients):
                x, y = split.client(int(c))
                output = self.outputs(w[i], x)
                loss = self.loss(output, y).mean() * len(x) if len(x) else output.sum() * 0
                sums = {"loss": loss} | {k: v.sum() for k, v in _score(output, y).items()}
                yield torch.tensor([i], device=w.device), {k: v[None] for k, v in sums.items()}
        elif len(w) > 1 and w.stride(0) == 0:
            index = np.concatenate([np.arange(*split.offsets[c : c + 2].tolist()) for c in clients])
            owner = np.repeat(np.arange(len(clients)), counts)
            for k in range(0, max(len(index), 1), BLOCK):
                at = torch.as_tensor(index[k : k + BLOCK], device=w.device)
                output = self._block_outputs(w[0], split.x.index_select(0, at))
                rows = torch.as_tensor(owner[k : k + BLOCK], device=w.device)
                yield rows, self._per_sample(output, split.y.index_select(0, at))
        elif self.stacked is not None:
            for chunk in alike(counts, max(1, BLOCK // max(1, int(counts.max(initial=1)))), np.argsort(-counts)):
                batch = _cast(padded(split, clients[chunk]), w)
                rows = torch.as_tensor(chunk, device=w.device)
                output = self.stacked.outputs(w[rows], batch.x)
                values = self._per_sample(output.flatten(0, 1), batch.y.flatten(0, 1))
                real = 1.0 if batch.weight is None else batch.weight > 0
                yield rows, {k: (v.view(batch.y.shape[:2]) * real).sum(1) for k, v in values.items()}
        else:
            for i, c in enumerate(clients):
                for xb, yb in self._blocks(*split.client(int(c))):
                    values = self._per_sample(self._block_outputs(w[i], xb), yb)
                    yield torch.full((len(yb),), i, device=w.device), values

    def _per_sample(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """[b] loss and score of every sample."""
        return {"loss": self.per_sample_loss(output[None], target[None])[0], **_score(output, target)}

    @staticmethod
    def _blocks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for k in range(0, max(len(x), 1), BLOCK):
            yield x[k : k + BLOCK], y[k : k + BLOCK]

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """w: [p], x: [b, ...] -> the model's outputs [b, ...] in evaluation mode."""
        return torch.cat([self._block_outputs(w, xb) for xb, _ in self._blocks(x, x)])

    def _block_outputs(self, w: Tensor, x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = x.to(w.dtype)
        with torch.no_grad():
            if self.stacked is not None:
                return self.stacked.outputs(w[None], x[None])[0]
            module, parameters = self._workspace()
            module.eval()
            for q, view in zip(parameters, self.layout.views(w), strict=True):
                q.data = view
            return module(_input(x))

    def check(self, split: Split, classes: int | None, who: str = "the model") -> None:
        """Try the model on a few samples; raise ModelError, in one line, where its output does not fit the targets."""
        x, y = split.x[:2], split.y[:2]
        try:
            output = self._block_outputs(self.w0, x)
        except (RuntimeError, ValueError, TypeError) as e:
            reason = str(e).strip().splitlines()[0]
            raise ModelError(f"{who} does not accept inputs of shape {list(x.shape[1:])}: {reason}") from None
        shape = list(output.shape)
        if self.loss == "cross-entropy":
            if y.is_floating_point():
                raise ModelError("cross-entropy needs integer class labels, the targets are floats; use loss='mse'")
            wanted = classes or int(split.y.max()) + 1
            if output.dim() != 2 or shape[1] < wanted:
                raise ModelError(
                    f"{who} gives output of shape {shape[1:]} per sample; {wanted} classes need [{wanted}]"
                )
        elif self.loss == "mse":
            if not y.is_floating_point():
                raise ModelError("mse needs float targets, the labels are integers; use loss='cross-entropy'")
            if output.numel() != y.numel():
                raise ModelError(f"{who} gives output of shape {shape[1:]} per sample; targets are {list(y.shape[1:])}")


def _check(model: nn.Module) -> None:
    if not any(q.requires_grad for q in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no trainable parameters")
    for name, m in model.named_modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"layer {name!r} is {type(m).__name__}: its running statistics are not part of what clients exchange; "
                "replace it by GroupNorm with polyfed.models.replace_batchnorm(model)"
            )


def _cast(batch: Batch, w: Tensor) -> Batch:
    if batch.x.is_floating_point() and batch.x.dtype != w.dtype:
        batch = batch._replace(x=batch.x.to(w.dtype))
    if batch.y.is_floating_point() and batch.y.dtype != w.dtype:
        batch = batch._replace(y=batch.y.to(w.dtype))
    return batch


def _input(x: Tensor) -> Tensor:
    """Images go in channels-last, as the convolution weights do."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _score(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Per sample: 0/1 correct for class labels, squared error for numbers."""
    if not target.is_floating_point():
        return {"accuracy": (output.argmax(1) == target).to(output.dtype)} if output.dim() == 2 else {}
    if output.numel() != target.numel():
        return {}
    gap = output.reshape(target.shape) - target
    return {"squared": gap.square().flatten(1).mean(1) if gap.dim() > 1 else gap.square()}


class _KeyedDropout(nn.Module):
    """Dropout whose mask comes from a generator that is set before every client's forward pass."""

    def __init__(self, p: float, per_channel: bool):
        super().__init__()
        self.p, self.per_channel, self.generator = p, per_channel, torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.per_channel else x.shape
        keep = torch.rand(shape, generator=self.generator, dtype=torch.float32) >= self.p
        return x * keep.to(x.device, x.dtype) / (1 - self.p)


def _key_dropout(module: nn.Module) -> None:
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.dropout._DropoutNd):
                setattr(parent, name, _KeyedDropout(child.p, not isinstance(child, nn.Dropout)))


def _seed_dropout(module: nn.Module, key: int) -> None:
    for k, m in enumerate(m for m in module.modules() if isinstance(m, _KeyedDropout)):
        m.generator.manual_seed((key + k) % 2**63)
