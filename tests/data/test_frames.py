"""Federations from DataFrames and from data sets of dicts."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from doors import written

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError


def frames(n=30):
    rng = np.random.default_rng(0)
    made = {}
    for name in ("north", "south"):
        t = pd.DataFrame({"age": rng.integers(30, 90, n), "chol": rng.normal(5, 1, n).round(2)})
        t.loc[::7, "chol"] = np.nan
        made[name] = t.assign(ward=rng.choice(["icu", "surgery"], n), ill=rng.choice(["yes", "no"], n))
    return made


def test_frames_are_prepared_as_their_csv_files_are(tmp_path):
    made, how = frames(), {"target": "ill", "test_fraction": 0.3, "seed": 2}
    here, there = pf.data.from_frames(made, **how), pf.Federation.from_folder(written(tmp_path, made), **how)
    assert here.names == there.names
    for one, other in ((here.train, there.train), (here.test, there.test)):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
    assert here.meta["preparation"] == there.meta["preparation"]
    run = pf.fit(torch.nn.Linear(5, 2), here, pf.FedAvg(lr=0.1), rounds=1)
    assert len(run.predict("north", made["north"].head(3))) == 3


@pytest.mark.parametrize(
    ("made", "given", "said"),
    [
        ({}, {}, "frames: found none, expected one for each client"),
        ({"a": [[1, 2]]}, {}, "client 'a': found a list, expected a DataFrame of pandas or polars, or an Arrow table"),
        (frames(), {"target": "il"}, r"no column 'il', which columns.target names \(did you mean 'ill'\?\)"),
        (frames(), {"site": {"west": {}}}, "columns.site: found repairs of 'west'"),
        ({"a": pd.DataFrame({"x": [1], "y": [""]})}, {}, "client 'a', line 2, column 'y': found '', expected a target"),
    ],
)
def test_frames_that_do_not_fit(made, given, said):
    with pytest.raises((DataError, ConfigError), match=said):
        pf.data.from_frames(made, **given)


class Dicts:
    """Stands for a Hugging Face data set: columns, a length, and items that are dicts of Python's values."""

    def __init__(self, x, y):
        self.x, self.y, self.column_names = x, y, ["pixels", "label", "text"]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, k):
        return {"pixels": self.x[k].tolist(), "label": int(self.y[k]), "text": "seen"}


def test_a_data_set_of_dicts_is_read_by_its_keys():
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(n, 4)), rng.integers(0, 2, n)) for n in (12, 20)]
    fed = pf.Federation.from_datasets([Dicts(*p) for p in parts], input="pixels", target="label")
    same = pf.Federation.from_arrays([(x.astype(np.float32), y) for x, y in parts])
    assert torch.equal(fed.train.x, same.train.x)
    assert torch.equal(fed.train.y, same.train.y)
    with pytest.raises(DataError, match="item 0: found a dict, expected input= to name its key; it has pixels, label"):
        pf.Federation.from_datasets([Dicts(*p) for p in parts])
    with pytest.raises(DataError, match=r"no key 'lable', which target names \(did you mean 'label'\?\); it has"):
        pf.Federation.from_datasets([Dicts(*p) for p in parts], input="pixels", target="lable")


def test_a_hugging_face_data_set():
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    parts = [datasets.Dataset.from_dict({"f": [[1.0, k], [2.0, k], [0.0, k]], "label": [0, 1, 0]}) for k in (0.0, 1.0)]
    for made in (parts, [p.with_format("torch") for p in parts]):
        fed = pf.Federation.from_datasets(made, input="f", target="label", test_fraction=0.0)
        assert fed.train.x.tolist() == [[1, 0], [2, 0], [0, 0], [1, 1], [2, 1], [0, 1]]


def test_without_the_audits_package_the_data_are_prepared_alike_and_a_note_says_what_is_skipped(monkeypatch):
    pytest.importorskip("polyfed_audit")
    made = frames()
    made["south"]["age"] *= 365.25
    whole = pf.data.from_frames(made, seed=0)
    for name in ("polyfed_audit", "polyfed_audit.findings"):
        monkeypatch.setitem(sys.modules, name, None)
    bare = pf.data.from_frames(made, seed=0)
    assert bare.train.x.equal(whole.train.x)
    said = [note for note in bare.notes if note not in whole.notes]
    assert len(said) == 1
    assert said[0].startswith("the audit between sites is skipped: it needs the package polyfed_audit")
