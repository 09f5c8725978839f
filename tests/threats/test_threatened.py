"""Attackers and robust rules in the event loop: what they change, what they leave alone, and which methods they compose
with."""

from functools import partial

import numpy as np
import pytest
import torch
from exchanged import private_rows

import polyfed as pf
from polyfed import threats
from polyfed.algorithms import shipped
from polyfed.base.errors import ConfigError
from polyfed.base.randomness import client_keys
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Uniform
from polyfed.engines.local import LocalEngine, make_plan, make_rows

N, DIM = 10, 4


def federation(seed=0, size=None, heads=None):
    """Ten clients of one linear law, of unlike sizes unless told; heads: what each multiplies it with."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=DIM)
    data = []
    for i in range(N):
        x = rng.normal(size=(size or int(rng.integers(10, 20)), DIM))
        data.append((x, (1 if heads is None else heads[i]) * (x @ w) + 0.1 * rng.normal(size=len(x))))
    return pf.Federation.from_arrays(data, test=data)


def line():
    """x -> w . x, from w = 0."""
    linear = torch.nn.Linear(DIM, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(linear.weight)
    return linear


def two_layers(bias=False):
    """x -> h (b . x), plus a bias if asked: a body of one direction and a head of one number."""
    layers = (torch.nn.Linear(k, 1, bias=bias and k == 1, dtype=torch.float64) for k in (DIM, 1))
    model = torch.nn.Sequential(*layers)
    for q in model.parameters():
        torch.nn.init.constant_(q, 0.5)
    return model


def layers_for(method):
    """`two_layers`, with a bias for the one method that needs it."""
    return partial(two_layers, bias=isinstance(method, pf.Recalibrated))


def loop(method, attack=None, robust=None, *, model=line, fed=None, fraction=1.0, chunk=4, plain=False, seed=3):
    fed = fed or federation()
    task = Task(model(), "mse", device="cpu")
    keys = client_keys(fed.names)
    rows, work = make_rows(method, task, N, N, None), Work(steps=5, batch_size=None)
    engine = LocalEngine(task, {"train": fed.train}, rows, keys, work, seed, make_plan(task, N, 8, chunk, 1))
    threat = {} if plain else {"forge": threats.Forging(attack, keys, seed), "rule": robust}
    return Loop(task, fed.train.counts, fed.names, method, Uniform(fraction), engine, seed, **threat)


def run(*args, rounds=5, **settings):
    the_loop = loop(*args, **settings)
    for _ in range(rounds):
        the_loop.step()
    return the_loop


def personal(the_loop):
    return the_loop.personal(np.arange(N))


@pytest.mark.parametrize("method", [pf.FedAvg(), pf.Scaffold(), pf.FPFC(), pf.FedCET(0.05)])
def test_without_a_threat_nothing_changes(method):
    assert torch.equal(personal(run(method)), personal(run(method, plain=True)))
    nobody, plain = run(method, threats.SignFlip(ratio=0.0)), run(method, plain=True)
    assert torch.equal(personal(nobody), personal(plain))
    assert np.array_equal(nobody.scored("train")["loss"], plain.scored("train")["loss"])


class Spy(LocalEngine):
    """Keeps what the server gets from an engine's clients."""

    def __init__(self, engine):
        vars(self).update(vars(engine))
        self.seen, self.private = [], []

    def exchange(self, algorithm, received, round, tally):
        reply = super().exchange(algorithm, received, round, tally)
        self.seen.append({k: v.clone() for k, v in tally.uplinks().items()})
        self.private.append(private_rows(self, round.ids))
        return reply


def test_only_attackers_uploads_are_forged():
    """In the first round honest clients send, and all clients keep, what they would without attackers."""
    the_loop, honest = loop(pf.Ditto(), threats.GaussianNoise(ratio=0.4)), loop(pf.Ditto(), plain=True)
    bad = the_loop.forge.attackers
    the_loop.engine, honest.engine = Spy(the_loop.engine), Spy(honest.engine)
    the_loop.step(), honest.step()
    a, b = the_loop.engine.seen[0]["w"], honest.engine.seen[0]["w"]
    assert bad.sum() == 4
    assert torch.equal(a[~bad], b[~bad])
    assert (a[bad] != b[bad]).all()
    assert torch.equal(the_loop.engine.private[0]["w"], honest.engine.private[0]["w"])
    assert (the_loop.ledger.array()[:, :5] == honest.ledger.array()[:, :5]).all()


