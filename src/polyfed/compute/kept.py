"""Models whose trained parameters all lie above frozen modules: the output of these for a sample is a feature, which
never changes, and the modules above are a task of their own, on features."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyfed.base.errors import ModelError
from polyfed.base.typed import named_modules
from polyfed.compute.net import model_input, output_of
from polyfed.compute.split import Split
from polyfed.compute.task import Task, part_of
from polyfed.compute.trial import Keyed, same

TRIED = 8  # samples on which the parts have to equal the whole
TAILS = 16  # places for the cut that are tried, from the highest
BLOCK = 64  # samples a pass on a processor, whatever the number of threads: it decides the last bits


class Call(NamedTuple):
    """One call of a module in a pass."""

    name: str
    x: Tensor  # the tensor that went in
    out: Tensor  # the tensor that came out


class Kept(NamedTuple):
    """A model cut in two."""

    task: Task  # of the whole model
    top: Task  # of the modules above the cut, with the same vector and the same layers' names
    first: str  # the lowest of these, by name
    shape: tuple[int, ...]  # of a feature

    def key(self, split: Split) -> str:
        """A digest of all that the features of these samples depend on, `torch.__version__` included."""
        w = self.task.w0
        h = blake2b(f"{self.task.net.fixed_digest} {self.first} {w.dtype} {w.device.type} {torch.__version__}".encode())
        h.update(f"{split.x.dtype} {[*split.x.shape]}".encode())
        h.update(split.x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return h.hexdigest()[:32]

    def features_(self, out: Tensor, x: Tensor, threads: int) -> None:
        """Write the features of samples into `out: [N, *shape]`, the same whatever the number of threads."""
        on_cpu = self.task.device.type == "cpu"
        # an accelerator takes larger blocks one by one
        block = BLOCK if on_cpu else max(BLOCK, self.task.net.block)

        def write(k: int) -> None:
            out[k : k + block] = _entering(self.task, self.first, x[k : k + block])

        if not on_cpu:
            with self.task.net.exactly():
                for k in range(0, len(x), block):
                    write(k)
            return
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for _ in pool.map(write, range(0, len(x), block)):
                    pass
        finally:
            torch.set_num_threads(before)


class _Reached(BaseException):
    """Ends a pass once the feature is there."""

    def __init__(self, x: Tensor):
        self.x = x


def kept(task: Task, x: Tensor) -> Kept | None:
    """Cut a task's model above its frozen modules, after `check`; x: [N, ...] samples, on any device.

    None where nothing is frozen below the trained parts, the frozen modules draw random numbers, or the modules above
    them are no chain. The cut is found in a pass, from the output back, whatever the model's code looks like.
    """
    if task.net.bf16 or task.net.tf32 or not _frozen(task.model):
        return None
    x = x[torch.linspace(0, len(x) - 1, min(len(x), TRIED), dtype=torch.float64).long()].to(task.device)
    x = x.to(task.dtype) if x.is_floating_point() or not task.net.integers else x
    calls, output = _watched(task, x)
    names = {name for name, m in named_modules(task.model) if any(q.requires_grad for q in m.parameters(recurse=False))}
    frozen = _frozen(task.model)
    for tail in itertools.islice(_tails(calls, output, names), TAILS):
        top = _top(task, tail)
        if top is not None and _frozen(top.model) < frozen and _fits(task, top, tail[0].name, x):
            return Kept(task, top, tail[0].name, tuple(tail[0].x.shape[1:]))
    return None


def _frozen(model: nn.Module) -> int:
    return sum(q.numel() for q in model.parameters() if not q.requires_grad)


def _watched(task: Task, x: Tensor) -> tuple[list[Call], Tensor]:
    """The calls of a training pass, in the order of their ends, of modules called once on one tensor."""
    module, parameters = task.net.workspace(training=True)
    task.net.point(parameters, task.w0.clone())
    calls, calls_of = list[Call](), dict[str, int]()

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            calls_of[name] = calls_of.get(name, 0) + 1
            if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                calls.append(Call(name, args[0], out))

        return hook

    hooks = [m.register_forward_hook(note(name), with_kwargs=True) for name, m in named_modules(module) if name]
    try:
        with torch.enable_grad(), Keyed(0, task.device):
            output = module(model_input(x))
    finally:
        for hook in hooks:
            hook.remove()
    return [call for call in calls if calls_of[call.name] == 1], output


def _tails(calls: list[Call], out: Tensor, needed: set[str]) -> Iterator[list[Call]]:
    """Chains of calls that end in `out` and hold all `needed` modules, those of the smallest modules first."""
    for k, call in enumerate(calls):
        if call.out is out:
            rest = {name for name in needed if name != call.name and not name.startswith(f"{call.name}.")}
            if not rest and not call.x.requires_grad:
                yield [call]
            yield from ([*below, call] for below in _tails(calls[:k], call.x, rest))


def _top(task: Task, tail: list[Call]) -> Task | None:
    """The task of these modules alone, under their names; None where their parameters then have another order."""
    top = nn.Sequential()
    for call in tail:
        *inside, last = call.name.split(".")
        at = top
        for part in inside:
            children = dict(at.named_children())
            if part not in children:
                at.add_module(part, nn.Sequential())
            elif part != [*children][-1]:
                return None
            at = at.get_submodule(part)
        at.add_module(last, task.model.get_submodule(call.name))
    names = [name for name, q in top.named_parameters() if q.requires_grad]
    return part_of(task, top) if names == [e.name for e in task.layout.entries] else None


def _fits(task: Task, top: Task, first: str, x: Tensor) -> bool:
    """True where features are the same in training and evaluation, and the modules above make the same of them."""
    feature = _entering(task, first, x, training=False)
    if not feature.is_floating_point() or feature.dim() < 2 or len(feature) != len(x):
        return False
    with Keyed(0, task.device) as keyed:
        again = _entering(task, first, x, training=True)
    if keyed.drew or not same(feature, again):
        return False
    for training in (True, False):
        both = [output_of(of.net, of_x, training) for of, of_x in ((task, x), (top, feature))]
        if not same(*both):
            return False
    return same(feature, again)  # which the modules above may have written to


def _entering(task: Task, name: str, x: Tensor, training: bool = False) -> Tensor:
    """The input [N, ...] of the module of this name."""
    module, parameters = task.net.workspace(training)
    task.net.point(parameters, task.w0)
    x = x.to(task.dtype) if x.is_floating_point() or not task.net.integers else x

    def reach(_: nn.Module, args: tuple[Tensor]) -> None:
        raise _Reached(args[0])

    hook = module.get_submodule(name).register_forward_pre_hook(reach)
    try:
        with torch.no_grad():
            module(model_input(x))
    except _Reached as e:
        return e.x.clone(memory_format=torch.contiguous_format)
    finally:
        hook.remove()
    raise ModelError(f"model: {name} is not called for some samples, and is for others")
