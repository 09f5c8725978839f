"""Models whose forward takes inputs by name, such as input_ids and attention_mask. A federation has them side by
side in one array, which is parted here again."""

from math import prod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ModelError

if TYPE_CHECKING:
    from polyfed.data.federation import Federation


class Named(nn.Module):
    """A model that is called with its inputs by name, and of whose result one field (None: all) is the output."""

    def __init__(self, base: nn.Module, layout: dict[str, tuple[tuple[int, ...], bool]], output: str | None):
        super().__init__()
        self.base, self.layout, self.output = base, layout, output  # layout: (shape, True for whole numbers) by name

    def forward(self, x: Tensor) -> Tensor:
        """x: [b, numbers of all inputs]"""
        given: dict[str, Tensor] = {}
        at = 0
        for name, (shape, whole) in self.layout.items():
            part = x[:, at : at + prod(shape)].reshape(len(x), *shape)
            given[name] = part.long() if whole and part.is_floating_point() else part
            at += prod(shape)
        made = self.base(**given)
        return made if self.output is None else getattr(made, self.output)


@checked
def named(model: nn.Module, federation: "Federation", output: str | None = None) -> nn.Module:
    """A model for a federation whose inputs have names, which become the arguments of the model's forward.

    Parameters
    ----------
    model : nn.Module
        Its forward takes each input of the federation by its name, [b, ...].
    federation : Federation
        Made by `Federation.from_arrays` with an x of several arrays.
    output : str or None
        The field to train on, where forward returns more than a tensor, such as "logits" of models of transformers.

    Returns
    -------
    nn.Module
        To be trained; `base` is the model given, and so it is in `run.model(client)`.
    """
    layout = federation.meta.get("layout")
    if layout is None:
        raise ModelError("federation: found inputs without names, expected a dict of arrays as x in from_arrays")
    return Named(model, layout, output)
