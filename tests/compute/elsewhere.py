"""A device that is none: its tensors hold their numbers on the processor, are worked out there, and are called "meta".

What a real accelerator would refuse is refused (tensors of two devices in one operation, `numpy`), and what would make
the host wait for it is noted: a number read back, a copy to the host, a shape that follows from values. So a run on it
has a run's numbers, and shows what a run on an accelerator would ask for. It cannot show that kernels are there, what
they round to or how fast they are."""

import traceback
from collections import Counter

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
aten = torch.ops.aten
PLACES = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)  # whose indices may come from the host


class There(Tensor):
    """A tensor on the device; `held` has its numbers."""

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )

    def __init__(self, held):
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} outside of the device's time")


class Elsewhere(TorchDispatchMode):
    """Inside, the device is there.

    found: operations by name, views left out     to, back: bytes copied to it and from it
    waits: [(operation, file:line of ours)] at which the host waits for it     strict: they are errors"""

    def __init__(self, strict=False):
        super().__init__()
        self.strict, self.to, self.back = strict, 0, 0
        self.found, self.waits = Counter(), []
        self._functions = _Functions(self)

    @classmethod
    def _should_skip_dynamo(cls):  # or torch's compiler is loaded, which is slow
        return False

    def __enter__(self):
        self._functions.__enter__()
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self._functions.__exit__(*raised)

    def wait(self, what, size):
        where = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "/src/polyfed" in f.filename]
        self.waits.append((what, where[-1] if where else ""))
        self.back += size
        if self.strict:
            raise AssertionError(f"{what} waits for the device, at {self.waits[-1][1]}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in given if isinstance(t, There)]
        assert all(isinstance(t, There) or not t.is_meta for t in given), f"{func} of numbers made in torch's own code"
        goes = kwargs.get("device")
        name = func.overloadpacket.__name__
        if not there and goes != DEVICE:
            return func(*args, **kwargs)
        if goes is not None:
            kwargs["device"] = torch.device("cpu")
        copies = func in (aten._to_copy.default, aten.copy_.default)
        here = [t for t in given if not isinstance(t, There) and t.dim()]
        if here and there and not copies and func not in PLACES:
            raise RuntimeError(f"{name}: tensors are on the device and on the processor")
        made = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        if func is aten._local_scalar_dense.default or not any(isinstance(t, Tensor) for t in tree_leaves(made)):
            if made is not None:
                self.wait(name, 8)
            return made
        if _chosen(args[1]) if func is aten.index.Tensor else set(WAITS) & set(func.tags):
            self.wait(name, 8)
        if copies and (
            goes is not None and goes != DEVICE if func is aten._to_copy.default else here and given[0] is here[0]
        ):
            self.wait(name, made.nbytes)
            return made if func is aten._to_copy.default else args[0]
        if copies and not (there and given[-1] is there[-1]):
            self.to += given[-1].nbytes
        elif not func.is_view:
            self.found[name] += 1
        same = {id(t.held): t for t in there}
        return tree_map(lambda t: same.get(id(t)) if id(t) in same else There(t) if isinstance(t, Tensor) else t, made)


def _held(t):
    return t.held if isinstance(t, There) else t


def _chosen(indices):
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)


class _Functions(TorchFunctionMode):
    """What does not come as an operation: numbers made from Python's or numpy's, storage, `data`."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        one = args[0] if args and isinstance(args[0], There) else None
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if one is not None and func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=one.dtype).to(DEVICE)
        if one is not None and func is Tensor.__getitem__ and type(args[1]) is list:
            args = one, torch.tensor(args[1]).to(DEVICE)
        if one is not None and func == Tensor.is_meta.__get__:
            return False
        if one is not None and func is Tensor.untyped_storage:
            return one.held.untyped_storage()
        if one is not None and func in (Tensor.numpy, Tensor.__array__):
            raise TypeError("can't convert a tensor on the device to numpy")
        if one is not None and func is Tensor.tolist:
            self._device.wait("tolist", one.held.nbytes)
            return one.held.tolist()
        if one is not None and func == Tensor.data.__set__:
            one.held = args[1].held.detach()
        return func(*args, **kwargs)


class _Tape(TorchDispatchMode):
    """Notes the operations inside, and refuses what a recording refuses. read: what they take and have not made"""

    def __init__(self, device, given):
        super().__init__()
        self._device, self.steps, self.read = device, [], {}
        self.own = {id(t): t for t in given if t is not None}

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self._device.waits), self._device.to
        made = func(*args, **(kwargs or {}))
        if (len(self._device.waits), self._device.to) != before:
            raise RuntimeError(f"{func.overloadpacket.__name__}: not permitted while operations are recorded")
        self.read |= {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, There) and id(t) not in self.own}
        self.own |= {id(t): t for t in tree_leaves(made) if isinstance(t, There)}
        if not func.is_view:
            self.steps.append((func, args, kwargs or {}, made))
        return made


def recording(device, tapes):
    """`graphs.record` for the device: the same operations on the same tensors, one launch. tapes: takes them"""

    def record(run, given):
        with _Tape(device, given) as tape:
            made = run(*given)
        tapes.append(tape)

        def play():
            before = device.found.copy()
            with torch.no_grad():
                for func, args, kwargs, old in tape.steps:
                    for into, new in zip(tree_leaves(old), tree_leaves(func(*args, **kwargs)), strict=True):
                        if isinstance(into, There) and new is not into:
                            into.held.copy_(new.held)
            device.found.clear()
            device.found.update(before + Counter(launch=1))

        return play, made

    return record
