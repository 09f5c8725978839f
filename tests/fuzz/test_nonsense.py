"""A list of silent nonsense: each case is refused in one line that says what is wrong, or gives the right number.

`CASES` is a table: what is done -> (how, what must come of it). Text is a pattern of the refusal; anything else is the
number known independently. docs/notes/hardening.md lists them."""

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import polyfed as pf
from polyfed import threats
from polyfed.base.errors import PolyfedError
from polyfed.core.schedule import Asynchronous, Bernoulli, Delays
from polyfed.runs.build import Parts
from polyfed.runs.config import assign, resolve
from polyfed.runs.ownership import unsealed

RNG = np.random.default_rng(7)
SLOPE = RNG.normal(size=3)


def site(m, classes=True, d=3):
    x = RNG.normal(size=(m, d)).astype(np.float32)
    y = x[:, :3] @ SLOPE.astype(np.float32)
    return (x, (y > 0).astype(np.int64)) if classes else (x, y)


SITES = [site(m) for m in (20, 30, 40, 50)]
FED = pf.Federation.from_arrays(SITES, test=SITES)
LINES = [site(m, classes=False) for m in (20, 30)]
REGRESSION = pf.Federation.from_arrays(LINES, test=LINES)


def net(outputs=2, inputs=3):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


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


def resumed(tmp, fed=FED, **changed):
    """A run of two rounds, then continued to four with something changed."""
    fit(rounds=2, out=tmp / "run", model=changed.pop("before", None))
    return fit(fed, **({"rounds": 4, "out": tmp / "run", "resume": True} | changed))


def spoiled():
    model = net()
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    return model


def cut(file):
    file.write_text("\n".join(file.read_text().splitlines()[:6]))


def delays(tmp, text):
    (tmp / "d.csv").write_text("client,compute,network\n" + text)
    return Delays.from_file(tmp / "d.csv", FED.names)


def huge():
    x = SITES[0][0].astype(np.float64)
    x[0, 0] = 1e300
    return arrays((x, SITES[0][1]), SITES[1])


def same(a, b):
    """The largest difference between the models of two runs."""
    return float((a.personal - b.personal).abs().max())


def accuracy_of_one_logit():
    def bce(output, target):
        return F.binary_cross_entropy_with_logits(output[:, 0], target.float())

    run = fit(model=net(1), loss=bce, rounds=20)
    with torch.no_grad():
        right = [
            float(((run.model(i)(torch.from_numpy(x))[:, 0] > 0).numpy() == y).mean()) for i, (x, y) in enumerate(SITES)
        ]
    return float(np.abs(run.clients["test_accuracy"] - right).max())


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
OTHER = (SITES[0][0][:, :2], SITES[0][1])

