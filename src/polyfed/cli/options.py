"""Declaration of commands: each is a class whose docstring is its help and whose fields are its arguments and options.

    class Leave(Command, takes=("out", "quiet")):
        \"""Train again without some clients, ...\"""

        run: Path = argument("Folder of a run or of a comparison.")
        client: list[str] = option("Who leaves, by name; repeatable.", ..., "NAME")

The command is the function of that name, `leave` of leave.py beside the declaration. Its module is imported when the
command is called, and it is given an instance of the class. Help, completion and a mistyped option are answered from
the declaration alone, which imports neither torch nor numpy.
"""

import re
from collections.abc import Callable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, dataclass_transform

from typer import Argument, Context, Option

from polyfed.base.errors import ConfigError
from polyfed.cli import complete, portable
from polyfed.cli.late import late
from polyfed.runs.training import Columns, Data, Model, Settings

DATA, TRAIN, WHERE = "Data and model", "Training", "Results and machine"
FILE = {table.table: table for table in (Settings, Data, Columns, Model)}  # the tables of an experiment file


class Spec(NamedTuple):
    """Declaration of an argument or an option. key: of the experiment file, that it sets"""

    info: Any
    default: Any
    key: str

    def parameter(self, name: str, hint: Any) -> Parameter:
        """The field as a parameter of a function; yes or no is a flag, which has no opposite."""
        if hint is bool and self.info.default is ... and not self.info.param_decls:
            self.info.param_decls = (f"--{name}".replace("_", "-"),)
        default = Parameter.empty if self.default is ... else self.default
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, self.info])


def argument(help: str, default: Any = ..., metavar: str | None = None, *, key: str = "", **more: Any) -> Any:
    """A field that is an argument, required unless it has a default. key: of the experiment file, that it sets."""
    return Spec(Argument(help=help, metavar=metavar, **more), default, key)


def option(
    help: str, default: Any = None, metavar: str | None = None, *names: str, key: str = "", panel: str = "", **more: Any
) -> Any:
    """A field that is an option; it is required where its default is `...`.

    names: how it is written, where not like the field     key: of the experiment file, that it sets
    """
    return Spec(Option(*names, help=help, metavar=metavar, rich_help_panel=panel or None, **more), default, key)


def of(table: type[Any], name: str, panel: str, metavar: str | None = None, default: Any = None, **more: Any) -> Any:
    """A field that is the option of a setting, with its help; it is text, which the setting's own type reads."""
    doc = table.__dataclass_fields__[name].metadata["setting"].doc
    key = f"{table.table}.{name}".strip(".").replace("_", "-") if table in FILE.values() else ""
    return option(doc, default, metavar, key=key, panel=panel, **more)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(argument, option, of))