def test_every_upload_is_forged_anew():
    """Another value per client, per round, and per exchange of a round."""
    the_loop = loop(pf.FedCET(0.05), threats.SameValue(ratio=0.4))
    bad = the_loop.forge.attackers
    wire = the_loop.engine = Spy(the_loop.engine)
    the_loop.step(), the_loop.step()
    uploads = [up["z"][bad] for up in wire.seen if up]
    assert len(uploads) == 3
    assert all((z == z[:, :1]).all() for z in uploads)
    assert len(torch.cat(uploads)[:, 0].unique()) == 3 * 4


def test_what_is_forged_does_not_depend_on_chunks_or_numbering():
    attack, order = threats.GaussianNoise(ratio=0.4), [3, 1, 9, 0, 2, 8, 7, 4, 6, 5]
    a, b = (run(pf.FPFC(), attack, chunk=c, fraction=0.5) for c in (1, 10))
    assert torch.allclose(personal(a), personal(b), atol=1e-9)
    c = run(pf.FPFC(), attack, fraction=0.5, fed=federation().reorder(order))
    assert torch.allclose(personal(c), personal(a)[order], atol=1e-8)
    assert (c.forge.attackers == a.forge.attackers[order]).all()


def test_scaled_updates_start_from_the_model_received():
    the_loop, honest = loop(pf.FedAvg(), threats.ScaledUpdate(scale=3.0, ratio=1.0)), loop(pf.FedAvg(), plain=True)
    for one in (the_loop, honest):
        one.server |= {"w": torch.ones(DIM, dtype=torch.float64)}
        one.step()
    assert torch.allclose(the_loop.server["w"], 1 + 3 * (honest.server["w"] - 1), atol=1e-12)


@pytest.mark.parametrize(
    "robust", [threats.Median(), threats.Krum(), threats.GeometricMedian(), threats.TrimmedMean(0.4)]
)
def test_the_servers_mean_is_the_robust_value(robust):
    """FedAvg's weighted mean returns what the rule makes of the uploads, whatever the numbers of samples."""
    the_loop = loop(pf.FedAvg(), robust=robust)
    wire = the_loop.engine = Spy(the_loop.engine)
    the_loop.step()
    assert torch.allclose(the_loop.server["w"], robust(wire.seen[0]["w"]), atol=1e-12)


class Mean:
    """The rule that changes nothing, where all clients count the same."""

    name = "mean"

    def __call__(self, values):
        return values.mean(0)


VARIANTS = [
    pf.FedSLR(lam=0.02, form="all-duals"),
    pf.FedSLR(lam=0.02, structure="S+LR"),
    pf.FedLin(0.1, keep_down=0.5),
    pf.FedLin(0.1, keep_up=0.5),
    pf.FedCET(0.05),
    pf.Scaffold(0.1, option=1),
    pf.FPFC(0.05, shared_layers="body"),
    pf.IFCA(0.05, k=3, init_scale=1.0, averaging="gradient"),
    pf.IFCA(0.05, k=3, init_scale=1.0, weighted=True, restarts=2),
    pf.IFCA(0.05, k=3, init_scale=1.0, shared_layers="0"),
    pf.IFCA(0.05, k=3, init_scale=1.0, shared_layers="0", averaging="gradient"),
]
# which no linear network for numbers fits; they take plain means, but FedAS, FedGH, FedTGP and FedPAC's heads
CLASSES_OR_NORMS = (
    pf.FedEM, pf.FedRC, pf.KNNPer,
    pf.FedBN, pf.FedLC, pf.FedRoD, pf.FedAS, pf.FedDBE, pf.FedNTD, pf.FedPAC, pf.FedProto, pf.FedTGP, pf.FedGH, pf.MOON,
)  # fmt: skip
OURS = [
    cls() for cls in shipped().values() if cls not in CLASSES_OR_NORMS and not cls.adapter_train
]  # other tests make methods too


@pytest.mark.parametrize("method", OURS + VARIANTS, ids=str)
def test_a_rule_that_takes_the_mean_changes_nothing(method):
    """On clients of one size every mean is plain: by "mean" server and models are what they are without."""
    fraction = 1.0 if isinstance(method, pf.FedCET) else 0.5
    settings = {"model": layers_for(method), "fed": federation(size=12), "fraction": fraction}
    a, b = run(method, robust=Mean(), **settings), run(method, plain=True, **settings)
    for name, value in b.server.items():
        if value.is_floating_point():
            assert torch.allclose(a.server[name], value, rtol=0, atol=1e-11), name
    assert torch.allclose(personal(a), personal(b), rtol=0, atol=1e-11)


