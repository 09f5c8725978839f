"""Net: a model and its loss on flat vectors, with the ways its passes can go. Gradients (`gradients.py`), local steps
(`steps.py`) and outputs (`outputs.py`) are functions of it; `Task` shows methods what they need of all three."""

import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.base.errors import ConfigError, ModelError
from polyfed.base.typed import named_modules, tf32
from polyfed.compute.batches import Batch, on_device
from polyfed.compute.batchnorm import begin
from polyfed.compute.dropout import halves
from polyfed.compute.graphs import Recorder
from polyfed.compute.grouped import grouped_pass
from polyfed.compute.layout import Layout
from polyfed.compute.losses import Criterion, Loss
from polyfed.compute.narrow import placed
from polyfed.compute.optimizers import Optimizer
from polyfed.compute.recompute import blocks
from polyfed.compute.stacked import BLOCK, Stacked, chain, rows
from polyfed.compute.trial import EMBEDDINGS, Functions, Keyed, check_structure, reason, still
from polyfed.compute.vectorised import stacked_pass

Guarded = Callable[[Tensor, Batch], Tensor | None]  # (models [s, p], batch) -> gradients [s, p]; None: the plain ones
CACHED, ONE = 1 << 24, 1 << 26  # bytes of activations when evaluating one model, as a step would keep: on a CPU, else


