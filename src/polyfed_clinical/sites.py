"""Sites with their rows, and what they answer: every exchange of a federated regression is a message, and billed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyfed.base.errors import ConfigError, DataError
from polyfed.core.algorithm import Down, State
from polyfed.core.ledger import Ledger, down_bytes, row_bytes
from polyfed.data.federation import Federation
from polyfed_clinical.models import Model
from polyfed_clinical.newton import FEW, FINE, INTERCEPT, SINGULAR, newton

CONSTANTS = 1e-13  # deviation of a column, over its mean, that is rounding
ROUNDING = 1e-24  # variance beside a fit that leaves none, of a target whose pooled one is 1


class Design(NamedTuple):
    """State of the server after the sites' sums, sent back to them: means and deviations of the columns."""

    mean: Tensor
    scale: Tensor
    target: Tensor  # [2] mean and deviation of a linear model's target, else [0]

    def rows(self, x: Tensor, intercept: bool) -> Tensor:
        """[N, p]: standardised, behind a 1 where there is an intercept."""
        z = (x - self.mean) / self.scale
        return torch.cat([torch.ones(len(x), 1, dtype=x.dtype), z], 1) if intercept else z

    @property
    def unit(self) -> float:
        """Size of 1 of `targets` in the target as given."""
        return float(self.target[1]) if len(self.target) else 1.0

    @property
    def zero(self) -> float:
        """Value of 0 of `targets` in the target as given."""
        return float(self.target[0]) if len(self.target) else 0.0

    def targets(self, y: Tensor) -> Tensor:
        """[N, 2]: standardised for a linear model, else as given."""
        return torch.stack([(y[:, 0] - self.zero) / self.unit, y[:, 1]], 1) if len(self.target) else y

    def back(self, intercepts: int) -> Tensor:
        """[p, p]: from coefficients of `rows` and `targets`, intercepts first, to those of the columns as given."""
        matrix = torch.eye(intercepts + len(self.scale), dtype=self.scale.dtype)
        matrix[:intercepts, intercepts:] = -self.mean / self.scale
        matrix[intercepts:, intercepts:] /= self.scale
        return matrix * self.unit

    def given(self, beta: Tensor, intercepts: int) -> Tensor:
        """[p]: coefficients of the columns as given."""
        given = self.back(intercepts) @ beta
        given[:intercepts] += self.zero
        return given

    def standardised(self, beta: Tensor) -> Tensor:
        """[p]: coefficients of `rows` and `targets`, from those of `rows` and the target as given."""
        if not len(self.target):
            return beta
        return torch.cat([beta[:1] - self.target[0], beta[1:]]) / self.unit


