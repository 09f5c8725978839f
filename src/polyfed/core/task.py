"""Task: a model, a loss and its metrics, on flat vectors, for s clients at once.

Three ways to a gradient, the same numbers: closed form for chains of linear layers (`stacked.py`); on an accelerator
one vectorised forward pass with stacked weights and one backward pass of the summed losses (clients do not interact);
otherwise the module itself, one client after another, its parameters pointed at views of the vector.
"""

import copy
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from math import isfinite, prod
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed.core.batches import Batch, alike, padded
from polyfed.core.errors import ConfigError, DataError, ModelError, closest
from polyfed.core.layout import Layout
from polyfed.core.metric import Metric, Seen
from polyfed.core.optimizers import Optimizer
from polyfed.core.scores import DEFAULT, fitting
from polyfed.core.split import Split, restored, trained
from polyfed.core.stacked import LOSSES, Drift, Stacked, chain
from polyfed.core.trial import EMBEDDINGS, Keyed, check_structure, reason, still, train_twice
from polyfed.core.typed import add_, copy_, named_modules

Loss = str | Callable[[Tensor, Tensor], Tensor]
BLOCK = 8192  # samples per forward pass when evaluating
TRIED = 64  # samples that metrics are tried on
FEW = 32  # classes up to which their losses are worked out for many samples at once


