"""What a run folder remembers: that a run is over, on which data, with which frozen tensors and versions it began."""

import dataclasses
import json
import os
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import polyfed as pf
from polyfed.base import checkpoint
from polyfed.base.errors import RunError
from polyfed.runs import folder as folder_module
from polyfed.runs import schema as reading
from polyfed.runs import trainer as trainer_module

NAMES = ("oslo", "=cmd|calc", "007", "common", "NA")


def federation(names=NAMES, seed=0):
    rng = np.random.default_rng(seed)
    draw = [(rng.normal(size=(12, 3)), rng.integers(0, 2, 12)) for _ in names]
    return pf.Federation.from_arrays(draw, names=names, classes=2, test_fraction=0.25)


def train(fed=None, model=None, **settings):
    torch.manual_seed(0)
    return pf.fit(
        model or torch.nn.Linear(3, 2),
        fed or federation(),
        pf.Ditto(lr=0.1),
        **{"rounds": 6, "batch_size": None, **settings},
    )


def enough(progress):
    return bool(progress.records) and progress.records[-1].round >= 3


@pytest.mark.parametrize("lost", [(), ("summary.json", "clients.csv")])
def test_a_run_that_a_callback_ended_stays_ended(tmp_path, lost):
    run = train(out=tmp_path, callbacks=[enough])
    assert run.trained.t == 3
    before = (tmp_path / "clients.csv").read_bytes()
    for name in lost:
        (tmp_path / name).unlink()
    again = train(out=tmp_path, callbacks=[enough], resume=True)
    assert (again.trained.t, again.status) == (3, "finished")
    assert torch.equal(again.personal, run.personal)
    assert (tmp_path / "clients.csv").read_bytes() == before  # in the order of columns too


def flipped(fed, part):
    split = getattr(fed, part)
    return {part: dataclasses.replace(split, y=1 - split.y)}


@pytest.mark.parametrize(
    ("word", "change"),
    [
        *((part, partial(flipped, part=part)) for part in ("test", "train", "validation")),
        ("clients", lambda f: {"names": (*f.names[:-1], "bergen")}),
        ("clients", lambda f: {"classes": 3}),
        ("preparation", lambda f: {"meta": {**f.meta, "options": {"scaled": True}}}),
    ],
)
def test_changed_data_are_refused_by_name(tmp_path, word, change):
    fed = federation().with_validation(0.3, 0)
    train(fed, model=torch.nn.Linear(3, 3), out=tmp_path, rounds=1)
    other = dataclasses.replace(fed, **change(fed))
    with pytest.raises(RunError, match=rf"cannot resume .*the data have changed since it began \({word}\)$"):
        train(other, model=torch.nn.Linear(3, 3), out=tmp_path, resume=True)