CASES = {
    # data files
    "an empty cell": (
        lambda tmp: folder(tmp, one="a,b,y\n1,,0\n2,1,1\n", missing="refuse"),
        r"one\.csv, line 2, column 'b': found '', a gap"),
    "a cell that says nan": (
        lambda tmp: folder(tmp, one=GOOD, two="a,b,y\nnan,1,0\n", missing="refuse"),
        r"two\.csv, line 2, column 'a': found 'nan', a gap"),
    "a number beyond float32": (
        lambda tmp: folder(tmp, one=GOOD, two="a,b,y\n1e39,2,0\n1,2,1\n", standardise="none"),
        r"client 'two', column 'a': found numbers beyond 3\.4e\+38"),
    "a decimal comma": (lambda tmp: folder(tmp, one="a;b;y\n1,5;2;0\n"), r"one\.csv"),
    "no target column": (lambda tmp: (folder(tmp, one=GOOD), pf.Federation.from_folder(tmp, "z")), "no column 'z'"),
    "no header": (lambda tmp: folder(tmp, one="1,2,0\n2,1,1\n"), "header"),
    "a header and no rows": (lambda tmp: folder(tmp, one=GOOD, two="a,b,y\n"), "'two' has no training samples"),
    "a label of 1e20": (
        lambda tmp: folder(tmp, one="a,y\n1,100000000000000000000\n2,0\n", task="classification").classes, 2),
    # arrays and labels
    "two clients of one name": (lambda tmp: arrays(*SITES[:2], names=["a", "a"]), "called 'a'"),
    "one class in all": (lambda tmp: arrays(*[(x, 0 * y) for x, y in SITES]), "two classes"),
    "labels 1 and 2": (lambda tmp: arrays(*[(x, y + 1) for x, y in SITES]).classes, 2),
    "labels -1 and 1": (lambda tmp: arrays(*[(x, 2 * y - 1) for x, y in SITES]).classes, 2),
    "labels true and false": (lambda tmp: same(fit(), fit(arrays(*BOOLEAN, test=BOOLEAN))), 0),
    "a test label never trained": (
        lambda tmp: arrays(SITES[0], test=[(SITES[0][0], SITES[0][1] + 1)]), "found label 2, expected 0 to 1"),
    "a label of 2^63": (lambda tmp: arrays((SITES[0][0], np.full(20, 2**63, np.uint64))), "9223372036854775808"),
    "clients of other features": (lambda tmp: arrays(SITES[1], OTHER), "client-1.*inputs are of shape"),
    "a client of one sample": (lambda tmp: arrays(*SITES, site(1)).test.counts[-1], 0),
    "a test fraction of 1": (lambda tmp: arrays(*SITES, test_fraction=1), "test fraction: found 1"),
    "a number beyond float32 in an array": (lambda tmp: fit(huge()), "found inputs beyond 3.4e.38"),
    "an index that pandas wrote": (lambda tmp: folder(tmp, one=",a,y\n0,1,0\n1,0,1\n"), "column 1 has no name"),
    "masked numbers": (lambda tmp: arrays((np.ma.masked_greater(SITES[0][0], 1), SITES[0][1])), "inputs are masked"),
    "labels written as 0.0 and 1.0": (
        lambda tmp: folder(tmp, one="a,y\n1,0.0\n2,1.0\n3,1.0\n").classes, 2),
    # models and losses
    "a callable loss on [N, 1] and [N]": (
        lambda tmp: same(*(fit(REGRESSION, net(1), loss=loss, rounds=5) for loss in ("mse", F.mse_loss))), 0),
    "one logit for two classes": (lambda tmp: accuracy_of_one_logit(), 0),
    "a model with NaN in it": (lambda tmp: fit(model=spoiled()), "'weight'.*(NaN|not finite)"),
    "a parameter without use": (
        lambda tmp: float(not fit(model=Unused()).personal.isfinite().all()), 0),
    "float16": (lambda tmp: toml(tmp, 'dtype = "float16"'), "dtype"),
    # settings
    "a negative weight decay": (lambda tmp: fit(weight_decay=-1.0), "weight_decay"),
    "no local steps": (lambda tmp: fit(local_steps=lambda t: 0), "local_steps"),
    "a fraction that rounds to no client": (lambda tmp: cohorts(fraction=0.01), 1),
    "a batch larger than the data": (lambda tmp: same(fit(batch_size=10**6), fit(batch_size=None)), 0),
    "evaluation beyond the last round": (lambda tmp: fit(rounds=3, evaluate_every=10).records[-1].round, 3),
    "one seed twice": (lambda tmp: typed("seeds=[1,1]"), "seeds"),
    "a method twice": (lambda tmp: typed(methods=("fedavg", "fedavg")), "listed twice"),
    "true for a number": (lambda tmp: typed("rounds=true"), "rounds"),
    "a number in quotes": (lambda tmp: toml(tmp, '[algorithm]\nname = "fedavg"\nlr = "0.1"'), "algorithm.lr"),
    "a path with a line break": (lambda tmp: resolve(tmp / "a\nb.toml"), r"a\\nb\.toml: no such file"),
    "a name longer than any file's": (
        lambda tmp: typed(f"data.name='{'1' * 420}'"), "unknown data set"),
    "a key that is misspelt": (lambda tmp: typed("local-step=3"), "local-steps"),
    "local steps and epochs": (lambda tmp: typed("local-steps=3", "local-epochs=2"), "leave out one"),
    "another name than the method typed": (lambda tmp: typed("algorithm.name=ditto"), "leave out one"),
    "clients where the data have their own": (lambda tmp: typed("data.clients=7").data, "clients"),
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
    "a step size changed before going on": (lambda tmp: resumed(tmp, method=pf.FedAvg(0.2)), "algorithm is"),
    "fewer rounds than are done": (lambda tmp: resumed(tmp, rounds=1), "rounds"),
    "a cut config.toml": (
        lambda tmp: (fit(out=tmp / "run"), cut(tmp / "run/config.toml"), unsealed(tmp / "run/config.toml")), "was cut"),
    "names that differ in signs alone": (names_that_clash, 0),
}  # fmt: skip


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = net(), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("case", CASES)
def test_refused_or_right(case, tmp_path):
    attempt, expected = CASES[case]
    if not isinstance(expected, str):
        assert attempt(tmp_path) == pytest.approx(expected, abs=1e-6)
        return
    with pytest.raises(PolyfedError) as caught:
        attempt(tmp_path)
    assert re.search(expected, str(caught.value)), str(caught.value)
