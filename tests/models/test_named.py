"""Inputs by name: the same numbers as one array, and the model is called with each by its name."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import DataError, ModelError

RNG = np.random.default_rng(0)
IDS, AGES = RNG.integers(0, 9, (2, 20, 5)), RNG.normal(size=(2, 20)).astype(np.float32)
MASKS = (RNG.random((2, 20, 5)) < 0.8).astype(np.int64)
Y = (IDS[:, :, 0] > 4).astype(np.int64)


class Sample(NamedTuple):
    ids: np.ndarray
    mask: np.ndarray
    age: np.ndarray


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(5, 2)

    def forward(self, age, ids, mask):
        assert ids.shape[1:] == mask.shape[1:] == (5,)
        assert age.dim() == 1
        shown = (self.embedding(ids) * mask[..., None]).sum(1)
        return self.head(torch.cat([shown, age[:, None].to(shown.dtype)], 1))


class ByHand(nn.Module):
    """The same on the array that one would pack by hand."""

    def __init__(self):
        super().__init__()
        self.base = Net()

    def forward(self, x):
        return self.base(ids=x[:, :5].long(), mask=x[:, 5:10], age=x[:, 10])


def trained(fed, make):
    torch.manual_seed(0)
    return pf.fit(make(), fed, pf.FedAvg(lr=0.3), rounds=3, batch_size=7)


@pytest.mark.parametrize("form", [dict, Sample])
def test_named_inputs_train_as_the_array_that_one_would_pack(form):
    pairs = [(form(ids=i, mask=m, age=a), y) for i, m, a, y in zip(IDS, MASKS, AGES, Y, strict=True)]
    packed = [
        (np.concatenate([i, m, a[:, None]], 1).astype(np.float32), y)
        for i, m, a, y in zip(IDS, MASKS, AGES, Y, strict=True)
    ]
    fed = pf.Federation.from_arrays(pairs)
    mine = trained(fed, lambda: pf.models.named(Net(), fed))
    other = trained(pf.Federation.from_arrays(packed), ByHand)
    assert torch.equal(mine.server["w"], other.server["w"])
    model = mine.model(0).base  # which is called as before
    assert model(torch.zeros(1), torch.zeros(1, 5).long(), torch.ones(1, 5)).shape == (1, 2)


def test_bert_takes_what_its_tokenizer_makes():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
        )
    )  # fmt: skip
    names = ("input_ids", "attention_mask", "token_type_ids")
    pairs = [(dict(zip(names, (i, m, 1 - m), strict=True)), y) for i, m, y in zip(IDS, MASKS, Y, strict=True)]
    fed = pf.Federation.from_arrays(pairs, test_fraction=0.0)
    assert fed.train.x.dtype == torch.int64
    made = pf.models.named(bert, fed, output="logits")
    given = {name: torch.from_numpy(a) for name, a in pairs[0][0].items()}
    bert.eval()
    with torch.no_grad():
        assert torch.equal(made(fed.train.client(0)[0]), bert(**given).logits)
    run = pf.fit(made, fed, pf.FedAvg(lr=0.1), rounds=1)
    assert run.history.loss.iloc[-1] < run.history.loss.iloc[0]


def test_what_does_not_fit_is_said():
    whole = {"ids": IDS[0], "mask": MASKS[0]}
    for pairs, says in (
        ([({}, Y[0])], "client 'client-0', train: found no inputs, expected arrays by name"),
        ([(whole | {"mask": MASKS[0][:9]}, Y[0])], "inputs differ in length: ids 20, mask 9"),
        (
            [(whole, Y[0]), ({"ids": IDS[1]}, Y[1])],
            r"'client-1', .*ids \[5\], those of client 'client-0' ids \[5\], mask",
        ),
        ([(whole, Y[0]), (IDS[1], Y[1])], "inputs are one array, those of client 'client-0' ids"),
        (
            [(whole | {"age": AGES[0], "ids": IDS[0] + 2**25}, Y[0])],
            r"found 335544\d+ in the inputs 'ids', expected at",
        ),
    ):
        with pytest.raises(DataError, match=says):
            pf.Federation.from_arrays(pairs)
    with pytest.raises(DataError, match="test: the inputs are one array, those of training ids"):
        pf.Federation.from_arrays([(whole, Y[0])], [(IDS[0], Y[0])])
    with pytest.raises(ModelError, match="found inputs without names"):
        pf.models.named(Net(), pf.Federation.from_arrays([(IDS[0], Y[0])]))
