"""The board: every registered method on the same settings, with one budget of gradients and one number of trials."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from polyfed import Algorithm, FedEM, Federation, FedRC
from polyfed.algorithms import shipped
from polyfed.base.errors import ConfigError, Diverged, PolyfedError
from polyfed.base.typed import seeded
from polyfed.core.algorithm import REGISTRY
from polyfed.data import load
from polyfed.models import build
from polyfed.models.mlp import SIZE
from polyfed.runs.result import Result
from polyfed.runs.trainer import prepare
from polyfed.runs.training import Training
from polyfed.studies.compare import Comparison
from polyfed_papers.pfllib import leaderboard_net
from polyfed_papers.recipes.recipe import Bench
from polyfed_tuning.ladder import At, Ladder, climb

UNCOUNTED = 1000  # the seed of the first draw that settings are chosen by
DRAWS = (UNCOUNTED, UNCOUNTED + 1, UNCOUNTED + 2)
HELD = 0.25  # of the training samples, to choose by
MORE, MOST = 4, 50  # trials that all methods of a setting get while a choice is at an edge, and where that ends
WORK: dict[str, Any] = {"local_steps": 5, "batch_size": 20}
RATES = (0.03, 0.1, 0.3)
TENS = 10.0  # points that a regression's targets are divided by, so that such step sizes suit them
OTHER_RATES = {"pfedme": (0.01, 0.02, 0.05)}  # below 1 / lam
OWN, TUNED = "local", "fedavg-ft"  # what gains are taken over
REHEARSED = ("local", "fedavg", "fedavg-ft", "ifca")

APART = {
    "fedasync": "asynchronous: made for replies that come one at a time",
    "fedbuff": "asynchronous: made for replies that come one at a time",
    "gpgd": "a step of FedSLR alone, its paper's yardstick",
    "lpgd": "a step of FedSLR alone, its paper's yardstick",
    "hypcluster": "IFCA with weights",
    "feddpa": "for adapters alone",
    "fedrpca": "for adapters alone",
} | dict.fromkeys(
    ("clove", "compressedscaffnew", "gradskip", "knn-per", "led", "locodl", "pfedgraph", "scafflix", "scaffnew",
     "sr-fca", "tamuna"),
    "came after the records of the boards",
)  # fmt: skip

# the second setting that is tuned, and where the search begins; the first is the step size
SECOND: dict[str, tuple[str, tuple[float, ...]]] = {
    "apfl": ("alpha", (0.25, 0.5, 0.75)),
    "apple": ("weight_lr", (1e-4, 1e-3, 1e-2)),
    "cfl": ("eps1", (0.1, 0.2, 0.4)),
    "clove": ("k", (3, 4, 5)),
    "sr-fca": ("quantile", (0.1, 0.2, 0.4)),
    "ditto": ("lam", (0.03, 0.1, 0.3)),
    "fedacs": ("quantile", (0.5, 0.75, 0.9)),
    "feddpa": ("lam", (0.25, 0.5, 0.75)),
    "fedrpca": ("beta", (1.5, 2.0, 3.0)),
    "fedadagrad": ("server_lr", (0.01, 0.03, 0.1)),
    "fedadam": ("server_lr", (0.01, 0.03, 0.1)),
    "fedala": ("eta", (0.3, 1.0, 3.0)),
    "fedamp": ("lam", (0.1, 1.0, 10.0)),
    "fedas": ("align_lr", (0.003, 0.01, 0.03)),
    "fedavg-ft": ("finetune_lr", (0.03, 0.1, 0.3)),
    "fedavgm": ("beta", (0.5, 0.8, 0.9)),
    "fedbabu": ("finetune_epochs", (1, 2, 4)),
    "feddbe": ("kappa", (0.1, 1.0, 10.0)),
    "feddyn": ("alpha", (0.01, 0.03, 0.1)),
    "fedfomo": ("models", (2, 3, 5)),
    "fedgh": ("server_lr", (0.03, 0.1, 0.3)),
    "fedlc": ("tau", (0.3, 1.0, 3.0)),
    "fedntd": ("beta", (0.3, 1.0, 3.0)),
    "fedpac": ("head_lr", (0.03, 0.1, 0.3)),
    "fedproto": ("lam", (0.1, 1.0, 10.0)),
    "fedprox": ("mu", (0.01, 0.1, 1.0)),
    "fedrep": ("head_epochs", (1, 2, 3)),
    "fedrod": ("personal_lr", (0.03, 0.1, 0.3)),
    "fedslr": ("lam", (1e-5, 1e-4, 1e-3)),
    "fedsoft": ("lam", (0.03, 0.1, 0.3)),
    "fedspa": ("density", (0.25, 0.5, 0.75)),
    "fedtgp": ("lam", (0.1, 1.0, 10.0)),
    "fedyogi": ("server_lr", (0.01, 0.03, 0.1)),
    "fesem": ("k", (1, 2, 3)),
    "flexcfl": ("k", (1, 2, 3)),
    "fpfc": ("lam", (0.1, 0.3, 0.6)),
    "heurfedamp": ("self_weight", (0.25, 0.5, 0.75)),
    "ifca": ("k", (1, 2, 3)),
    "moon": ("mu", (0.1, 1.0, 10.0)),
    "pacfl": ("threshold", (5.0, 10.0, 20.0)),
    "per-fedavg": ("alpha", (0.01, 0.03, 0.1)),
    "pfedgraph": ("alpha", (0.2, 0.4, 0.8)),
    "pfedhn": ("server_lr", (0.003, 0.01, 0.03)),
    "pfedme": ("personal_lr", (0.01, 0.03, 0.1)),
    "q-fedavg": ("q", (0.1, 0.3, 1.0)),
    "stocfl": ("tau", (0.25, 0.5, 0.75)),
}

# what is not at its default: work outside the rounds that would use the whole budget up, and FPFC's layers
OTHER: dict[str, dict[str, Any]] = {
    "stocfl": {"anchor_epochs": 2},
    "fedala": {"passes": 5},
    "fedpac": {"body_epochs": 1},
    "fpfc": {"shared_layers": "body"},  # as in its paper: the last layer is fused
    "fedem-following": {"responsibilities": "following"},
    "fedrc-following": {"responsibilities": "following"},
}


# where a pass over a client's samples takes hundreds of steps: every solve of a round takes as many as the first,
# FedALA's weights a fiftieth of a pass; fine-tuning waits for the last round; FedPAC has the features of all samples
# twice a round, three of which count as a gradient
LONG: dict[str, dict[str, Any]] = {
    "ditto": {"personal_epochs": 0},
    "fedala": {"share": 0.02},
    "fedpac": {"head_epochs": None, "body_epochs": None},
    "fedrep": {"head_epochs": None, "body_epochs": None},
    "fedslr": {"personal_epochs": None},
}
FEATURES = {"fedpac": 2 / 3}


class FedEMFollowing(FedEM, abstract=True):
    name = "fedem-following"


class FedRCFollowing(FedRC, abstract=True):
    name = "fedrc-following"


# rows of one setting alone, which ask no other method for more trials
BESIDE: dict[str, dict[str, type[Algorithm]]] = {
    "mixtures": {cls.name: cls for cls in (FedEMFollowing, FedRCFollowing)}
}

PARTS = {"fedem": 3, "fedrc": 3}  # nets of a mixture, each like the others' one net

# gradients to a batch that the engine counts once (below 1: some batches that it counts are not used), and passes over
# all samples in every round, which it does not count
GRADIENTS: dict[str, Callable[[Any], float]] = {
    "apfl": lambda method: 2,
    "fedem": lambda method: PARTS["fedem"],
    "fedrc": lambda method: PARTS["fedrc"],
    "fedrod": lambda method: 2,
    "pfedme": lambda method: method.inner_steps,
    "per-fedavg": lambda method: 2 / 3 if method.order == "first" else 1,
}
PASSES = ("fedas", "fedlin", "fedspa", "fedtrack", "per-fedavg")
LAST = ("fedavg-ft", "fedbabu", "per-fedavg")  # personalise for deployment alone: only a client's last round counts


def gradients(
    method: Algorithm, run: Result, batch: int = WORK["batch_size"], rounds: float = math.inf, features: float = 0.0
) -> float:  # fmt: skip
    """Gradients that the models deployed after `rounds` took of a client, on average, in batches of this size."""
    # features: share of a pass's gradients that is added in every round
    ledger, counts = run.ledger[run.ledger["round"] < rounds], run.federation.train.counts
    clients = ledger["client"].astype(int)
    passes = counts[clients] / batch * (1.0 if method.name in PASSES else features)
    each = GRADIENTS.get(method.name, lambda _: 1)(method) * ledger["steps"] + passes
    total = each.sum()
    if method.name in LAST:
        personal = each * 0 + passes if method.name in PASSES else ledger["steps"] - WORK["local_steps"]
        total += personal.groupby(clients).last().sum() - personal.sum()
    return float(total) / run.federation.n


class Reader(nn.Module):
    """Letters, each of which becomes 8 numbers, through a GRU, whose last state says the next one."""

    def __init__(self, letters: int, hidden: int):
        super().__init__()
        self.letters, self.gru = nn.Embedding(letters, SIZE), nn.GRU(SIZE, hidden, batch_first=True)
        self.head = nn.Linear(hidden, letters)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.letters(x))[0][:, -1])


@dataclass(frozen=True)
class Setting:
    """A setting of the comparison."""

    data: str
    partition: str | None = None
    clients: int | None = None
    hidden: int = 32  # units of the perceptron
    share: float = 1.0  # of the clients, in each round
    options: tuple[tuple[str, Any], ...] = ()  # of the data set
    generated: bool = False  # data that take a seed
    letters: int = 0  # of inputs that are texts
    folder: str | None = None  # of the data set's files
    recurrent: bool = False  # a GRU reads the letters
    convolutional: bool = False  # PFLlib's net
    looks: int = 10  # evaluations of a run
    tested: float = 0.2  # of each client's samples, where no test set is given
    metric: str = "accuracy"
    rate: float = 1.0  # factor of the step sizes that searches begin at
    only: tuple[str, ...] = ()  # the methods, where not all
    training: tuple[tuple[str, Any], ...] = ()  # differences from WORK
    chosen: "tuple[str, Setting] | None" = None  # (name, setting) where settings are chosen, if not here
    draws: int = len(DRAWS)  # that settings are chosen by
    usual: bool = False  # methods are at their defaults, without OTHER
    long: bool = False  # a pass over a client's samples is long: see LONG

    def federation(self, seed: int, held: float = 0.0) -> Federation:
        """The clients under a seed; settings are chosen by the share `held` of the training samples."""
        return _federation(self, seed, held)

    def model(self, cls: type[Algorithm], seed: int) -> nn.Module:
        data, name = self.federation(seed), registered(cls).name
        if self.recurrent:
            with seeded(seed):
                return Reader(self.letters, self.hidden)
        if self.convolutional:
            return leaderboard_net(data.input_shape, data.outputs, seed)
        outputs = data.classes or 1
        more = {"parts": PARTS[name], "by_class": name == "fedrc"} if name in PARTS else {}
        kind = "mixture" if more else "mlp"
        return build(kind, data.input_shape, outputs, seed, hidden=self.hidden, letters=self.letters, **more)

    @property
    def said(self) -> str:
        """The setting in words."""
        options = "".join(f", {k} {v}" for k, v in self.options)
        clients = f", {self.clients} clients" if self.clients else ""
        cohort = f", {100 * self.share:.0f} % of them a round" if self.share < 1 else ""
        net = "PFLlib's convolutional net" if self.convolutional else f"{self.hidden} units"
        return (
            f"{self.data}{options}, {self.partition or 'natural clients'}{clients}{cohort}; {net}"
            + " of a GRU" * self.recurrent
            + "; targets in tens of points" * (self.metric != "accuracy")
        )


@lru_cache(maxsize=16)  # a setting's draws and ten seeds; those of several may be tens of gigabytes
def _federation(setting: Setting, seed: int, held: float) -> Federation:
    options: dict[str, Any] = dict(setting.options) | ({"seed": seed} if setting.generated else {})
    data = load(setting.data, setting.folder, **options)
    if data.classes is None:
        data = replace(data, y=data.y / TENS)
    test = "given" if data.test_groups is not None else "own" if data.x_test is None else "merged"
    return data.partition(setting.partition, setting.clients, seed, test, setting.tested, validation_fraction=held)


SMALL = {
    "digits": Setting("digits", "dirichlet:0.3", 10, options=(("flat", True),)),
    "hospitals": Setting("heart-disease", hidden=8),
    "synthetic": Setting("synthetic", options=(("clients", 12),), generated=True),
}
FULL = SMALL | {
    "two-classes": Setting("digits", "pathological:2", 20, options=(("flat", True),)),
    "cohorts": Setting("digits", "dirichlet:0.1", 40, share=0.25, options=(("flat", True),)),
    "turned": Setting("digits", "iid+rotation:0/90/180/270", 12),
    "swapped": Setting("digits", "dirichlet:1.0+label-swap:4", 12, options=(("flat", True),)),
    "noisy": Setting("digits", "dirichlet:0.5+noise:4.0", 12, options=(("flat", True),)),
    "mixtures": Setting("mixtures", options=(("clients", 20),), generated=True),
    "fpfc-s1": Setting("fpfc-s1", options=(("scale", "small"),), generated=True),
}
TWELVE = (
    "local", "fedavg", "fedavg-ft", "apfl", "ditto", "fedacs", "fedper", "fedprox", "fedrep", "fedslr", "fpfc", "ifca",
)  # fmt: skip
NATURAL = {  # clients that nobody made, in the user's folder, but for the hospitals, which are everywhere
    "school": Setting("school", metric="rmse", rate=0.1),
    "parkinsons": Setting("parkinsons", metric="rmse", rate=0.1),
    "tiny-shakespeare": Setting("tiny-shakespeare", options=(("samples", 200),), generated=True, letters=80,
                                recurrent=True, only=TWELVE),
    "har": Setting("har"),
    "femnist": Setting("femnist", share=0.1, options=(("samples", 200),), generated=True),
    "digit-5": Setting("digit-5", options=(("clients", 4), ("samples", 200)), generated=True),
    "office-caltech10": Setting("office-caltech10"),
    "shakespeare": Setting("shakespeare", share=0.1, options=(("samples", 200),), generated=True, letters=80),
    "hospitals": SMALL["hospitals"],
}  # fmt: skip
SHIFTS = {  # of which the groups are known
    "label": Setting("digits", "pathological:2", 10),
    "feature": Setting("digits", "iid+rotation:0/90/180/270", 10),
    "concept": Setting("digits", "iid+label-swap:4", 10),
    "all-three": Setting("digits", "dirichlet:1.0+rotation:0/180+label-swap:4", 10),
}
CLUSTERED = (
    "local", "fedavg", "fedavg-ft", "ifca", "cfl", "pacfl", "fpfc", "fesem", "fedsoft", "stocfl", "flexcfl", "fedacs",
    "fedem", "fedrc", "clove", "pfedgraph", "sr-fca",
)  # fmt: skip


def contenders(bench: Bench, some: Sequence[str] = (), few: Sequence[str] = REHEARSED) -> dict[str, type[Algorithm]]:
    """All methods that come with polyfed, or some of them, and those that the command brought; a few in a rehearsal."""
    REGISTRY.load()
    methods = {name: cls for name, cls in sorted(REGISTRY.items()) if issubclass(cls, Algorithm)}
    names = few if bench.rehearse else some or [name for name in shipped() if name not in APART]
    return {name: methods[name] for name in (*names, *bench.joining)}


def ladders(cls: type[Algorithm], setting: Setting | None = None) -> dict[str, Ladder]:
    """The settings of a method that are tuned, and where the search of each begins."""
    some = [("lr", OTHER_RATES.get(cls.name, RATES)), *([SECOND[cls.name]] if cls.name in SECOND else [])]
    names = {f.name for f in fields(cls)} - fixed(cls.name, setting).keys()
    rate = 1.0 if setting is None else setting.rate
    begun = {name: tuple(rate * v for v in values) if name.endswith("lr") else values for name, values in some}
    return {name: Ladder.of(cls, name, values) for name, values in begun.items() if name in names}


def registered(cls: type[Algorithm]) -> type[Algorithm]:
    """The method that a row is of, by which its runs are read again."""
    return next(one for one in cls.__mro__ if issubclass(one, Algorithm) and REGISTRY.get(one.name) is one)


def fixed(name: str, setting: Setting | None = None) -> dict[str, Any]:
    """What of a method is neither tuned nor at its default."""
    usual, long = (False, False) if setting is None else (setting.usual, setting.long)
    return ({} if usual else OTHER.get(name, {})) | (LONG.get(name, {}) if long else {})


def made(cls: type[Algorithm], at: At, setting: Setting | None = None) -> Algorithm:
    """The method at the values of its ladders."""
    pairs = zip(ladders(cls, setting).items(), at, strict=True)
    return registered(cls)(**fixed(cls.name, setting), **{k: int(v) if ladder.whole else v for (k, ladder), v in pairs})


def start(cls: type[Algorithm], setting: Setting | None = None) -> At:
    """Start of a search: the middle of every ladder."""
    return tuple(ladder.values[len(ladder.values) // 2] for ladder in ladders(cls, setting).values())


def refusal(setting: Setting, cls: type[Algorithm]) -> str:
    """The reason why a method cannot be trained in a setting, or ""."""
    data = setting.federation(UNCOUNTED)  # that it is not there is no method's reason
    try:
        method, training = made(cls, start(cls, setting), setting), Training(**work(setting))
        prepare(setting.model(cls, UNCOUNTED), data, method, training)
    except PolyfedError as e:
        return str(e)
    return ""


def work(setting: Setting) -> dict[str, Any]:
    """Training settings of all methods in a setting."""
    return WORK | dict(setting.training) | ({"fraction": setting.share} if setting.share < 1 else {})


def rounds_within(setting: Setting, method: Algorithm, budget: int) -> tuple[int, float]:
    """Rounds of a method within a budget of gradients per client, at least one, and their cost by the first three."""
    try:
        run = evaluated(setting, setting.federation(UNCOUNTED), method, 3, UNCOUNTED)
    except Diverged:
        return 1, math.nan
    features = FEATURES.get(method.name, 0.0) if setting.long else 0.0
    first, three = (gradients(method, run, work(setting)["batch_size"], rounds, features) for rounds in (1, 3))
    each = max((three - first) / 2, 1e-9)
    rounds = max(1, 1 + math.floor((budget - first) / each + 1e-9))
    return rounds, first + (rounds - 1) * each


def score(bench: Bench, name: str, setting: Setting, cls: type[Algorithm], budget: int, at: At) -> float:
    """Mean validation score over the draws; a method that one of them refuses or that explodes is never chosen."""
    if setting.chosen is not None:
        return score(bench, *setting.chosen, cls, budget, at)

    @cache  # as many under every draw
    def planned() -> tuple[Algorithm, int, float]:
        method = made(cls, at, setting)
        return method, *within(bench, setting, method, budget)

    key, values = f"{name}-{cls.name}", "-".join(f"{v:g}" for v in at)
    total, draws = 0.0, DRAWS[: 1 if bench.rehearse else setting.draws]
    for draw in draws:
        merit = partial(drawn, bench, setting, cls, budget, planned, draw)
        kept = bench.once(f"{key}-draw{draw}-at-{values}", merit)  # no value is trained twice
        total += -math.inf if kept is None else kept
        if total == -math.inf:  # whatever the other draws say
            break
    return total / len(draws)


def trained(setting: Setting, method: Algorithm, rounds: int) -> Algorithm:
    """The method as it is trained for so many rounds."""
    late: dict[str, Any] = {"finetune_from": rounds - 1} if hasattr(method, "finetune_from") else {}
    return replace(method, **late) if setting.long else method


def drawn(
    bench: Bench, setting: Setting, cls: type[Algorithm], budget: int,
    planned: Callable[[], tuple[Algorithm, int, float]], draw: int,
) -> float | None:  # fmt: skip
    """Validation score under one draw; None for values that the method refuses, or at which it explodes."""
    data = setting.federation(draw, HELD)
    try:
        method, rounds, spent = planned()
        if spent > budget and not bench.rehearse:  # in one round
            return None
        run = evaluated(setting, data, trained(setting, method, rounds), rounds, draw, "validation", **bench.where)
    except (ConfigError, Diverged):
        return None
    merit = run.metric.merit(np.asarray(run.final["validation"][setting.metric]))
    return float(np.nanmean(merit))  # of the clients that have such samples


def evaluated(
    setting: Setting, data: Federation, method: Algorithm, rounds: int, seed: int, *splits: str, **more: Any
) -> Result:  # fmt: skip
    """A run whose last models are evaluated on these splits alone."""
    how = Training(rounds=rounds, seed=seed, evaluate_every=0, metrics=setting.metric, **more, **work(setting))
    return replace(prepare(setting.model(type(method), seed), data, method, how), looks=splits).run()


def within(bench: Bench, setting: Setting, method: Algorithm, budget: int) -> tuple[int, float]:
    return rounds_within(setting, method, 1 if bench.rehearse else budget)


def searched(bench: Bench, name: str, setting: Setting, cls: type[Algorithm], trials: int, budget: int) -> int:
    """At how many settings the choice of a method is at an edge, after so many trials."""
    tried = partial(score, bench, name, setting, cls, budget)
    return climb(tried, list(ladders(cls, setting).values()), trials).edges


def agreed(
    bench: Bench, name: str, setting: Setting, methods: Sequence[type[Algorithm]], budget: int, trials: int
) -> int:  # fmt: skip
    """Trials of every method in a setting: as many more for all as it takes until no method's choice is at an edge."""
    while 1 < trials < MOST:
        tasks = [
            (f"{name}/{cls.name}, {trials} trials", UNCOUNTED,
             partial(searched, bench, name, setting, cls, trials, budget))
            for cls in methods
            if ladders(cls)
        ]  # fmt: skip
        if not any(bench.all_of(tasks)):
            break
        trials += MORE
    return trials


