"""Local steps that leave the lowest layers as they are: what comes out of these is computed once, and only what lies
above is trained, on that."""

from typing import NamedTuple

from torch import Tensor

from polyfed.core.batches import Batches
from polyfed.core.task import Task


class Upper(NamedTuple):
    """The layers above the frozen ones: their task, where they begin in the vector, and what goes into them."""

    task: Task
    start: int
    data: Batches


def upper(task: Task, w: Tensor, data: Batches, only: Tensor) -> Upper | None:
    """What is left to train on these clients' samples of models `w: [s, p]`.

    None where the lowest layers are trained too, the model is no sequence of modules, or their outputs would be needed
    less than once: inputs are augmented, or fewer samples seen than there are.

    only: [p] or [s, p], not 0 for what is trained
    """
    cut = task.cut(only)
    if cut is None or data.work.augment is not None or data.seen < data.split.counts[data.clients].sum():
        return None
    x = task.through(w, [data.split.client(int(c))[0] for c in data.clients], cut)
    above = task.above(cut)
    return Upper(above, task.p - above.p, data.on(x))
