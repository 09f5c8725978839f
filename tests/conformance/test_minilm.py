"""The conformance table on adapters of a real pretrained model: the embeddings and the last layer of MiniLM.

`pytest -m long tests/conformance/test_minilm.py` takes an hour of a core; `-k` chooses methods and rows."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from instances import METHODS
from torch import nn

from polyfed.base.typed import seeded
from polyfed.core.algorithm import Algorithm
from polyfed.models import adapted, build
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture
from polyfed.runs.rehearsal import taken
from polyfed_papers.adapters import absent, minilm
from polyfed_testing import rows, stage

MISSING = absent("sentences")
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")]


LORA = "lora:r=2,targets=query+value"
_ONCE, _STEPS = dict[Any, Any](), dict[Any, Any]()  # what rows of a method share, apart from the other table's


class Words(nn.Module):
    """MiniLM on as many tokens as there are numbers, each the nearest of some words: its mean state."""

    def __init__(self):
        super().__init__()
        self.base: Any = build("transformers", (8,), 1, backbone=str(minilm())).get_submodule("base")
        self.base.encoder.layer = self.base.encoder.layer[-1:]
        known = self.base.embeddings.word_embeddings.weight[2000:5001:100].detach()  # of 31 words
        self.base.embeddings.word_embeddings = nn.Embedding.from_pretrained(known.clone())
        for part in self.base.modules():  # a row compares a sample of weight two with two samples, which drop apart
            if isinstance(part, nn.Dropout):
                part.p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (5 * x.clamp(-3, 3) + 15).long()
        return self.base(input_ids=words).last_hidden_state.mean(1)


@cache
def network(outputs: int, adapter: str) -> nn.Sequential:
    with seeded(5):
        made = adapted(nn.Sequential(Words(), nn.Linear(384, outputs)), adapter)
    assert isinstance(made, nn.Sequential)
    return made


def network_of(method: Algorithm, outputs: int = stage.CLASSES) -> nn.Module:
    """With an update of query and value, a chart unless the method has another; or what a method needs in its place."""
    if method.adapter_train:
        return network(outputs, f"{LORA},train={method.adapter_train}")
    chart = network(outputs, LORA)
    other = copy.deepcopy(chart)
    for q in other.parameters():
        if q.requires_grad:
            q.data.neg_()
    mixtures = (Mixture(chart, other, classes=classes) for classes in (None, outputs))
    return taken(method, chart, network(outputs, "norms"), *mixtures, Memory(chart, rows=7, k=3))


@pytest.mark.parametrize("row", rows.ROWS, ids=lambda row: row.__name__)
@pytest.mark.parametrize("name", [name for name in METHODS if "(" not in name])
def test_row(name, row, monkeypatch):
    for module in (rows, stage):
        monkeypatch.setattr(module, "network_of", network_of)
    monkeypatch.setattr(stage, "_ONCE", _ONCE)
    monkeypatch.setattr(stage, "_STEPS", _STEPS)
    if why := row(METHODS[name]):
        pytest.skip(why)
