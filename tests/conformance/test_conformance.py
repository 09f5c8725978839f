"""The conformance table: every method × every property. What each row is, is in `instances.py`."""

import dataclasses
import inspect
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from exchanged import private_rows
from extended import Extended
from halfway import killed
from instances import BATCH, CLASSES, METHODS, NAMES, ROUNDS, SIZES, SMALL, federation, kind_of, loop, model, train
from traffic import stated

import polyfed as pf
from polyfed import core
from polyfed.base import checkpoint
from polyfed.base.errors import Diverged
from polyfed.core.algorithm import Algorithm, Personal, Round
from polyfed.core.rounds import Loop
from polyfed.core.schedule import Asynchronous, Delays, Schedule, Uniform
from polyfed.core.uplinks import Tally
from polyfed.core.worker import Reply
from polyfed.engines.local import LocalEngine
from polyfed.testing import check_method

N = len(SIZES)
HERE = Path(__file__).parent
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
each_class = pytest.mark.parametrize("cls", sorted({type(m) for m in METHODS.values()}, key=lambda c: c.name))


@dataclass(frozen=True)
class Only(Schedule):
    """The same few clients every round."""

    ids: tuple[int, ...]

    def cohort(self, seed, t, keys):
        return np.array(self.ids)


def test_the_table_has_the_methods():
    first = {"local", "fedavg", "fedprox", "scaffold", "ditto", "fedacs", "fedcet", "fpfc"}
    assert first <= {m.name for m in METHODS.values()}


# the engine decides how fast, not what


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "tolerance", "batch_size"),
    [
        (m, kind, torch.float64, 1e-10, batch)
        for m in METHODS
        for kind in (kind_of(METHODS[m]), "mlp", "cnn")
        for batch in (BATCH, None)
        if (kind, batch) in ((kind_of(METHODS[m]), BATCH), ("cnn", None)) or ("(" not in m and batch == BATCH)
    ]
    + [(m, kind_of(METHODS[m]), torch.float32, 1e-5, BATCH) for m in METHODS if "(" not in m],
)
def test_chunks_and_workers_do_not_change_the_models(name, kind, dtype, tolerance, batch_size):
    """Two rounds: what the first leaves at the server and at the clients enters the second."""

    def personal(chunk, workers):
        settings = {"dtype": dtype, "batch_size": batch_size, "chunk": chunk, "workers": workers}
        return train(METHODS[name], kind=kind, local_epochs=1, rounds=2, evaluate_every=0, **settings).personal

    together = personal(N, 1)
    for chunk, workers in ((1, 2), (2, 2)):
        assert (personal(chunk, workers) - together).abs().max() <= tolerance, (chunk, workers)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@each_method
def test_relabelling_the_clients_relabels_the_result(method, fraction):
    order = [3, 0, 5, 1, 4, 2]
    a = train(method, dtype=torch.float64, fraction=fraction)
    b = train(method, federation().reorder(order), dtype=torch.float64, fraction=fraction)
    assert (b.personal - a.personal[order]).abs().max() <= 1e-9
    for key, values in a.trained.ledger.by_client(N).items():
        assert (b.trained.ledger.by_client(N)[key] == values[order]).all(), key


