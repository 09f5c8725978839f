"""Check that a model, its loss and its metrics fit the samples, by trying them on a few before anything is run."""

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from math import isfinite, prod

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, ModelError
from polyfed.base.typed import row_norms, seeded
from polyfed.compute.batches import Batch
from polyfed.compute.losses import column
from polyfed.compute.net import Net, model_input, output_of
from polyfed.compute.recompute import saved_bytes
from polyfed.compute.split import Split
from polyfed.compute.task import Task
from polyfed.compute.trial import Functions, alone, reason, train_twice
from polyfed.metrics.metric import Predictions
from polyfed.metrics.scores import fitting

ROUGH = 0.1  # share of a gradient that rounding, in bfloat16 too, stays below, and other draws exceed
TRIED = 64  # samples that metrics are tried on
MEAN = 2  # see `_pairing`
FEW = 16  # samples that a loss is tried on, together and one by one
log = logging.getLogger("polyfed")


def check(task: Task, split: Split, classes: int | None, who: str = "the model") -> None:
    """Try the model and its loss on two samples; `who` is the model's name in errors. classes: None for a regression

    Raises ModelError for an output that is not a tensor or does not fit the targets, for a loss that is not a number or
    does not depend on the model, and for what would make a run depend on the order of clients: buffers that a training
    pass changes, state outside of parameters, random numbers that are not torch's.
    """
    x, y = (t.to(task.device) for t in _few(split))
    y = y.to(task.dtype) if y.is_floating_point() else y
    output = _outputs_of(task, x, split, who)
    shape = list(output.shape[1:])
    _check_targets(task, shape, y, classes or (0 if y.is_floating_point() else int(split.y.max()) + 1), who)
    if callable(task.loss) and len(shape) == 1 and shape[0] > 1 and not y.is_floating_point():
        task.threshold = 0.5 if _probable(output) else 0.0
    some = output, y
    if task.requested:  # a function or scorer is tried on more than two samples
        at = _spread(split)
        some = task.outputs(task.w0.clone(), split.x[at].to(task.device)), split.y[at]
    task.scores = fitting(task.requested, Predictions(some[0].cpu(), some[1].cpu(), task.threshold), classes or 0)
    if callable(task.loss) and not task.settled:  # newcomers' samples come to a task that is in use
        _settle_shape(task, split)
    task.settled = True
    if task.net.stacked is not None:
        return
    batch = task.net.cast(Batch(x[None], y[None]), task.w0)
    inputs, targets = batch.x[0], batch.y[0]
    task.net.random, task.net.still = _draws(task, inputs, targets, who)
    for training in (False, True):
        alone(partial(output_of, task.net, training=training), inputs, who, training)
    if split.weight is not None and callable(task.loss):
        _check_weighted(task, split)
    task.net.sample_bytes = _sample_bytes(task.net, inputs)
    if task.net.vectorised:
        _settle_many(task, x, y, split.weight is not None, who)


def _draws(task: Task, x: Tensor, y: Tensor, who: str) -> tuple[bool, Functions]:
    """Whether the model draws random numbers, and `Keyed.still`; ModelError where a run could not repeat."""
    module, parameters = task.net.workspace(training=True)
    task.net.point(parameters, task.w0.clone())

    def step() -> tuple[Tensor, Tensor]:
        task.net.workspace(training=True)
        with torch.enable_grad():
            output = module(model_input(x))
            return output, _tried_loss(task, output, y)

    def evaluate() -> Tensor:
        task.net.workspace(training=False)
        with torch.no_grad():
            return module(model_input(x))

    try:
        return train_twice(module, parameters, step, evaluate, who)
    except ModelError:
        raise
    except Exception as e:
        raise ModelError(f"{who} cannot be trained on inputs of shape {list(x.shape[1:])}: {reason(e)}") from None


def _sample_bytes(net: Net, x: Tensor) -> int:
    """Bytes that one more sample keeps for the backward pass of one model."""

    def kept(x: Tensor) -> int:
        module, parameters = net.workspace(training=True)
        with seeded(0), torch.enable_grad(), net.precision():
            return saved_bytes(lambda: module(model_input(x)), parameters, [*map(module.get_submodule, net.blocks)])

    return max(0, kept(torch.cat([x, x])) - kept(x)) // len(x)


def _settle_many(task: Task, x: Tensor, y: Tensor, weighted: bool, who: str) -> None:
    """Settle how many models are computed at once: by vmap or grouped; else one by one, with a warning."""
    why = "it mixes the samples of a batch"
    shared = task.device.type != "cpu" and not all(q.requires_grad for q in task.model.parameters())
    ways = (True, False) if shared else (False, True)  # one pass of the shared part leaves attention to fused kernels
    if task.net.blocks:  # which cannot be computed again inside vmap
        ways = (True,)
    for task.net.grouped in ways:
        task.net.vectorised = True
        try:
            _try_many(task, x, y, weighted)
        except Exception as e:  # an operation that has no rule for many models at once, or random numbers but dropout's
            task.net.vectorised, why = False, reason(e)
        if task.net.vectorised:
            return
    log.warning("%s is trained one client after another: %s", who, why)


