"""Task: a model, a loss and its metrics, on flat vectors, for s clients at once. Gradients come in closed form
(`stacked.py`), from one vectorised pass on an accelerator, or from the module itself, client after client."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, DataError, ModelError
from polyfed.base.typed import add_, copy_, named_modules, plain, tf32
from polyfed.compute import compiled
from polyfed.compute.batches import Batch, Batches
from polyfed.compute.batchnorm import begin
from polyfed.compute.grouped import grouped_pass
from polyfed.compute.layout import Layout
from polyfed.compute.losses import Criterion, Loss, tokens
from polyfed.compute.narrow import placed
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.recompute import Again, blocks, kept_short
from polyfed.compute.split import Split
from polyfed.compute.stacked import BLOCK, Affine, Drift, Stacked, chain, rows
from polyfed.compute.terms import Also, Entering, members
from polyfed.compute.trial import EMBEDDINGS, Keyed, check_structure, reason, still
from polyfed.compute.vectorised import stacked_pass
from polyfed.metrics.metric import Metric
from polyfed.metrics.scores import DEFAULT

FOUND = ("random", "threshold", "integers")
Guarded = Callable[[Tensor, Batch], Tensor | None]  # (models [s, p], batch) -> gradients [s, p]; None: the plain ones
AT_ONCE = 1 << 30  # bytes of activations when evaluating many models on their own samples
ONE = 1 << 26  # bytes of them when evaluating one model, as a step would keep


class Task:
    """A model and a loss as functions of the flat parameter vector.

    Random layers (dropout of any kind) draw from a key per client and step. A module whose parameters are all frozen is
    always in evaluation mode, and shares its parameters with the given model. Integer inputs stay integers for a model
    with an embedding and become floats for others.

    Parameters
    ----------
    model : nn.Module
        Its trainable parameters define the vector, their present values the start `w0: [p]`.
    loss : str or callable
        "cross-entropy", "mse", "tokens" (classes at every token, targets [b, T], -100 where none is wanted), or (output
        [b, ...], target [b, ...]) -> mean loss, a scalar. For float targets [b], outputs [b, 1] are reshaped to [b]
        first, and the reverse, unless `check` finds that the loss is a mean over samples only with outputs as they are.
    weight_decay : float
        Adds weight_decay/2 * ||w||^2 to every client's loss.
    optimizer : Optimizer
        Takes the local steps of `local_sgd`.
    device : torch.device, str or None
        None keeps the model's.
    dtype : torch.dtype or None
        Precision; None keeps the model's.
    bf16 : bool
        Products and convolutions of local training in bfloat16, by torch's autocast; weights, losses, gradients and
        updates, and every evaluation, stay in float32.
    tf32 : bool
        On a CUDA device, float32 products and convolutions of local training by TF32's tensor cores.
    metrics : sequence of Metric or None
        Scores of clients' models, the first leads; None: accuracy for classes, RMSE for numbers.
    class_weights : sequence of float or None
        One number per class, which multiplies the loss of its samples; the mean over a batch divides by the number of
        its samples. For "cross-entropy" only.
    recompute : bool
        Activation checkpointing: the model's blocks keep their inputs and are computed again in the backward pass, with
        the same gradients. Blocks are the entries of lists of at least two modules of one class.

    Raises
    ------
    ModelError
        The model has no trainable parameter, parameters that have no values yet, or a BatchNorm that is not frozen.
        `check` finds the rest by trying.
    ConfigError
        The loss is unknown, bf16 is asked for with other weights than float32, or recompute of a model without blocks.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        loss: Loss = "cross-entropy",
        *,
        weight_decay: float = 0.0,
        optimizer: Optimizer = Optimizer(),  # noqa: B008  (frozen)
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bf16: bool = False,
        tf32: bool = False,
        metrics: Sequence[Metric] | None = None,
        class_weights: Sequence[float] | None = None,
        recompute: bool = False,
    ):
        self._still = still(model)
        try:
            self.model = copied(model, of=lambda q: nn.Parameter(q.detach(), requires_grad=False))
            check_structure(self.model, lambda m: _training(m, self._parts(m)))
            self.model = placed(self.model, device, dtype)
        except (RuntimeError, TypeError, ValueError, AttributeError) as e:
            raise ModelError(f"{type(model).__name__} cannot be copied: {reason(e)}") from None
        self.weight_decay, self.optimizer = weight_decay, optimizer
        self.asked = tuple(metrics or ())
        self.scores, self.settled = self.asked or DEFAULT, False  # `check` keeps those that fit
        self.layout = Layout(self.model)
        self.p = self.layout.p
        self.w0 = self.layout.flatten(self.model)
        self.criterion = Criterion(loss, class_weights, self.w0.device)
        named = zip(self.layout.entries, self.layout.views(self.w0), strict=True)
        broken = [e.name for e, v in named if not _finite(v)]
        if broken:
            raise ModelError(f"parameter {broken[0]!r} of {type(model).__name__} holds NaN or infinity before training")
        layers = chain(self.model) if isinstance(loss, str) else None
        self.of_rows = layers is not None  # samples of any shape go in as rows, into a copy of the model as here
        if self.of_rows:
            self.model.register_forward_pre_hook(rows)
        self.statistics = None if self.layout.statistics is None else self.layout.statistics.to(self.device)
        if self.statistics is not None:
            self.model.register_forward_pre_hook(begin)
        if bf16 and self.w0.dtype != torch.float32:
            found = str(self.w0.dtype).removeprefix("torch.")
            raise ConfigError(f"precision: found bf16 with weights in {found}, expected float32")
        self.bf16, self.tf32 = bf16, tf32
        layers = layers if not bf16 else None  # autocast is of modules
        self.stacked = Stacked(layers, self.layout, self.criterion) if layers else None
        self.vectorised = self.stacked is None and self.w0.device.type != "cpu"
        self.blocks = blocks(self.model) if recompute else []
        if recompute and not self.blocks:
            raise ConfigError(
                f"recompute: found no blocks in {type(model).__name__}, expected a list of at least two modules of one "
                "class, such as a transformer's layers"
            )
        self.grouped = False  # in one pass of the frozen part, as `check` finds where the other way fails
        self.sample_bytes = 0  # of memory that a sample keeps in a step through the module, as `check` finds
        # until `check` has tried: any model may draw, and one output is a logit
        self.random = True
        self.threshold: float | None = 0.0
        self.embeds = self.integers = any(isinstance(m, EMBEDDINGS) for m in self.model.modules())
        self.guard: Guarded | None = None  # makes the gradients in their stead, of a run with privacy by row
        self._local = threading.local()

    @property
    def found(self) -> dict[str, Any]:
        """The findings of `check`, for `adopt`."""
        return {name: getattr(self, name) for name in FOUND} | {"reshape": self.criterion.reshape}

    def adopt(self, found: Mapping[str, Any]) -> "Task":
        """Take over the findings of `check` of the same model and loss.

        Parameters
        ----------
        found : mapping
            As the other task has it.

        Returns
        -------
        Task
            This one.
        """
        for name in FOUND:
            setattr(self, name, found[name])
        self.criterion.reshape = found["reshape"]
        return self

    @property
    def loss(self) -> Loss:
        """The loss as it was given."""
        return self.criterion.loss

    @property
    def class_weights(self) -> Tensor | None:
        """[C] float64, or None."""
        return self.criterion.class_weights

    @property
    def device(self) -> torch.device:
        """The device of the vector and of all computing."""
        return self.w0.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the start, and of all that is trained from it."""
        return self.w0.dtype

    @property
    def batched(self) -> bool:
        """True where several clients in one call are computed together, and not one after another."""
        return self.stacked is not None or self.vectorised

    @property
    def block(self) -> int:
        """Samples of one model per forward pass when evaluating."""
        return min(BLOCK, max(1, ONE // max(1, self.sample_bytes)))

    @property
    def classes(self) -> int:
        """C: the outputs, one per class. Raises ModelError for a loss that is not cross-entropy."""
        if self.loss != "cross-entropy":
            name = self.loss if isinstance(self.loss, str) else getattr(self.loss, "__name__", "a function")
            raise ModelError(f"loss: found {name}, expected cross-entropy, for a method that counts classes")
        return self.layout.head(self.w0)[1].shape[0]

    @property
    def width(self) -> int:
        """d: the features that enter the last layer, which is linear. Raises ModelError for outputs at every token."""
        if self.loss is tokens:
            raise ModelError(
                "loss: found tokens, expected one answer for each sample, for a method that reads features"
            )
        return self.layout.head(self.w0)[0].shape[1]

    @cached_property
    def fixed(self) -> dict[str, Tensor]:
        """Tensors that the model uses besides the vector, by name: frozen parameters and persistent buffers."""
        kept = self.model.state_dict().keys()
        frozen = {name: q.detach() for name, q in self.model.named_parameters() if not q.requires_grad}
        return frozen | {name: b for name, b in self.model.named_buffers() if name in kept}

    @cached_property
    def fixed_digest(self) -> str:
        """Digest of `fixed`, the layers' types and the vector's layout; "" where nothing is fixed."""
        if not self.fixed:
            return ""
        h = blake2b(digest_size=16)
        for name, m in named_modules(self.model):
            h.update(f"{name} {type(m).__name__} {name in self._still}\n".encode())
        for name, shape, _ in self.layout.entries:
            h.update(f"{name} {shape}\n".encode())
        for name, t in sorted(self.fixed.items()):
            h.update(f"{name} {t.dtype} {[*t.shape]}\n".encode())
            h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return h.hexdigest()

    def part(self, module: nn.Module) -> "Task":
        """The same loss and optimiser for a module that is part of the model.

        Parameters
        ----------
        module : nn.Module
            Made of the model's own modules.

        Returns
        -------
        Task
            With what `check` has found of the whole.
        """
        part = Task(
            module, self.loss, weight_decay=self.weight_decay, optimizer=self.optimizer, bf16=self.bf16,
            tf32=self.tf32, class_weights=plain(self.class_weights),
        ).adopt(self.found)  # fmt: skip
        part.asked, part.scores, part.settled = self.asked, self.scores, self.settled
        part.grouped, part.blocks = self.grouped, blocks(part.model) if self.blocks else []
        part.vectorised, part.sample_bytes = self.vectorised and part.stacked is None, self.sample_bytes
        return part

    def place(self, split: Split) -> Split:
        """The split on the task's device, as the model takes it: floats in its precision, integers where it embeds.

        Parameters
        ----------
        split : Split
            The samples, anywhere.

        Returns
        -------
        Split
            The same samples.
        """
        wide = split.x.dtype, split.y.dtype
        split = split.to(self.device, self.dtype)
        if not self.integers and not split.x.is_floating_point():
            split = replace(split, x=split.x.to(self.dtype))
        for t, before, what in zip((split.x, split.y), wide, ("inputs", "targets"), strict=True):
            if t.dtype != before and not _finite(t):
                most = torch.finfo(t.dtype).max
                raise DataError(f"found {what} beyond {most:.2g}, the largest {str(t.dtype)[6:]}; scale them")
        return split

    def module(self, w: Tensor) -> nn.Module:
        """A copy of the model with other parameters.

        Parameters
        ----------
        w : Tensor
            [p] the parameters.

        Returns
        -------
        nn.Module
            On the task's device.
        """
        return self.layout.load_(copy.deepcopy(self.model), w)

    # gradients

    def gradient(
        self, w: Tensor, batch: Batch, need_loss: bool = True, also: Also | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Each client's gradient of the mean loss on its own samples.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        batch : Batch
            s rows.
        need_loss : bool
            False may skip the loss.
        also : callable or None
            A term of the losses, see `local_sgd`.

        Returns
        -------
        tuple of Tensor
            [s, p] gradients, 0 at running statistics of BatchNorm, and [s] losses or None.
        """
        return passed(self, w, batch, need_loss, also)[:2]

    def gradient_on(self, w: Tensor, batch: Batch) -> Callable[[], Tensor] | None:
        """`gradient` as a function of what `w` holds at each call, for many steps on one batch.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models, to be changed in place between calls.
        batch : Batch
            s rows.

        Returns
        -------
        callable or None
            () -> [s, p], overwritten by the next call. None where steps gain nothing by it.
        """
        if self.stacked is None or self.guard is not None:
            return None
        gradient = self.stacked.gradient_on(w, self.cast(batch, w))
        decay = self.weight_decay
        return (lambda: gradient().add_(w, alpha=decay)) if decay else gradient

    def _undecayed(
        self, w: Tensor, batch: Batch, need_loss: bool, also: Also | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`gradient` without weight decay."""
        if self.guard is not None and (g := self.guard(w, batch)) is not None:
            if also is not None:
                raise ConfigError("privacy: found a method that adds to the loss of a row, expected unit = 'site'")
            return g, None
        if not need_loss and also is None and (g := compiled.gradient(self, w, batch)) is not None:
            return g, None
        if self.stacked is not None:
            return self.stacked.gradient(w, batch, need_loss, also)
        if self.vectorised and len(w) > 1:
            return self._vectorised(w, batch, also)
        return self._one_by_one(w, batch, also)

    def affine(
        self,
        w: Tensor,
        lr: float | Tensor,
        pull: tuple[float | Tensor, Tensor] | None = None,
        shift: Tensor | None = None,
        minus: Tensor | None = None,
    ) -> Affine:
        """The effect of a pull, a shift and weight decay on w in a step, besides the gradient of the loss.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        lr : float or Tensor
            Step size; a tensor is [s, 1].
        pull, shift, minus : tuple, Tensor or None
            As in `local_sgd`.

        Returns
        -------
        Affine
            Its vectors as they are given; `summed` makes a `Drift` of it, for `descend_`.
        """
        strength, anchor = pull if pull is not None else (0.0, None)
        rate = lr * (strength + self.weight_decay)
        keep: float | Tensor = 1.0
        terms: list[tuple[float | Tensor, Tensor]] = []
        if isinstance(rate, Tensor) or rate:
            # a number stays one: to read it back from an accelerator would be to wait for it
            each = (1 - torch.as_tensor(rate, dtype=torch.float64)).to(w.dtype)
            if anchor is not None:
                # by the rounded rest of `keep`: a model at its anchor stays there
                share = strength / (strength + self.weight_decay) if self.weight_decay else 1.0
                by = ((1 - each.double()) * share).to(w.dtype)
                terms.append((by if by.dim() else float(by.numpy()), anchor))
            keep = each.expand(len(w), -1) if each.dim() else float(each.numpy())
        terms += [(by, v) for by, v in ((-lr, shift), (lr, minus)) if v is not None]
        return Affine(keep, terms)

    def descent_on(self, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift) -> Callable[[], None] | None:
        """`descend_` as a function, for many steps on one batch.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models, changed in place by every call.
        batch : Batch
            s rows.
        lr : float or Tensor
            Step size; a tensor is [s, 1].
        drift : Drift
            The rest of a step.

        Returns
        -------
        callable or None
            () -> None. None where steps gain nothing by it.
        """
        if self.stacked is None or self.guard is not None or batch.live is not None:
            return None
        return self.stacked.descent_on(w, self.cast(batch, w), lr, drift)

    def descend_(self, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift | None = None, steps: int = 1) -> None:
        """Gradient steps in place: w <- keep * w + add - lr * gradient of the loss, without weight decay.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        batch : Batch
            s rows.
        lr : float or Tensor
            Step size; a tensor is [s, 1].
        drift : Drift
            The rest of a step, `affine(...).summed()`; None: weight decay.
        steps : int
            How many, all on this batch.
        """
        drift = drift or self.affine(w, lr).summed()
        if batch.live is None and compiled.descend_(self, w, self.cast(batch, w), lr, drift, steps):
            return
        descend = self.descent_on(w, batch, lr, drift) or partial(self._descend_, w, batch, lr, drift)
        for _ in range(steps):
            descend()

    def _descend_(self, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift) -> None:
        """One step, where nothing is set up for many."""
        batch = self.cast(batch, w)
        if not self.batched and self.guard is None and self.statistics is None:
            empty = [] if batch.sizes is None else [i for i, b in enumerate(batch.sizes) if b == 0]
            for i in empty:
                if batch.live is None or batch.live[i]:
                    drift.row(i)(w[i])
            for i, views, parameters, loss in self._losses(w, batch):
                if batch.live is None or batch.live[i]:
                    g = slopes(loss, parameters)
                    drift.row(i)(w[i])
                    add_(views, g, alpha=-float(lr[i] if isinstance(lr, Tensor) and lr.dim() else lr))
            return
        g = self._undecayed(w, batch, need_loss=False)[0]
        moves = None if self.statistics is None else g.index_select(-1, self.statistics)
        new = statistics_(self, drift(w.clone()).sub_(g.mul_(lr)), w, moves)
        w.copy_(new if batch.live is None else torch.where(batch.live > 0, new, w))

    def _one_by_one(self, w: Tensor, batch: Batch, also: Also | None) -> tuple[Tensor, Tensor]:
        g, losses = torch.zeros_like(w, memory_format=torch.contiguous_format), w.new_zeros(len(w))
        for i, _, parameters, loss in self._losses(w, batch, also):
            copy_(self.layout.views(g[i]), slopes(loss, parameters))
            losses[i] = loss.detach()
        return g, losses

    def _losses(
        self, w: Tensor, batch: Batch, also: Also | None = None
    ) -> Iterator[tuple[int, list[Tensor], list[nn.Parameter], Tensor]]:
        """Client by client through the module: (row, views of w[row], parameters, loss), without rows of no samples."""
        module, parameters = self.workspace(training=True, second=also is not None)  # which may evaluate models
        keys = self._keys(batch)

        def again(draws: object, key: int) -> Again:
            return lambda: partial(self._drawing, key, draws.count if isinstance(draws, Keyed) else 0)

        for i in range(len(w)):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            if b == 0:
                continue
            views = self.point(parameters, w[i])
            key = 0 if keys is None else int(keys[i])
            with torch.enable_grad(), self._drawing(key) as draws, kept_short(module, self.blocks, again(draws, key)):
                with self.precision(), nullcontext() if also is None else Entering(module) as seen:
                    output = module(model_input(batch.x[i, :b]))
                loss = self.criterion.mean(output.to(w.dtype), batch.y[i, :b], _weight(batch, i, b))
            if also is not None and seen is not None:
                f, z, one = seen.entered().to(w.dtype), output.to(w.dtype), batch.row(i, b)
                with torch.enable_grad():
                    loss = loss + also(f[None], z[None], one, slice(i, i + 1))[0]
            yield i, views, parameters, loss

    def hvp(self, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """The Hessian of each client's mean loss times a vector, by two backward passes, one client after another.

        Parameters
        ----------
        w, v : Tensor
            [s, p] the clients' models, and the vectors.
        batch : Batch
            s rows.

        Returns
        -------
        Tensor
            [s, p].
        """
        out = torch.zeros_like(w, memory_format=torch.contiguous_format)
        for i, _, parameters, loss in self._losses(w, self.cast(batch, w)):
            with torch.enable_grad():
                grads = slopes(loss, parameters, create_graph=True)
                slope = torch.stack([(g * u).sum() for g, u in zip(grads, self.layout.views(v[i]), strict=True)]).sum()
                if slope.requires_grad:
                    second = torch.autograd.grad(slope, parameters, materialize_grads=True)
                    copy_(self.layout.views(out[i]), second)
        return out.add_(v, alpha=self.weight_decay) if self.weight_decay else out

    def _vectorised(self, w: Tensor, batch: Batch, also: Also | None) -> tuple[Tensor, Tensor]:
        if batch.sizes is not None and not any(batch.sizes):
            return torch.zeros_like(w), w.new_zeros(len(w))
        module, _ = self.workspace(training=True)
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            with self.precision():
                seen = None if also is None else Entering(module)
                output, *features = self.many_pass(module, self.layout, w, batch.x, self._keys(batch), seen)
            loss = self.criterion.of_models(output.to(w.dtype), batch)
            if also is not None:
                loss = loss + also(features[0].to(w.dtype), output.to(w.dtype), batch, slice(0, len(w)))
            (g,) = slopes(loss.sum(), [w])
        return g, loss.detach()

    @property
    def many_pass(self) -> Callable[..., tuple[Tensor, ...]]:
        """The pass that computes many models on their own samples at once."""
        return partial(grouped_pass, blocks=self.blocks) if self.grouped else stacked_pass

    def _keys(self, batch: Batch) -> np.ndarray | None:
        """[s] uint64 keys of the model's draws in this step."""
        if not self.random:
            return None
        return batch.seed() if batch.seed else np.zeros(len(batch.x), dtype=np.uint64)

    def each_outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """Every model's outputs on its own samples in evaluation mode, computed together where `batched`.

        Parameters
        ----------
        w, x : Tensor
            [s, p] the clients' models, and [s, b, ...] their inputs.

        Returns
        -------
        Tensor
            [s, b, ...].
        """
        if self.stacked is not None:
            return self.stacked.outputs(w, x)
        if self.vectorised:
            return self._each_pass(w, x, None)[0]
        return torch.stack([self.outputs(mine, own) for mine, own in zip(w, x, strict=True)])

    def _each_pass(self, w: Tensor, x: Tensor, seen: Entering | None) -> list[Tensor]:
        """`stacked_pass` in evaluation mode, in parts that fit in memory."""
        module = self.workspace(training=False)[0]
        most = max(1, AT_ONCE // max(1, self.sample_bytes))
        rows, b = min(most, len(w)), max(1, most // len(w))
        with self.exactly():
            out = [
                [
                    self.many_pass(module, self.layout, w[i : i + rows], x[i : i + rows, k : k + b], None, seen)
                    for i in range(0, len(w), rows)
                ]
                for k in range(0, max(x.shape[1], 1), b)
            ]
        return [
            torch.cat([torch.cat([part[which] for part in some]) for some in out], 1) for which in range(len(out[0][0]))
        ]

    @torch.no_grad()
    def features(self, w: Tensor, x: Tensor) -> Tensor:
        """The features, which enter the last layer, of every model's own samples, in evaluation mode.

        Parameters
        ----------
        w, x : Tensor
            [s, p] the clients' models, and [s, b, ...] their inputs.

        Returns
        -------
        Tensor
            [s, b, d].
        """
        self.layout.head(w)
        x = x.to(w.dtype) if x.is_floating_point() or not self.integers else x
        if self.stacked is not None:
            return self.stacked.features(w, x)
        seen = Entering(self.workspace(training=False)[0])
        if self.vectorised:
            return self._each_pass(w, x, seen)[1]
        found: list[Tensor] = []
        for mine, own in zip(w, x, strict=True):
            parts: list[Tensor] = []
            for k in range(0, max(len(own), 1), self.block):
                with seen:
                    output = self.outputs(mine, own[k : k + self.block])
                if output.shape != seen.left().shape or not torch.equal(output, seen.left()):
                    raise ModelError(f"model: its outputs are not those of its last layer, {self.layout.end}")
                parts.append(seen.entered())
            found.append(torch.cat(parts))
        return torch.stack(found)

    def class_means(self, w: Tensor, data: Batches) -> Tensor:
        """The mean features of each class over every client's training samples, weighted as their losses are.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        data : Batches
            Their samples.

        Returns
        -------
        Tensor
            [s, C, d], 0 for a class that a client has no sample of (`data.counts`).
        """
        classes, batch = self.classes, self.cast(data.whole(), w)
        features = self.features(w, batch.x)
        share = members(batch.y, classes).to(w)
        if batch.weight is not None:
            share = share * batch.weight[..., None]
        return share.mT @ features / share.sum(1)[..., None].clamp(min=torch.finfo(w.dtype).tiny)

    def workspace(self, training: bool, second: bool = False) -> tuple[nn.Module, list[nn.Parameter]]:
        """This thread's own copy of the module and its trainable parameters.

        Parameters
        ----------
        training, second : bool
            Its mode, which frozen modules ignore; and True for another copy, to use while the first is in use.

        Returns
        -------
        tuple
            nn.Module, and a list of nn.Parameter.
        """
        name = "second" if second else "first"
        if not hasattr(self._local, name):
            module = copied(self.model, of=lambda q: q)
            setattr(self._local, name, (module, trainable(module), self._parts(module)))
        module, parameters, still = getattr(self._local, name)
        if training:
            _training(module, still)
        else:
            module.eval()
        return module, parameters

    def point(self, parameters: list[nn.Parameter], w: Tensor) -> list[Tensor]:
        """Let the parameters of a workspace be views of a vector.

        Parameters
        ----------
        parameters : list of nn.Parameter
            As `workspace` gives them.
        w : Tensor
            [p] the vector.

        Returns
        -------
        list of Tensor
            The views.
        """
        views = self.layout.views(w)
        for q, view in zip(parameters, views, strict=True):
            q.data = view
        return views

    def _drawing(self, key: int, count: int = 0) -> AbstractContextManager[object]:
        return Keyed(key, self.device, count) if self.random else nullcontext()

    def precision(self) -> AbstractContextManager[object]:
        """A context in which products and convolutions are in bfloat16 where `bf16` asks for it."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def exactly(self) -> AbstractContextManager[object]:
        """A context in which CUDA computes products and convolutions without TF32, its default for the latter."""
        return tf32(False) if self.device.type == "cuda" else nullcontext()

    def _parts(self, module: nn.Module) -> list[nn.Module]:
        return [module.get_submodule(name) for name in self._still]

    @torch.no_grad()
    def loss_of(self, w: Tensor, batch: Batch) -> Tensor:
        """Each client's mean loss on the real samples of its row, weighted as in training, without weight decay.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models, or [s, c, p] several for each.
        batch : Batch
            s rows.

        Returns
        -------
        Tensor
            [s], or [s, c].
        """
        batch, many = self.cast(batch, w), w.view(len(w), -1, self.p)
        if self.stacked is not None:
            return self.stacked.losses(many, batch).view(w.shape[:-1])
        out: list[Tensor] = []
        for i, models in enumerate(many):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            x, y, weight = batch.x[i, :b], batch.y[i, :b], _weight(batch, i, b)
            out += [self.criterion.mean(self.outputs(model, x), y, weight) for model in models]
        return torch.stack(out).view(w.shape[:-1])

    @torch.no_grad()
    def losses(self, w: Tensor, batch: Batch) -> Tensor:
        """The loss of every sample of a row at each of its client's models, without weight decay and sample weights.

        Parameters
        ----------
        w : Tensor
            [s, c, p] the clients' models.
        batch : Batch
            s rows.

        Returns
        -------
        Tensor
            [s, c, b]; of padding any number.
        """
        batch, each = self.cast(batch, w), self.criterion.each
        if callable(self.loss):
            mean = self.criterion.mean

            def each(output: Tensor, target: Tensor) -> Tensor:
                means = [mean(output[0, k : k + 1], target[0, k : k + 1]) for k in range(target.shape[1])]
                return torch.stack(means)[None]

        rows = zip(w, batch.x, batch.y, strict=True)
        return torch.stack([
            torch.cat([each(self.outputs(model, x)[None], y[None]) for model in models]) for models, x, y in rows
        ])  # fmt: skip

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The model's outputs in evaluation mode.

        Parameters
        ----------
        w, x : Tensor
            [p] its parameters, and [b, ...] inputs.

        Returns
        -------
        Tensor
            [b, ...].
        """
        if x.is_floating_point() or not self.integers:
            x = x.to(w.dtype)
        blocks = [x[k : k + self.block] for k in range(0, max(len(x), 1), self.block)]
        with torch.no_grad(), self.exactly(), self._drawing(0) if self.stacked is None else nullcontext():
            if self.stacked is not None:
                out = [self.stacked.outputs(w[None], block[None])[0] for block in blocks]
            else:
                module, parameters = self.workspace(training=False)
                self.point(parameters, w)
                out = [module(model_input(block)) for block in blocks]
        return out[0] if len(out) == 1 else torch.cat(out)

    def cast(self, batch: Batch, w: Tensor) -> Batch:
        """The batch in the precision of w; integers stay what they are where the model embeds them.

        Parameters
        ----------
        batch : Batch
            s rows.
        w : Tensor
            [s, p] the clients' models.

        Returns
        -------
        Batch
            The same samples.
        """
        x, y, weight = batch[:3]
        if x.dtype != w.dtype and (x.is_floating_point() or not self.integers):
            batch = batch._replace(x=x.to(w.dtype))
        if y.is_floating_point() and y.dtype != w.dtype:
            batch = batch._replace(y=y.to(w.dtype))
        if weight is not None and weight.dtype != w.dtype:
            batch = batch._replace(weight=weight.to(w.dtype))
        return batch


def output_of(task: Task, x: Tensor, training: bool) -> Tensor:
    """The outputs of a pass through the module at the start."""
    module, parameters = task.workspace(training)
    task.point(parameters, task.w0.clone())
    with torch.no_grad(), Keyed(0, task.device):
        return module(model_input(x))


def undecayed(
    task: Task, w: Tensor, batch: Batch, need_loss: bool = False, also: Also | None = None
) -> tuple[Tensor, Tensor | None]:
    """`Task.gradient` of the loss alone; at running statistics of BatchNorm, what the pass takes off them."""
    return task._undecayed(w, batch, need_loss, also)


def passed(
    task: Task, w: Tensor, batch: Batch, need_loss: bool = False, also: Also | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`Task.gradient`, and what the pass takes off running statistics of BatchNorm: [s, k], or None without any."""
    at = task.statistics
    g, loss = undecayed(task, w, task.cast(batch, w), need_loss, also)
    moves = None if at is None else g.index_select(-1, at)
    g, w = bare(task, g), bare(task, w)
    if task.weight_decay:
        g.add_(w, alpha=task.weight_decay)
        if loss is not None:
            loss = loss + task.weight_decay / 2 * w.square().sum(-1)
    return g, loss, moves


def bare(task: Task, v: Tensor) -> Tensor:
    """A direction [..., p] with 0 at running statistics of BatchNorm, which are no parameters."""
    return v if task.statistics is None else v.index_fill(-1, task.statistics, 0)


def statistics_(
    task: Task, w: Tensor, before: Tensor, moves: Tensor | None, live: Tensor | float | None = 1.0
) -> Tensor:
    """Set running statistics of BatchNorm in `w` to those `before` less `moves` of a pass, where `live` is not 0."""
    if moves is not None and (at := task.statistics) is not None:
        part = live.index_select(-1, at) if isinstance(live, Tensor) and live.shape[-1] == task.p else live
        w.index_copy_(-1, at, before.index_select(-1, at) - moves * (1.0 if part is None else part))
    return w


def _weight(batch: Batch, i: int, b: int) -> Tensor | None:
    """The weights of row i's samples, where they are not all the same."""
    return batch.weight[i, :b] if batch.weighted and batch.weight is not None else None


def _finite(t: Tensor) -> bool:
    return bool(t.isfinite().all())


def copied(module: nn.Module, of: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
    """A copy of a module that shares the memory of frozen parameters; `of` makes the copy's from the module's."""
    frozen = [q for q in module.parameters() if not q.requires_grad and type(q) is nn.Parameter]
    return copy.deepcopy(module, {id(q): of(q) for q in frozen})


def slopes(loss: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradients, 0 for parameters that the pass has not used."""
    if not loss.requires_grad:
        return tuple(torch.zeros_like(q) for q in parameters)
    return torch.autograd.grad(loss, parameters, create_graph=create_graph, materialize_grads=True)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [q for q in module.parameters() if q.requires_grad]


def _training(module: nn.Module, parts: list[nn.Module]) -> None:
    """Training mode, but for the frozen modules."""
    module.train()
    for part in parts:
        part.eval()


def model_input(x: Tensor) -> Tensor:
    """A copy, which the model may write to; of images channels-last, as the convolution weights are."""
    return x.clone(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)