@dataclass(frozen=True, eq=False)
class Site:
    """One site's rows, and its side of every exchange."""

    name: str
    x: Tensor  # [N, columns]
    target: Tensor  # [N, 2], see `models`
    cluster: Tensor | None = None  # [N] from 0, of rows that are not independent

    def complete(self) -> "Site":
        """The site without the rows that lack a number."""
        kept = ~(self.x.isnan().any(1) | self.target.isnan().any(1))
        if not kept.any():
            raise DataError(f"site {self.name!r}: every row has a gap; at least one without is needed")
        cluster = None if self.cluster is None else self.cluster[kept].unique(return_inverse=True)[1]
        return replace(self, x=self.x[kept], target=self.target[kept], cluster=cluster)

    def sums(self, model: Model) -> State:
        """Squares are about the site's own mean: those of a column far from zero would lose all digits."""
        sums = moments_of(self.x) | {"target": self.target.sum(0)}
        return sums | ({"target squares": squares(self.target[:, :1])} if model.name == "linear" else {})

    def derivatives(self, model: Model, design: Design, beta: Tensor) -> State:
        value, gradient, information = model.derivatives(
            beta, design.rows(self.x, model.intercept), design.targets(self.target)
        )
        return {"value": value, "gradient": gradient, "information": upper(information)}

    def meat(self, model: Model, design: Design, beta: Tensor) -> State:
        """The middle of the sandwich: the sum over clusters of the outer products of their scores; and how many."""
        x, y = design.rows(self.x, model.intercept), design.targets(self.target)
        scores = model.scores(beta, x, y)
        if self.cluster is not None:
            scores = scores.new_zeros(self.clusters, len(beta)).index_add(0, self.cluster, scores)
        return {"meat": upper(scores.T @ scores), "clusters": torch.tensor(self.clusters)}

    @property
    def clusters(self) -> int:
        """Number of clusters: rows, where each stands alone."""
        return len(self.x) if self.cluster is None else int(self.cluster.max()) + 1

    def own(self, model: Model, design: Design, beta: Tensor, robust: bool) -> State:
        """The site's own fit, started from the federated one; NaN where it has none, with the columns to blame."""
        x, y = design.rows(self.x, model.intercept), design.targets(self.target)
        best = newton(lambda b: model.derivatives(b, x, y), beta)
        spread, outcome, covariance = dispersion(model, best.value, len(x), len(beta)), best.outcome, best.covariance
        if outcome == FINE and not spread > ROUNDING:
            outcome = SINGULAR
        if robust and outcome == FINE:
            middle = full(self.meat(model, design, best.beta)["meat"], len(beta))
            spread = correction(model, self.cluster is not None, self.clusters, len(x), len(beta))
            outcome, covariance = outcome if self.clusters > len(beta) else FEW, covariance @ middle @ covariance
        back, none = design.back(int(model.intercept)), torch.full_like(beta, torch.nan)
        covariance = covariance * max(spread, 0.0)
        answer = {
            "estimate": design.given(best.beta, int(model.intercept)),
            "se": (back @ covariance @ back.T).diagonal().sqrt(),
        }
        if model.intercept:  # at the pooled means of the columns
            centre = best.beta[0] * design.unit + design.zero
            answer["centre"] = torch.stack([centre, covariance[0, 0].sqrt() * design.unit])
        answer = answer if outcome == FINE else {name: none[: len(t)] for name, t in answer.items()}
        return answer | {"outcome": torch.tensor(outcome, dtype=torch.uint8), "columns": best.columns}


def upper(matrix: Tensor) -> Tensor:
    """[p (p + 1) / 2]: a symmetric matrix as it is sent."""
    above = torch.triu_indices(*matrix.shape)
    return matrix[above[0], above[1]]


def full(sent: Tensor, p: int) -> Tensor:
    """[p, p]: a symmetric matrix from what was sent of it."""
    whole, above = sent.new_zeros(p, p), torch.triu_indices(p, p)
    whole[above[0], above[1]] = sent
    return whole + whole.triu(1).T


def dispersion(model: Model, value: float, n: int, p: int) -> float:
    """The factor on the inverse information: the residual variance of a linear regression, 1 for the others."""
    if model.name != "linear":
        return 1.0
    return -2 * value / (n - p) if n > p else 0.0


def correction(model: Model, clustered: bool, clusters: int, n: int, p: int) -> float:
    """The factor on a sandwich: that for few clusters, none for single rows (HC0) and for Cox."""
    if not clustered or not model.intercept or clusters < 2 or n <= p:
        return 1.0
    return clusters / (clusters - 1) * (n - 1) / (n - p)


