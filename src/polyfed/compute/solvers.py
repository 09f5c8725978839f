"""Local solvers for s clients at once, and the proximal operators that several methods share."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from polyfed.base.arguments import answer, checked
from polyfed.base.errors import ConfigError
from polyfed.base.typed import row_norms
from polyfed.compute import compiled
from polyfed.compute.batches import Batches
from polyfed.compute.frozen import upper
from polyfed.compute.gradients import bare, gradient, gradient_on, passed, statistics_
from polyfed.compute.net import Net
from polyfed.compute.optimizers import Advance
from polyfed.compute.outputs import each_outputs
from polyfed.compute.stacked import Drift, first
from polyfed.compute.steps import affine, descend_, descent_on
from polyfed.compute.task import Task
from polyfed.compute.terms import Also, Distillation, Taught, Toward, together

Prox = Callable[[Tensor], Tensor] | None


@checked
def local_sgd(
    task: Task,
    w: Tensor,
    data: Batches,
    lr: float | Tensor,
    *,
    pull: tuple[float | Tensor, Tensor] | None = None,
    shift: Tensor | None = None,
    minus: Tensor | None = None,
    correct: Callable[[Tensor, Tensor], Tensor] | None = None,
    prox: Callable[[Tensor], Tensor] | None = None,
    only: Tensor | None = None,
    toward: tuple[float | Tensor, Tensor] | None = None,
    teacher: tuple[Tensor, Distillation] | None = None,
    also: Also | None = None,
) -> Tensor:
    """Mini-batch SGD, each client its own number of steps.

        d = g + strength (w - anchor) + shift - minus
        w <- prox(w - lr d)

    A pull, `shift` and `minus` cost next to nothing in a step; `correct` is a function that is called at every step,
    for directions of another form. The run's local optimiser, where it is another one, takes the steps in direction d.

    Parameters
    ----------
    task : Task
        The model and loss.
    w : Tensor
        [s, p] start; it is not changed.
    data : Batches
        The batches to go through.
    lr : float or Tensor
        Step size; a tensor is [s, 1].
    pull : tuple or None
        (strength, anchor): a pull towards anchor [s, p], the gradient of strength/2 ||w - anchor||^2 (FedProx:
        ``pull=(self.mu, x)``). The strength is a number, or a tensor that broadcasts to [s, p].
    shift, minus : Tensor or None
        [s, p], added to and subtracted from every gradient (SCAFFOLD: ``shift=c, minus=ci``).
    correct : callable or None
        (w, g) -> [s, p], in place of the mean-loss gradients g.
    prox : callable or None
        w -> [s, p], applied after every step; it may change w.
    only : Tensor or None
        [p] or [s, p], 1 where trained and 0 elsewhere; None: everything. Outputs of the lowest layers, where they are
        not trained, are computed once.
    toward : tuple or None
        (strength, M): adds strength_y ||f - M_y||^2 to the loss of a sample of class y, with f its features, which
        enter the last layer. M is [s, C, d]; the strength is a number, or one for every class [s, C].
    teacher : tuple or None
        (models [s, p], Distillation): adds the divergence from these frozen models' outputs.
    also : callable or None
        (features [m, b, d], outputs [m, b, C], batch, rows) -> [m]: a term of the mean losses of the clients `rows`,
        differentiated by autograd; ``batch.mean`` is the mean over a client's samples.

    Returns
    -------
    Tensor
        [s, p] the models after the last step.

    Raises
    ------
    ConfigError
        The method takes proximal steps and the run's optimiser is not plain SGD, or the method adds to the loss and the
        run is private by row.
    """
    net = task.net
    correct = correct and partial(answer, "correct", correct, takes=Tensor)
    prox = prox and partial(answer, "prox", prox, takes=Tensor)
    also = also and partial(answer, "also", also, takes=Tensor)
    if prox is not None and not net.optimizer.plain:
        raise ConfigError(f"optimizer: found {net.optimizer.name!r}, expected plain sgd for a method's proximal steps")
    terms = (toward and Toward(*toward), teacher and Taught(partial(each_outputs, net), *teacher), also)
    added = together([term for term in terms if term is not None])
    plain = correct is None and prox is None and net.guard is None and added is None
    if only is not None and plain and (above := upper(task, w, data, only)) is not None:
        rest = slice(above.start, None)
        pulled = None if pull is None else (_at(pull[0], rest), pull[1][..., rest])
        plus, less = (None if v is None else v[..., rest] for v in (shift, minus))
        w = _copied(w)
        w[:, rest] = local_sgd(
            above.task, w[:, rest], above.data, lr, pull=pulled, shift=plus, minus=less, only=only[..., rest]
        )
        return w
    kept = only
    if net.statistics is not None:  # no direction, and no decay, is theirs
        kept = (torch.ones_like(w[0]) if only is None else only).index_fill(-1, net.statistics, 0)
    elif correct is None and net.optimizer.plain:
        drift = affine(net, w, lr, pull, shift, minus)
        fusible = prox is None and also is None
        if fusible and (trained := compiled.train(net, w, data, lr, drift, only, None, toward, teacher)) is not None:
            return trained
        if only is None and added is None:
            return _descended(net, _copied(w), data, lr, drift.summed(), prox)
    w = _copied(w)
    advance = None if net.optimizer.plain else net.optimizer.start(w, kept)
    direction = _direction(pull, shift, minus, correct, kept)
    if added is None and (batch := data.same) is not None and (slope := gradient_on(net, w, batch)) is not None:
        return _repeated(w, data, lr, lambda: direction(w, slope()), advance, prox)
    g = torch.zeros_like(w)
    for batch in data:
        m = batch.rows
        grad, _, moves = passed(net, w[:m], batch, also=added)
        if m == len(w):
            g = grad
        else:
            g[:m] = grad
        step = direction(w, g)[:m]
        if advance is None and prox is None and batch.live is None and not isinstance(lr, Tensor) and kept is only:
            w[:m].sub_(step, alpha=lr)
            continue
        new = w[:m] - first(lr, m) * step if advance is None else advance(w[:m], step, first(lr, m))
        if prox is not None:
            full = w.clone()
            full[:m] = new
            new = prox(full)[:m]
        new = statistics_(net, new, w[:m], moves, None if only is None else first(only, m))
        w[:m] = new if batch.live is None else torch.where(batch.live > 0, new, w[:m])
    return w


def _repeated(
    w: Tensor, data: Batches, lr: float | Tensor, step: Callable[[], Tensor], advance: Advance | None, prox: Prox
) -> Tensor:
    """w after all steps in the directions that `step` finds from it, on samples that stay the same."""
    for _ in data.repeat():
        if advance is not None:
            w.copy_(advance(w, step(), lr))
        elif isinstance(lr, Tensor):
            w.sub_(lr * step())
        else:
            w.sub_(step(), alpha=lr)
        if prox is not None:
            w.copy_(prox(w))
    return w


def _copied(w: Tensor) -> Tensor:
    return w.clone(memory_format=torch.contiguous_format)


def _descended(net: Net, w: Tensor, data: Batches, lr: float | Tensor, drift: Drift, prox: Prox) -> Tensor:
    """w after all steps w <- prox(keep w + add - lr gradient), most of them in place."""
    if (
        (batch := data.same) is not None
        and (prox is None or not batch.native)  # the kernel sets nothing up for many steps
        and (descend := descent_on(net, w, batch, lr, drift)) is not None
    ):
        for _ in data.repeat():
            descend()
            if prox is not None:
                w.copy_(prox(w))
        return w
    for batch in data:
        m = batch.rows
        descend_(net, w[:m], batch, first(lr, m), drift.first(m))
        if prox is not None and m == len(w) and batch.live is None:
            w = prox(w)
        elif prox is not None:
            new = prox(w.clone())[:m]
            w[:m] = new if batch.live is None else torch.where(batch.live > 0, new, w[:m])
    return w


def sgd_with_curvature(
    task: Task, w: Tensor, data: Batches, lr: float | Tensor, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`local_sgd` that also measures the smoothness it meets: ([s, p], [s] largest ||g - g'|| / ||w - w'||).

    Gradients are compared at successive iterates on the same samples. With full batches they are at hand, but for a
    client of one step; with mini-batches each step costs a second gradient.
    """
    net = task.net
    if not data.full_batch:
        smoothness = w.new_zeros(len(w), dtype=torch.float64)
        drift = affine(net, w, lr, shift=shift)
        if (trained := compiled.train(net, w, data, lr, drift, curvature=smoothness)) is not None:
            return trained, smoothness.to(w.dtype)
    largest = w.new_zeros(len(w))
    last: list[tuple[Tensor, Tensor]] = []

    def ratio(move: Tensor, w1: Tensor, g1: Tensor, g0: Tensor) -> None:
        m = len(w1)
        # shorter moves are skipped: 0 says that nothing was measured
        usable = move > 1e-12 * row_norms(w1).clamp(min=1)
        largest[:m] = torch.where(usable, torch.maximum(largest[:m], row_norms(g1 - g0) / move), largest[:m])

    def watch(w1: Tensor, g1: Tensor) -> Tensor:
        if last:
            w0, g0 = last.pop()
            ratio(row_norms(bare(net, w1 - w0)), w1, g1, g0)
        last.append((w1.clone(), g1.clone()))
        return g1

    if data.full_batch:
        end = local_sgd(task, w, data, lr, shift=shift, correct=watch)
        if (once := data.steps == 1).any():
            before = largest.clone()
            g1 = gradient(net, end, data.whole(), need_loss=False)[0]
            ratio(row_norms(bare(net, end - w)), end, g1, last.pop()[1])
            largest = torch.where(once, largest, before)
        return end, largest
    w = _copied(w)
    for batch in data:
        m, rate = batch.rows, torch.as_tensor(first(lr, batch.rows), dtype=w.dtype, device=w.device)
        g, _, moves = passed(net, w[:m], batch)
        d = g if shift is None else bare(net, g + shift[:m])
        if batch.live is not None:
            rate = rate * batch.live  # who has finished stays where it is, which is no move
        new = statistics_(net, torch.addcmul(w[:m], rate, d, value=-1), w[:m], moves, batch.live)
        ratio(rate.abs().expand(m, 1)[:, 0] * row_norms(d), new, gradient(net, new, batch, need_loss=False)[0], g)
        if m == len(w):
            w = new
        else:
            w[:m] = new
    return w, largest


def _direction(
    pull: tuple[float | Tensor, Tensor] | None,
    shift: Tensor | None,
    minus: Tensor | None,
    correct: Callable[[Tensor, Tensor], Tensor] | None,
    only: Tensor | None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """(w, g) -> d as in `local_sgd`, 0 where nothing is trained."""

    def direction(w: Tensor, g: Tensor) -> Tensor:
        d = g if correct is None else correct(w, g)
        if pull is not None:
            d = d + pull[0] * (w - pull[1])
        if shift is not None:
            d = d + shift
        if minus is not None:
            d = d - minus
        return d if only is None else d * only

    return direction


def _at(value: float | Tensor, where: slice) -> float | Tensor:
    """The part of a number, or of a tensor that broadcasts to [s, p], at these parameters."""
    return value[..., where] if isinstance(value, Tensor) and value.dim() and value.shape[-1] > 1 else value


def soft_threshold(w: Tensor, amount: float) -> Tensor:
    """Proximal operator of amount * ||w||_1, element by element."""
    near = w.clamp(-amount, amount)
    return torch.sub(w, near, out=near)