def _try_many(task: Task, x: Tensor, y: Tensor, weighted: bool) -> None:
    """Settle whether many models are computed at once, and the memory that a sample then takes."""
    w, sizes = task.w0.expand(2, -1).clone(), [len(x), 1]
    real = np.arange(len(x)) < np.array(sizes)[:, None]
    weight = torch.as_tensor(real / real.sum(1, keepdims=True), device=w.device)
    keys = np.arange(2, dtype=np.uint64)
    pair = torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)])
    batch = Batch(*pair, weight, sizes, seed=lambda: keys, weighted=weighted)
    # one model has both samples, the other the second and padding: a model that mixes a batch's samples has other
    # gradients then than one by one
    many = task.gradient(w, batch)[0]
    task.net.vectorised = False
    one = task.gradient(w, batch)[0]
    task.net.vectorised = bool((row_norms(many - one) <= ROUGH * row_norms(one)).all())
    module, inputs = task.net.workspace(training=True)[0], task.net.cast(batch, w).x

    def kept(b: int) -> int:
        start, some = w[:1].clone().requires_grad_(), inputs[:1, :b].clone()
        drawn = task.net.drawn(batch._replace(x=some, seed=lambda: keys[:1]))
        with torch.enable_grad(), task.net.precision():
            made = partial(task.net.many_pass, module, task.layout, start, some, drawn, None)
            return saved_bytes(lambda: made()[0], (start, some), [*map(module.get_submodule, task.net.blocks)])

    task.net.sample_bytes = kept(len(x)) - (kept(len(x) - 1) if len(x) > 1 else 0)


def _outputs_of(task: Task, x: Tensor, split: Split, who: str) -> Tensor:
    """The outputs in evaluation mode; settles whether the model takes integers."""
    errors: list[Exception] = []
    for integers in (False,) if x.is_floating_point() else (True,) if task.net.embeds else (False, True):
        task.net.integers = integers
        try:
            output = task.outputs(task.w0.clone(), x)
            break
        except Exception as e:
            errors.append(e)
    else:
        hint = ""
        if task.net.embeds and x.is_floating_point():
            hint = "; it has an embedding, which takes integers, and the inputs are floats"
        elif task.net.embeds:
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


def _check_targets(task: Task, shape: list[int], y: Tensor, classes: int, who: str) -> None:
    if task.loss == "cross-entropy":
        if y.dim() == 2 and not y.is_floating_point():
            raise ModelError("cross-entropy needs a label for each sample, those here are of tokens; use loss='tokens'")
        if y.is_floating_point():
            raise ModelError(
                "cross-entropy needs integer class labels, the targets are floats; use loss='mse' for numbers, or "
                "make the federation with task='classification' if they are labels"
            )
        if len(shape) != 1 or shape[0] < classes:
            raise ModelError(
                f"{who} returns output of shape {shape} per sample, expected [{classes}] for {classes} classes"
            )
    elif task.loss == "mse":
        if not y.is_floating_point():
            if y.dim() == 2:
                raise ModelError("mse needs float targets, those here are labels of tokens; use loss='tokens'")
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
        task.threshold = _indifferent(task, shape) if classes == 2 else None


def _tried_loss(task: Task, output: Tensor, target: Tensor) -> Tensor:
    """`Criterion.mean` with errors of a callable reported as its own."""
    if not callable(task.loss):
        return task.net.criterion.mean(output, target)
    try:
        loss = task.loss(task.net.criterion.aligned(output.clone(), target), target.clone())
    except Exception as e:
        shapes = f"outputs {list(output.shape)} and targets {list(target.shape)} ({target.dtype})"
        raise ModelError(f"loss: fails on {shapes}: {reason(e)}") from None
    if not _is_tensor(loss) or not loss.is_floating_point():
        kind = loss.dtype if _is_tensor(loss) else type(loss).__name__
        raise ModelError(f"loss: returned a {kind}, expected a float tensor for (output, target)")
    return loss.mean()