class Task:
    """A model and a loss as functions of the flat parameter vector.

    Random layers (dropout of any kind) draw from a key per client and step. Frozen parts that the model has in
    evaluation mode stay in it. Integer inputs stay integers for a model with an embedding and become floats for others.

    Parameters
    ----------
    model : nn.Module
        Its trainable parameters define the vector, their present values the start `w0: [p]`.
    loss : str or callable
        "cross-entropy", "mse", or (output [b, ...], target [b, ...]) -> mean loss, a scalar. For float targets [b],
        outputs [b, 1] are reshaped to [b] first, and the reverse.
    weight_decay : float
        Adds weight_decay/2 * ||w||^2 to every client's loss.
    optimizer : Optimizer
        What takes the local steps of `local_sgd`.
    device : torch.device, str or None
        Where to compute; None keeps the model's.
    dtype : torch.dtype or None
        Precision; None keeps the model's.
    bf16 : bool
        Products and convolutions of local training in bfloat16, by torch's autocast; weights, losses, gradients and
        updates, and every evaluation, stay in float32.
    metrics : sequence of Metric or None
        What clients' models are judged by, the first leads; None: accuracy for classes, RMSE for numbers.
    class_weights : sequence of float or None
        One number per class, which multiplies the loss of its samples; the mean over a batch divides by the number of
        its samples. For "cross-entropy" only.

    Raises
    ------
    ModelError
        The model has no trainable parameter, parameters that have no values yet, or a BatchNorm that is not frozen (its
        statistics mix samples and are no part of the vector). `check` finds the rest by trying.
    ConfigError
        The loss is unknown, or bf16 is asked for with other weights than float32.
    """

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
        metrics: Sequence[Metric] | None = None,
        class_weights: Sequence[float] | None = None,
    ):
        if class_weights is not None and loss != "cross-entropy":
            raise ConfigError("class-weights: found weights with another loss than cross-entropy; weigh in the loss")
        if isinstance(loss, str) and loss not in LOSSES:
            raise ConfigError(
                f"unknown loss {loss!r}{closest(loss, LOSSES)}; known: {', '.join(LOSSES)}, or a callable"
            )
        self._still = still(model)
        try:
            self.model = copy.deepcopy(model)
            check_structure(self.model, lambda m: _training(m, self._parts(m)))
            self.model = self.model.to(device=device, dtype=dtype)
        except (RuntimeError, TypeError, ValueError, AttributeError) as e:
            raise ModelError(f"{type(model).__name__} cannot be copied: {reason(e)}") from None
        self.loss, self.weight_decay, self.optimizer = loss, weight_decay, optimizer
        self._asked = tuple(metrics or ())
        self.scores, self._settled = self._asked or DEFAULT, False  # `check` keeps what fits
        self.layout = Layout(self.model)
        self.p = self.layout.p
        self.w0 = self.layout.flatten(self.model)
        broken = [
            e.name for e, v in zip(self.layout.entries, self.layout.views(self.w0), strict=True) if not _finite(v)
        ]
        if broken:
            raise ModelError(f"parameter {broken[0]!r} of {type(model).__name__} holds NaN or infinity before training")
        layers = chain(self.model)
        known = isinstance(loss, str)
        weights = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)
        self._class_weights = None if weights is None else weights.to(self.w0.device)
        if bf16 and self.w0.dtype != torch.float32:
            found = str(self.w0.dtype).removeprefix("torch.")
            raise ConfigError(f"precision: found bf16 with weights in {found}, expected float32")
        self.bf16 = bf16
        layers = layers if not bf16 else None  # autocast is of modules
        self.stacked = Stacked(layers, self.layout, loss, self._class_weights) if known and layers else None
        self.vectorised = known and self.stacked is None and self.w0.device.type != "cpu"
        # until `check` has tried: any model may draw, [b, 1] is reshaped, and one output is a logit
        self.random, self._reshape, self._threshold = True, True, 0.0
        self._embeds = self.integers = any(isinstance(m, EMBEDDINGS) for m in self.model.modules())
        self._local, self._above = threading.local(), dict[int, Task]()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.w0.device

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the start, and of what is trained from it."""
        return self.w0.dtype

    @property
    def batched(self) -> bool:
        """Whether several clients in one call are computed together, and not one after another."""
        return self.stacked is not None or self.vectorised

    @cached_property
    def fixed(self) -> dict[str, Tensor]:
        """What the model uses besides the vector, by name: frozen parameters and persistent buffers."""
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
            h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()

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

        Raises
        ------
        DataError
            This precision does not hold the numbers.
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

    # the upper layers by themselves

    def cut(self, only: Tensor) -> int | None:
        """Below which of the model's modules nothing is trained.

        Parameters
        ----------
        only : Tensor
            [..., p], not 0 for what is trained.

        Returns
        -------
        int or None
            How many lie below. None where they have no parameters, the model is not a `Sequential`, or it may draw
            random numbers.
        """
        if self._pieces is None or (self.stacked is None and self.random):
            return None
        trained = [bool(v.any()) for v in only.split_with_sizes(self.layout.sizes, -1)]
        for k, (mine, before) in enumerate(self._pieces):
            if any(trained[e] for e in mine):
                return k if before else None
        return None

    @cached_property
    def _pieces(self) -> list[tuple[list[int], bool]] | None:
        """Each module of a sequence: its parameters, by place, and whether the modules below have some, all others.

        None for a model that is no sequence.
        """
        if type(self.model) is not nn.Sequential:
            return None
        place = {id(q): k for k, q in enumerate(_trainable(self.model))}
        mine = [[place[id(q)] for q in _trainable(module)] for module in _sequence(self.model)]
        first = [min(itertools.chain(*mine[k:]), default=0) for k in range(len(mine))]
        return [(m, max(itertools.chain(*mine[:k]), default=first[k]) < first[k]) for k, m in enumerate(mine)]

    def above(self, cut: int) -> "Task":
        """The same loss and optimiser for the upper modules, whose parameters end the vector.

        Parameters
        ----------
        cut : int
            How many modules lie below, as `cut` gives it.

        Returns
        -------
        Task
            Of the modules from `cut` on.
        """
        if cut not in self._above:
            model, weights = nn.Sequential(*_sequence(self.model)[cut:]), self._class_weights
            task = Task(
                model,
                self.loss,
                weight_decay=self.weight_decay,
                bf16=self.bf16,
                class_weights=None if weights is None else [float(c) for c in weights],
            )
            task.random, task._reshape = self.random, self._reshape
            self._above[cut] = task
        self._above[cut].optimizer = self.optimizer  # which a rehearsal replaces
        return self._above[cut]

    def through(self, w: Tensor, clients: list[Tensor], cut: int) -> Tensor:
        """What the modules below `cut` make of samples in training.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        clients : list of Tensor
            [b, ...] inputs of each.
        cut : int
            As `cut` gives it.

        Returns
        -------
        Tensor
            [N, ...], all of the first client's, then the second's, ...
        """
        module, parameters = self._workspace()
        _training(module, self._local.still)
        below, out = nn.Sequential(*_sequence(module)[:cut]), list[Tensor]()
        for row, x in zip(w, clients, strict=True):
            for q, view in zip(parameters, self.layout.views(row), strict=True):
                q.data = view
            x = x.to(w.dtype) if x.is_floating_point() or not self.integers else x
            with torch.no_grad(), self._precision():
                out.append(below(_input(x)).to(w.dtype))
        return torch.cat(out)

    # gradients

    def gradient(self, w: Tensor, batch: Batch, need_loss: bool = True) -> tuple[Tensor, Tensor | None]:
        """Each client's gradient of the mean loss on its own samples.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        batch : Batch
            s rows.
        need_loss : bool
            False may skip the loss.

        Returns
        -------
        tuple of Tensor
            [s, p] gradients, and [s] losses or None.
        """
        g, loss = self._undecayed(w, self._cast(batch, w), need_loss)
        if self.weight_decay:
            g.add_(w, alpha=self.weight_decay)
            if loss is not None:
                loss = loss + self.weight_decay / 2 * w.square().sum(-1)
        return g, loss

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
        if self.stacked is None:
            return None
        gradient = self.stacked.gradient_on(w, self._cast(batch, w))
        decay = self.weight_decay
        return (lambda: gradient().add_(w, alpha=decay)) if decay else gradient

    def _undecayed(self, w: Tensor, batch: Batch, need_loss: bool) -> tuple[Tensor, Tensor | None]:
        """`gradient` without weight decay."""
        if self.stacked is not None:
            return self.stacked.gradient(w, batch, need_loss)
        if self.vectorised and len(w) > 1:
            return self._vectorised(w, batch)
        return self._one_by_one(w, batch)

    def drift(
        self,
        w: Tensor,
        lr: float | Tensor,
        pull: tuple[float | Tensor, Tensor] | None = None,
        shift: Tensor | None = None,
    ) -> Drift:
        """What a pull, a shift and weight decay make of w in a step, besides the gradient of the loss.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        lr : float or Tensor
            Step size; a tensor is [s, 1].
        pull, shift : tuple, Tensor or None
            As in `local_sgd`.

        Returns
        -------
        Drift
            For `descend_`.
        """
        strength, anchor = pull if pull is not None else (0.0, None)
        rate = lr * (strength + self.weight_decay)
        keep: float | Tensor = 1.0
        add: Tensor | None = None
        if isinstance(rate, Tensor) or rate:
            # a number stays one: to read it back from an accelerator would be to wait for it
            each = (1 - torch.as_tensor(rate, dtype=torch.float64)).to(w.dtype)
            if anchor is not None:
                # by what is not kept as it was rounded: a model at its anchor stays there
                share = strength / (strength + self.weight_decay) if self.weight_decay else 1.0
                add = anchor * ((1 - each.double()) * share).to(w.dtype)
            keep = each.expand(len(w), -1) if each.dim() else float(each.numpy())
        if shift is not None and (add is None or isinstance(lr, Tensor)):
            add = -lr * shift if add is None else add - lr * shift
        elif shift is not None and add is not None:
            add = torch.sub(add, shift, alpha=float(lr))
        return Drift(keep, add)

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
            What the steps do besides.

        Returns
        -------
        callable or None
            () -> None. None where steps gain nothing by it.
        """
        if self.stacked is None or batch.live is not None:
            return None
        return self.stacked.descent_on(w, self._cast(batch, w), lr, drift)

    def descend_(self, w: Tensor, batch: Batch, lr: float | Tensor, drift: Drift | None = None) -> None:
        """One gradient step in place: w <- keep * w + add - lr * gradient of the loss, without weight decay.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        batch : Batch
            s rows.
        lr : float or Tensor
            Step size; a tensor is [s, 1].
        drift : Drift
            What the step does besides, as `drift` makes it; None: weight decay.
        """
        drift = drift or self.drift(w, lr)
        if (descend := self.descent_on(w, batch, lr, drift)) is not None:
            descend()
            return
        batch = self._cast(batch, w)
        if not self.batched:
            empty = [] if batch.sizes is None else [i for i, b in enumerate(batch.sizes) if b == 0]
            for i in empty:
                if batch.live is None or batch.live[i]:
                    drift.row(i)(w[i])
            for i, views, parameters, loss in self._losses(w, batch):
                if batch.live is None or batch.live[i]:
                    g = torch.autograd.grad(loss, parameters)
                    drift.row(i)(w[i])
                    add_(views, g, alpha=-float(lr[i] if isinstance(lr, Tensor) and lr.dim() else lr))
            return
        g = self._undecayed(w, batch, need_loss=False)[0]
        new = drift(w.clone()).sub_(g.mul_(lr))
        w.copy_(new if batch.live is None else torch.where(batch.live > 0, new, w))

    def _one_by_one(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        g, losses = torch.zeros_like(w, memory_format=torch.contiguous_format), w.new_zeros(len(w))
        for i, _, parameters, loss in self._losses(w, batch):
            copy_(self.layout.views(g[i]), torch.autograd.grad(loss, parameters))
            losses[i] = loss.detach()
        return g, losses

    def _losses(self, w: Tensor, batch: Batch) -> Iterator[tuple[int, list[Tensor], list[nn.Parameter], Tensor]]:
        """Client by client through the module: (row, views of w[row], the parameters that see them, loss to derive).

        Rows without samples are left out.
        """
        module, parameters = self._workspace()
        _training(module, self._local.still)
        for i in range(len(w)):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            if b == 0:
                continue
            views = self.layout.views(w[i])
            for q, view in zip(parameters, views, strict=True):
                q.data = view
            with torch.enable_grad(), self._drawing(batch.seed(i) if self.random and batch.seed else 0):
                with self._precision():
                    output = module(_input(batch.x[i, :b]))
                loss = self._mean_loss(output.to(w.dtype), batch.y[i, :b], _weight(batch, i, b))
            yield i, views, parameters, loss

    def hvp(self, w: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """The Hessian of each client's mean loss times a vector, by two backward passes, one client after another.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        v : Tensor
            [s, p] the vectors.
        batch : Batch
            s rows.

        Returns
        -------
        Tensor
            [s, p].
        """
        out = torch.zeros_like(w, memory_format=torch.contiguous_format)
        for i, _, parameters, loss in self._losses(w, self._cast(batch, w)):
            with torch.enable_grad():
                grads = torch.autograd.grad(loss, parameters, create_graph=True)
                slope = torch.stack([(g * u).sum() for g, u in zip(grads, self.layout.views(v[i]), strict=True)]).sum()
                if slope.requires_grad:
                    second = torch.autograd.grad(slope, parameters, materialize_grads=True)
                    copy_(self.layout.views(out[i]), second)
        return out.add_(v, alpha=self.weight_decay) if self.weight_decay else out

    def _vectorised(self, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        module, _ = self._workspace()
        _training(module, self._local.still)
        w = w.detach().requires_grad_()
        with torch.enable_grad():
            with self._precision():
                output = self._stacked_outputs(module, w, batch.x)
            per_sample = self.per_sample_loss(output.to(w.dtype), batch.y)
            loss = per_sample.mean(1) if batch.weight is None else (per_sample * batch.weight).sum(1)
            (g,) = torch.autograd.grad(loss.sum(), w)
        return g, loss.detach()

    def _stacked_outputs(self, module: nn.Module, w: Tensor, x: Tensor) -> Tensor:
        def forward(views: list[Tensor], x: Tensor) -> Tensor:
            named = {e.name: v for e, v in zip(self.layout.entries, views, strict=True)}
            return torch.func.functional_call(module, named, (x,))

        return torch.func.vmap(forward)(self.layout.views(w), x)

    def _each_outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """Every model's outputs on its own samples in evaluation mode: [s, p], [s, b, ...] -> [s, b, ...]."""
        if self.stacked is not None:
            return self.stacked.outputs(w, x)
        return self._stacked_outputs(self._workspace()[0].eval(), w, x)

    def _workspace(self) -> tuple[nn.Module, list[nn.Parameter]]:
        """This thread's own copy of the module and its trainable parameters."""
        if not hasattr(self._local, "module"):
            module = copy.deepcopy(self.model)
            self._local.module, self._local.still = module, self._parts(module)
            self._local.parameters = _trainable(module)
        return self._local.module, self._local.parameters

    def _drawing(self, key: int) -> AbstractContextManager[object]:
        return Keyed(key, self.device) if self.random else nullcontext()

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def _parts(self, module: nn.Module) -> list[nn.Module]:
        return [module.get_submodule(name) for name in self._still]

    # losses and metrics

    def _mean_loss(self, output: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
        """The mean over samples; with weight: [b] the weighted sum."""
        if weight is not None:
            if not callable(self.loss):
                return (self.per_sample_loss(output.reshape(1, len(output), -1), target[None])[0] * weight).sum()
            each = [self._mean_loss(output[k : k + 1], target[k : k + 1]) for k in range(len(target))]
            return (torch.stack(each) * weight).sum()
        if callable(self.loss):
            return self.loss(self._aligned(output, target), target).mean()
        if self.loss == "cross-entropy":
            if self._class_weights is not None:
                return self.per_sample_loss(output[None], target[None]).mean()
            return F.cross_entropy(output, target)
        return F.mse_loss(output.reshape(target.shape), target)

    def _aligned(self, output: Tensor, target: Tensor) -> Tensor:
        """Outputs [b, 1] as float targets [b], or the reverse: a loss would broadcast them to [b, b]."""
        a, b = output.shape, target.shape
        if self._reshape and target.is_floating_point() and (a == (*b, 1) or b == (*a, 1)):
            return output.reshape(b)
        return output

    def per_sample_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of every sample; for named losses only.

        Parameters
        ----------
        output : Tensor
            [s, b, out].
        target : Tensor
            [s, b, ...].

        Returns
        -------
        Tensor
            [s, b].
        """
        if self.loss == "cross-entropy":
            if output.shape[2] <= FEW or output.stride(2) != 1:  # along samples, not along the few classes of each
                loss = F.cross_entropy(output.transpose(1, 2), target, reduction="none")
            else:
                loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
            return loss if self._class_weights is None else loss * self._class_weights.to(loss.dtype)[target]
        gap = output.flatten(2) - target.reshape(output.flatten(2).shape)
        return gap.square().mean(2)

    @torch.no_grad()
    def loss_of(self, w: Tensor, batch: Batch) -> Tensor:
        """Each client's mean loss on the real samples of its row, weighted as in training, without weight decay.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        batch : Batch
            s rows.

        Returns
        -------
        Tensor
            [s].
        """
        batch = self._cast(batch, w)
        out: list[Tensor] = []
        for i in range(len(w)):
            b = batch.x.shape[1] if batch.sizes is None else batch.sizes[i]
            out.append(self._mean_loss(self.outputs(w[i], batch.x[i, :b]), batch.y[i, :b], _weight(batch, i, b)))
        return torch.stack(out)

    @torch.no_grad()
    def metrics(self, w: Tensor, split: Split, clients: np.ndarray) -> dict[str, np.ndarray]:
        """The mean loss and every metric that fits, of each client's model on its own samples.

        Parameters
        ----------
        w : Tensor
            [s, p] the clients' models.
        split : Split
            The samples.
        clients : array
            [s] positions in `split`.

        Returns
        -------
        dict of array
            [s] each; NaN for a client without samples, or where a metric has no value.
        """
        totals: dict[str, Tensor] = {}
        kept: list[tuple[Tensor, Seen]] | None = [] if any(m.per == "client" for m in self.scores) else None
        for rows, values in self._scored(w, split, clients, kept):
            for name, v in values.items():
                if name not in totals:
                    totals[name] = torch.zeros(len(w), dtype=torch.float64, device=w.device)
                totals[name].index_add_(0, rows, v.double())
        counts = split.counts[clients]
        with np.errstate(invalid="ignore", divide="ignore"):
            means = {k: np.where(counts > 0, t.cpu().numpy() / counts, np.nan) for k, t in totals.items()}
        means |= {m.name: np.sqrt(means[m.name]) for m in self.scores if m.root and m.name in means}
        return means | (self._whole(kept, counts) if kept else {})

    def _whole(self, kept: list[tuple[Tensor, Seen]], counts: np.ndarray) -> dict[str, np.ndarray]:
        """The metrics that need all samples of a client, in double precision: {name: [s]}."""
        rows, output, target = (
            torch.cat(parts).cpu() for parts in zip(*((r, s.output, s.target) for r, s in kept), strict=True)
        )
        order = rows.argsort(stable=True)
        output, target, cuts = output[order].double(), target[order], np.concatenate([[0], np.cumsum(counts)])
        seen = [Seen(output[a:b], target[a:b], self._threshold) for a, b in itertools.pairwise(map(int, cuts))]
        return {m.name: np.array([m.of(s) for s in seen]) for m in self.scores if m.per == "client"}

    def _scored(
        self, w: Tensor, split: Split, clients: np.ndarray, kept: list[tuple[Tensor, Seen]] | None
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """What `metrics` adds up: (rows of w, values to add to those rows), together covering every sample once.

        One model for all clients (rows that are views of one vector) takes a few large passes over all samples; models
        that can be computed together go in chunks of similar clients; any other goes client by client.
        kept: receives (the row of every sample, what was seen) where a metric needs all samples of a client
        """
        counts = split.counts[clients]

        def seen(rows: Tensor, output: Tensor, target: Tensor, unit: Tensor | None) -> Seen:
            found = Seen(restored(output, unit), target, self._threshold)
            if kept is not None:
                kept.append((rows, found))
            return found

        if callable(self.loss):
            for i, c in enumerate(clients):
                x, y = split.client(int(c))
                output, unit = self.outputs(w[i], x), split.units([int(c)])
                loss = self._mean_loss(output, trained(y, unit)) * len(x) if len(x) else output.sum() * 0
                found = seen(torch.full((len(y),), i, device=w.device), output, y, unit)
                sums = {"loss": loss} | {k: v.sum() for k, v in self._score(found).items()}
                yield torch.tensor([i], device=w.device), {k: v[None] for k, v in sums.items()}
        elif len(w) > 1 and w.stride(0) == 0:
            owner = np.repeat(np.arange(len(clients)), counts)
            x, y = split.of_all(clients)
            for k in range(0, max(len(owner), 1), BLOCK):
                some, who = slice(k, k + BLOCK), owner[k : k + BLOCK]
                output = self._block_outputs(w[0], x(some))
                rows, unit = torch.as_tensor(who, device=w.device), split.units(clients[who])
                yield rows, self._per_sample(seen(rows, output, y(some), unit), unit)
        elif self.batched:
            for chunk in alike(counts, max(1, BLOCK // max(1, int(counts.max(initial=1)))), np.argsort(-counts)):
                batch = self._cast(padded(replace(split, unit=None, weight=None), clients[chunk]), w)
                rows, unit = torch.as_tensor(chunk, device=w.device), split.units(clients[chunk])
                output = self._each_outputs(w[rows], batch.x)
                each = None if unit is None else unit[:, None].expand(*batch.y.shape[:2], 2).flatten(0, 1)
                found = Seen(restored(output.flatten(0, 1), each), batch.y.flatten(0, 1), self._threshold)
                values = self._per_sample(found, each)
                real = 1.0 if batch.weight is None else batch.weight > 0
                if kept is not None:
                    some = torch.ones_like(output[..., 0]) > 0 if batch.weight is None else batch.weight > 0
                    at = rows[:, None].expand(some.shape)[some]
                    seen(at, output[some], batch.y[some], None if each is None else each[some.flatten()])
                yield rows, {k: (v.view(batch.y.shape[:2]) * real).sum(1) for k, v in values.items()}
        else:
            for i, c in enumerate(clients):
                for xb, yb in self._blocks(*split.client(int(c))):
                    rows, unit = torch.full((len(yb),), i, device=w.device), split.units([int(c)])
                    yield rows, self._per_sample(seen(rows, self._block_outputs(w[i], xb), yb, unit), unit)

    def per_sample(self, w: Tensor, x: Tensor, y: Tensor, unit: Tensor | None = None) -> dict[str, Tensor]:
        """What every sample adds to the metrics: their mean is the metric; see `terms` for those that are no means.

        Parameters
        ----------
        w : Tensor
            [p] one model.
        x, y : Tensor
            [b, ...] samples and their targets.
        unit : Tensor or None
            [1, 2] shift and scale of the targets, as a `Split` has them.

        Returns
        -------
        dict of Tensor
            [b] each; without the loss where that is a callable, which gives a mean.
        """
        return self.terms(restored(self.outputs(w, x), unit), y, unit)

    def terms(self, output: Tensor, target: Tensor, unit: Tensor | None = None) -> dict[str, Tensor]:
        """`per_sample` of outputs, whatever gave them.

        Parameters
        ----------
        output, target : Tensor
            [b, ...] outputs, in the targets' own units, and the targets of the same samples.
        unit : Tensor or None
            [1, 2] shift and scale of the targets, as a `Split` has them.

        Returns
        -------
        dict of Tensor
            As `per_sample`.
        """
        found = Seen(output, target, self._threshold)
        values = self._score(found) if callable(self.loss) else self._per_sample(found, unit)
        exact = Seen(output.cpu().double(), target.cpu(), self._threshold)
        return values | {m.name: torch.as_tensor(m.terms(exact)) for m in self.scores if m.terms and m.fits(exact)}

    @torch.no_grad()
    def judged(
        self, outputs: Sequence[Tensor], targets: Sequence[Tensor], units: Sequence[Tensor | None]
    ) -> dict[str, np.ndarray]:
        """`metrics` of outputs, whatever gave them, in double precision.

        Parameters
        ----------
        outputs, targets : sequence of Tensor
            Of every client, [b, ...] each, on the CPU, in the targets' own units.
        units : sequence of Tensor or None
            [1, 2] each: shift and scale of the targets, as a `Split` has them.

        Returns
        -------
        dict of array
            As `metrics`.
        """
        pairs = zip(outputs, targets, strict=True)
        exact = [(o.double(), y.double() if y.is_floating_point() else y) for o, y in pairs]
        seen = [Seen(o, y, self._threshold) for o, y in exact]
        losses = [
            float(self._mean_loss(trained(o, unit), trained(y, unit))) if len(y) else np.nan
            for (o, y), unit in zip(exact, units, strict=True)
        ]
        found = {m.name: np.array([m.of(s) for s in seen]) for m in self.scores if m.compute}
        return {"loss": np.array(losses), **found}

    def _per_sample(self, seen: Seen, unit: Tensor | None) -> dict[str, Tensor]:
        """[b] loss and score of every sample; the loss is that of the targets as they are trained on."""
        loss = self.per_sample_loss(seen.output[None], seen.target[None])[0]
        loss = loss if unit is None else (loss.double() / unit[..., 1].square()).to(loss.dtype)
        return {"loss": loss, **self._score(seen)}

    def _score(self, seen: Seen) -> dict[str, Tensor]:
        """{metric: [b]}: what each sample adds to the metrics that are means over samples, where they fit."""
        mine = ((m.name, m.compute) for m in self.scores if m.per == "sample" and (self._settled or m.fits(seen)))
        return {name: compute(seen) for name, compute in mine if compute}

    @staticmethod
    def _blocks(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for k in range(0, max(len(x), 1), BLOCK):
            yield x[k : k + BLOCK], y[k : k + BLOCK]

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The model's outputs in evaluation mode.

        Parameters
        ----------
        w : Tensor
            [p] its parameters.
        x : Tensor
            [b, ...] inputs.

        Returns
        -------
        Tensor
            [b, ...].
        """
        return torch.cat([self._block_outputs(w, xb) for xb, _ in self._blocks(x, x)])

    def _block_outputs(self, w: Tensor, x: Tensor) -> Tensor:
        if x.is_floating_point() or not self.integers:
            x = x.to(w.dtype)
        with torch.no_grad(), self._drawing(0) if self.stacked is None else nullcontext():
            if self.stacked is not None:
                return self.stacked.outputs(w[None], x[None])[0]
            module, parameters = self._workspace()
            module.eval()
            for q, view in zip(parameters, self.layout.views(w), strict=True):
                q.data = view
            return module(_input(x))

    def _cast(self, batch: Batch, w: Tensor) -> Batch:
        """The batch in the precision of w; integers stay what they are where the model embeds them."""
        x, y, weight = batch[:3]
        if x.dtype != w.dtype and (x.is_floating_point() or not self.integers):
            batch = batch._replace(x=x.to(w.dtype))
        if y.is_floating_point() and y.dtype != w.dtype:
            batch = batch._replace(y=y.to(w.dtype))
        if weight is not None and weight.dtype != w.dtype:
            batch = batch._replace(weight=weight.to(w.dtype))
        return batch

    # what fits

    def check(self, split: Split, classes: int | None, who: str = "the model") -> None:
        """Try the model and its loss on two samples.

        Parameters
        ----------
        split : Split
            Where the samples are from.
        classes : int or None
            How many there are; None for a regression.
        who : str
            What an error calls the model.

        Raises
        ------
        ModelError
            In one line, what cannot be trained: an output that is not a tensor or does not fit the targets; a loss that
            is not a number, or does not depend on every trainable parameter; and whatever would make a run depend on
            the order in which clients are run, by layer: buffers that a training pass changes, state outside of
            parameters, random numbers that are not torch's.
        """
        x, y = (t.to(self.device) for t in _few(split))
        y = y.to(self.dtype) if y.is_floating_point() else y
        output = self._outputs_of(x, split, who)
        shape = list(output.shape[1:])
        self._check_targets(shape, y, classes or (0 if y.is_floating_point() else int(split.y.max()) + 1), who)
        if callable(self.loss) and len(shape) == 1 and shape[0] > 1 and not y.is_floating_point():
            self._threshold = 0.5 if _probable(output) else 0.0
        some = output, y
        if self._asked:  # a function or scorer is tried on more than two samples
            at = torch.linspace(0, len(split.x) - 1, min(len(split.x), TRIED)).long()
            some = self._block_outputs(self.w0.clone(), split.x[at].to(self.device)), split.y[at]
        self.scores = fitting(self._asked, Seen(some[0].cpu(), some[1].cpu(), self._threshold), classes or 0)
        self._settled = True
        if self.stacked is not None:
            return
        batch = self._cast(Batch(x[None], y[None]), self.w0)
        module, parameters = self._workspace()
        views = self.layout.views(self.w0.clone())
        for q, view in zip(parameters, views, strict=True):
            q.data = view

        def step() -> tuple[Tensor, Tensor]:
            _training(module, self._local.still)
            with torch.enable_grad():
                output = module(_input(batch.x[0]))
                return output, self._tried_loss(output, batch.y[0])

        def evaluate() -> Tensor:
            module.eval()
            with torch.no_grad():
                return module(_input(batch.x[0]))

        try:
            self.random = train_twice(module, parameters, step, evaluate, who)
        except ModelError:
            raise
        except Exception as e:
            raise ModelError(f"{who} cannot be trained on inputs of shape {list(x.shape[1:])}: {reason(e)}") from None
        if split.weight is not None and callable(self.loss):
            self._check_weighted(split)
        if self.vectorised:
            try:
                self._vectorised(
                    self.w0.expand(2, -1), self._cast(Batch(x.expand(2, *x.shape), y.expand(2, *y.shape)), self.w0)
                )
            except Exception:  # random numbers, or an operation that has no rule for many models at once
                self.vectorised = False

    def _outputs_of(self, x: Tensor, split: Split, who: str) -> Tensor:
        """The outputs in evaluation mode; settles whether the model takes integers."""
        errors: list[Exception] = []
        for integers in (False,) if x.is_floating_point() else (True,) if self._embeds else (False, True):
            self.integers = integers
            try:
                output = self._block_outputs(self.w0.clone(), x)
                break
            except Exception as e:
                errors.append(e)
        else:
            hint = ""
            if self._embeds and x.is_floating_point():
                hint = "; it has an embedding, which takes integers, and the inputs are floats"
            elif self._embeds:
                hint = f"; the inputs are integers from {int(split.x.min())} to {int(split.x.max())}"
            raise ModelError(f"{who} does not accept inputs of shape {list(x.shape[1:])}: {reason(errors[0])}{hint}")
        if not _is_tensor(output):
            raise ModelError(
                f"{who} returns a {type(output).__name__}, expected one tensor [samples, ...]; "
                "wrap it in a module that returns the tensor to be trained"
            )
        if not output.is_floating_point() or output.dim() == 0 or len(output) != len(x):
            raise ModelError(
                f"{who} returns {output.dtype} of shape {list(output.shape)} for {len(x)} samples, "
                f"expected floats of shape [{len(x)}, ...]"
            )
        return output

    def _check_targets(self, shape: list[int], y: Tensor, classes: int, who: str) -> None:
        if self.loss == "cross-entropy":
            if y.is_floating_point():
                raise ModelError(
                    "cross-entropy needs integer class labels, the targets are floats; use loss='mse' for numbers, or "
                    "make the federation with task='classification' if they are labels"
                )
            if len(shape) != 1 or shape[0] < classes:
                raise ModelError(
                    f"{who} returns output of shape {shape} per sample, expected [{classes}] for {classes} classes"
                )
        elif self.loss == "mse":
            if not y.is_floating_point():
                raise ModelError(
                    "mse needs float targets, the labels are integers; use loss='cross-entropy' for labels, or make "
                    "the federation with task='regression' if they are numbers"
                )
            if len(y) * prod(shape) != y.numel():
                labels = "; if they are labels, make the federation with task='classification'" if y.dim() == 1 else ""
                raise ModelError(
                    f"{who} returns output of shape {shape} per sample, expected {list(y.shape[1:])} like "
                    f"the targets{labels}"
                )
        elif not y.is_floating_point() and prod(shape) == 1:
            self._threshold = self._indifferent(shape) if classes == 2 else None

    def _tried_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """`_mean_loss` with errors of a callable reported as its own; settles whether it wants its outputs reshaped."""
        if not callable(self.loss):
            return self._mean_loss(output, target)
        errors: list[Exception] = []
        for reshape in (True, False):  # a loss that takes the column out itself fails on reshaped outputs
            self._reshape = reshape
            try:
                loss = self.loss(self._aligned(output, target), target)
            except Exception as e:
                errors.append(e)
                continue
            if not _is_tensor(loss) or not loss.is_floating_point():
                kind = loss.dtype if _is_tensor(loss) else type(loss).__name__
                raise ModelError(f"loss: returned a {kind}, expected a float tensor for (output, target)")
            return loss.mean()
        shapes = f"outputs {list(output.shape)} and targets {list(target.shape)} ({target.dtype})"
        raise ModelError(f"loss: fails on {shapes}: {reason(errors[0])}")

    def _check_weighted(self, split: Split) -> None:
        """Raise ConfigError if the loss of some samples is not the mean over their losses, one by one."""
        at = torch.linspace(0, len(split.x) - 1, min(len(split.x), TRIED)).long()
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        try:
            some = self.place(Split(split.x[at], split.y[at], np.array([0, len(at)])))
            output = self.outputs(self.w0, some.x)
            mean = self._mean_loss(output, some.y)
            each = self._mean_loss(output, some.y, torch.full_like(mean, 1 / len(at)).expand(len(at)))
            fits = not getattr(self.loss, "whole", False) and bool(torch.isclose(mean, each, rtol=1e-3))
        except Exception:  # it does not take one sample
            fits = False
        if not fits:
            raise ConfigError(f"weights: the loss {name} is no mean over samples, which weights of samples need")

    def _indifferent(self, shape: list[int]) -> float | None:
        """The output at which a loss on labels 0 and 1 prefers neither: 1/2 for probabilities, else 0 for logits."""

        def preference(z: float) -> float:
            output, label = torch.full((1, *shape), z, dtype=self.dtype), torch.zeros(1, dtype=torch.int64)
            try:
                return float(self._mean_loss(output, label + 1) - self._mean_loss(output, label))
            except Exception:
                return float("nan")

        return 0.5 if abs(preference(0.5)) < 1e-6 else 0.0 if isfinite(preference(-1.0)) else None


def _few(split: Split) -> tuple[Tensor, Tensor]:
    """Two samples to try a model on; of integer inputs those with the smallest and the largest number."""
    if split.x.is_floating_point():
        return split.x[:2], split.y[:2]
    size = split.x[0].numel()
    at = torch.stack([split.x.argmin(), split.x.argmax()]).div(size, rounding_mode="floor")
    return split.x[at], split.y[at]


def _probable(output: Tensor) -> bool:
    """Whether outputs [b, C] are probabilities of C classes."""
    return bool((output >= 0).all()) and bool(((output.sum(1) - 1).abs() < 1e-4).all())


def _weight(batch: Batch, i: int, b: int) -> Tensor | None:
    """The weights of row i's samples, where they are not all the same."""
    return batch.weight[i, :b] if batch.weighted and batch.weight is not None else None


def _is_tensor(given: object) -> bool:
    """A model and a loss of the user's promise a tensor; not all keep it."""
    return isinstance(given, Tensor)


def _finite(t: Tensor) -> bool:
    return bool(t.isfinite().all())


def _sequence(model: nn.Module) -> list[nn.Module]:
    """The modules of a `Sequential`, one that stands in two places twice."""
    return [*cast("nn.Sequential", model)]


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [q for q in module.parameters() if q.requires_grad]


def _training(module: nn.Module, parts: list[nn.Module]) -> None:
    """Training mode, but for the frozen parts that stay in evaluation mode."""
    module.train()
    for part in parts:
        part.eval()


def _input(x: Tensor) -> Tensor:
    """Images go in channels-last, as the convolution weights do."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