@each_method
def test_same_seed_same_bits_other_seed_other_bits(method):
    a, b, c = (train(method, fraction=0.5, seed=seed, workers=2, chunk=2).personal for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


@cache
def other_test_split() -> pf.Federation:
    """The small federation with other test images, labels and counts."""
    fed, rng = federation(), np.random.default_rng(1)
    test = [(50 * rng.normal(size=(9, 1, 6, 6)).astype(np.float32), rng.integers(CLASSES, size=9)) for _ in range(N)]
    return pf.Federation.from_arrays([fed.train.client(i) for i in range(N)], test, names=NAMES, classes=CLASSES)


@each_method
def test_the_test_split_changes_no_bit_of_what_is_trained(method):
    """Neither the models nor the server's state nor what clients keep: test samples are for metrics alone."""
    a, b = (train(method, fed, rounds=2, fraction=0.5) for fed in (federation(), other_test_split()))
    assert torch.equal(a.personal, b.personal)
    for mine, yours in ((a.server, b.server), (a.trained.engine.rows.tensors, b.trained.engine.rows.tensors)):
        assert mine.keys() == yours.keys()
        assert all(torch.equal(mine[k], yours[k]) for k in mine)
    assert not np.array_equal(a.final["test"]["loss"], b.final["test"]["loss"])


# what crosses the network


@dataclass
class Exchange:
    """One exchange as the wire saw it, with copies of what it was made from."""

    round: Round
    down: dict[str, torch.Tensor]
    up: dict[str, torch.Tensor]
    private: dict[str, torch.Tensor]  # after it
    server: dict[str, torch.Tensor]  # before it
    shared: list[str]  # messages that lie in the same memory as a private row


class Wire(LocalEngine):
    """A loop's engine, in its place, that keeps a record of what it carries."""

    def __init__(self, loop: Loop):
        vars(self).update(vars(loop.engine))
        self.loop, self.record = loop, []
        loop.engine = self

    def exchange(self, algorithm, received, round, tally, server=None) -> Reply:
        before = {k: v.clone() for k, v in self.loop.server.items()}
        tally.added = {}  # every row is kept
        reply = super().exchange(algorithm, received, round, tally)
        up, private, new = (
            dict(tally.uplinks()),
            private_rows(self, round.ids),
            [t for _, rows in self._new for t in rows.values()],
        )
        homes = {t.untyped_storage().data_ptr() for t in (*self.rows.tensors.values(), *new)}
        messages = {f"down {k}": t for k, t in received.items()} | {f"up {k}": t for k, t in up.items()}
        shared = [k for k, t in messages.items() if t.untyped_storage().data_ptr() in homes]
        copies = [{k: t.clone() for k, t in part.items()} for part in (received, up, private)]
        self.record.append(Exchange(round, *copies, before, shared))
        return reply


def watched(method: Algorithm, rounds: int = ROUNDS, **settings) -> tuple[Loop, list[Exchange]]:
    the_loop = loop(method, **settings)
    wire = Wire(the_loop)
    for _ in range(rounds):
        the_loop.step()
    return the_loop, wire.record


@each_method
def test_no_message_lies_in_the_memory_of_a_private_row(method):
    for exchange in watched(method)[1]:
        assert exchange.shared == []


@pytest.mark.parametrize("schedule", [Uniform(), Uniform(0.5)], ids=["all", "half"])
@each_method
def test_the_downlink_is_a_function_of_the_server_state_alone(method, schedule):
    the_loop, record = watched(method, schedule=schedule)
    for tensor in the_loop.engine.rows.tensors.values():
        tensor.fill_(float("nan"))
    twin = dataclasses.replace(method)  # nothing remembered inside the method either
    for exchange in record:
        server = {k: v.clone() for k, v in exchange.server.items()}
        again = twin.downlink(server, exchange.round)
        m = len(exchange.round.ids)
        now = {k: t.expand(m, *t.shape) for k, t in again.shared.items()} | dict(again.each)
        assert now.keys() == exchange.down.keys()
        assert all(torch.equal(now[k], exchange.down[k]) for k in now)
        assert all(torch.equal(server[k], exchange.server[k]) for k in server), "the downlink changed the server"


def letting(tensors) -> None:
    """Numbers that are not finite are let through."""


def one_round(the_loop: Loop, ids: np.ndarray) -> list[dict[str, torch.Tensor]]:
    """The uplinks of one round, phase by phase, the clients' state as it is now."""
    uplinks = []
    for phase in range(the_loop.algorithm.phases(the_loop.t)):
        round = the_loop.round(ids, phase)
        down = the_loop.algorithm.downlink(the_loop.server, round)
        m = len(ids)
        messages = {k: t.expand(m, *t.shape) for k, t in down.shared.items()} | dict(down.each)
        tally = Tally(round, messages)
        with patch.object(core.worker, "diverged", letting), patch.object(core.uplinks, "diverged", letting):
            the_loop.engine.exchange(the_loop.algorithm, messages, round, tally)
        the_loop.server = the_loop.algorithm.aggregate(the_loop.server, tally.uplinks(), round)
        the_loop.engine.commit()
        uplinks.append({k: t.clone() for k, t in tally.uplinks().items()})
    return uplinks


def columns(t: torch.Tensor) -> set[bytes]:
    """The columns of [s, p], each as bytes."""
    return {column.numpy().tobytes() for column in t.T.contiguous()}


@each_method
def test_a_personal_model_is_either_the_uplink_or_unknown_to_it(method):
    """A method whose deployed model lives with the client uploads numbers of that model, as its equations say, or an
    uplink that does not depend on it at all: then NaN in its place changes no bit of what is sent."""
    if not isinstance(method, Personal):
        pytest.skip("its clients keep no model of their own")
    ids = np.arange(N)
    honest, poisoned = loop(method), loop(method)
    for the_loop in (honest, poisoned):
        the_loop.step()
    poisoned.engine.rows.tensors["w"].fill_(float("nan"))
    sent, suspect = one_round(honest, ids), one_round(poisoned, ids)
    blind = all(torch.equal(a[k], b[k]) for a, b in zip(sent, suspect, strict=True) for k in a)
    if blind:
        return
    for exchange in watched(method)[1]:
        model_now, zero = columns(exchange.private["w"]), columns(torch.zeros_like(exchange.private["w"][:, :1]))
        for name, t in exchange.up.items():
            if t.dim() > 1 and t.shape[1] > 1:
                assert columns(t) <= model_now | zero, f"uplink {name} is made from the personal model without being it"


@pytest.mark.parametrize("schedule", [Uniform(), Uniform(0.5)], ids=["all", "half"])
@each_method
def test_the_ledger_weighs_what_was_sent_and_that_is_what_the_paper_says(method, schedule):
    the_loop, record = watched(method, schedule=schedule)
    sums = np.zeros((ROUNDS, N, 2), dtype=np.int64)
    trips = np.zeros((ROUNDS, N), dtype=np.int64)
    for e in record:
        for row, i in enumerate(e.round.ids.tolist()):
            moved = [sum(t[row].numel() * t.element_size() for t in part.values()) for part in (e.down, e.up)]
            sums[e.round.t, i] += moved
            trips[e.round.t, i] += 1
    frame = the_loop.ledger.frame()
    assert len(frame) == (trips > 0).sum()
    for row in frame.itertuples():
        assert (row.down_bytes, row.up_bytes) == tuple(sums[row.round, row.client])
        assert row.exchanges <= trips[row.round, row.client]
    unit, told = 4 * the_loop.task.p, stated(method, the_loop.task.layout)
    whole = 4 * len(the_loop.task.layout.entries) if told.whole else 0
    met = np.cumsum(trips > 0, axis=0) > 1
    for t in range(ROUNDS):
        for way, units in enumerate((told.down, told.up)):
            times = 1 + told.before if t == 0 else 1
            extra = sums[t][trips[t] > 0, way] - times * round(units * unit, 6)
            if way == 1 and told.signature:
                extra = extra[met[t][trips[t] > 0]]
            assert (extra >= -whole).all()
            assert (extra <= times * 4 * told.numbers + whole).all()


@pytest.mark.parametrize("schedule", [Uniform(0.7), Asynchronous(Delays("uniform", 0, 20))], ids=["cohorts", "late"])
@each_method
def test_float64_throughout(method, schedule, monkeypatch):
    """Whatever a float64 run sends, keeps and deploys is what extended precision gives, to a few rounding errors.

    Not dtypes but values: every operator of a few rounds is repeated in numpy's longdouble on values of its own
    (`extended.py`). The runs differ by less than 1e-14. A number that goes through float32 anywhere on its way,
    though it may end in a float64 tensor, differs by 1e-8.
    """
    if schedule.late(N) and any(method.in_step(N, t) for t in range(ROUNDS)):
        pytest.skip("its replies are never late")
    monkeypatch.setenv("POLYFED_NATIVE", "0")  # torch's operators are repeated; the kernel has test_native.py
    the_loop, record = watched(method, rounds=0, dtype=torch.float64, schedule=schedule)
    with Extended() as exact:
        for _ in range(6 if schedule.late(N) else ROUNDS):
            the_loop.step()
        deployed = the_loop.personal(np.arange(N))
    found = {"a deployed model": deployed}
    found |= {f"server {k}": t for k, t in the_loop.server.items()}
    found |= {f"client {k}": t for k, t in the_loop.engine.rows.tensors.items()}
    for e in record:
        found |= {f"round {e.round.t}, down {k}": t for k, t in e.down.items()}
        found |= {f"round {e.round.t}, up {k}": t for k, t in e.up.items()}
    errors = {name: exact.error(t) for name, t in found.items() if t.is_floating_point()}
    assert all(error < 1e-12 for error in errors.values()), errors
    assert exact.taken < 1e-12, "a number that left torch for Python"
    run = train(method, dtype=torch.float64, rounds=1, local_epochs=1, evaluate_every=0)
    assert next(run.model(0).parameters()).dtype == torch.float64


def test_a_detour_through_float32_is_found():
    """The detector itself: a float32 factor in a float64 product, one number taken out, and nothing in clean sums."""
    x, steps = torch.rand(4, 3, dtype=torch.float64), torch.arange(1, 5)
    with Extended() as exact:
        clean = x / (steps[:, None].double() * 0.1) + x.mean(0)
        assert exact.taken == 0
        slip = x / (steps[:, None] * 0.1) + x.mean(0)
        float((steps * 0.1)[2])
    assert slip.dtype == torch.float64
    assert exact.error(clean) < 1e-15
    assert exact.error(slip) > 1e-9
    assert exact.taken > 1e-9


# nobody is forgotten


@each_method
def test_a_client_smaller_than_a_batch_trains(method):
    run = train(method, schedule=Only((SMALL,)), local_epochs=1, rounds=8)
    w0 = run.trained.task.w0
    assert SIZES[SMALL] < BATCH
    assert (run.personal[SMALL] - w0).norm() > 1e-4 * w0.norm()


@each_method
def test_a_client_that_is_never_picked_is_evaluated(method):
    run = train(method, schedule=Only(tuple(range(1, N))))
    assert run.clients["rounds"].tolist() == [0] + [ROUNDS] * (N - 1)
    for split in ("train", "test"):
        for metric, values in run.final[split].items():
            assert np.isfinite(values).all(), (split, metric)
    assert torch.isfinite(run.personal).all()
    x, y = federation().test.client(0)
    with torch.no_grad():
        own = (run.model(0)(x).argmax(1) == y).double().mean()
    assert run.clients["test_accuracy"][0] == pytest.approx(float(own))


# killed and resumed

KILLS = [("after", t) for t in range(ROUNDS + 1)] + [("draft", 2), ("rename", 1), ("rename", ROUNDS)]
EVERY = ("fedavg", "scaffold", "ditto", "fedcet", "fpfc", "ifca", "fedslr")  # kinds of state; the others die less often
DEATHS = [(m, *kill) for m in METHODS for kill in (KILLS if m in EVERY else [("after", 2), ("rename", ROUNDS)])]


@pytest.fixture(scope="module")
def graves(tmp_path_factory):
    """The folders of all killed runs, {(method, when, round): path}."""
    return killed(tmp_path_factory.mktemp("killed"), DEATHS, "memory")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    return {
        name: train(method, out=root / str(i), checkpoint_every=1) for i, (name, method) in enumerate(METHODS.items())
    }


def lines(run: pf.Run) -> list[dict]:
    assert run.folder is not None
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


@pytest.mark.xdist_group("deaths")  # all of them are prepared at once, by one worker
@pytest.mark.parametrize(("name", "when", "t"), DEATHS, ids=[f"{m}-{when}-{t}" for m, when, t in DEATHS])
def test_kill_minus_nine_then_resume_gives_the_same_bits(name, when, t, graves, undisturbed):
    folder, expected = graves[name, when, t], undisturbed[name]
    assert not (folder / "summary.json").exists()
    run = train(METHODS[name], out=folder, checkpoint_every=1, resume=True)
    assert run.status == "finished"
    for kind, a, b in (
        ("server", run.server, expected.server),
        ("client", run.trained.engine.rows.tensors, expected.trained.engine.rows.tensors),
    ):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]), f"{kind} {key}"
    assert torch.equal(run.personal, expected.personal)
    assert run.ledger.drop(columns="seconds").equals(expected.ledger.drop(columns="seconds"))
    assert lines(run) == lines(expected)
    assert run.clients.equals(expected.clients)