def cell(bench: Bench, name: str, setting: Setting, cls: type[Algorithm], trials: int, budget: int) -> Comparison:
    """One method in one setting: its settings by validation, then all seeds. What is done is read back."""
    key, tried = f"{name}-{cls.name}", partial(score, bench, name, setting, cls, budget)
    some = list(ladders(cls, setting).values())
    at = bench.choose(f"{key}-by-{setting.draws}-draws", tried, some, trials) if some else ()
    method = made(cls, at, setting)
    rounds, _ = bench.once(f"{key}-rounds", partial(within, bench, setting, method, budget))
    often = max(1, rounds // setting.looks)
    return bench.compare(
        f"{name}/{cls.name}", partial(setting.model, cls), setting.federation,
        {cls.name: trained(setting, method, rounds)}, rounds=rounds,
        evaluate_every=often, metrics=setting.metric, **work(setting),
    )  # fmt: skip


def tuned_to(
    bench: Bench, name: str, cls: type[Algorithm], setting: Setting | None = None
) -> tuple[Mapping[str, float], int]:
    """(the values that were chosen, how many are at an edge of what was tried)."""
    if not (some := ladders(cls, setting)):
        return {}, 0
    key = next(key for key in bench.choices if key.startswith(f"{name}-{cls.name}-by-"))
    return dict(zip(some, bench.once(key, dict)["best"], strict=True)), bench.choices[key][1]
