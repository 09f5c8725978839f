"""Algorithm: what a method is. Four functions on tensors; clients, devices, bytes and saving are
not its business. Shapes: n clients in the federation, s in this call, p parameters.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, MethodError
from polyfed.base.registry import Registry
from polyfed.base.settings import Configured
from polyfed.base.values import COUNTED, FREE, Limits
from polyfed.compute.batches import Batches
from polyfed.core import contract
from polyfed.core.messages import KNOWN, Down, Round, Server, State, mean
from polyfed.core.uplinks import Uplinks

if TYPE_CHECKING:
    from polyfed.compute.task import Task

__all__ = [
    "KNOWN",
    "REGISTRY",
    "Algorithm",
    "Down",
    "Personal",
    "Round",
    "Server",
    "State",
    "check",
    "make",
    "mean",
    "outlined",
    "started",
]

SMALL = 1 << 20  # numbers, of a server's state that is made to see what it is like


def _is_method(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Algorithm)


METHODS = ("polyfed.methods", "a class that derives from polyfed.Algorithm", _is_method)
REGISTRY: Registry[type["Algorithm"]] = Registry("algorithm.name", group=METHODS)


@dataclass(frozen=True)
class Algorithm(Configured):
    """Base of every method. The dataclass fields are its hyper-parameters; it keeps no other state.

    A subclass is registered as soon as it is defined, under its lower-case class name, or under `name` where the paper
    writes a hyphen ("lg-fedavg").

    `citation` is BibTeX. `certificates` name what proves the implementation right, independently of itself.
    """

    table: ClassVar[str] = "algorithm"
    name: ClassVar[str]
    citation: ClassVar[str] = ""
    certificates: ClassVar[tuple[str, ...]] = ()
    synchronous: ClassVar[bool] = False  # whether every reply must be taken in the round its message was sent
    step_sizes: ClassVar[tuple[str, ...]] = ("lr",)  # the hyper-parameters that a decaying step size scales
    discloses: ClassVar[dict[str, str]] = {}  # uplinks that are made of samples and not of training: what they are
    plain_sgd: ClassVar[str | None] = None  # why the local steps must be those of plain SGD

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        own = cls.__dict__.get("__init__")
        if own is not None and own.__code__.co_filename != "<string>":  # where dataclasses write theirs
            raise MethodError(
                f"{contract.place(own)}: {cls.__name__} has an __init__ of its own, expected a frozen dataclass whose "
                "settings are fields, such as lr: float = 0.1"
            )
        if not abstract:
            REGISTRY.add(cls.name, cls)

    @classmethod
    def implied(cls, name: str) -> Limits:
        """Bounds of a setting that follow from its name: step sizes are never negative, epochs are counts.

        Parameters
        ----------
        name : str
            Name of the field.

        Returns
        -------
        Limits
            They hold in addition to the field's own bounds.
        """
        if name in cls.step_sizes:
            return Limits(ge=0)
        return Limits(ge=0, le=COUNTED) if name.endswith("_epochs") else FREE

    def decayed(self, factor: float) -> "Algorithm":
        """The method with its local step sizes scaled.

        Parameters
        ----------
        factor : float
            What every hyper-parameter named in `step_sizes` is multiplied by.

        Returns
        -------
        Algorithm
            A copy, or the method itself for a factor of 1.

        Raises
        ------
        ConfigError
            A step size is not a number.
        """
        if factor == 1:
            return self
        scaled = {key: getattr(self, key) for key in self.sizes()}
        for key, value in scaled.items():
            self.require(not isinstance(value, str), key, "a number, to decay it")
        return dataclasses.replace(self, **{key: factor * value for key, value in scaled.items()})

    def sizes(self) -> list[str]:
        """The settings that are step sizes; a method without local SGD need not have an `lr`."""
        known = [f.name for f in dataclasses.fields(self)]
        for key in self.step_sizes:
            if key not in known and key != "lr":
                raise ConfigError(f"step_sizes of {type(self).__name__}: found {key!r}, expected names of its settings")
        return [key for key in self.step_sizes if key in known]

    def plan(self, task: "Task", n: int) -> str | None:
        """One line about the run before it starts, such as the solver chosen and its memory.

        Parameters
        ----------
        task : Task
            The model and loss.
        n : int
            Clients in the federation.

        Returns
        -------
        str or None
            None if there is nothing to say.
        """
        return None

    def phases(self, t: int) -> int:
        """How many exchanges a round has.

        Parameters
        ----------
        t : int
            Round, from 0.

        Returns
        -------
        int
            1 unless a method needs more.
        """
        return 1

    def in_step(self, n: int, t: int = 0) -> str | None:
        """Why the method cannot run asynchronously.

        Parameters
        ----------
        n : int
            Clients in the federation.
        t : int
            Round, from 0.

        Returns
        -------
        str or None
            The reason, to go behind the method's name; None if it can.
        """
        phases = self.phases(t)
        if phases > 1:
            return f"needs {phases} exchanges a round"
        return "needs replies in the round they were asked for" if self.synchronous else None

    def needs_sgd(self) -> str | None:
        """Why the local steps must be those of plain SGD, not clipped.

        Returns
        -------
        str or None
            By default `plain_sgd`; None if any local optimiser will do.
        """
        return self.plain_sgd

    def audience(self, server: State, round: Round) -> Tensor:
        """Which clients this exchange is with, in a round of several exchanges.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.
        round : Round
            The exchange with the whole cohort.

        Returns
        -------
        Tensor
            Some of `round.ids`, in their order; by default all.
        """
        return round.ids

    def init_server(self, task: "Task", w0: Tensor, n: int) -> "State | Server":
        """The server's tensors before the first round.

        The loop adds "known": [n], the training samples of the clients met so far, 0 for a client not met yet.

        Parameters
        ----------
        task : Task
            The model and loss.
        w0 : Tensor
            [p] the common start.
        n : int
            Clients in the federation.

        Returns
        -------
        dict of Tensor or Server
            A plain dict where no tensor has a row per client; otherwise `Server`, which says which tensors have.
        """
        return {"w": w0}

    def init_client(self, task: "Task", w0: Tensor) -> State:
        """One client's private tensors before it is first picked; they never leave it.

        Parameters
        ----------
        task : Task
            The model and loss.
        w0 : Tensor
            [p] the common start.

        Returns
        -------
        dict of Tensor
            Empty if the method keeps none.
        """
        return {}

    def warm_start(self, task: "Task", models: Tensor, samples: Tensor) -> tuple[State, State]:
        """The state to start from, given the clients' models of another method's run.

        Each client is billed for sending its model.

        Parameters
        ----------
        task : Task
            The model and loss.
        models : Tensor
            [n, p] the clients' models.
        samples : Tensor
            [n] their training samples.

        Returns
        -------
        tuple of dict of Tensor
            The server's state, and the clients' private rows [n, ...].

        Raises
        ------
        ConfigError
            By default: the method cannot be warm-started.
        """
        raise ConfigError(f"start: {self.name} cannot be warm-started from another method's models")

    def downlink(self, server: State, round: Round) -> Down:
        """What the server sends.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.
        round : Round
            The exchange; `round.ids` are the receivers.

        Returns
        -------
        Down
            By default the server's "w", shared by all.
        """
        return Down(shared={"w": server["w"]})

    def local_update(
        self, task: "Task", client: State, down: State, data: Batches, round: Round
    ) -> tuple[State, State]:
        """What s clients do.

        Parameters
        ----------
        task : Task
            The model and loss, with their gradients.
        client : dict of Tensor
            [s, ...] the clients' private tensors.
        down : dict of Tensor
            [s, ...] what they received; a shared message is a view with s equal rows.
        data : Batches
            Their batches of this exchange.
        round : Round
            The exchange; `round.ids` are these s clients.

        Returns
        -------
        tuple of dict of Tensor
            The new private tensors and the uplink, [s, ...] each. Private tensors left out stay as they were.
        """
        raise contract.unwritten(self, "local_update")

    def aggregate(self, server: State, up: Uplinks, round: Round) -> State:
        """The server's next state, from what the clients sent.

        Parameters
        ----------
        server : dict of Tensor
            The server's state. It is handed over: its tensors may be written into once everything has been asked of
            `up`.
        up : Uplinks
            `up.mean("w")` and `up.sum("w")`, or `up["w"]`, [s, ...], where every client's own upload is needed.
        round : Round
            The exchange; `round.ids` are the senders.

        Returns
        -------
        dict of Tensor
            The whole next state.
        """
        raise contract.unwritten(self, "aggregate")

    def accepts(self, task: "Task", up: State) -> str:
        """What is wrong with the numbers of one client's uplink, where `aggregate` could not work with them.

        Names, shapes, types and that numbers are finite have been checked. Asked of what real sites send, before the
        reply counts.

        Parameters
        ----------
        task : Task
            The model and loss.
        up : dict of Tensor
            What the client sent in one exchange, without the clients' axis.

        Returns
        -------
        str
            By default empty: any numbers will do. A method that uses integers as positions says those that are none.
        """
        return ""

    def deployment(self, server: State, round: Round) -> Down:
        """What clients would receive in order to deploy a model now.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.
        round : Round
            The exchange; `round.ids` are the receivers.

        Returns
        -------
        Down
            By default the usual downlink.
        """
        return self.downlink(server, round)

    def personal(self, client: State, down: State) -> Tensor:
        """The model that each client would deploy now.

        Parameters
        ----------
        client : dict of Tensor
            [s, ...] the clients' private tensors.
        down : dict of Tensor
            [s, ...] what they received as `deployment`.

        Returns
        -------
        Tensor
            [s, p].
        """
        return down["w"]

    def common(self, server: State) -> Tensor | None:
        """The one model that all clients have in common.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.

        Returns
        -------
        Tensor or None
            [p], or None if there is none.
        """
        w = server.get("w")
        return w if w is not None and w.dim() == 1 else None

    def factors(self, server: State) -> dict[str, tuple[Tensor, Tensor]] | None:
        """The common model's low-rank layers as factors.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.

        Returns
        -------
        dict of tuple of Tensor, or None
            ([d1, r], [r, d2]) by the layer's name; None if the method makes none.
        """
        return None

    def parameters(self, client: State, down: State) -> Tensor | int | None:
        """How many numbers describe the clients' models, positions not counted.

        Parameters
        ----------
        client : dict of Tensor
            [s, ...] the clients' private tensors.
        down : dict of Tensor
            [s, ...] what they received as `deployment`.

        Returns
        -------
        Tensor, int or None
            [s], or one number for all; None: all p.
        """
        return None

    def conserved(self, server: State, clients: State) -> State:
        """The sums over all clients that the method rests on, as differences that are zero whatever has been lost.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.
        clients : dict of Tensor
            [n, ...] the private tensors of all clients.

        Returns
        -------
        dict of Tensor
            Zero but for rounding, by what they say; empty if the method rests on none.
        """
        return {}

    def report(self, server: State) -> dict[str, Any]:
        """Findings worth a line in the report: clusters, mixing matrix, step sizes.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.

        Returns
        -------
        dict
            JSON-able values, or tensors.
        """
        return {}


class Personal(Algorithm, abstract=True):
    """A method whose deployable model lives with the client as `client["w"]`: no downlink is needed to evaluate it."""

    def init_client(self, task: "Task", w0: Tensor) -> State:
        return {"w": w0}

    def personal(self, client: State, down: State) -> Tensor:
        return client["w"]


def started(algorithm: Algorithm, task: "Task", n: int) -> Server:
    """The server's state before the first round, with "known"."""
    state = contract.server_state(algorithm, algorithm.init_server(task, task.w0.clone(), n))
    return state._replace(each={**state.each, KNOWN: task.w0.new_zeros(n)})


def outlined(algorithm: Algorithm, task: "Task", n: int) -> State:
    """What `started` would hold, for its shapes and for what the method refuses; where it could be large, without it.

    torch's operators without storage (its meta device) load its compiler, seconds of imports, which a small run need
    not wait for.
    """
    small = n * n * task.p <= SMALL
    w0 = task.w0.clone() if small else task.w0.to("meta")
    return contract.server_state(algorithm, algorithm.init_server(task, w0, n)).whole()


def make(name: str, /, **settings: Any) -> Algorithm:
    """A method by its registered name, with hyper-parameters. Raises ConfigError naming what is wrong."""
    return REGISTRY.make(name, settings)


def check(algorithm: Algorithm, dtype: torch.dtype = torch.float64) -> None:
    """Raise ConfigError for a hyper-parameter that does not fit, whatever the method's own `__post_init__` does.

    dtype: of the training, which step sizes must be numbers of
    """
    Configured.__post_init__(algorithm)
    most = torch.finfo(dtype).max
    for key in algorithm.sizes():
        value = getattr(algorithm, key)
        name = str(dtype).removeprefix("torch.")
        algorithm.require(isinstance(value, str) or value <= most, key, f"at most {most:.3g}, the largest {name}")
