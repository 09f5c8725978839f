"""A list of silent nonsense: each case is refused in one line that says what is wrong, or gives the right number.

`CASES` is a table: what is done -> (how, what must come of it). Text is a pattern of the refusal; anything else is the
number known independently. docs/notes/hardening.md lists them."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import polyfed as pf
from polyfed import threats
from polyfed.base.errors import PolyfedError
from polyfed.core.schedule import Asynchronous, Bernoulli, Delays
from polyfed.runs.build import Parts
from polyfed.runs.config import assign, resolve

RNG = np.random.default_rng(7)
SLOPE = RNG.normal(size=3)


def site(m):
    x = RNG.normal(size=(m, 3)).astype(np.float32)
    return x, (x @ SLOPE.astype(np.float32) > 0).astype(np.int64)


SITES = [site(m) for m in (20, 30, 40, 50)]
FED = pf.Federation.from_arrays(SITES, test=SITES)


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def fit(fed=FED, model=None, method=None, **settings):
    settings = {"rounds": 1, "batch_size": None} | settings
    return pf.fit(model or net(), fed, method or pf.FedAvg(0.1), **settings)


def arrays(*sites, **options):
    return pf.Federation.from_arrays(list(sites), **options)


def folder(tmp, one, two=None, **options):
    """A federation from CSV files of these contents."""
    for name, text in {"one": one, "two": two}.items():
        if text is not None:
            (tmp / f"{name}.csv").write_text(text)
    return pf.Federation.from_folder(tmp, **options)


GOOD = "a,b,y\n1,2,0\n2,1,1\n3,4,0\n"


def typed(*texts, methods=("fedavg",)):
    """An experiment from the texts of --set."""
    command: dict = {}
    for text in texts:
        assign(command, text)
    return Parts(resolve(None, command, methods)).experiment


def toml(tmp, text):
    (tmp / "e.toml").write_text(text)
    return resolve(tmp / "e.toml")


def spoiled():
    model = net()
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    return model


def delays(tmp, text):
    (tmp / "d.csv").write_text("client,compute,network\n" + text)
    return Delays.from_file(tmp / "d.csv", FED.names)


def huge():
    x = SITES[0][0].astype(np.float64)
    x[0, 0] = 1e300
    return arrays((x, SITES[0][1]), SITES[1])


def names_that_clash(tmp):
    names = ["a/b", "a_b", "a b", "common"]
    run = fit(pf.Federation.from_arrays(SITES, test=SITES, names=names), method=pf.Local(0.1), out=tmp / "run")
    gap = 0.0
    for i, name in enumerate(names):
        pf.Run.open(tmp / "run").export(name, tmp / f"{i}.safetensors")
        kept = load_file(tmp / f"{i}.safetensors")
        gap = max(gap, *(float((kept[k] - v).abs().max()) for k, v in run.model(i).state_dict().items()))
    return gap


def cohorts(**settings):
    """The most clients that take part in a round."""
    return int(fit(rounds=6, **settings).ledger.groupby("round").size().max())


HALF = {"schedule": Bernoulli(0.5)}
LATE = {"schedule": Asynchronous(Delays())}
BOOLEAN = [(x, y.astype(bool)) for x, y in SITES]

CASES = {
    # data files
    "a number beyond float32": (
        lambda tmp: folder(tmp, one=GOOD, two="a,b,y\n1e39,2,0\n1,2,1\n", standardise="none"),
        r"client 'two', column 'a': found numbers beyond 3\.4e\+38"),
    "a decimal comma": (lambda tmp: folder(tmp, one="a;b;y\n1,5;2;0\n"), r"one\.csv"),
    "a label of 1e20": (
        lambda tmp: folder(tmp, one="a,y\n1,100000000000000000000\n2,0\n", task="classification").classes, 2),
    # arrays and labels
    "labels true and false": (
        lambda tmp: fit(arrays(*BOOLEAN, test=BOOLEAN)).personal.numpy(), fit().personal.numpy()),
    "a number beyond float32 in an array": (lambda tmp: fit(huge()), "found inputs beyond 3.4e.38"),
    "an index that pandas wrote": (lambda tmp: folder(tmp, one=",a,y\n0,1,0\n1,0,1\n"), "column 1 has no name"),
    "masked numbers": (lambda tmp: arrays((np.ma.masked_greater(SITES[0][0], 1), SITES[0][1])), "inputs are masked"),
    # models
    "a model with NaN in it": (lambda tmp: fit(model=spoiled()), "'weight'.*(NaN|not finite)"),
    # settings
    "a negative weight decay": (lambda tmp: fit(weight_decay=-1.0), "weight_decay"),
    "a fraction that rounds to no client": (lambda tmp: cohorts(fraction=0.01), 1),
    "one seed twice": (lambda tmp: typed("seeds=[1,1]"), "seeds"),
    "a number in quotes": (lambda tmp: toml(tmp, '[algorithm]\nname = "fedavg"\nlr = "0.1"'), "algorithm.lr"),
    "a path with a line break": (lambda tmp: resolve(tmp / "a\nb.toml"), r"a\\nb\.toml: no such file"),
    "a name longer than any file's": (
        lambda tmp: typed(f"data.name='{'1' * 420}'"), "unknown data set"),
    "local steps and epochs": (lambda tmp: typed("local-steps=3", "local-epochs=2"), "leave out one"),
    "a fraction beside another schedule": (
        lambda tmp: typed("fraction=0.5", "schedule.name=asynchronous"), "fraction"),
    "one client's delay twice": (
        lambda tmp: delays(tmp, "".join(f"client-{i},1,1\n" for i in (0, 1, 1, 2, 3))),
        "two rows for client 'client-1'"),
    "delays of other clients": (lambda tmp: fit(schedule=Asynchronous(Delays(compute=(1.0, 2.0)))), "for each of 4"),
    "asynchronous without delays": (lambda tmp: sorted(fit(rounds=4, **LATE).ledger["client"]), [0, 1, 2, 3]),
    "an early end by a numpy bool": (
        lambda tmp: fit(rounds=9, callbacks=[lambda p: np.bool_(p.round >= 3)]).trained.t, 3),
    # threats
    "an attack by no client": (lambda tmp: fit(attack=threats.SignFlip(ratio=0.2)), "attack.ratio.*none"),
    "an attack by every client": (lambda tmp: fit(attack=threats.SignFlip(ratio=1.0)), "attack.ratio.*all"),
    "a median of one reply at a time": (lambda tmp: fit(robust=threats.Median(), **LATE), "robust.*1 upload"),
    "a trimmed mean that trims nothing": (lambda tmp: fit(robust=threats.TrimmedMean(0.2)), "robust.*none is cut"),
    "Krum of too few": (lambda tmp: fit(robust=threats.Krum(0.45), fraction=0.5), "robust.*Krum"),
    "a median of half of the clients": (lambda tmp: fit(robust=threats.Median(), **HALF), "robust.*2 uploads"),
    # folders and continuing
    "fewer rounds than are done": (
        lambda tmp: [fit(rounds=n, out=tmp / "run", resume=n < 2) for n in (2, 1)], "rounds"),
    "names that differ in signs alone": (names_that_clash, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refused_or_right(case, tmp_path):
    attempt, expected = CASES[case]
    if not isinstance(expected, str):
        assert attempt(tmp_path) == pytest.approx(expected, abs=1e-6)
        return
    with pytest.raises(PolyfedError) as caught:
        attempt(tmp_path)
    assert re.search(expected, str(caught.value)), str(caught.value)
