"""Pretrained models from files of this machine: a folder of the library transformers, or a file of weights for any
module. Nothing is downloaded, no object is unpickled, and no code of a folder is run."""

import hashlib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, ModelError
from polyfed.base.settings import is_mapping
from polyfed.base.typed import named_modules

DROPPING = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")  # of a configuration
# of the states [b, T, d]: their mean over tokens, the first, the last token's; none: an output for each; words: a logit
# for each word of the vocabulary at each token, by the model's own head
POOLS = ("mean", "first", "last", "none", "words")


class Pretrained(nn.Module):
    """A model of transformers, and a linear layer on the states it makes of texts or images [b, C, H, W].

    Texts are ids [b, T], or ids and mask [b, 2, T], whose mask is 1 for tokens and 0 for padding.
    """

    def __init__(self, base: nn.Module, width: int, outputs: int, pool: str):
        super().__init__()
        self.base, self.pool = base, pool
        self.images = str(getattr(base, "main_input_name", "")) == "pixel_values"
        if pool != "words":
            self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        if self.images:
            states, mask = self.base(pixel_values=x).last_hidden_state, None
            states = states.flatten(2).mT if states.dim() == 4 else states  # of convolutions
        else:
            ids, mask = (x[:, 0], x[:, 1]) if x.dim() == 3 else (x, None)
            made = self.base(input_ids=ids, attention_mask=mask)
            if self.pool == "words":
                return made.logits
            states = made.last_hidden_state
        return self.head(self._pooled(states, mask).to(self.head.weight.dtype))

    def _pooled(self, states: Tensor, mask: Tensor | None) -> Tensor:
        if self.pool == "none":
            return states
        if self.pool == "first":
            return states[:, 0]
        real = states.new_ones(states.shape[:2]) if mask is None else mask.to(states.dtype)
        if self.pool == "last":
            place = torch.arange(1, real.shape[1] + 1, device=real.device)
            at = (real * place).argmax(1)
            return states[torch.arange(len(at), device=real.device), at]
        return (states * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)


def transformers(input_shape: tuple[int, ...], outputs: int, backbone: str = "", pool: str = "mean") -> nn.Module:
    """A pretrained model of the library transformers from a folder, with a linear layer on its pooled states."""
    if pool not in POOLS:
        raise ConfigError(f"model.pool: found {pool!r}, expected {', '.join(POOLS)}")
    if not (Path(backbone) / "config.json").is_file():
        raise ConfigError(f"model.backbone: found {backbone!r}, expected a folder with config.json and safetensors")
    try:
        library: Any = import_module("transformers")
        logging: Any = import_module("transformers.utils").logging
    except ImportError:
        raise ModelError("model transformers: is not installed; pip install 'polyfed[transformers]'") from None
    shown, before = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a head of the file is not used, which it would report
    try:
        drops = library.AutoConfig.from_pretrained(backbone, local_files_only=True).to_dict()
        # attention that drops inside torch's own function has masks without keys
        eager = {"attn_implementation": "eager"} if any(drops.get(key) for key in DROPPING) else {}
        kind = library.AutoModelForCausalLM if pool == "words" else library.AutoModel
        base = kind.from_pretrained(backbone, local_files_only=True, use_safetensors=True, dtype="auto", **eager)
    except Exception as e:  # whatever a folder's configuration may bring the library to
        raise ModelError(f"model.backbone: {backbone}: transformers cannot read it ({reason(e)})") from None
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()
    if getattr(base, "pooler", None) is not None:
        base.pooler = None  # a layer more, which other poolings leave untrained
    base.config.use_cache = False  # of keys and values, for texts that are made token by token
    if pool == "words" and base.config.vocab_size < outputs:
        raise ModelError(
            f"model.backbone: {backbone} knows {base.config.vocab_size} words, the tokenizer has {outputs}"
        )
    sizes = getattr(base.config, "hidden_sizes", None)
    width = sizes[-1] if sizes else base.config.hidden_size
    return Pretrained(base.train(), int(width), outputs, pool)


@checked
def pretrained(model: nn.Module, path: str | Path) -> nn.Module:
    """Give a model the weights of a file.

    Parameters
    ----------
    model : nn.Module
        Changed in place; its last layer, the head, stays as it is where the file has none of its shape.
    path : str or Path
        A state dict: safetensors, or what `torch.save` wrote, which is read with `weights_only=True`. It has
        every tensor below the head; other names are not used.

    Returns
    -------
    nn.Module
        The model, its weights in the precision of the file.
    """
    tensors, head = _tensors(Path(path)), ""
    for name, m in named_modules(model):
        if any(True for _ in m.parameters(recurse=False)):
            head = name
    fitting = dict[str, Tensor]()
    for name, t in model.state_dict().items():
        given = tensors.get(name)
        if given is not None and given.shape == t.shape:
            fitting[name] = given
        elif name.rpartition(".")[0] != head:
            has = "no such tensor" if given is None else f"one of shape {list(given.shape)}"
            raise ModelError(
                f"model.backbone: {path}: for {name!r} of {type(model).__name__} expected shape {list(t.shape)}, "
                f"found {has}"
            )
    model.load_state_dict(fitting, strict=False, assign=True)
    return model


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; checkpoints often have them under one of two keys."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"model.backbone: {path}: cannot be read ({reason(e)})") from None
    except Exception:  # torch's unpickler has errors of many kinds
        raise ConfigError(f"model.backbone: {path}: found objects or no tensors, expected a state dict alone") from None
    for key in ("state_dict", "model"):
        tensors = tensors[key] if is_mapping(tensors) and is_mapping(tensors.get(key)) else tensors
    if not is_mapping(tensors) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ConfigError(f"model.backbone: {path}: found no state dict, expected tensors by name")
    return {str(name).removeprefix("module."): t for name, t in tensors.items()}


def digest_of(path: Path) -> str:
    """Sixteen hex digits of a weights file, or of a folder's configuration and weights. Raises ConfigError for none."""
    files = [path / "config.json", *sorted(path.glob("*.safetensors"))] if path.is_dir() else [path]
    try:
        h = hashlib.sha256()
        for file in files:
            about = file.stat()
            h.update(_digest(file, about.st_mtime_ns, about.st_size))
    except OSError as e:
        raise ConfigError(f"model.backbone: {path}: cannot be read ({reason(e)})") from None
    return h.hexdigest()[:16]


@lru_cache(32)
def _digest(file: Path, changed: int, size: int) -> bytes:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").digest()