@pytest.mark.parametrize("method", OURS + VARIANTS, ids=str)
def test_what_is_only_averaged_may_be_swapped_between_clients(method):
    """An uplink of which the server takes plain means and sums alone may be dealt out anew among the clients."""
    used = run(method, model=layers_for(method), rounds=2).used
    only = [name for name, words in used.items() if not words & {"rows", "mean within groups"}]
    if not only:
        pytest.skip("it needs the rows of all it receives")

    def server(swapped):
        the_loop = loop(
            method, model=layers_for(method), fed=federation(size=12)
        )  # of one size: weighted means are plain
        whole = the_loop.engine.exchange

        def exchange(algorithm, received, round, tally):
            reduce = tally.reduce
            tally.reduce = lambda up, *more: reduce(
                {k: t.flip(0) if swapped and k in only else t for k, t in up.items()}, *more
            )
            return whole(algorithm, received, round, tally)

        the_loop.engine.exchange = exchange
        for _ in range(3):
            the_loop.step()
        return the_loop.server

    a, b = server(False), server(True)
    for name, value in a.items():
        if value.is_floating_point() and not (isinstance(method, pf.FedSLR) and value.dim() > 1):
            assert torch.allclose(b[name], value, rtol=0, atol=1e-11), name


@pytest.mark.parametrize("method", [pf.FedAvg(), pf.FedTrack(0.1), pf.FedLin(0.5)])
def test_clipping_is_relative_to_the_model_sent_out(method):
    """Also where it went out in an exchange before."""
    the_loop = loop(method, robust=threats.NormClipping(1e-3))
    the_loop.server |= {"w": torch.full((DIM,), 5.0, dtype=torch.float64)}
    the_loop.step()
    assert 0 < float((the_loop.server["w"] - 5).norm()) <= 1e-3 + 1e-12


ATTACKS = [
    threats.SameValue(ratio=0.4), threats.SignFlip(ratio=0.4), threats.GaussianNoise(ratio=0.4),
    threats.ScaledUpdate(scale=-20.0, ratio=0.4),
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=[a.name for a in ATTACKS])
def test_forty_percent_ruin_a_mean_and_not_a_median(attack):
    """Clients of one law: the honest optimum is known, and robust values stay near it."""
    fed = federation()
    x, y = fed.train.x.numpy(), fed.train.y.numpy()
    optimum = torch.from_numpy(np.linalg.lstsq(x, y, rcond=None)[0])

    def error(robust):
        w = run(pf.FedAvg(), attack, robust, rounds=15, fed=fed).server["w"]
        return float((w - optimum).norm())

    assert error(None) > 10
    for robust in (threats.Median(), threats.GeometricMedian(), threats.Krum(0.4)):
        assert error(robust) < 0.2, robust


def test_a_median_within_each_cluster():
    fed = federation(heads=np.repeat([1.0, -1.0], N // 2))
    the_loop = loop(pf.IFCA(0.05, k=3, init_scale=1.0, seed=1), robust=threats.Median(), fed=fed)
    wire = the_loop.engine = Spy(the_loop.engine)
    before = the_loop.server["w"]
    the_loop.step()
    w, cluster = wire.seen[0]["w"], wire.seen[0]["cluster"]
    assert len(cluster.unique()) > 1
    for j, model in enumerate(the_loop.server["w"]):
        mine = w[cluster == j].numpy()
        expected = np.median(mine, axis=0) if len(mine) else before[j].numpy()
        assert np.allclose(model.numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("method", [pf.FPFC(), pf.FedACS(), pf.Local(), pf.FedAMP(), pf.FedSpa()], ids=lambda m: m.name)
def test_a_method_without_a_mean_is_refused_by_name(method):
    with pytest.raises(ConfigError, match=f"robust: {method.name} does not average its uploads, so median cannot"):
        pf.fit(line(), federation(), method, loss="mse", robust=threats.Median(), rounds=1)


def test_tensors_choose_what_is_forged():
    the_loop = loop(pf.Scaffold(), threats.SameValue(ratio=1.0, tensors=("dc",)))
    honest = loop(pf.Scaffold(), plain=True)
    the_loop.step(), honest.step()
    assert torch.equal(the_loop.server["w"], honest.server["w"])
    assert not torch.allclose(the_loop.server["c"], honest.server["c"])
