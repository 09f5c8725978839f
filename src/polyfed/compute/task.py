"""Task: a model, a loss and its metrics for s clients at once, as methods see them. The model and how its passes go are
a `Net`; gradients, local steps and outputs are functions of that (`gradients.py`, `steps.py`, `outputs.py`)."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import DataError, ModelError
from polyfed.base.typed import plain
from polyfed.compute import gradients, outputs
from polyfed.compute.batches import Batch, Batches
from polyfed.compute.losses import Loss, tokens
from polyfed.compute.net import Net
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.recompute import blocks
from polyfed.compute.split import Split
from polyfed.compute.stacked import Drift
from polyfed.compute.steps import descend_
from polyfed.compute.terms import Also, members
from polyfed.metrics.metric import Metric
from polyfed.metrics.scores import DEFAULT


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
        self.net = net = Net(
            model, loss, weight_decay, optimizer, device, dtype, bf16, tf32, class_weights, recompute
        )  # fmt: skip
        self.model, self.layout, self.p, self.w0 = net.model, net.layout, net.p, net.w0
        self.loss, self.device, self.dtype = net.loss, net.device, net.dtype
        self.requested = tuple(metrics or ())
        self.scores, self.settled = self.requested or DEFAULT, False  # `check` keeps those that fit
        self.threshold: float | None = 0.0  # until `check` has tried: one output is a logit

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
        if not self.net.integers and not split.x.is_floating_point():
            split = replace(split, x=split.x.to(self.dtype))
        for t, before, kind in zip((split.x, split.y), wide, ("inputs", "targets"), strict=True):
            if t.dtype != before and not t.isfinite().all():
                most = torch.finfo(t.dtype).max
                raise DataError(f"found {kind} beyond {most:.2g}, the largest {str(t.dtype)[6:]}; scale them")
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
        return gradients.gradient(self.net, w, batch, need_loss, also)

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
            The rest of a step, `compute.steps.affine(...).summed()`; None: weight decay.
        steps : int
            How many, all on this batch.
        """
        descend_(self.net, w, batch, lr, drift, steps)

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
        return outputs.loss_of(self.net, w, batch)

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
        return outputs.losses(self.net, w, batch)

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
        return outputs.outputs(self.net, w, x)

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
        return outputs.features(self.net, w, x)

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
        classes, batch = self.classes, self.net.cast(data.whole(), w)
        features = self.features(w, batch.x)
        share = members(batch.y, classes).to(w)
        if batch.weight is not None:
            share = share * batch.weight[..., None]
        return share.mT @ features / share.sum(1)[..., None].clamp(min=torch.finfo(w.dtype).tiny)


def findings(task: Task) -> dict[str, Any]:
    """What `check` has found, for `adopt`."""
    net, reshape = task.net, task.net.criterion.reshape
    return {"random": net.random, "integers": net.integers, "threshold": task.threshold, "reshape": reshape}


def adopt(task: Task, findings: Mapping[str, Any]) -> Task:
    """Take over the findings of `check` of the same model and loss."""
    task.net.random, task.net.integers, task.threshold = (findings[k] for k in ("random", "integers", "threshold"))
    task.net.criterion.reshape = findings["reshape"]
    return task


def having(task: Task, **changed: Any) -> Task:
    """A copy that differs in these attributes of its net, such as `guard`."""
    task = copy.copy(task)
    task.net = copy.copy(task.net)
    vars(task.net).update(changed)
    return task


def part_of(task: Task, module: nn.Module) -> Task:
    """The same loss and optimiser for a module made of the model's own modules, with what `check` has found."""
    net = task.net
    part = Task(
        module, task.loss, weight_decay=net.weight_decay, optimizer=net.optimizer, bf16=net.bf16, tf32=net.tf32,
        class_weights=plain(net.criterion.class_weights),
    )  # fmt: skip
    part.requested, part.scores, part.settled = task.requested, task.scores, task.settled
    part.net.grouped, part.net.blocks = net.grouped, blocks(part.model) if net.blocks else []
    part.net.vectorised, part.net.sample_bytes = net.vectorised and part.net.stacked is None, net.sample_bytes
    return adopt(part, findings(task))
