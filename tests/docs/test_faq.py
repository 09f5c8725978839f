"""The page of messages: each is what the code says today, provoked here, and each is on the page."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import PolyfedError
from polyfed.cli.folders import claimed

HEADS = re.findall(r"^### `(.+)`$", (Path(__file__).resolve().parents[2] / "docs/how-to/faq.md").read_text(), re.M)


def federation(x=None):
    return pf.Federation.from_arrays([(np.ones((4, 3)) if x is None else x, np.arange(4) % 2)])


def folder(crp):
    Path("sites").mkdir()
    rows = [f"p{i},{30 + i},{crp if i == 0 else i},{'ill' if i % 2 else 'well'}\n" for i in range(12)]
    Path("sites/a.csv").write_text("patient,age,crp,outcome\n" + "".join(rows), encoding="latin-1")
    return pf.data.load("sites").notes


def diverge():
    numbers = pf.Federation.from_arrays([(np.eye(4, 3), np.arange(4.0))])
    pf.fit(torch.nn.Linear(3, 1), numbers, pf.FedAvg(1e30), rounds=5)


def of_a_comparison():
    pf.compare(torch.nn.Linear(3, 2), federation(), [pf.Local()], seeds=1, rounds=0, out="c", report=False)
    pf.Run.open("c")


def train(model):
    pf.fit(model, federation(), pf.FedAvg(0.1), rounds=2)


def into_a_folder_that_is_used():
    with pytest.raises(PolyfedError):
        of_a_comparison()
    with claimed(Path("c"), "c", force=False, resume=False):
        pass


PROVOKED = [  # in the order of the page
    lambda: folder("7"),
    lambda: folder("<5"),
    lambda: folder("é"),
    lambda: federation(np.full((4, 3), np.nan)),
    lambda: pf.data.load("fashion-mnist", "."),
    lambda: train(torch.nn.Linear(3, 1)),
    lambda: train(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))),
    diverge,
    into_a_folder_that_is_used,
    of_a_comparison,
]


def test_the_page_has_ten_messages():
    assert len(HEADS) == len(PROVOKED) == 10


@pytest.mark.parametrize(("said", "provoke"), [*zip(HEADS, PROVOKED, strict=False)])
def test_a_message_is_what_the_code_says(said, provoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        found = "\n".join(provoke() or ())  # notes, where it is no error
    except PolyfedError as error:
        found = str(error)
    assert re.search(re.escape(said).replace(r"\.\.\.", ".+"), found)
