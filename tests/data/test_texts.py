"""Texts for a causal language model: what follows each token, packed or not; Hugging Face's data sets as tables."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import DataError

END, T = 99, 4
TEXTS = {"bern": ["1 2 3", "4 5 6 7 8 9", "10"], "oslo": ["11 12", "13 14"]}
NONE = -100.0


def ids(texts):
    return [[int(word) for word in text.split()] for text in texts]


def made(texts=None, **given):
    return pf.data.from_texts(texts or TEXTS, ids, length=T, **{"test_fraction": 0.0, **given})


def test_a_row_is_asked_for_what_follows_and_for_nothing_in_padding():
    fed = made()
    assert fed.input_shape == (2, T)
    x, y = fed.train.client(0)
    assert x.tolist() == [[[1, 2, 3, 0], [1, 1, 1, 0]], [[4, 5, 6, 7], [1, 1, 1, 1]], [[10, 0, 0, 0], [1, 0, 0, 0]]]
    assert y.tolist() == [[2, 3, NONE, NONE], [5, 6, 7, 8], [NONE] * 4]
    x, y = made(end=END).train.client(1)
    assert x[:, 0].tolist() == [[11, 12, END, 0], [13, 14, END, 0]]
    assert y.tolist() == [[12, END, NONE, NONE], [14, END, NONE, NONE]]


def test_packed_rows_are_full_and_ask_for_every_token_but_the_first_of_a_text():
    fed = made(pack=True, end=END)
    for i, texts in enumerate(TEXTS.values()):
        x, y = fed.train.client(i)
        stream = [k for own in ids(texts) for k in (*own, END)]
        assert x[:, 0].flatten()[: len(stream)].tolist() == stream
        assert x[:, 1].sum() == len(stream)
        assert len(x) == -(-len(stream) // T)
        asked = [k for own in ids(texts) for k in (*own[1:], END, NONE)]
        assert y.flatten()[: len(stream)].tolist() == asked
        assert (y.flatten()[len(stream) :] == NONE).all()


def test_no_text_is_in_two_parts():
    texts = {name: [f"{k} {k + 100} {k + 200}" for k in range(20 * i, 20 * i + 20)] for i, name in enumerate("ab")}
    fed = made(texts, pack=True, end=END, test_fraction=0.25, validation_fraction=0.2, seed=3)
    for i in range(2):
        seen = [
            set(split.client(i)[0][:, 0].flatten().tolist()) - {0, END}
            for split in (fed.train, fed.test, fed.validation)
        ]
        assert [len(part) for part in seen] in ([36, 15, 9], [35, 15, 9])
        assert len(set.union(*seen)) == sum(map(len, seen))


def test_a_causal_model_reaches_the_perplexity_of_the_texts():
    """Each number follows from the one before: 1. Packed, one of nine is the end: exp of that entropy, 1.42."""
    texts = {name: [" ".join(str((s + k) % 12) for k in range(9)) for s in 20 * [*range(12)]] for name in "ab"}

    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)

        def forward(self, x):
            return self.head(self.embedding(x[:, 0]))

    torch.manual_seed(0)
    for pack, least in ((False, 1.0), (True, (9 * 9**8 / 8**8) ** (1 / 9))):
        fed = pf.data.from_texts(texts, ids, length=8, pack=pack, end=12)
        how = {"loss": "tokens", "metrics": "perplexity", "rounds": 10, "batch_size": 8}
        run = pf.fit(Bigram(), fed, pf.FedAvg(lr=2.0), **how)
        found = run.history.query("split == 'test'").perplexity
        assert found.iloc[0] > 8
        assert 0.98 * least < found.iloc[-1] < 1.15 * least


@pytest.mark.parametrize(
    ("texts", "given", "said"),
    [
        ({}, {}, "texts: found none"),
        ({"a": []}, {}, "client 'a': found no texts"),
        ({"a": ["1", 2]}, {}, "client 'a': found a int, expected texts"),
        ({"a": ["1", " "]}, {}, "client 'a': text 2 has no token"),
        ({"a": pd.DataFrame({"txt": ["1"]})}, {}, r"client 'a': no column 'text' \(did you mean 'txt'\?\)"),
        (TEXTS, {"pack": True}, "end: found none"),
        (TEXTS, {"length": 1}, "length: found 1, expected at least 2"),
    ],
)
def test_what_holds_no_texts_is_refused_in_a_line(texts, given, said):
    with pytest.raises(DataError, match=said):
        pf.data.from_texts(texts, ids, **{"length": T, **given})


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (lambda texts: None, "tokenizer: made a NoneType, expected a list of ids for each text"),
        (lambda texts: [["a"]] * len(texts), "tokenizer: made a list, expected a list of ids"),
        (lambda texts: [[1]], "tokenizer: found ids of 1 texts, expected 3"),
    ],
)
def test_a_function_that_is_no_tokenizer_is_refused(tokenizer, said):
    with pytest.raises(DataError, match=said):
        pf.data.from_texts(TEXTS, tokenizer, length=T)


def test_a_tokenizer_by_its_file(tokenizer):
    fed = pf.data.from_texts({"a": ["pain fever"], "b": ["none"]}, tokenizer, length=3, test_fraction=0.0)
    assert fed.train.x[:, 0].tolist() == [[2, 3, 0], [4, 0, 0]]


# data sets of the library datasets


FRAME = pd.DataFrame({"age": [30, 40, 50, 60], "ill": [0, 1, 1, 0], "text": ["1 2", "3 4", "5 6", "7 8"]})


class Fake:
    def __init__(self):
        plain = SimpleNamespace(dtype="whatever")
        self.features = {"age": plain, "ill": SimpleNamespace(names=["no", "yes"]), "text": plain}

    def to_pandas(self):
        return FRAME.copy()


def test_a_data_set_of_hugging_face_is_a_table_whose_classes_have_names():
    fed = pf.data.from_frames({"a": Fake(), "b": Fake()}, "ill", drop=["text"], test_fraction=0.0, standardise="none")
    assert fed.meta["preparation"]["labels"] == ["no", "yes"]
    x, y = fed.train.client(0)
    assert x[:, 0].tolist() == FRAME.age.tolist()
    assert y.tolist() == FRAME.ill.tolist()
    texts = made({"a": Fake(), "b": FRAME})
    assert torch.equal(*(texts.train.client(i)[0] for i in range(2)))
    assert np.array_equal(texts.train.client(0)[1][:, 0], [2, 4, 6, 8])
