"""Private runs in simulation: the sums are the plain ones, the noise is what the account says, and what cannot be
private is refused by name."""

import json
import math

import numpy as np
import pytest
import torch

import polyfed as pf
import polyfed.algorithms
from polyfed.algorithms import shipped
from polyfed.base.errors import ConfigError, ModelError, RunError
from polyfed.core.algorithm import REGISTRY, Algorithm
from polyfed.runs.privacy import Privacy
from polyfed.runs.trainer import Trainer, prepare
from polyfed.runs.training import Training
from polyfed_privacy.accounts import epsilon_of, rho_of
from polyfed_privacy.guard import Guard
from polyfed_privacy.ledger import Ledger
from polyfed_privacy.noise import Gaussian
from polyfed_privacy.planned import Planned

SUMS = [
    "apfl", "ditto", "fedadagrad", "fedadam", "fedyogi", "fedavg", "fedavg-ft", "fedavgm", "fedbabu", "feddyn",
    "fedlin", "fedper", "fedprox", "fedrep", "fedslr", "fedtrack", "gpgd", "lg-fedavg", "lpgd", "per-fedavg", "pfedme",
    "recalibrated", "scaffold",
]  # fmt: skip
ROWS = [
    "cfl", "fedacs", "fedamp", "fedasync", "fedbuff", "fedspa", "fpfc", "heurfedamp", "hypcluster", "ifca", "pacfl",
]  # fmt: skip
BY_ROW = [  # their local steps read nothing that is made of samples
    "ditto", "fedadagrad", "fedadam", "fedyogi", "fedavg", "fedavg-ft", "fedavgm", "fedbabu", "fedprox", "gpgd", "lpgd",
    "per-fedavg", "pfedme", "recalibrated",
]  # fmt: skip
SIZES = {"bern": 40, "oslo": 24, "riga": 9, "wien": 31}


def federation(inputs: int = 5, scale: float = 1.0) -> pf.Federation:
    rng = np.random.default_rng(0)
    sites = [(scale * rng.normal(size=(n, inputs)), np.arange(n) % 3) for n in SIZES.values()]
    return pf.Federation.from_arrays(sites, names=[*SIZES], classes=3, test_fraction=0)


def net(inputs: int = 5, hidden: int | None = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    if hidden is None:
        return torch.nn.Linear(inputs, 3)
    return torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 3))


def method(name: str) -> Algorithm:
    return REGISTRY.make(name, {"lr": 0.05} if name == "fedcet" else {})


PRIVATE = {"sums": "secure", "epsilon": 2.0, "delta": 1e-5, "clip": 1.0}
SITE = PRIVATE | {"unit": "site"}


def settings(rounds: int = 6, privacy: dict | None = None, **more) -> Training:
    given = {"rounds": rounds, "batch_size": None, "local_steps": 1, "evaluate_every": 0, "privacy": privacy}
    return Training(**(given | more))


def alike(plain, secure) -> None:
    """The servers' states but for rounding; float32 keeps seven digits."""
    for key, value in plain.server.items():
        if value.is_floating_point() and value.numel():
            gap = (value.double() - secure.server[key].double()).abs().max()
            assert gap <= 4e-6 * max(1.0, float(value.abs().max()))


def planned(trainer: Trainer) -> Planned:
    return trainer.door.args[0]


@pytest.mark.parametrize("name", [*SUMS, "fedcet"])
@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_secure_sums_are_the_plain_ones_but_for_rounding(name, fraction):
    """With everybody, and with each of four sites absent in turn."""
    fed = federation()
    plain, secure = (
        prepare(net(), fed, method(name), settings(6, p, local_steps=3, fraction=fraction)).run()
        for p in (None, {"sums": "secure"})
    )
    alike(plain, secure)
    up = [run.trained.ledger.totals()[1] for run in (plain, secure)]
    assert up[1] == 2 * up[0]
    there = secure.trained.ledger.frame().groupby("round")["client"].apply(set)
    absent = [{0, 1, 2, 3} - who for who in there]
    assert [who for who in ({0}, {1}, {2}, {3}) if who in absent] == ([{0}, {1}, {2}, {3}] if fraction < 1 else [])


