"""Training: every setting of a run besides its model, its data and its method, each declared once; and the tables of an
experiment file that name those.

From these fields follow the keys of experiment files, the keywords of `fit`, the options of the command line with their
help, config.toml, and what a checkpoint is compared with before it is continued.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn

from polyfed.base import columns
from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, PolyfedError, closest
from polyfed.base.registry import Registry
from polyfed.base.settings import Configured, found, is_list, is_mapping, kebab, setting, settings_of
from polyfed.base.values import COUNT, COUNTED, Limits, Words
from polyfed.runs.privacy import Privacy, privacy_of

if TYPE_CHECKING:  # types that the command line can do without until something is trained
    import torch
    from torch import nn

    from polyfed.compute.losses import Loss
    from polyfed.compute.optimizers import StepSizes
    from polyfed.compute.task import Task
    from polyfed.core.schedule import Schedule
    from polyfed.metrics.metric import Metric
    from polyfed.runs.threats import Attack, Rule

SEED = Annotated[int, Limits(ge=0)]
EACH = Annotated[Sequence[int], Words("a list with one number per client")]
NAMED = Annotated[Mapping[str, int], Words("a table with one number per client")]
WEIGHTS = Annotated[Sequence[float], Words("a list with one number per class")]
BY_LABEL = Annotated[Mapping[str, float], Words("a table with one number for each label, a text")]
FUNCTION = Annotated[Callable[..., Any], Words("a function")]
BATCH = Annotated[int, Limits(ge=1, le=COUNTED), Words("an integer of at least 1, full")]
SEEDS = 10_000
MANY = Annotated[int, Limits(ge=1, le=SEEDS)]
WHICH = Annotated[list[SEED], Words("a list of seeds")]
WHO = Annotated[list[str], Words("a list of clients' names")]
JUDGES = Annotated[str, Words("names such as auc,brier")]
TABLE, PRECISION = Words("a table with a name"), Words("float32, float64")
DEVICE = Annotated[str, Words("auto, cpu or cuda")]


class Table(Configured):
    """Base of settings that there is one table of in an experiment file: errors name the key alone."""

    def refuse(self, key: str, expected: str, near: str = "") -> NoReturn:
        """Raise the error for a value of the setting `key`."""
        error = self.refusal(
            f"{self.table}{'.' if self.table else ''}{key}: {found(getattr(self, key), expected, near)}"
        )
        error.key = key
        raise error from None

    def dump(self) -> dict[str, Any]:
        """The table as a file has it; what is not set is left out, an object of Python is a word about it."""
        values = {kebab(s.name): plain(getattr(self, s.name)) for s in settings_of(type(self))}
        return {key: value for key, value in values.items() if value not in (None, {})}


@dataclass(frozen=True)
class Patience(Configured):
    """Early stopping, at the first evaluation that is `rounds` or more after the best one."""

    table: ClassVar[str] = "stop"

    rounds: int = setting(ge=1, le=COUNTED, doc="Rounds without a better score.")
    delta: float = setting(0.0, ge=0, le=COUNTED, doc="Gain beyond which a score is better.")

    def best(self, looks: Iterable[tuple[int, float]]) -> int | None:
        """The round of the highest score, of equal ones the first, of (round, score, NaN where there is none)."""
        best: tuple[int, float] | None = None
        for t, score in looks:
            if score == score and (best is None or score > best[1] + self.delta):
                best = t, score
        return None if best is None else best[0]


STOPS: Registry[type[Patience]] = Registry("stop")
STOPS |= {"patience": Patience}


def stop_of(text: str) -> Patience:
    """The rule of a text such as patience:20,delta=0.001. Raises ConfigError for a text that names none."""
    return STOPS.read(text, "stop")


@checked
@dataclass(frozen=True)
class Training(Table):
    """Settings of how a run trains. Each has a default; `polyfed config` lists them with their meaning.

    Values may be given as an experiment file has them (`dtype="float64"`, `attack={"name": "sign-flip"}`) or as the
    objects that they name. A value that does not fit is a ConfigError of one line.
    """

    rounds: int = setting(100, ge=0, le=COUNTED, decides=False, doc="Communication rounds.")
    fraction: float = setting(
        1.0,
        gt=0,
        le=1,
        doc="Share of the clients that take part in a round, drawn without replacement; not with a schedule.",
    )
    local_epochs: int | None = setting(
        None, ge=1, le=COUNTED, doc="Passes over a client's data per round (1), unless local-steps is set."
    )
    local_steps: COUNT | EACH | NAMED | FUNCTION | None = setting(
        None, doc="Local steps per round instead of epochs: one number, or one per client."
    )
    batch_size: BATCH | None = setting(32, doc="Samples per local step; full (None in Python): all of a client's.")
    augment: str | FUNCTION | None = setting(
        None, doc="Augmentation of training images, such as flip+crop:4 or flip+crop:4,p=0.5."
    )
    loss: Literal["cross-entropy", "mse", "tokens"] | FUNCTION | None = setting(
        None,
        doc="The clients' loss. Default: cross-entropy for classes, mse for numbers. tokens: cross-entropy at each "
        "token, whose classes are targets [T] of integers (or floats of them), -100 where none is wanted.",
    )
    class_weights: Literal["balanced"] | WEIGHTS | BY_LABEL | None = setting(
        None,
        doc="Factors on the loss of each class's samples: balanced, inversely to its share of all training rows; "
        "one per class; or a table by label.",
    )
    metrics: JUDGES | Sequence[Any] | FUNCTION | None = setting(
        None, doc="What models are judged by, such as auc,brier; the first leads. Else accuracy, or rmse for numbers."
    )
    weight_decay: float = setting(
        0.0, ge=0, le=COUNTED, doc="Adds weight-decay/2 ||w||^2 to every client's loss; with adamw it is decoupled."
    )
    optimizer: str = setting(
        "sgd",
        doc="Local optimiser: sgd, momentum:0.9, adam:beta1=0.9,beta2=0.999,eps=1e-8, or adamw. Uses the method's lr, "
        "restarts with every local solve.",
    )
    clip_norm: float | None = setting(
        None, gt=0, le=COUNTED, doc="Longest direction of a local step; longer ones are scaled down, client by client."
    )
    lr_schedule: str = setting(
        "constant",
        doc="Step sizes over the rounds: exponential:factor=0.99,every=5, cosine:rounds=60, or constant; each takes "
        "warmup=5, rounds of a linear rise.",
    )
    as_released: bool = setting(
        False,
        doc="Train as the authors' released code does, of ten methods: optimiser, decay, batches, epochs and the "
        "method's own settings (see polyfed algorithms NAME).",
    )
    schedule: Annotated[Schedule, TABLE] | Mapping[str, Any] | None = setting(
        None, doc="Who takes part and when, instead of a fraction every round: uniform, bernoulli or asynchronous."
    )
    attack: Annotated[Attack, TABLE] | None = setting(
        None, doc="An attack by some clients, such as sign-flip; attackers are left out of every metric."
    )
    robust: Annotated[Rule, TABLE] | None = setting(
        None, doc="A robust rule in place of the server's means, such as median."
    )
    privacy: Annotated[Privacy, Words("a table, such as {sums: secure, threshold: 3}")] | None = setting(
        None, doc="Secure sums and differential privacy: the table [privacy], see docs/privacy.md."
    )
    seed: SEED = setting(0, doc="Seed of every random draw.")
    dtype: Annotated[torch.dtype, PRECISION] | None = setting(
        None, doc="Precision of all arithmetic: float32 or float64. Default: the model's."
    )
    precision: Literal["bf16", "tf32"] | None = setting(
        None,
        doc="bf16: products and convolutions of local training in bfloat16, the weights in float32; for convolutional "
        "networks. tf32: on a CUDA device, their factors rounded to 10 bits.",
    )
    recompute: bool = setting(
        False,
        doc="Activation checkpointing: blocks of the model, such as a transformer's layers, keep only their inputs and "
        "are computed again in the backward pass. Less memory, a third more time, the same numbers.",
    )
    evaluate_every: int | None = setting(
        None,
        ge=0,
        le=COUNTED,
        decides=False,
        doc="Evaluate every N rounds; 0: only at the end. Default: as often as costs at most 10 % of training.",
    )
    stop: str | None = setting(
        None,
        doc="Stop early by validation samples: patience:20 ends a run at the first evaluation 20 rounds or more after "
        "the best one (of the first of metrics, mean over clients) and keeps that round's models; "
        "patience:20,delta=0.01: only gains above 0.01 count.",
    )
    checkpoint_every: int | None = setting(
        None,
        ge=1,
        le=COUNTED,
        decides=False,
        doc="Rounds between checkpoints. Default: every ten seconds, and at the end.",
    )
    device: DEVICE = setting("auto", decides=False, doc="Where to train: auto, cpu or cuda.")
    chunk: int | None = setting(
        None, ge=1, le=COUNTED, decides=False, doc="Clients computed together. Default: planned for this machine."
    )
    workers: int | None = setting(
        None,
        ge=1,
        le=1024,
        decides=False,
        doc="Threads, or actors with engine = ray. Default: planned for this machine.",
    )
    engine: str = setting(
        "local",
        decides=False,
        doc="Where clients run: local, in this process; ray, in actors of this machine; ray:ADDRESS, of a cluster.",
    )
    track: Literal["mlflow", "tensorboard", "wandb"] | None = setting(
        None, decides=False, doc="Write settings and evaluations for this tool too: mlflow, tensorboard or wandb."
    )

    @classmethod
    def scope(cls) -> dict[str, Any]:
        """The types that are imported late."""
        import torch

        from polyfed.compute.losses import Loss
        from polyfed.core.schedule import Schedule
        from polyfed.metrics.metric import Metric
        from polyfed.runs.threats import Attack, Rule

        types: dict[str, Any] = {"torch": torch, "nn": torch.nn, "Loss": Loss, "Metric": Metric}
        return types | {"Schedule": Schedule, "Attack": Attack, "Rule": Rule}

    def __post_init__(self) -> None:
        import torch

        from polyfed.compute.augment import steps_of
        from polyfed.core.schedule import schedule_of
        from polyfed.metrics.scores import metrics_of
        from polyfed.runs.threats import ATTACKS, RULES

        self._read("privacy", Mapping, privacy_of)
        for name, registry in (("attack", ATTACKS), ("robust", RULES)):
            self._read(name, Mapping, lambda table, registry=registry: registry.make(*_named(table), kebab))
        if isinstance(self.dtype, str) and self.dtype in ("float32", "float64"):
            object.__setattr__(self, "dtype", getattr(torch, self.dtype))
        self._read("batch_size", str, lambda text: None if text == "full" else text)
        if self.metrics is not None:
            self._read("metrics", object, metrics_of)
        # labels are texts in files; in Python they may be the numbers that they are
        self._read("class_weights", Mapping, lambda table: {str(label): w for label, w in table.items()})
        super().__post_init__()
        each = self.local_steps
        self.require(not isinstance(each, Sized) or len(each) > 0, "local_steps", "one number per client")
        self.require(re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is not None, "device", "auto, cpu or cuda")
        self.require(re.fullmatch(r"local|ray(:\S+)?", self.engine) is not None, "engine", "local, ray or ray:ADDRESS")
        self.require(self.dtype is None or self.dtype.is_floating_point, "dtype", "float32 or float64")
        given: Any = self.class_weights
        numbers: list[float] = list(given.values()) if is_mapping(given) else list(given) if is_list(given) else []
        self.require(all(w > 0 for w in numbers), "class_weights", "positive numbers")
        # the small languages are read once, so that what is wrong with them is said here
        self._read("augment", str, steps_of, keep=True)
        self._read("optimizer", str, _optimizers().optimizer_of, keep=True)
        self._read("lr_schedule", str, _optimizers().step_sizes_of, keep=True)
        self._read("stop", str, stop_of, keep=True)
        self.require(self.stop is None or self.evaluate_every != 0, "evaluate_every", "at least 1 with stop")
        length = getattr(self.step_sizes, "rounds", self.rounds)
        self.require(self.rounds <= length, "rounds", f"at most the {length} of lr-schedule")
        self._read("schedule", Mapping, lambda table: schedule_of(table, self.fraction, None), keep=True)

    def _read(self, name: str, kind: type, read: Callable[[Any], Any], keep: bool = False) -> None:
        """Put in the place of a value of this kind what it stands for, unless it is to be kept; errors name it."""
        value = getattr(self, name)
        if not isinstance(value, kind):
            return
        try:
            made = read(value)
        except PolyfedError as e:
            e.key = f"{name}.{e.key}" if e.key else name
            raise
        if not keep:
            object.__setattr__(self, name, made)

    # what it stands for

    @property
    def epochs(self) -> int:
        """Local passes per round, at least 1, where `local_steps` does not replace them."""
        return 1 if self.local_epochs is None else self.local_epochs

    @property
    def step_sizes(self) -> StepSizes:
        """Local step sizes over the rounds, from `lr_schedule`."""
        return _optimizers().step_sizes_of(self.lr_schedule)

    def task(
        self,
        model: nn.Module,
        loss: Loss,
        device: torch.device | str | None = None,
        metrics: Sequence[Metric] | None = None,
        class_weights: Sequence[float] | None = None,
    ) -> Task:
        """The model and its loss, as these settings have them trained.

        Parameters
        ----------
        model : nn.Module
            Its present parameters are the common start.
        loss : str or callable
            As `Task` takes it.
        device : torch.device, str or None
            Where to compute; None keeps the model's.
        metrics : sequence of Metric or None
            In the place of the settings' own.
        class_weights : sequence of float or None
            What the settings' own come to, one number per class.

        Returns
        -------
        Task
            With the local optimiser, and the weight decay in the loss unless the optimiser has it.
        """
        from polyfed.compute.task import Task
        from polyfed.metrics.scores import metrics_of

        optimizer = _optimizers().optimizer_of(self.optimizer, self.weight_decay, self.clip_norm)
        inside = 0.0 if optimizer.name == "adamw" else self.weight_decay
        judges = metrics_of(self.metrics) if metrics is None else metrics
        return Task(
            model, loss, weight_decay=inside, optimizer=optimizer, device=device, dtype=self.dtype,
            bf16=self.precision == "bf16", tf32=self.precision == "tf32", metrics=judges, class_weights=class_weights,
            recompute=self.recompute,
        )  # fmt: skip

    def dump(self) -> dict[str, Any]:
        return {"batch-size": "full"} | super().dump()

    def schedule_for(self, names: Sequence[str]) -> Schedule:
        """Return the schedule: who takes part and when.

        Parameters
        ----------
        names : sequence of str
            The clients' names.

        Returns
        -------
        Schedule
            The schedule given, or a fraction of the clients in every round.
        """
        from polyfed.core.schedule import Uniform, schedule_of

        if isinstance(self.schedule, Mapping):
            return schedule_of(self.schedule, self.fraction, tuple(names))
        return self.schedule or Uniform(self.fraction)

    @classmethod
    def deciding(cls) -> list[str]:
        """The keys that decide the numbers of a run, as a file spells them."""
        return [kebab(s.name) for s in settings_of(cls) if s.decides]


@dataclass(frozen=True)
class Settings(Training):
    """The keys at the top of an experiment file: those of a run, and which runs."""

    seeds: MANY | WHICH | None = setting(
        None,
        decides=False,
        doc="Number of seeds, counted up from seed, or a list of them: 5 or 0,3,7. Default: one; of several methods "
        "without a seed ten, or three or more as a minute holds them; 5 for `polyfed compare`.",
    )
    portable: bool = setting(False, decides=False, doc="Give the same bits on every x86 processor with AVX2; slower.")

    def __post_init__(self) -> None:
        super().__post_init__()
        which = self.seeds if isinstance(self.seeds, list) else [self.seed]
        self.require(0 < len(which) <= SEEDS, "seeds", f"1 to {SEEDS} seeds")
        self.require(len(set(which)) == len(which), "seeds", "distinct seeds")


@dataclass(frozen=True)
class Data(Table):
    """[data]: a named data set or a folder, and how it is divided among clients."""

    table: ClassVar[str] = "data"

    name: str = setting("heart-disease", doc="Data set (see polyfed data list) or folder of files.")
    dir: str | None = setting(None, doc="Folder with downloaded data.")
    partition: str | None = setting(None, doc="How samples are divided among clients: iid, dirichlet:0.5, natural, ...")
    clients: int | None = setting(None, ge=1, le=COUNTED, doc="Number of clients.")
    test: Literal["own", "ratio", "ratio-floor", "given", "merged", "independent"] | None = setting(
        None,
        doc="Test samples: own, held out of each client's; ratio, official ones in its class ratio (ratio-floor: "
        "rounded down); given, its own official ones; merged, held out of all samples, official ones included; "
        "independent, the official ones divided by the same rule.",
    )
    test_fraction: float = setting(0.2, ge=0, lt=1, doc="Share of a client's samples held out for testing.")
    test_samples: int = setting(100, ge=1, le=COUNTED, doc="Test samples per client, for test = ratio or ratio-floor.")
    validation_fraction: float | None = setting(
        None, ge=0, lt=1, doc="Share of a client's training samples held out for validation."
    )
    seed: SEED | None = setting(None, doc="Seed of the partition. Default: the run's.")
    global_file: str | None = setting(None, doc="Table or npz file of test rows on which all models are scored too.")
    without: WHO | None = setting(None, doc="Clients to leave out, by name: a federation that never had them.")
    options: Mapping[str, Any] = setting(factory=dict, doc="The data set's own options (see polyfed data list).")


@dataclass(frozen=True)
class Columns(columns.Columns, Table):
    """[columns]: what the columns of CSV files are, and how they become inputs."""

    def dump(self) -> dict[str, Any]:
        return {kebab(key): plain(value) for key, value in self.given.items()}


@dataclass(frozen=True)
class Model(Table):
    """[model]: a named model, or `name` in the user's own `file`. All other keys are the model's options."""

    table: ClassVar[str] = "model"

    name: str | None = setting(None, doc="linear, mlp, cnn, lenet, resnet18 or transformers, or a class in file.")
    file: str | None = setting(None, doc="Python file that defines the model.")
    backbone: str | None = setting(
        None,
        doc="Pretrained weights: a folder of the library transformers, which is the model, or a file for the named "
        "model (safetensors, or a state dict of torch). Nothing is downloaded.",
    )
    backbone_digest: str | None = setting(None, doc="Digest of the backbone, which a run writes; another is refused.")
    batchnorm: Literal["groups", "statistics"] | None = setting(
        None,
        doc="Put GroupNorm in the place of BatchNorm layers, or make their running statistics parameters, which FedAvg "
        "averages and FedBN leaves with the client. Default: refused unless frozen.",
    )
    adapter: str | None = setting(
        None,
        doc="Part of the model to train, the rest is frozen: probe, biases, norms, last:K, or "
        "lora:r=8,targets=query+value.",
    )
    options: Mapping[str, Any] = setting(
        factory=dict, doc="Any other key is an option of the model, such as hidden of mlp."
    )


def training_of(training: Training | None, given: Mapping[str, Any]) -> Training:
    """`training` with the settings `given` to a function by keyword. Raises ConfigError for one that there is not."""
    keys = [s.name for s in settings_of(Training)]
    for key in given:
        if key not in keys:
            raise ConfigError(f"{key}: unknown setting{closest(key, keys)}; known: {', '.join(keys)}")
    return Training(**given) if training is None else dataclasses.replace(training, **given)


def plain(value: Any) -> Any:
    """A setting's value as TOML can hold it: objects by their name and settings, functions by that word."""
    from polyfed.compute.batches import Each
    from polyfed.core.schedule import Schedule
    from polyfed.runs.threats import Threat

    if isinstance(value, Threat | Privacy):
        return value.dump()
    if isinstance(value, Schedule):
        return _in_short(repr(value))
    if is_mapping(value):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, str | int | float | None):
        return value
    if callable(value):
        return str(value) if isinstance(value, Each) else "function"
    return [plain(v) for v in value] if is_list(value) else str(value).removeprefix("torch.")


def _optimizers() -> Any:
    from polyfed.compute import optimizers

    return optimizers


def _named(table: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A table as (its name, its settings by their Python names)."""
    return table.get("name"), {str(key).replace("-", "_"): value for key, value in table.items() if key != "name"}


def _in_short(text: str) -> str:
    """A text that says in one line what it is, and by its digest whether it is the same."""
    if len(text) <= 1000:
        return text
    return f"{text[:100]}... (blake2b {hashlib.blake2b(text.encode(), digest_size=16).hexdigest()})"
