"""Algorithm: a method as four functions on tensors; clients, devices, bytes and saving are not its business. Shapes:
n clients in the federation, s in this call, p parameters."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import MethodError
from polyfed.base.registry import Registry
from polyfed.base.settings import Configured, Setting
from polyfed.base.values import COUNTED, FREE, Limits
from polyfed.compute.batches import Batches
from polyfed.compute.task import Task
from polyfed.core import contract
from polyfed.core.messages import KNOWN as KNOWN
from polyfed.core.messages import Down as Down
from polyfed.core.messages import Round as Round
from polyfed.core.messages import Server as Server
from polyfed.core.messages import State as State
from polyfed.core.messages import mean as mean
from polyfed.core.stated import Needs as Needs
from polyfed.core.stated import Portrait as Portrait
from polyfed.core.stated import by_settings as by_settings
from polyfed.core.uplinks import Uplinks

SMALL = 1 << 20  # numbers of a server's state that is made for its shapes


def _is_method(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Algorithm)


METHODS = ("polyfed.methods", "a class that derives from polyfed.Algorithm", _is_method)
REGISTRY: Registry[type["Contender"]] = Registry("algorithm.name", group=METHODS)


class Contender(Configured):
    """Base of methods and yardsticks, the rows of a comparison, each of which a run can be made with.

    A subclass is registered as soon as it is defined, under its lower-case class name, or under `name` where the paper
    writes a hyphen ("lg-fedavg"). The dataclass fields are its settings; it keeps no other state.
    """

    table: ClassVar[str] = "algorithm"
    name: ClassVar[str]
    needs: Needs = Needs()  # no field, as this class is no dataclass
    linear_claims: str = ""  # what it promises of models that are linear in the trained vector alone, as a phrase
    linear_only: bool = False  # True: adapters that are not linear in what they train, such as dora, are refused
    adapter_train: str = ""  # of a method for LoRA adapters alone: the `train` that theirs must have
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

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
        if name in step_sizes(cls):
            return Limits(ge=0)
        return Limits(ge=0, le=COUNTED) if name.endswith("_epochs") else FREE


def step_sizes(cls: type[Contender]) -> list[str]:
    """The settings that are step sizes: `lr`, and those that say so."""
    return [f.name for f in dataclasses.fields(cls) if f.name == "lr" or f.metadata.get("setting", Setting()).step_size]


@dataclass(frozen=True)
class Algorithm(Contender, abstract=True):
    """Base of every method.

    A method to which clients are added by a rule of its own also has `admit(task, server, samples)`, which returns a
    `Newcomer`; one that starts from other methods' models, `warm_start(task, models, samples)`, see `runs.resume`.
    """

    def __init_subclass__(cls, **kwargs: Any):
        contract.takes(cls, Algorithm)
        super().__init_subclass__(**kwargs)

    def init_server(self, task: Task, w0: Tensor, n: int) -> "State | Server":
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

    def init_client(self, task: Task, w0: Tensor) -> State:
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

    def downlink(self, server: State, round: Round) -> Down:
        """Return the server's messages.

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

    def local_update(self, task: Task, client: State, down: State, data: Batches, round: Round) -> tuple[State, State]:
        """Train s clients.

        Parameters
        ----------
        task : Task
            The model and loss, with their gradients.
        client, down : dict of Tensor
            [s, ...] the clients' private tensors, and their downlink; a shared message is a view with s equal rows.
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
        """The server's next state, from the clients' uplinks.

        Parameters
        ----------
        server : dict of Tensor
            The server's state; its tensors may be written into once everything has been asked of `up`.
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

    def accepts(self, task: Task, up: State) -> str:
        """Say why `aggregate` could not work with the numbers of one client's uplink.

        Asked of replies of real sites, before they count. Names, shapes, types and finiteness have been checked.

        Parameters
        ----------
        task : Task
            The model and loss.
        up : dict of Tensor
            One client's uplink of one exchange, without the clients' axis.

        Returns
        -------
        str
            By default empty: any numbers will do. A method that uses integers as positions names those out of range.
        """
        return ""

    def deployment(self, server: State, round: Round) -> Down:
        """Return the messages that clients would receive in order to deploy a model now.

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

    def personal(self, task: Task, client: State, down: State) -> Tensor:
        """The model that each client would deploy now.

        Parameters
        ----------
        task : Task
            The model and loss.
        client, down : dict of Tensor
            [s, ...] the clients' private tensors, and their `deployment`.

        Returns
        -------
        Tensor
            [s, p].
        """
        return down["w"]

    def parameters(self, task: Task, client: State, down: State) -> Tensor | int | None:
        """Count the numbers that describe the clients' models, positions not counted.

        Parameters
        ----------
        task : Task
            The model and loss.
        client, down : dict of Tensor
            [s, ...] the clients' private tensors, and their `deployment`.

        Returns
        -------
        Tensor, int or None
            [s], or one number for all; None: all p.
        """
        return None

    def describe(self, server: State) -> Portrait:
        """Describe the state, for reports.

        Parameters
        ----------
        server : dict of Tensor
            The server's state.

        Returns
        -------
        Portrait
            By default the server's "w" as the model that all clients have in common, where it is one vector.
        """
        w = server.get("w")
        return Portrait(common=w if w is not None and w.dim() == 1 else None)

    def conserved(self, server: State, clients: State) -> State:
        """The sums over all clients that the method relies on, as differences that are zero whatever has been lost.

        Parameters
        ----------
        server, clients : dict of Tensor
            The server's state, and the private tensors of all clients, [n, ...].

        Returns
        -------
        dict of Tensor
            Zero but for rounding, each under a name that says what it is; empty if the method relies on none.
        """
        return {}


class Personal(Algorithm, abstract=True):
    """A method whose deployable model lives with the client as `client["w"]`: evaluating it needs no downlink."""

    def init_client(self, task: Task, w0: Tensor) -> State:
        return {"w": w0}

    def personal(self, task: Task, client: State, down: State) -> Tensor:
        return client["w"]


def started(algorithm: Algorithm, task: Task, n: int, keys: np.ndarray | None = None) -> Server:
    """The server's state before the first round, with "known". keys: [n] of the clients; None: newcomers', all 0."""
    keys = np.zeros(n, dtype=np.uint64) if keys is None else keys
    state = contract.server_state(algorithm, algorithm.init_server(task, task.w0.clone(), n), keys)
    return state._replace(each={**state.each, KNOWN: task.w0.new_zeros(n)})


def outlined(algorithm: Algorithm, task: Task, n: int) -> State:
    """The server's first state for its shapes and refusals alone; a large one is made on torch's meta device."""
    # the meta device loads torch's compiler, seconds of imports that a small run need not wait for
    small = n * n * task.p <= SMALL
    w0 = task.w0.clone() if small else task.w0.to("meta")
    keys = np.zeros(n, dtype=np.uint64)
    return contract.server_state(algorithm, algorithm.init_server(task, w0, n), keys).whole()


def decayed(algorithm: Algorithm, factor: float) -> Algorithm:
    """The method with its local step sizes scaled, also those of a method among its fields."""
    if factor == 1:
        return algorithm
    scaled: dict[str, Any] = {key: getattr(algorithm, key) for key in step_sizes(type(algorithm))}
    for key, value in scaled.items():
        algorithm.require(not isinstance(value, str), key, "a number, to decay it")
        scaled[key] = factor * value
    for f in dataclasses.fields(algorithm):
        if isinstance(inner := getattr(algorithm, f.name), Algorithm):
            scaled[f.name] = decayed(inner, factor)
    return dataclasses.replace(algorithm, **scaled)


def make(name: str, /, **settings: Any) -> Algorithm:
    """A method by its registered name, with hyper-parameters. Raises ConfigError that names a wrong one."""
    return REGISTRY.make(name, settings)


def check(algorithm: Contender, dtype: torch.dtype = torch.float64) -> None:
    """Raise ConfigError for a hyper-parameter that does not fit training in `dtype`."""
    # again: the method may have a `__post_init__` that does not call this one
    Configured.__post_init__(algorithm)
    most = torch.finfo(dtype).max
    for key in step_sizes(type(algorithm)):
        value = getattr(algorithm, key)
        name = str(dtype).removeprefix("torch.")
        algorithm.require(isinstance(value, str) or value <= most, key, f"at most {most:.3g}, the largest {name}")