@pytest.mark.parametrize(
    ("cls", "given"),
    [
        (pf.HypCluster, {}),
        (pf.IFCA, {"averaging": "gradient"}),
        (pf.IFCA, {"averaging": "shrinking"}),
        (pf.IFCA, {"shared_layers": "body", "restarts": 2}),
    ],
)
@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_one_hot_sums_are_the_means_within_clusters(cls, given, fraction):
    """Every model, and the one that each client deploys; no tensor of the server has a row per client."""
    fed, how = federation(), settings(6, fraction=fraction, local_steps=1)
    plain = prepare(net(), fed, cls(k=3, init_scale=0.5, **given), how).run()
    how = settings(6, {"sums": "secure"}, fraction=fraction, local_steps=1)
    run = prepare(net(), fed, cls(k=3, init_scale=0.5, one_hot=True, **given), how).run()
    assert (plain.server["w"] - run.server["w"]).abs().max() < 4e-6
    assert len(set(plain.clusters)) > 1
    assert run.clusters is None
    assert np.allclose(plain.personal, run.personal, atol=4e-6)
    assert not [name for name, t in run.server.items() if len(t) == 4 and name != "known"]
    bytes_up = [r.trained.ledger.frame().groupby("round")["up_bytes"].max()[5] for r in (plain, run)]
    p = run.server["w"].shape[1]
    assert bytes_up == [4 * p + 4, 8 * (3 * p + 3)]


@pytest.mark.parametrize(
    ("name", "rounding"), [("scaffold", 1e-10), ("feddyn", 1e-10), ("fedslr", 1e-10), ("fedcet", 1e-13)]
)
def test_sums_that_a_method_rests_on_hold_under_secure_sums(name, rounding):
    """FedCET's clients keep what they send, and go on with what they have sent: their sum is exact."""
    how = settings(20, {"sums": "secure"}, local_steps=3, dtype="float64")
    run = prepare(net(), federation(), method(name), how).run()
    rows = run.trained.engine.private(torch.arange(4))
    for gap in run.algorithm.conserved(run.server, rows).values():
        assert gap.abs().max() < rounding


OTHERS = [name for name in shipped() if name not in SUMS]


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_method_has_the_plain_sums_or_is_refused_by_name(name):
    fed, said = federation(), ""
    try:
        secure = prepare(net(), fed, method(name), settings(3, {"sums": "secure"}))
        alike(prepare(net(), fed, method(name), settings(3)).run(), secure.run())
    except (ConfigError, ModelError) as e:  # one that needs every client's own, or a model of another kind
        said = str(e)
    if name in ROWS:
        assert f"privacy: the server of {name} needs every client's own" in said


def test_numbers_that_a_sum_does_not_hold_are_refused_at_the_client():
    with pytest.raises(
        RunError, match=r"client 'bern': uplink 'w': found .*, expected numbers between .*: their sum would wrap"
    ):
        prepare(net(hidden=None), federation(scale=1e8), pf.FedAvg(lr=1e4), settings(2, {"sums": "secure"})).run()


WIDE_CLIP = PRIVATE | {"sums": "open", "unit": "site", "noise": "server", "clip": 1e6}  # noise beyond the integers
SMALL_EPSILON = PRIVATE | {"sums": "open", "noise": "own", "epsilon": 1e-9, "delta": 1e-300}
IDLE = {"clip": 0.05, "unit": "site", "delta": 1e-6, "noise": "server", "absent": 1, "per": "run"}  # without epsilon


@pytest.mark.parametrize(
    ("given", "privacy", "line"),
    [
        ({"robust": {"name": "median"}}, {"sums": "secure"}, "robust: not with"),
        ({"attack": {"name": "sign-flip", "ratio": 0.3}}, {"sums": "secure"}, "attack: not with"),
        ({"engine": "ray"}, {"sums": "secure"}, "engine: not with"),
        ({}, {"sums": "secure", "threshold": 5}, "privacy.threshold: found 5, and 4 sites"),
        ({}, {**PRIVATE, "absent": 4}, "privacy.absent: found 4"),
        (
            {"schedule": {"name": "asynchronous", "concurrency": 2, "delays": "uniform:1,2"}},
            {"sums": "secure"},
            "one by one",
        ),
        ({"dtype": "float32"}, PRIVATE, "dtype: found float32, expected float64"),
        ({}, {**PRIVATE, "delta": 0.02}, "privacy.delta: found 0.02, expected less than 1 in 104 rows"),
        ({"local_steps": 2}, PRIVATE, "privacy.noise: shared adds noise once"),
        ({"batch_size": 8}, PRIVATE, "privacy.noise: shared adds noise once"),
        ({}, WIDE_CLIP, r"privacy\.clip: found 1e\+06, expected less than "),
        ({}, SMALL_EPSILON, r"privacy\.epsilon: found 1e-09, expected a larger one"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_said_before_training(given, privacy, line):
    with pytest.raises(ConfigError, match=line):
        prepare(net(), federation(), pf.FedAvg(), settings(privacy=privacy, **given)).run()


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"epsilon": 0.0, "clip": 1.0}, "privacy.epsilon"),
        ({"epsilon": math.inf, "clip": 1.0}, "privacy.epsilon"),
        ({"epsilon": 1.0, "noise": "own"}, "privacy.clip"),
        ({"epsilon": 1.0, "clip": 0.0, "noise": "own"}, "privacy.clip"),
        ({"epsilon": 1.0, "clip": 1.0}, "privacy.sums.*expected secure"),
        ({"epsilon": 1.0, "clip": 1.0, "unit": "site", "noise": "own"}, "privacy.noise"),
        ({"delta": 1.0}, "privacy.delta"),
        ({**PRIVATE, "quantile": 0.5}, "privacy.unit.*site"),
        ({"epsilonn": 1.0}, r"privacy.epsilonn: unknown key \(did you mean 'epsilon'\?\)"),
        ({"threshold": 1}, "privacy.threshold"),
        *(
            ({"sums": "secure", k: v}, f"privacy.epsilon .*found None, expected a number, where {k} is given")
            for k, v in IDLE.items()
        ),
        ({"sums": "secure", "noise": "own"}, "privacy.epsilon .*found None, expected a number, where noise is given"),
    ],
)
def test_bad_settings_are_one_line(table, line):
    with pytest.raises(ConfigError, match=line):
        settings(privacy=table)