class Command:
    """Base of commands. An instance has what was asked for as attributes; what was not is at its default.

    takes: options of its base that it has behind its own     group: of commands, that it belongs to
    module: with the command's function, where it is not called like it
    asks: its argument with an experiment or a run that may ask for --portable
    idle: by field, when it would have no effect, for which it is then refused: "with --a without --b | with ARGUMENT"
    """

    specs: ClassVar[dict[str, Spec]] = {}
    parameters: ClassVar[dict[str, Parameter]] = {}  # of all fields, also of those of its bases
    names: ClassVar[tuple[str, ...]]  # of those that it has
    place: ClassVar[tuple[str, str]]  # of its function: module and name
    group: ClassVar[str]
    asks: ClassVar[str]
    idle: ClassVar[dict[str, str]] = {}

    def __init_subclass__(
        cls, takes: tuple[str, ...] = (), module: str = "", group: str = "", asks: str = "",
        idle: dict[str, str] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        super().__init_subclass__(**more)
        own = {name: spec for name, spec in vars(cls).items() if isinstance(spec, Spec)}
        cls.specs = cls.specs | own
        cls.parameters = cls.parameters | {n: spec.parameter(n, cls.__annotations__[n]) for n, spec in own.items()}
        for name, spec in own.items():
            setattr(cls, name, spec.default)
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
        package = cls.__module__.rpartition(".")[0]
        cls.place, cls.names = (f"{package}.{module or group or name}", name), (*own, *takes)
        cls.group, cls.asks, cls.idle = group, asks, {n: v for n, v in cls.idle.items() if n not in own} | (idle or {})

    def __init__(self, **given: Any):
        vars(self).update(given)


class Shared(Command, idle={"force": "without --out"}):
    """Base of commands with options that several have."""

    out: Path | None = option("Folder for the results. Default: runs/<time>-<name>.", panel=WHERE)
    force: bool = option("Rename the results in --out to NAME.old, and begin anew.", False, panel=WHERE)
    quiet: bool = option("Show no progress.", False, None, "--quiet", "-q", panel=WHERE)


class Experiment(Shared):
    """Base of commands that take keys of an experiment file."""

    set: list[str] | None = option(
        "Set any key of the experiment file, such as algorithm.lr=0.05 (see polyfed config).", None, "KEY=VALUE",
        autocompletion=complete.settings,
    )  # fmt: skip
    data: str | None = of(Data, "name", DATA, autocompletion=complete.data)
    data_dir: str | None = of(Data, "dir", DATA, "DIR")
    target: str | None = of(Columns, "target", DATA, "COLUMN")
    site: str | None = of(Columns, "by", DATA, "COLUMN")
    query: str | None = of(Columns, "query", DATA, "SQL")
    split: str | None = of(Columns, "split", DATA, "COLUMN")
    test_file: str | None = of(Columns, "test_file", DATA, "FILE")
    global_file: str | None = of(Data, "global_file", DATA, "FILE")
    standardise: str | None = of(Columns, "standardise", DATA, "SCOPE")
    drop: str | None = of(Columns, "drop", DATA, "A,B,...")
    weights: str | None = of(Columns, "weights", DATA, "COLUMN")
    encoding: str | None = of(Columns, "encoding", DATA, "NAME")
    partition: str | None = of(Data, "partition", DATA)
    clients: str | None = of(Data, "clients", DATA, "N")
    model: str | None = of(Model, "name", DATA)
    backbone: str | None = of(Model, "backbone", DATA, "PATH")
    adapter: str | None = of(Model, "adapter", DATA)
    rounds: str | None = of(Settings, "rounds", TRAIN, "N")
    stop: str | None = of(Settings, "stop", TRAIN, "RULE")
    fraction: str | None = of(Settings, "fraction", TRAIN, "X")
    local_epochs: str | None = of(Settings, "local_epochs", TRAIN, "N")
    local_steps: str | None = of(Settings, "local_steps", TRAIN, "N")
    batch_size: str | None = of(Settings, "batch_size", TRAIN, "N")
    lr: str | None = option("Step size of every method.", None, "X", key="algorithm.lr", panel=TRAIN)
    optimizer: str | None = of(Settings, "optimizer", TRAIN, "NAME")
    as_released: bool = of(Settings, "as_released", TRAIN, default=False)
    metrics: str | None = of(Settings, "metrics", TRAIN, "NAMES")
    seed: str | None = of(Settings, "seed", TRAIN, "N")
    seeds: str | None = of(Settings, "seeds", TRAIN)
    device: str | None = of(Settings, "device", WHERE)
    engine: str | None = of(Settings, "engine", WHERE, "NAME")
    workers: str | None = of(Settings, "workers", WHERE, "N")
    dtype: str | None = of(Settings, "dtype", WHERE)
    track: str | None = of(Settings, "track", WHERE, "TOOL")
    portable: bool = of(Settings, "portable", WHERE, default=False)


def word(cls: type[Command]) -> str:
    """Name of a command within its group."""
    return cls.place[1].removeprefix(f"{cls.group}_").replace("_", "-")


def callback(cls: type[Command]) -> Callable[..., int]:
    """A command as typer takes it: a function whose parameters are the fields of its class."""

    def command(context: Context, **given: Any) -> int:
        sources = {p: context.get_parameter_source(p.name or "") for p in context.command.params}
        refuse_idle(cls.idle, {p.name or "": p.opts[0] for p, s in sources.items() if s and s.name == "COMMANDLINE"})
        file = given.get(cls.asks)
        if given.get("portable") or (file is not None and portable.asked_by(file)):
            portable.pin()  # before torch is imported
        return late(*cls.place)(cls(**given)) or 0

    context = Parameter("context", Parameter.KEYWORD_ONLY, annotation=Context)
    command.__signature__ = Signature([context, *(cls.parameters[n] for n in cls.names)])  # pyrefly: ignore[missing-attribute]
    command.__name__, command.__doc__ = cls.place[1], cls.__doc__
    return command


def refuse_idle(idle: dict[str, str], given: dict[str, str]) -> None:
    """Raise ConfigError for a field that has no effect, see `Command.idle`. given: name -> how it is written"""
    for name, cases in ((n, idle[n]) for n in idle if n in given):
        for case in cases.split(" | "):
            beside = re.findall(r"(with|without) (?:--)?([\w-]+)", case)
            if all((other.lower().replace("-", "_") in given) == (how == "with") for how, other in beside):
                raise ConfigError(f"{given[name]}: has no effect {case}")


def every(*but: str) -> tuple[str, ...]:
    """The names of all options of training, but for some."""
    return tuple(name for name in (*Experiment.names, "out", "force", "quiet") if name not in but)