# a run that explodes


@pytest.mark.parametrize("lr", [30.0, 1e12], ids=["slowly", "at once"])
@each_method
def test_divergence_is_loud_and_leaves_a_finite_checkpoint(method, lr, tmp_path):
    if "lr" not in {f.name for f in dataclasses.fields(method)}:
        pytest.skip("it has no step size")
    if isinstance(method, pf.FedAdagrad | pf.FedAdam | pf.FedYogi) and lr == 30:
        pytest.skip("moves of any length become steps of about server_lr: it does not explode slowly")
    key = "personal_lr" if isinstance(method, pf.PFedMe) else "lr"  # pFedMe refuses such an lr; its inner steps explode
    wild = dataclasses.replace(method, **{key: lr})
    fed = federation(regression=True)
    kind = kind_of(method)
    with pytest.raises(Diverged) as error:
        pf.fit(model(kind, outputs=1), fed, wild, loss="mse", rounds=60, batch_size=BATCH, workers=1, out=tmp_path)
    found = re.match(r"round (\d+): client '(.+?)'", str(error.value))
    assert found, str(error.value)
    assert found[2] in NAMES
    assert "\n" not in str(error.value)
    tensors, meta, warnings = checkpoint.load(tmp_path / "checkpoint")
    assert warnings == []
    assert meta["t"] <= int(found[1])
    assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())