# differential privacy by row: which methods


@pytest.mark.parametrize("name", [*SUMS, "fedcet"])
def test_the_local_step_decides_whether_rows_can_be_private(name):
    """As an analysis by hand finds; APFL's two gradients share batches, and one is asked for at a private model."""
    how = settings(privacy=PRIVATE | {"noise": "own"}, local_steps=2)
    if name in BY_ROW:
        assert planned(prepare(net(), federation(), method(name), how)).releases > 0
    else:
        with pytest.raises(ConfigError, match=f"privacy.unit: .*{name}"):
            prepare(net(), federation(), method(name), how)


def test_an_uplink_made_of_samples_beside_gradients_is_refused():
    how = settings(privacy=PRIVATE | {"noise": "own"})
    with pytest.raises(ConfigError, match="depends on samples by more than gradients"):
        prepare(net(), federation(), pf.PerFedAvg(order="exact"), how)


def test_a_row_is_used_once_in_every_pass_of_batches():
    """Batches of one pass share no row, so a pass is one release, however many steps it has. What stays at home costs
    nothing: Ditto's personal solve is plain, and its releases are FedAvg's."""
    how = settings(10, PRIVATE | {"noise": "own"}, local_steps=None, local_epochs=2, batch_size=4)
    assert planned(prepare(net(), federation(), pf.FedAvg(), how)).releases == 20
    how = settings(10, PRIVATE | {"noise": "own"}, local_steps=3)
    found = [planned(prepare(net(), federation(), m, how)) for m in (pf.FedAvg(), pf.Ditto())]
    assert found[0].releases == found[1].releases == 30
    assert found[1].home == {"personal"}


# the noise is what the account says


WIDE = 400


def noise_of(noise: str, absent: int = 0, **more) -> np.ndarray:
    """Numbers of noise in the server's model after one round, in units of the deviation that is owed; each site is one.

    That of rows is measured by the audit, see test_privacy_audit.py."""
    fed, lr = federation(WIDE, 20), 0.5  # so that clips have work to do
    given = SITE | {"noise": noise, "absent": absent} | more
    trainer = prepare(net(WIDE, None), fed, pf.FedAvg(lr=lr), settings(1, given))
    run, task = trainer.run(), trainer.task
    x, weights = task.w0[None], np.array([*SIZES.values()])
    moves = [-lr * task.gradient(x, next(iter(_batch(task, fed, i))))[0][0] for i in range(len(weights))]
    moves = [m * min(1.0, 1.0 / float(m.norm())) for m in moves]
    clean = x[0] + sum(n * m for n, m in zip(weights, moves, strict=True)) / weights.sum()
    z = planned(trainer).multiplier
    if more:  # Andrew et al., section 2.3, with the deviation of bits that Following has
        z = (z**-2 - (2 * max(len(weights) / 20, z)) ** -2) ** -0.5
    owed = z * weights.max() / weights.sum() * math.sqrt(len(weights) / (len(weights) - absent))
    return (run.server["w"] - clean).numpy() / owed