def _settle_shape(task: Task, split: Split) -> None:
    """Settle whether a callable loss gets outputs [b, 1] in the shape of targets [b], or as they are.

    In one of the two a loss may pair every output with every target. It gets the shape in which it is a mean, or a sum,
    over samples; if neither, the one in which the order of targets matters; else the targets'.
    """
    at = torch.cat([_spread(split, FEW), *_extremes(split.y)])
    x, y = split.x[at].to(task.device), split.y[at].to(task.device)
    y = y.to(task.dtype) if y.is_floating_point() else y
    output = task.outputs(task.w0.clone(), x)
    if not column(output, y) or bool((y == y[:1]).all()):
        return
    # the model's outputs may all be the same, and all below the targets; mixtures of other samples' targets are neither
    mixed = (0.7 * y.roll(1, 0) + 0.3 * y.roll(2, 0)).view(output.shape).to(output.dtype)
    pairings: dict[bool, tuple[int, list[Tensor]]] = {}
    for reshape in (True, False) if y.is_floating_point() else (True,):  # outputs of labels are never reshaped
        task.net.criterion.reshape = reshape
        with seeded(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairings[reshape] = _pairing(task, (output, mixed), y)
    task.net.criterion.reshape = max(pairings, key=lambda reshape: (pairings[reshape][0], reshape))
    (best, slopes), other = pairings[task.net.criterion.reshape], pairings.get(not task.net.criterion.reshape, (-1, []))
    name = getattr(task.loss, "__name__", type(task.loss).__name__)
    one, two = (f"[{', '.join(['b', *map(str, t.shape[1:])])}]" for t in (output, y))
    if best == 0:
        log.warning(
            "loss %s: pairs every output %s with every target %s; shuffled targets do not change it", name, one, two
        )
    elif best == other[0] < MEAN and not all(map(_near, slopes, other[1])):
        log.warning(
            "loss %s: no mean over samples, and for outputs %s not what it is for %s, which it gets", name, one, two
        )


def _pairing(task: Task, tried: Sequence[Tensor], y: Tensor) -> tuple[int, list[Tensor]]:
    """(`MEAN` for a mean or sum over samples, 1 where the order of targets matters, else 0, -1 if it fails; slopes)."""
    mean, ordered, gradients = True, False, list[Tensor]()
    for output in tried:
        try:
            # training uses slopes; they also tell where values are the same
            gradients.append(both := _slopes(task, output, y))
        except Exception:
            return -1, []
        if not both.isfinite().all():
            continue
        try:
            each = torch.cat([_slopes(task, output[k : k + 1], y[k : k + 1]) for k in range(len(y))])
            mean = mean and (_near(both * len(y), each) or _near(both, each))
            ordered = ordered or not _near(both, _slopes(task, output, y.roll(-1, 0)))
        except Exception:  # it does not take one sample, or not every order of them
            mean = False
    return MEAN if mean else int(ordered), gradients


def _slopes(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """Derivative of the loss by every output."""
    with torch.enable_grad():
        output = output.clone().requires_grad_()
        loss = task.net.criterion.mean(output, y)
        if not loss.requires_grad:  # `train_twice` says so
            return torch.zeros_like(output)
        return torch.autograd.grad(loss, output, materialize_grads=True)[0]


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-4 * torch.maximum(a.abs().max(), b.abs().max()))


def _check_weighted(task: Task, split: Split) -> None:
    """Raise ConfigError if the loss of some samples is not the mean over their losses, one by one."""
    at = _spread(split)
    name = getattr(task.loss, "__name__", type(task.loss).__name__)
    try:
        some = task.place(Split(split.x[at], split.y[at], np.array([0, len(at)])))
        output = task.outputs(task.w0, some.x)
        mean = task.net.criterion.mean(output, some.y)
        each = task.net.criterion.mean(output, some.y, torch.full_like(mean, 1 / len(at)).expand(len(at)))
        fits = not getattr(task.loss, "whole", False) and bool(torch.isclose(mean, each, rtol=1e-3))
    except Exception:  # it does not take one sample
        fits = False
    if not fits:
        raise ConfigError(f"weights: the loss {name} is no mean over samples, which weights of samples need")


def _indifferent(task: Task, shape: list[int]) -> float | None:
    """The output at which a loss on labels 0 and 1 prefers neither: 1/2 for probabilities, else 0 for logits."""

    def preference(z: float) -> float:
        output, label = torch.full((1, *shape), z, dtype=task.dtype), torch.zeros(1, dtype=torch.int64)
        try:
            return float(task.net.criterion.mean(output, label + 1) - task.net.criterion.mean(output, label))
        except Exception:
            return float("nan")

    return 0.5 if abs(preference(0.5)) < 1e-6 else 0.0 if isfinite(preference(-1.0)) else None


def _spread(split: Split, most: int = TRIED) -> Tensor:
    """Positions of at most `most` samples, from first to last."""
    return torch.linspace(0, len(split.x) - 1, min(len(split.x), most)).long()


def _extremes(t: Tensor) -> tuple[Tensor, Tensor]:
    """Positions [1] of the samples with the smallest and the largest number of [N, ...]."""
    numbers = t.flatten(1).shape[1] if t.dim() > 1 else 1
    return t.argmin().div(numbers, rounding_mode="floor")[None], t.argmax().div(numbers, rounding_mode="floor")[None]


def _few(split: Split) -> tuple[Tensor, Tensor]:
    """Two samples to try a model on; of integer inputs those with the smallest and the largest number."""
    if split.x.is_floating_point():
        return split.x[:2], split.y[:2]
    at = torch.cat(_extremes(split.x))
    return split.x[at], split.y[at]


def _probable(output: Tensor) -> bool:
    """True where outputs [b, C] are probabilities of C classes."""
    return bool((output >= 0).all()) and bool(((output.sum(1) - 1).abs() < 1e-4).all())


def _is_tensor(given: object) -> bool:
    """True for a tensor, which models and losses of users promise, and do not always return."""
    return isinstance(given, Tensor)