class Net:
    """A model and its loss on flat vectors; its arguments are those of `Task`.

    random, integers, sample_bytes, vectorised and grouped are guesses until `check` has tried.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        weight_decay: float,
        optimizer: Optimizer,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        bf16: bool,
        tf32: bool,
        class_weights: Sequence[float] | None,
        recompute: bool,
    ):
        self._still = still(model)
        try:
            self.model = copied(model, of=lambda q: nn.Parameter(q.detach(), requires_grad=False))
            check_structure(self.model, lambda m: _training(m, self._parts(m)))
            self.model = placed(self.model, device, dtype)
        except (RuntimeError, TypeError, ValueError, AttributeError) as e:
            raise ModelError(f"{type(model).__name__} cannot be copied: {reason(e)}") from None
        self.weight_decay, self.optimizer = weight_decay, optimizer
        self.layout = Layout(self.model)
        self.p = self.layout.p
        self.w0 = self.layout.flatten(self.model)
        self.device, self.dtype = self.w0.device, self.w0.dtype
        self.criterion = Criterion(loss, class_weights, self.device)
        self.loss = self.criterion.loss
        named = zip(self.layout.entries, self.layout.views(self.w0), strict=True)
        broken = [e.name for e, v in named if not v.isfinite().all()]
        if broken:
            raise ModelError(f"parameter {broken[0]!r} of {type(model).__name__} holds NaN or infinity before training")
        layers = chain(self.model) if isinstance(loss, str) else None
        self.of_rows = layers is not None  # samples of any shape go in as rows, into a copy of the model as here
        if self.of_rows:
            self.model.register_forward_pre_hook(rows)
        self.statistics = None if self.layout.statistics is None else self.layout.statistics.to(self.device)
        if self.statistics is not None:
            self.model.register_forward_pre_hook(begin)
        if bf16 and self.dtype != torch.float32:
            dtype_name = str(self.dtype).removeprefix("torch.")
            raise ConfigError(f"precision: found bf16 with weights in {dtype_name}, expected float32")
        self.bf16, self.tf32 = bf16, tf32
        layers = layers if not bf16 else None  # autocast is of modules
        self.stacked = Stacked(layers, self.layout, self.criterion) if layers else None
        self.vectorised = self.stacked is None and self.device.type != "cpu"
        self.blocks = _blocks(self.model) if recompute else []
        self.grouped = False  # in one pass of the frozen part, as `check` finds where the other way fails
        self.sample_bytes = 0  # of memory that a sample keeps in a step through the module, as `check` finds
        self.random = True  # until `check` has tried: any model may draw
        self.still: Functions = None  # as `Keyed` has it
        self.embeds = self.integers = any(isinstance(m, EMBEDDINGS) for m in self.model.modules())
        self.guard: Guarded | None = None  # makes the gradients in their stead, of a run with privacy by row
        self._local = threading.local()

    @property
    def batched(self) -> bool:
        """True where several clients in one call are computed together, and not one after another."""
        return self.stacked is not None or self.vectorised

    @property
    def block(self) -> int:
        """Samples of one model per forward pass when evaluating."""
        return min(BLOCK, max(1, (CACHED if self.device.type == "cpu" else ONE) // max(1, self.sample_bytes)))

    @cached_property
    def fixed(self) -> dict[str, Tensor]:
        """Tensors that the model uses besides the vector, by name: frozen parameters and persistent buffers."""
        kept = self.model.state_dict().keys()
        frozen = {name: q.detach() for name, q in self.model.named_parameters() if not q.requires_grad}
        return frozen | {name: b for name, b in self.model.named_buffers() if name in kept}

    @cached_property
    def fixed_digest(self) -> str:
        """Digest of `fixed`, the layers' types and the vector's layout; "" where nothing is fixed."""
        if not self.fixed:
            return ""
        h = blake2b(digest_size=16)
        for name, m in named_modules(self.model):
            h.update(f"{name} {type(m).__name__} {name in self._still}\n".encode())
        for name, shape, _ in self.layout.entries:
            h.update(f"{name} {shape}\n".encode())
        for name, t in sorted(self.fixed.items()):
            h.update(f"{name} {t.dtype} {[*t.shape]}\n".encode())
            h.update(t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return h.hexdigest()

    @property
    def many_pass(self) -> Callable[..., tuple[Tensor, ...]]:
        """The pass that computes many models on their own samples at once."""
        return partial(grouped_pass, blocks=self.blocks) if self.grouped else stacked_pass

    def keys(self, batch: Batch) -> np.ndarray | None:
        """[s] uint64 keys of the model's draws in this step."""
        if not self.random:
            return None
        return batch.seed() if batch.seed else np.zeros(len(batch.x), dtype=np.uint64)

    def drawn(self, batch: Batch) -> Tensor | None:
        """`keys` where the model is, [s, 2] halves."""
        return None if (keys := self.keys(batch)) is None else on_device(halves(keys), self.device)

    @property
    def recorder(self) -> Recorder:
        """Of the passes through this thread's own copy of the module."""
        if not hasattr(self._local, "recorder"):
            self._local.recorder = Recorder()
        return self._local.recorder

    def drawing(self, key: int, count: int = 0) -> AbstractContextManager[object]:
        """A context in which the model's draws are of this key."""
        return Keyed(key, self.device, count, self.still) if self.random else nullcontext()

    def workspace(self, training: bool, second: bool = False) -> tuple[nn.Module, list[nn.Parameter]]:
        """This thread's own copy of the module, and its trainable parameters; second: another, while that is in use."""
        name = "second" if second else "first"
        if not hasattr(self._local, name):
            module = copied(self.model, of=lambda q: q)
            setattr(self._local, name, (module, trainable(module), self._parts(module)))
            module.eval()
        module, parameters, still = getattr(self._local, name)
        if module.training is not training:  # modules are slow to tell
            if training:
                _training(module, still)
            else:
                module.eval()
        return module, parameters

    def point(self, parameters: list[nn.Parameter], w: Tensor) -> list[Tensor]:
        """Let the parameters of a workspace be views of a vector [p]; returns the views."""
        at = id(parameters), w.data_ptr(), w.stride(), w.dtype
        if at[1] == 0 or getattr(self._local, "at", None) != at:  # which nothing else can be while they lie there
            self._local.at, self._local.views = at, self.layout.views(w)
            for q, view in zip(parameters, self._local.views, strict=True):
                q.data = view
        return self._local.views

    def precision(self) -> AbstractContextManager[object]:
        """A context in which products and convolutions are in bfloat16 where `bf16` asks for it."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def exactly(self) -> AbstractContextManager[object]:
        """A context in which CUDA computes products and convolutions without TF32, its default for the latter."""
        return tf32(False) if self.device.type == "cuda" else nullcontext()

    def _parts(self, module: nn.Module) -> list[nn.Module]:
        return [module.get_submodule(name) for name in self._still]

    def cast(self, batch: Batch, w: Tensor) -> Batch:
        """The batch in the precision of w; integers stay what they are where the model embeds them."""
        x, y, weight = batch[:3]
        if x.dtype != w.dtype and (x.is_floating_point() or not self.integers):
            batch = batch._replace(x=x.to(w.dtype))
        if y.is_floating_point() and y.dtype != w.dtype:
            batch = batch._replace(y=y.to(w.dtype))
        if weight is not None and weight.dtype != w.dtype:
            batch = batch._replace(weight=weight.to(w.dtype))
        return batch


def output_of(net: Net, x: Tensor, training: bool) -> Tensor:
    """The outputs of a pass through the module at the start."""
    module, parameters = net.workspace(training)
    net.point(parameters, net.w0.clone())
    with torch.no_grad(), Keyed(0, net.device):
        return module(model_input(x))


def copied(module: nn.Module, of: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
    """A copy of a module that shares the memory of frozen parameters; `of` makes the copy's from the module's."""
    frozen = [q for q in module.parameters() if not q.requires_grad and type(q) is nn.Parameter]
    return copy.deepcopy(module, {id(q): of(q) for q in frozen})


def _blocks(model: nn.Module) -> list[str]:
    """The blocks to compute again. Raises ConfigError for a model without any."""
    if not (names := blocks(model)):
        raise ConfigError(
            f"recompute: found no blocks in {type(model).__name__}, expected a list of at least two modules of one "
            "class, such as a transformer's layers"
        )
    return names


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [q for q in module.parameters() if q.requires_grad]


def _training(module: nn.Module, parts: list[nn.Module]) -> None:
    """Training mode, but for the frozen modules."""
    module.train()
    for part in parts:
        part.eval()


def model_input(x: Tensor) -> Tensor:
    """A copy, which the model may write to; of images channels-last, as the convolution weights are."""
    return x.clone(memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format)
