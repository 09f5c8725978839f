"""Activation checkpointing: a block keeps its inputs, and is computed again, with the same draws, for the backward
pass. Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174)."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from polyfed.base.errors import ModelError
from polyfed.base.typed import named_modules
from polyfed.compute.narrow import saving

Again = Callable[[], Callable[[], AbstractContextManager[object]]]  # at a block's call -> how to compute it again


def blocks(model: nn.Module) -> list[str]:
    """Names of a model's blocks, such as a transformer's layers: entries of outermost lists of one class of modules."""
    names: list[str] = []
    for name, module in named_modules(model):
        inside = dict(module.named_children()) if isinstance(module, nn.ModuleList | nn.Sequential) else {}
        classes = [type(m) for m in inside.values() if any(True for _ in m.children())]
        if any(name.startswith(f"{outer}.") for outer in names):
            continue
        names += [
            f"{name}.{child}" if name else child
            for child, m in inside.items()
            if classes.count(type(m)) > 1 and not isinstance(m, nn.ModuleList | nn.Sequential)
        ]
    return names


@contextmanager
def kept_short(module: nn.Module, names: Sequence[str], again: Again) -> Generator[None]:
    """Let blocks keep nothing but their inputs for a backward pass; `again` gives a block's second pass its context."""
    if not names or not torch.is_grad_enabled():
        yield
        return
    changed: list[nn.Module] = []
    try:
        for name in names:
            block = module.get_submodule(name)
            block.forward = partial(_short, name, block.forward, again)
            changed.append(block)
        yield
    finally:
        for block in changed:
            del block.__dict__["forward"]


def _short(name: str, forward: Callable[..., Any], again: Again, *args: Any, **kwargs: Any) -> Any:
    call = _Call(name, forward, again(), args, kwargs)
    with saving(narrow=False), torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack):
        return forward(*args, **kwargs)


class _Call:
    """One call of a block. The tensors that it would have kept are numbered in the order of their making."""

    def __init__(self, name: str, forward: Callable[..., Any], inside: Callable[[], Any], args: Any, kwargs: Any):
        self._name, self._forward, self._inside, self._given = name, forward, inside, (args, kwargs)
        self._versions = [t._version for t in _tensors(self._given)]
        self._cast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {t.device.type for t in _tensors(self._given)}
        ]
        self._shapes, self._made = list[torch.Size](), dict[int, Tensor]()

    def pack(self, t: Tensor) -> int:
        self._shapes.append(t.shape)
        return len(self._shapes) - 1

    def unpack(self, k: int) -> Tensor:
        if k not in self._made:
            self._repeat()
        return self._made.pop(k)  # each is asked for once in a backward pass

    def _repeat(self) -> None:
        if self._versions != [t._version for t in _tensors(self._given)]:
            raise ModelError(f"recompute: layer {self._name!r} writes into its input, so it cannot be computed again")
        args, kwargs = tree_map(_alike, self._given)
        made: list[Tensor] = []

        def pack(t: Tensor) -> int:
            made.append(t.detach())
            return 0

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda _: made[0])
        contexts = (
            torch.enable_grad(),
            saving(narrow=False),
            self._inside(),
            *(torch.autocast(*cast) for cast in self._cast),
            hooks,
        )
        why = ""
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            try:
                self._forward(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as e:
                why = f" ({type(e).__name__})"
        if why or [t.shape for t in made] != self._shapes:
            raise ModelError(
                f"recompute: layer {self._name!r} does not do the same when it is computed again{why}; expected one "
                "that keeps nothing between its calls, such as a cache of keys and values"
            )
        self._made = dict(enumerate(made))


def _tensors(given: Any) -> list[Tensor]:
    return [t for t in tree_leaves(given) if isinstance(t, Tensor)]


def _alike(t: Any) -> Any:
    return t.detach().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t


def saved_bytes(make: Callable[[], Tensor], besides: Sequence[Tensor], blocks: Sequence[nn.Module] = ()) -> int:
    """Peak bytes that `make` keeps for a backward pass, `besides` not counted; `blocks` are computed again."""
    excluded = {t.untyped_storage().data_ptr() for t in besides}
    kept = [dict[int, int]() for _ in range(1 + len(blocks))]
    entering, where = dict[int, Tensor](), [0]  # which would else be gone, and their places used again

    def pack(t: Tensor) -> Tensor:
        kept[where[-1]][t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # an output that its own graph kept would keep the graph, and all weights in it

    def enter(k: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        where.append(k)
        entering.update({t.untyped_storage().data_ptr(): t for t in _tensors((args, kwargs))})

    def leave(_: nn.Module, given: Any, made: Any) -> None:
        where.pop()

    hooks = [m.register_forward_pre_hook(partial(enter, k), with_kwargs=True) for k, m in enumerate(blocks, 1)]
    hooks += [m.register_forward_hook(leave) for m in blocks]
    try:
        with saving(narrow=True, note=pack), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            result = make()  # kept until the bytes are counted, or their places would be used again
    finally:
        for hook in hooks:
            hook.remove()
    # of each block its inputs, and of the largest all the rest
    once = kept[0] | {at: t.untyped_storage().nbytes() for at, t in entering.items()}
    inside = [sum(n for at, n in own.items() if at not in excluded and at not in once) for own in kept[1:]]
    total = sum(n for at, n in once.items() if at not in excluded) + max(inside, default=0)
    del result
    return total