class Backbone(torch.nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.features, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.features.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        return self.head(self.features(x).tanh() * self.scale)


def test_frozen_tensors_are_kept_and_others_refused(tmp_path):
    torch.manual_seed(1)
    model = Backbone()
    run = train(model=model, out=tmp_path)
    fixed = load_file(tmp_path / "fixed.safetensors")
    assert set(fixed) == {"features.weight", "features.bias", "scale"}
    own, _ = folder_module.client_model(tmp_path, 0, "oslo")
    x, exported = torch.randn(5, 3), Backbone(2.0)
    exported.load_state_dict(own | fixed)  # complete
    assert torch.equal(exported(x), run.model("oslo")(x))
    model.features.weight.data += 1
    for changed in (model, Backbone(0.5)):
        with pytest.raises(RunError, match="frozen parameters or buffers are not those it began with"):
            train(model=changed, out=tmp_path, rounds=9, resume=True)
    assert pf.Task(torch.nn.Linear(3, 2)).net.fixed_digest == ""


def failing(progress):
    if progress.round == 4:
        raise ZeroDivisionError("a fault of the callback")


class Brittle(torch.nn.Linear):
    """A model that fails in one of its forward passes, with a product that the kernel does not take over."""

    left = 10**9

    def forward(self, x):
        Brittle.left -= self.training
        if Brittle.left == 0:
            raise ZeroDivisionError("a fault of the model")
        return 1.0 * super().forward(x)


@pytest.mark.parametrize("fault", ["callback", "model"])
def test_an_error_saves_the_last_whole_round(tmp_path, fault):
    torch.manual_seed(0)
    Brittle.left = 10**9 if fault == "callback" else 2 * len(NAMES) * 4  # in the fourth round, or about
    with pytest.raises(ZeroDivisionError, match=f"fault of the {fault}"):
        train(model=Brittle(3, 2), out=tmp_path, callbacks=[failing] if fault == "callback" else [])
    t = checkpoint.load(tmp_path / "checkpoint")[1]["t"]
    assert t == 4 if fault == "callback" else t > 0
    Brittle.left = 10**9
    run = train(model=Brittle(3, 2), out=tmp_path, resume=True)
    assert torch.equal(run.personal, train(model=Brittle(3, 2)).personal)
    assert f"ended after round {t} by ZeroDivisionError" in (tmp_path / "log.txt").read_text()


def test_versions_that_change_are_logged_and_all_are_kept(tmp_path, monkeypatch):
    train(out=tmp_path, rounds=2)
    now = trainer_module.versions()
    for t, version in ((4, "99.0"), (6, "99.1")):
        monkeypatch.setattr(trainer_module, "versions", lambda v=version: now | {"numpy": v})
        run = train(out=tmp_path, rounds=t, resume=True)
    assert run.settings.versions == now | {"numpy-from-round-2": "99.0", "numpy-from-round-4": "99.1"}
    log = (tmp_path / "log.txt").read_text()
    assert f"numpy 99.0 from round 2, before {now['numpy']}" in log
    assert "numpy 99.1 from round 4, before 99.0" in log


def test_no_name_is_a_formula_in_any_table_and_all_are_read_back(tmp_path):
    run = train(out=tmp_path)
    for path in tmp_path.glob("*.csv"):
        for line in path.read_text().splitlines():
            assert not any(cell.strip('"').startswith(("=", "@")) for cell in line.split(","))
    found = reading.clients(tmp_path)
    assert found["client"].tolist() == list(NAMES)
    assert found["test_accuracy"].tolist() == run.clients["test_accuracy"].tolist()
    assert pf.report.read(tmp_path).runs[0].clients["client"].tolist() == list(NAMES)


@pytest.mark.parametrize("many", [False, True])
def test_models_of_few_and_of_many_clients_are_read_alike(tmp_path, monkeypatch, many):
    monkeypatch.setattr(folder_module, "MANY", 2 if many else 256)
    run = train(out=tmp_path)
    assert (tmp_path / "models.safetensors").exists() == many
    assert (tmp_path / "models").exists() != many
    for i, name in enumerate(NAMES):
        own, shared = folder_module.client_model(tmp_path, i, name)
        assert not shared
        assert all(torch.equal(t, own[k]) for k, t in run.model(i).state_dict().items())


def test_two_runs_never_write_in_one_folder(tmp_path):
    """The second one is another process, in the middle of the first."""

    def second(progress):
        if progress.round == 2:
            child = os.fork()
            if not child:
                from polyfed.runs import ownership as files

                files._held.clear()  # as a process that was not forked from the first
                try:
                    train(out=tmp_path / "a", resume=True)
                except RunError as e:
                    (tmp_path / "said").write_text(str(e))
                os._exit(0)
            os.waitpid(child, 0)

    run = train(out=tmp_path / "a", callbacks=[second])
    assert f"in use by process {os.getpid()} on" in (tmp_path / "said").read_text()
    lines = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(7))
    assert len(pd.read_csv(tmp_path / "a/ledger.csv")) == len(run.ledger)