def _batch(task, fed, i):
    from polyfed.compute.batches import Batches, Work

    split = task.place(fed.train)
    return Batches(split, np.array([i]), np.zeros(1, dtype=np.uint64), Work(steps=1, batch_size=None), 0, 0)


@pytest.mark.parametrize(
    ("noise", "absent", "more"),
    [("shared", 0, {}), ("shared", 1, {}), ("server", 0, {}), ("shared", 1, {"quantile": 0.5})],
)
def test_variance_and_fourth_moment_of_what_leaves(noise, absent, more):
    """Halved noise, one of four sites without its own, noise before the clip: each misses by more than this allows."""
    x = noise_of(noise, absent, **more)
    n = len(x)
    assert abs(x.mean()) < 4.5 / n**0.5
    assert abs(x.var() - 1) < 4.5 * (2 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 4.5 * (96 / n) ** 0.5


@pytest.mark.parametrize("noise", ["shared", "server"])
def test_a_clip_follows_a_quantile_of_what_sites_send_within_the_budget(noise, tmp_path):
    """100 sites of one row, whose gradients at zero have lengths of 0.008 to 0.82; the clip begins at five times the
    middle. Booked is the budget, and a run that was stopped has the same clips."""
    x = np.random.default_rng(0).normal(size=(100, 8))
    rows = [(v[None] * (k + 1) / 100 / np.linalg.norm(v), [k % 3]) for k, v in enumerate(x)]
    fed, model = pf.Federation.from_arrays(rows, classes=3, test_fraction=0), torch.nn.Linear(8, 3, bias=False)
    torch.nn.init.zeros_(model.weight)
    private = {**PRIVATE, "unit": "site", "noise": noise, "epsilon": 50.0, "clip": 2.0, "quantile": 0.5, "delta": 1e-3}
    out = tmp_path / "run"

    def stop(progress):
        if progress.round == 13:
            raise KeyError

    with pytest.raises(KeyError):
        prepare(model, fed, pf.FedAvg(lr=1.0), settings(30, private, checkpoint_every=5)).run(out, callbacks=[stop])
    run = prepare(model, fed, pf.FedAvg(lr=1.0), settings(30, private, checkpoint_every=5)).run(out, resume=True)
    lines = [json.loads(line) for line in (out / "clips.jsonl").read_text().splitlines()]
    clips = dict(map(tuple, lines))
    assert [*clips] == [*range(1, 31)]
    assert len({(t, c) for t, c in lines}) == 30
    assert clips[1] == pytest.approx(2 * math.exp(-0.1), rel=0.05)
    assert 0.25 < clips[30] < 0.6
    spent = Ledger(out / "privacy.ledger").spent(fed.names[0], "arrays")
    assert epsilon_of(spent, 1e-3) == pytest.approx(50.0, rel=1e-3)
    assert run.status == "finished"


@pytest.mark.parametrize("inputs", [30, 3_000, 10**5])
def test_noise_that_sites_share_is_added_to_models_of_any_size(inputs):
    """One step of FedAvg is one, by rounding relative to numbers that grow with the model; also at a step size at which
    its rehearsal diverges, to weights whose rounding is larger than any step."""
    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(2, inputs)), rng.normal(size=2)) for _ in SIZES]
    fed = pf.Federation.from_arrays(sites, names=[*SIZES], test_fraction=0)
    how = settings(1, PRIVATE | {"noise": "shared"}, dtype="float64")
    for lr in (0.05, 1.0):
        trainer = prepare(torch.nn.Linear(inputs, 1), fed, pf.FedAvg(lr=lr), how)
        assert planned(trainer).rate == pytest.approx(lr, rel=1e-9)


@pytest.mark.parametrize(("noise", "steps"), [("shared", 1), ("server", 1), ("own", 1), ("own", 3)])
def test_what_is_booked_is_the_budget(noise, steps, tmp_path):
    """A row that is used in three steps of a round is three releases of one entry."""
    how = settings(7, PRIVATE | {"noise": noise, "ledger": str(tmp_path / "ledger")}, local_steps=steps)
    prepare(net(), federation(), pf.FedAvg(), how).run()
    ledger = Ledger(tmp_path / "ledger")
    for site in SIZES:
        assert epsilon_of(ledger.spent(site, "arrays"), 1e-5) == pytest.approx(2.0, rel=1e-3)
    lines = (tmp_path / "ledger").read_text().splitlines()
    assert len(lines) == 7 * len(SIZES)
    with pytest.raises(RunError, match="its privacy budget of epsilon 2 at delta 1e-05 is spent"):
        prepare(net(), federation(), pf.FedAvg(), how).run()


