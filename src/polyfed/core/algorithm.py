"""Algorithm: what a method is. Four functions on tensors; everything else (clients, devices, bytes, saving) is not its
business. Shapes: n clients in the federation, s in this call, p parameters.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from polyfed.core.batches import Batches
from polyfed.core.errors import ConfigError
from polyfed.core.settings import COUNTED, FREE, Configured, Limits, Registry
from polyfed.core.typed import weighted_sum

if TYPE_CHECKING:
    from polyfed.core.newcomer import Newcomer
    from polyfed.core.task import Task
    from polyfed.core.uplinks import Uplinks

State = dict[str, Tensor]


class Round(NamedTuple):
    """What both sides may know about one exchange.

    t: round, from 0     n: clients in the federation     phase: exchange within the round, from 0
    ids: [s] positions of the clients     samples: [s] their training samples (float)
    sent: [s] round at which their downlink left (earlier than t only when replies arrive late)
    """

    t: int
    n: int
    phase: int
    ids: Tensor
    samples: Tensor
    sent: Tensor

    def take(self, rows: Tensor) -> "Round":
        """The same exchange for some of its clients."""
        return self._replace(ids=self.ids[rows], samples=self.samples[rows], sent=self.sent[rows])


class Down(NamedTuple):
    """The messages of one downlink: `shared` is the same for every client, `each` has one row per client."""

    shared: State = {}  # noqa: RUF012  (never written to)
    each: State = {}  # noqa: RUF012


class Server(NamedTuple):
    """The server's tensors before the first round, by their axes; a method then sees them all under their names.

    shared: of no client in particular     each: [n, ...] a row per client     pairs: [n, n, ...] a row and a column
    per client     free: tensors whose shape changes in training

    Newcomers follow from it: a client more is a row more of `each`, and a row and a column more of `pairs`.
    """

    shared: State = {}  # noqa: RUF012  (never written to)
    each: State = {}  # noqa: RUF012
    pairs: State = {}  # noqa: RUF012
    free: State = {}  # noqa: RUF012

    def whole(self) -> State:
        """All tensors."""
        return {**self.shared, **self.each, **self.pairs, **self.free}


# [n] in every server's state, kept by the loop: training samples of the clients met so far, 0 for one not met
KNOWN = "known"
REGISTRY: Registry[type["Algorithm"]] = Registry("algorithm.name")


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

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = cls.__name__.lower()
        if not abstract:
            REGISTRY.add(cls.name, cls)

    @classmethod
    def implied(cls, name: str) -> Limits:
        """Step sizes are never negative, epochs are counts."""
        if name in cls.step_sizes:
            return Limits(ge=0)
        return Limits(ge=0, le=COUNTED) if name.endswith("_epochs") else FREE

    def decayed(self, factor: float) -> "Algorithm":
        """The method with its local step sizes scaled by `factor`."""
        if factor == 1:
            return self
        scaled = {key: getattr(self, key) for key in self.step_sizes}
        for key, value in scaled.items():
            self.require(not isinstance(value, str), key, "a number, to decay it")
        return dataclasses.replace(self, **{key: factor * value for key, value in scaled.items()})

    def plan(self, task: "Task", n: int) -> str | None:
        """What is worth knowing before a run with n clients starts, in one line: the solver chosen, its memory."""
        return None

    def phases(self, t: int) -> int:
        """Exchanges in round t."""
        return 1

    def in_step(self, n: int, t: int = 0) -> str | None:
        """Why the method cannot run asynchronously, or None."""
        phases = self.phases(t)
        if phases > 1:
            return f"needs {phases} exchanges a round"
        return "needs replies in the round they were asked for" if self.synchronous else None

    def audience(self, server: State, round: Round) -> Tensor:
        """Which of `round.ids` this exchange is with, in their order, where a round has several."""
        return round.ids

    def init_server(self, task: "Task", w0: Tensor, n: int) -> "State | Server":
        """The server's tensors before the first round; w0: [p]. A plain dict where none has a row per client, else
        `Server`, which says which have.

        The loop adds "known": [n], the training samples of the clients met so far, 0 for one that was not.
        """
        return {"w": w0}

    def init_client(self, task: "Task", w0: Tensor) -> State:
        """One client's private tensors before it is first picked; they never leave it. {} if none."""
        return {}

    def warm_start(self, task: "Task", models: Tensor, samples: Tensor) -> tuple[State, State]:
        """(server state, private rows [n, ...]) to start from the clients' models of another method's run.

        models: [n, p]     samples: [n]. Each client is billed for sending its model.
        """
        raise ConfigError(f"start: {self.name} cannot be warm-started from another method's models")

    def admit(self, task: "Task", server: State, samples: Tensor) -> "Newcomer":
        """The server's side of one client added after training; the n others stay frozen.

        samples: [n] their training samples. By default the method's own rule, with room for one client more.
        """
        from polyfed.core.newcomer import Newcomer

        return Newcomer(self, task, server, samples)

    def downlink(self, server: State, round: Round) -> Down:
        """What the server sends to the clients `round.ids`."""
        return Down(shared={"w": server["w"]})

    def local_update(
        self, task: "Task", client: State, down: State, data: Batches, round: Round
    ) -> tuple[State, State]:
        """What s clients do. client, down: [s, ...] each. Returns (new private state, uplink), [s, ...] each."""
        raise NotImplementedError

    def aggregate(self, server: State, up: "Uplinks", round: Round) -> State:
        """The server's next state from what `round.ids` sent: `up.mean("w")`, `up.sum("w")`, or `up["w"]`, [s, ...],
        where every client's own is needed.

        `server` is handed over: its tensors may be written into once everything has been asked of `up`.
        """
        raise NotImplementedError

    def deployment(self, server: State, round: Round) -> Down:
        """What `round.ids` would receive to deploy a model now; by default the usual downlink."""
        return self.downlink(server, round)

    def personal(self, client: State, down: State) -> Tensor:
        """[s, p]: the model that each client would deploy now, from its private state and `deployment`."""
        return down["w"]

    def common(self, server: State) -> Tensor | None:
        """[p]: the one model that all clients have in common; None where there is none."""
        w = server.get("w")
        return w if w is not None and w.dim() == 1 else None

    def factors(self, server: State) -> dict[str, tuple[Tensor, Tensor]] | None:
        """The common model's low-rank layers as factors [d1, r], [r, d2], by name; None: the method makes none."""
        return None

    def parameters(self, server: State, client: State) -> Tensor | int | None:
        """Numbers that describe the clients' models, one for all or [s], positions not counted; None: all p of them."""
        return None

    def report(self, server: State) -> dict[str, Any]:
        """Findings worth a line in the report: clusters, mixing matrix, step sizes. JSON-able, or tensors."""
        return {}


