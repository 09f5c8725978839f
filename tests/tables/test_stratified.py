"""split = "stratified" by every door: named data sets, arrays and npz files as tables."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError


def clients():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 3)), (np.arange(n) % 20 == 0).astype(int)) for n in (60, 81)]


def share(made, part="test", fraction=0.2):
    """Assert that of each client's classes this share is in a part."""
    for k in range(made.n):
        of = {p: s.client(k)[1] for p in ("train", "validation", "test") if (s := getattr(made, p)) is not None}
        for c in range(made.classes):
            there = sum(int((y == c).sum()) for p, y in of.items() if part == "test" or p != "test")
            assert there < 2 or int((of[part] == c).sum()) == min(max(1, round(fraction * there)), there - 1)


def test_arrays_npz_files_and_named_sets(cli, tmp_path):
    share(one := pf.Federation.from_arrays(clients(), split="stratified", validation_fraction=0.3))
    share(
        pf.Federation.from_arrays(clients(), split="stratified", validation_fraction=0.3, test_fraction=0.0),
        "validation",
        0.3,
    )
    for k, (x, y) in enumerate(clients()):
        np.savez(tmp_path / f"client-{k}.npz", x=x.astype(np.float32), y=y)
    two = pf.data.load(tmp_path, split="stratified").partition(validation_fraction=0.3)
    three = pf.Federation.from_folder(tmp_path, split="stratified", validation_fraction=0.3)
    for other in (two, three):
        assert torch.equal(one.train.x.float(), other.train.x)
        assert torch.equal(one.validation.y, other.validation.y)
        assert torch.equal(one.test.y, other.test.y)
    share(pf.data.load("heart-disease", split="stratified").partition())
    share(pf.data.load("digits", split="stratified").partition("dirichlet:0.3", clients=5))
    words = ("--split", "stratified", "--algorithm", "fedavg", "--rounds", "1", "--seeds", "1", "--out", "r")
    cli("run", "--data", "heart-disease", *words).done()
    made = pf.Run.open("r").federation
    share(made, fraction=float(made.meta["test"].removeprefix("own:")))


def test_what_arrays_cannot_be_split_by(cli, tmp_path):
    numbers = [(x, x[:, 0]) for x, _ in clients()]
    for call, said in (
        (lambda: pf.Federation.from_arrays(clients(), split="part"), "found 'part', expected stratified or none"),
        (lambda: pf.Federation.from_arrays(numbers, split="stratified"), "expected none for a regression"),
        (lambda: pf.data.load("digits", split="fold"), "found 'fold', expected stratified or none"),
        (lambda: pf.data.load(tmp_path, split="stratified"), "expected none for a regression"),
        (lambda: pf.data.load(tmp_path, by="x"), "columns.by: .* holds arrays"),
        (lambda: pf.data.load(tmp_path, test_file="t.csv"), "columns.test-file: .* holds arrays"),
        (lambda: pf.data.load("digits", by="x"), "by"),
    ):
        for k, (x, y) in enumerate(numbers):
            np.savez(tmp_path / f"{k}.npz", x=x, y=y)
        with pytest.raises((ConfigError, DataError), match=said) as e:
            call()
        assert "\n" not in str(e.value)
    for option in ("--site", "--test-file"):
        for place in (tmp_path, "heart-disease"):
            refused = cli("run", "--data", place, option, "x", "--out", "r")
            assert option.strip("-").replace("site", "by") in refused.err
            assert refused.err.strip().count("\n") == 0