@dataclass(eq=False)
class Wire:
    """Asks sites a question and weighs what is said: the ledger's row of a site has the bytes of its messages."""

    sites: Sequence[Site]
    ledger: Ledger = field(default_factory=Ledger)
    rounds: int = 0
    informed: set[int] = field(default_factory=set[int])  # who has the design

    def ask(
        self,
        answer: Callable[[Site, Tensor], State],
        beta: Tensor | None = None,
        who: Sequence[int] | None = None,
        design: Sequence[Tensor] = (),
    ) -> State:
        """The answers [who, ...] of the sites `who` (None: all) to `beta` [who, q], and at first to the design."""
        sites = [*range(len(self.sites))] if who is None else [*who]
        given = torch.zeros(len(sites), 0) if beta is None else beta
        replies, seconds, down = [], [], []
        for i, b in zip(sites, given, strict=True):
            start = time.perf_counter()
            replies.append({name: t[None] for name, t in answer(self.sites[i], b).items()})
            seconds.append(time.perf_counter() - start)
            sent = [t for t in (b, *(() if i in self.informed else design)) if len(t)]
            down.append(down_bytes(Down({str(k): t for k, t in enumerate(sent)})))
        self.informed |= set(sites) if len(design) else set()
        up = np.array([row_bytes(r) for r in replies])
        self.ledger.record(
            self.rounds, np.array(sites), np.array(1), np.array(down), up, np.array(0), np.array(seconds)
        )
        self.rounds += 1
        return {name: torch.cat([r[name] for r in replies]) for name in replies[0]}

    def total(self, answer: Callable[[Site, Tensor], State], beta: Tensor | None = None) -> State:
        """The sum over all sites of their answers to `beta` [q]."""
        given = None if beta is None else beta.expand(len(self.sites), -1)
        return {name: t.sum(0) for name, t in self.ask(answer, given).items()}

    def moments(self, values: Callable[[Site], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, means [c], deviations [c]) over all sites of their `values` [N, c]."""
        sums = self.ask(lambda site, _: moments_of(values(site)))
        return sums["n"].sum(), *pooled(sums["n"], sums["x"], sums["squares"])

    def took(self, ledger: Ledger, rounds: int) -> None:
        """Add what another method's run exchanged."""
        book = ledger.array().copy()
        book[:, 0] += self.rounds
        both = np.concatenate([self.ledger.array(), book])
        self.ledger.restore(torch.as_tensor(both))
        self.rounds += rounds


def gathered(
    sites: Any, model: Model, names: Sequence[str | int] | None, clusters: Sequence[Any] | None
) -> tuple[list[Site], list[str] | None]:
    """The sites with checked shapes, and the columns' names where the data have them."""
    columns = None
    if isinstance(sites, Federation):
        columns = sites.meta.get("columns")
        if sites.train.weight is not None:
            raise ConfigError(f"weights: the {model.name} regression takes none; leave the federation's weights out")
        pairs: list[Any] = [sites.train.client(i) for i in range(sites.n)]
        names = sites.names if names is None else names
    else:
        pairs = list(sites)
    if not pairs:
        raise DataError("no site; at least one is needed")
    named = _named(names, len(pairs))
    if clusters is not None and len(clusters) != len(pairs):
        raise ConfigError(f"clusters: found {len(clusters)}, expected an array per site, {len(pairs)} of them")
    checked: list[Site] = []
    for name, pair, labels in zip(named, pairs, clusters or [None] * len(pairs), strict=True):
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            raise DataError(f"site {name!r}: found {type(pair).__name__}, expected (x, y) or (x, time, event)")
        header = [str(c) for c in pair[0].columns] if hasattr(pair[0], "columns") else None
        if header is not None and columns is not None and header != columns:
            raise DataError(f"site {name!r}: its columns are {', '.join(header)}; expected {', '.join(columns)}")
        columns = header or columns
        x, *target = (_numbers(part, name) for part in pair)
        target = [column for t in target for column in (t.T if t.dim() == 2 else [t])]
        if len(target) == 1 and model.intercept:
            target.append(torch.ones_like(target[0]))
        elif model.name in ("logistic", "linear"):
            raise DataError(f"site {name!r}: found {len(target)} columns as target, expected {model.takes}, N of them")
        sizes = {t.shape for t in target}
        if x.dim() != 2 or sizes != {x.shape[:1]} or len(target) != 2 or not len(x):
            shapes = " and ".join(str(list(t.shape)) for t in (x, *target))
            raise DataError(f"site {name!r}: found {shapes}, expected [N, columns] and {model.takes}, N of each")
        if checked and x.shape[1] != checked[0].x.shape[1]:
            raise DataError(f"site {name!r}: {x.shape[1]} columns, {checked[0].name!r} has {checked[0].x.shape[1]}")
        if labels is not None and len(labels) != len(x):
            raise DataError(f"site {name!r}: found {len(labels)} clusters, expected one per row, {len(x)}")
        group = None if labels is None else torch.from_numpy(np.unique(np.asarray(labels), return_inverse=True)[1])
        checked.append(Site(name, x, torch.stack(target, 1), group))
    return checked, columns


def _named(names: Sequence[str | int] | None, sites: int) -> list[str]:
    """The sites' names, those given or numbers. Raises ConfigError unless they are distinct, and one per site."""
    named = [f"site-{i}" for i in range(sites)] if names is None else [str(name) for name in names]
    if len(named) != sites or len(set(named)) < sites:
        raise ConfigError(f"names: found {len(named)} ({', '.join(named[:5])}), expected {sites} distinct ones")
    return named


def squares(x: Tensor) -> Tensor:
    """[columns]: squares about the mean."""
    return (x - x.mean(0)).square().sum(0)


def moments_of(x: Tensor) -> State:
    """A site's message about its columns: rows, sums, squares about its own means."""
    return {"n": torch.tensor(len(x), dtype=torch.float64), "x": x.sum(0), "squares": squares(x)}


def pooled(n: Tensor, sums: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Means and deviations [columns] from the sites' messages [sites], [sites, columns] twice."""
    # Chan, Golub and LeVeque (American Statistician 37, 1983)
    mean = sums.sum(0) / n.sum()
    between = (n[:, None] * (sums / n[:, None] - mean).square()).sum(0)
    scale = ((squares.sum(0) + between) / n.sum()).sqrt()
    return mean, torch.where(scale > CONSTANTS * mean.abs(), scale, 0.0)  # less is rounding


def _numbers(values: Any, name: str) -> Tensor:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"site {name!r}: not all values are numbers") from None
    return torch.from_numpy(array.copy())


def labelled(columns: Sequence[str | int] | None, width: int) -> list[str]:
    if columns is None:
        return [f"x{k + 1}" for k in range(width)]
    if len(columns) != width or len({*columns, INTERCEPT}) <= width:
        raise ConfigError(
            f"columns: found {len(columns)} names, expected {width} distinct ones, none of them intercept"
        )
    return [str(c) for c in columns]


def check(site: Site, model: Model, columns: Sequence[str]) -> None:
    """Refuse what a site can see for itself: gaps, and targets that the model does not have."""
    where, (y, second) = f"site {site.name!r}", site.target.T
    without = "; missing = 'complete' leaves rows with gaps out"
    if bool((bad := ~site.x.isfinite()).any()):
        row, column = (int(k) for k in bad.nonzero()[0])
        raise DataError(f"{where}, row {row + 1}: column {columns[column]!r} is missing or infinite{without}")
    cox, counts = not model.intercept, model.name == "poisson"
    rules = [(~site.target.isfinite().all(1), y, "finite targets")]
    if model.name == "logistic":
        rules.append(((y != 0) & (y != 1), y, "targets of 0 or 1"))
    if counts:
        rules += [((y < 0) | (y != y.round()), y, "counts of 0 or more"), (second <= 0, second, "exposures above 0")]
    if cox:
        rules += [(y < 0, y, "times of 0 or more"), ((second != 0) & (second != 1), second, "events of 0 or 1")]
    for wrong, values, expected in rules:
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise DataError(f"{where}, row {row + 1}: found {float(values[row]):g}, expected {expected}")