def test_nothing_leaves_that_is_not_booked(monkeypatch):
    def full(self, entries, budget, limit=None):
        raise RunError("disk full")

    monkeypatch.setattr(Ledger, "book", full)
    trainer = prepare(net(), federation(), pf.FedAvg(), settings(3, PRIVATE))
    sent: list[str] = []
    monkeypatch.setattr(Guard, "opened", lambda *_: sent.append("sum"))
    with pytest.raises(RunError, match="disk full"):
        trainer.run()
    assert not sent


def test_no_noise_is_drawn_twice(monkeypatch):
    """Over all sites, rounds and tensors of a run; and another run on the same seed has other noise."""
    keys: list[bytes] = []
    draw = Gaussian.draw

    def noted(self, key, n):
        keys.append(key)
        return draw(self, key, n)

    monkeypatch.setattr(Gaussian, "draw", noted)
    runs = [prepare(net(), federation(), pf.FedAvg(), settings(5, PRIVATE)).run() for _ in range(2)]
    assert len(keys) == len(set(keys)) == 2 * 5 * len(SIZES)
    assert not torch.equal(runs[0].server["w"], runs[1].server["w"])
    keys.clear()
    prepare(net(), federation(), pf.FedAvg(), settings(5, PRIVATE | {"noise": "own"}, local_steps=3)).run()
    assert len(keys) == len(set(keys)) == 5 * 3 * len(SIZES)


def test_a_run_that_was_stopped_goes_on_with_the_same_noise_and_pays_once(tmp_path):
    fed, how = federation(), settings(6, PRIVATE, checkpoint_every=2)
    trainer = prepare(net(), fed, pf.FedAvg(), how)

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.round == 5:
            raise Stop

    out = tmp_path / "run"
    with pytest.raises(Stop):
        trainer.run(out, callbacks=[stop])
    found = prepare(net(), fed, pf.FedAvg(), how).run(out, resume=True)
    again = prepare(net(), fed, pf.FedAvg(), how)
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "noise.key").write_text((out / "noise.key").read_text())
    assert torch.equal(found.server["w"], again.run(tmp_path / "again").server["w"])
    assert len((out / "privacy.ledger").read_text().splitlines()) == 6 * len(SIZES)
    assert (out / "noise.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("unit", ["row", "site"])
def test_rounds_cannot_be_raised_without_budget(unit, tmp_path):
    fed, out, private = federation(), tmp_path / "run", PRIVATE | {"unit": unit}
    prepare(net(), fed, pf.FedAvg(), settings(3, private)).run(out)
    with pytest.raises(RunError, match=r"its noise was made for 3 rounds, which spend its whole privacy budget"):
        prepare(net(), fed, pf.FedAvg(), settings(5, private)).run(out, resume=True)
    (out / "noise.key").unlink()
    with pytest.raises(RunError, match=r"noise.key: found no secret"):
        prepare(net(), fed, pf.FedAvg(), settings(3, private)).run(out, resume=True)


def test_a_comparison_shares_the_budget_among_its_runs():
    one = Privacy(**PRIVATE)
    found = pf.compare(net(), federation(), [pf.FedAvg(), pf.Ditto(), pf.Local()], settings(3, PRIVATE), seeds=2)
    plan = next(iter(found.runs.values())).settings.privacy_plan
    assert plan["noise-multiplier"] == pytest.approx(math.sqrt(4 * 3 / (2 * rho_of(one.epsilon, one.delta))), rel=1e-6)
    alone = pf.compare(net(), federation(), [pf.FedAvg()], settings(3, PRIVATE | {"per": "run"}), seeds=2)
    assert next(iter(alone.runs.values())).settings.privacy_plan["epsilon-of-the-run"] == pytest.approx(2.0, rel=1e-6)


TRUST = {"shared": "none colludes with it", "own": "nobody else is trusted", "server": "trusted with every reply"}


def test_the_plan_says_who_is_trusted_and_what_is_not_covered():
    def says(method, **given):
        return prepare(net(), federation(), method, settings(50, PRIVATE | given))

    for noise, words in TRUST.items():
        text = "\n".join(says(pf.FedAvg(), noise=noise).describe["privacy-says"])
        assert words in text
        assert "Not covered" in text
    text = "\n".join(says(pf.FedAvg(), unit="site").describe["privacy-says"])
    assert "a model of any use is not to be had so" in text
    local = says(pf.Local())
    assert local.door is None, "local models leave nothing and cost nothing"
    assert local.describe["privacy-says"] == ["Nothing leaves the sites: there is nothing to protect."]
