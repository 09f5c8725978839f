"""Margins of the logits, constant at a client, as a shift of the last layer's bias: CE(W f + b + s, y) has the
gradients of CE at the bias b + s. A class with margin -inf is masked: it gets no gradient."""

import torch
from torch import Tensor

from polyfed.compute.task import Task
from polyfed.compute.terms import IMPOSSIBLE


def shifted(task: Task, w: Tensor, margin: Tensor) -> Tensor:
    """A copy of `w: [s, p]` with margin [s, C] added to the bias."""
    w = w.clone()
    task.layout.head(w)[1].add_(margin.clamp(min=IMPOSSIBLE).to(w))
    return w


def undo(task: Task, w: Tensor, margin: Tensor, before: Tensor) -> Tensor:
    """Undo `shifted` in place after training; a masked class gets its bias `before`, to the bit."""
    b = task.layout.head(w)[1]
    b.copy_(torch.where(margin.isinf(), task.layout.head(before)[1], b - margin.clamp(min=IMPOSSIBLE).to(b)))
    return w


def decay(task: Task, w: Tensor, margin: Tensor) -> Tensor | None:
    """[s, p] weight decay of the margin, for local steps to subtract; None without weight decay."""
    if not task.net.weight_decay:
        return None
    return task.net.weight_decay * shifted(task, torch.zeros_like(w), margin)