class Personal(Algorithm, abstract=True):
    """A method whose deployable model lives with the client as `client["w"]`: no downlink is needed to evaluate it."""

    def init_client(self, task: "Task", w0: Tensor) -> State:
        return {"w": w0}

    def personal(self, client: State, down: State) -> Tensor:
        return client["w"]


def started(algorithm: Algorithm, task: "Task", n: int) -> Server:
    """The server's state before the first round, with "known"."""
    state = algorithm.init_server(task, task.w0.clone(), n)
    state = state if isinstance(state, Server) else Server(state)
    return state._replace(each={**state.each, KNOWN: task.w0.new_zeros(n)})


def mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over the clients of `values: [s, ...]`, plain or weighted by `weights: [s]` (sample counts)."""
    if weights is None:
        return values.mean(0)
    return weighted_sum(weights / weights.sum(), values)


def make(name: str, /, **settings: Any) -> Algorithm:
    """A method by its registered name, with hyper-parameters. Raises ConfigError naming what is wrong."""
    return REGISTRY.make(name, settings)


def check(algorithm: Algorithm, dtype: torch.dtype = torch.float64) -> None:
    """Raise ConfigError for a hyper-parameter that does not fit, whatever the method's own `__post_init__` does.

    dtype: of the training, which step sizes must be numbers of
    """
    Configured.__post_init__(algorithm)
    most = torch.finfo(dtype).max
    for key in algorithm.step_sizes:
        value = getattr(algorithm, key)
        name = str(dtype).removeprefix("torch.")
        algorithm.require(isinstance(value, str) or value <= most, key, f"at most {most:.3g}, the largest {name}")