# what a method says about itself


@each_class
def test_the_docstring_documents_every_field(cls):
    doc = inspect.getdoc(cls)
    assert doc is not None
    assert len(doc.splitlines()[0]) > 10
    assert "Parameters\n----------\n" in doc, "no Parameters section"
    section = re.split(r"\n\n\w[\w ]*\n-{3,}\n", doc.split("Parameters\n----------\n")[1])[0]
    documented = [n.strip() for line in re.findall(r"^(\w[\w, ]*) : \S", section, re.M) for n in line.split(",")]
    assert documented == [f.name for f in dataclasses.fields(cls)]


@each_method
def test_a_sample_of_weight_two_counts_twice(method):
    check_method(method, rows="a sample of weight two counts twice")


@each_class
def test_the_citation_is_bibtex(cls):
    assert re.match(r"@\w+\{[\w:-]+,\n", cls.citation), cls.citation
    assert cls.citation.count("{") == cls.citation.count("}")
    assert "title" in cls.citation


@each_class
def test_the_certificates_exist(cls):
    """Each is "tests/algorithms/test_x.py::test_name: what it proves", and that test is there."""
    assert cls.certificates, f"{cls.__name__} names no certificate"
    root = HERE.parent.parent
    for line in cls.certificates:
        found = re.fullmatch(r"(tests/[\w/]+\.py)::(\w+): \S.*", line)
        assert found, line
        path = root / found[1]
        assert path.is_file(), f"{found[1]} does not exist"
        assert re.search(rf"^def {found[2]}\(", path.read_text(), re.M), f"{found[2]} is not in {found[1]}"
