"""Terms that a method adds to its clients' losses: of the features, which enter the last layer, and of the outputs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyfed.base.errors import ModelError
from polyfed.compute.batches import Batch
from polyfed.compute.layout import last

IMPOSSIBLE = -1e30  # a logit in place of -inf: its share is 0 exactly beside any other, and nothing is NaN

# (features [m, b, d], outputs [m, b, C], batch, rows) -> [m] a term of the mean losses of the m clients `rows`;
# `batch.mean` takes the mean over a client's samples
Also = Callable[[Tensor, Tensor, Batch, slice], Tensor]


class Distillation(NamedTuple):
    """Distillation from outputs t into outputs z: strength T^2 mean KL(softmax(t / T), softmax(z / T)).

    Attributes
    ----------
    strength, temperature : float
        Factor of the term, and T, which the outputs are divided by.
    true : bool
        False leaves out the output of each sample's own class (not-true distillation, FedNTD).
    """

    strength: float
    temperature: float = 1.0
    true: bool = True


class Toward(NamedTuple):
    """A pull of each sample's features to the vector of its class: mean_j strength_y ||f_j - M_y||^2."""

    strength: float | Tensor  # a tensor: one for every class [s, C]
    prototypes: Tensor  # [s, C, d]

    def __call__(self, features: Tensor, outputs: Tensor, batch: Batch, rows: slice) -> Tensor:
        M = self.prototypes[rows]
        gap = (features - M.gather(1, batch.y[..., None].expand(-1, -1, M.shape[2]))).square().sum(2)
        if isinstance(self.strength, Tensor):
            return batch.mean(self.strength[rows].to(gap).gather(1, batch.y) * gap)
        return self.strength * batch.mean(gap)


class Taught(NamedTuple):
    """Distillation from frozen models."""

    outputs: Callable[[Tensor, Tensor], Tensor]  # (w [m, p], x [m, b, ...]) -> [m, b, C]
    w: Tensor  # [s, p]
    form: Distillation

    def __call__(self, features: Tensor, outputs: Tensor, batch: Batch, rows: slice) -> Tensor:
        teacher = log_shares(self.outputs(self.w[rows], batch.x), batch.y, self.form)
        student = log_shares(outputs, batch.y, self.form)
        each = (teacher.exp() * (teacher - student)).sum(2)
        return self.form.strength * self.form.temperature**2 * batch.mean(each)


def log_shares(z: Tensor, y: Tensor, form: Distillation) -> Tensor:
    """Log-probabilities [..., C] of outputs [..., C]; a class that is left out has `IMPOSSIBLE`."""
    z = z / form.temperature
    if not form.true:
        z = z.scatter(-1, y[..., None], IMPOSSIBLE)
    return torch.log_softmax(z, -1)


def members(y: Tensor, classes: int) -> Tensor:
    """[..., C] True at each sample's class. y: [...]; nothing is read back from the device, as one_hot would"""
    return y[..., None] == torch.arange(classes, device=y.device)


def together(terms: list[Also]) -> Also | None:
    """The sum of some terms; None for none."""
    if not terms:
        return None

    def total(features: Tensor, outputs: Tensor, batch: Batch, rows: slice) -> Tensor:
        return torch.stack([term(features, outputs, batch, rows) for term in terms]).sum(0)

    return terms[0] if len(terms) == 1 else total


class Entering:
    """Watches the inputs of a module's last layer in a forward pass, and its outputs."""

    def __init__(self, module: nn.Module):
        self._layer = last(module)
        self._seen: tuple[Tensor, Tensor] | None = None

    def __enter__(self) -> "Entering":
        def keep(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._seen = inputs[0], output

        self._hook, self._seen = self._layer.register_forward_hook(keep), None
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def entered(self) -> Tensor:
        """The features of the latest pass."""
        return self._both()[0]

    def left(self) -> Tensor:
        """The layer's outputs in the latest pass."""
        return self._both()[1]

    def _both(self) -> tuple[Tensor, Tensor]:
        if self._seen is None:
            raise ModelError(f"model: its last layer, {self._layer}, takes no part in its outputs")
        return self._seen
