"""The federated fit: Newton's method on summed gradients and information matrices, or any method of polyfed; then
standard errors, and every site's own fit for the meta-analysis. All that a site says is a message, and billed.

Columns, and the target of a linear model, are centred and scaled by pooled means and deviations, from sums that the
sites send first; coefficients are those of the columns as given.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, DataError, Diverged
from polyfed.base.values import Limits
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm, Down, State
from polyfed.core.ledger import Ledger, down_bytes, row_bytes
from polyfed.data.federation import Federation
from polyfed.runs.rehearsal import rehearse
from polyfed.runs.trainer import fit as fit_method
from polyfed.runs.watching import Progress
from polyfed_clinical.models import Loss, Model, loss, named
from polyfed_clinical.summary import ClinicalFit

STEP = 1e-9  # Newton's last step, in standardised columns (and targets, of a linear model)
STILL = 1e-12  # a round of another method that moves no coefficient by more is the last
STEPS = 30  # where a likelihood has no maximum, every step goes on by about one
DEPENDENT = 1e-9  # smallest eigenvalue of a correlation matrix, of columns that are not combinations of one another
CONSTANTS = 1e-13  # deviation of a column, over its mean, that is rounding
FINE, ENDLESS, SINGULAR, CONSTANT = range(4)  # what became of a fit


class Design(NamedTuple):
    """State of the server after the sites' sums, sent back to them: means and deviations of the columns; target: [2]
    those of a linear model's target, else [0]."""

    mean: Tensor
    scale: Tensor
    target: Tensor

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

    def back(self, intercept: bool) -> Tensor:
        """[p, p]: from coefficients of `rows` and `targets` to those of the columns as given; see `given`."""
        slopes = torch.diag(1 / self.scale)
        if intercept:
            first = torch.cat([torch.ones(1, dtype=slopes.dtype), -self.mean / self.scale])[None]
            slopes = torch.cat([first, torch.cat([torch.zeros(len(slopes), 1, dtype=slopes.dtype), slopes], 1)])
        return slopes * self.unit

    def given(self, beta: Tensor, intercept: bool) -> Tensor:
        """[p]: coefficients of the columns as given."""
        found = self.back(intercept) @ beta
        if intercept:
            found[0] += self.zero
        return found

    def standardised(self, beta: Tensor) -> Tensor:
        """[p]: coefficients of `rows` and `targets`, from those of `rows` and the target as given."""
        if not len(self.target):
            return beta
        return torch.cat([beta[:1] - self.target[0], beta[1:]]) / self.unit


@dataclass(frozen=True, eq=False)
class Site:
    """One site's rows, and its side of every exchange. x: [N, columns]  target: [N, 2], see `models`"""

    name: str
    x: Tensor
    target: Tensor

    def sums(self, model: Model) -> State:
        """Squares are about the site's own mean: those of a column far from zero would lose all digits."""
        n = torch.tensor(len(self.x), dtype=torch.float64)
        found = {"n": n, "target": self.target.sum(0), "x": self.x.sum(0), "squares": _squares(self.x)}
        return found | ({"target squares": _squares(self.target[:, :1])} if model.name == "linear" else {})

    def derivatives(self, model: Model, design: Design, beta: Tensor) -> State:
        value, gradient, information = model.derivatives(
            beta, design.rows(self.x, model.intercept), design.targets(self.target)
        )
        above = torch.triu_indices(*information.shape)
        return {"value": value, "gradient": gradient, "information": information[above[0], above[1]]}

    def own(self, model: Model, design: Design, beta: Tensor) -> State:
        """The site's own fit, started from the federated one; NaN where it has none, and which columns are why.

        centre: the intercept at the pooled means of the columns, and its standard error
        """
        x, y = design.rows(self.x, model.intercept), design.targets(self.target)
        found = newton(lambda b: model.derivatives(b, x, y), beta)
        back = design.back(model.intercept)
        spread = dispersion(model, found.value, len(x), len(beta))
        fine = found.outcome == FINE and spread > 0
        covariance = back @ found.covariance @ back.T * max(spread, 0.0)
        middle = [
            found.beta[0] * design.unit + design.zero,
            (found.covariance[0, 0] * max(spread, 0.0)).sqrt() * design.unit,
        ]
        centre = {"centre": torch.stack(middle) if fine else beta.new_full((2,), torch.nan)} if model.intercept else {}
        return centre | {
            "estimate": design.given(found.beta, model.intercept) if fine else torch.full_like(beta, torch.nan),
            "se": covariance.diagonal().sqrt() if fine else torch.full_like(beta, torch.nan),
            "outcome": torch.tensor(FINE if fine else found.outcome or SINGULAR, dtype=torch.uint8),
            "columns": found.columns,
        }


class Found(NamedTuple):
    """beta: [p]     value: log-likelihood     covariance: [p, p] inverse information     outcome: FINE, or why not

    columns: [p] bool, those that are to blame
    """

    beta: Tensor
    value: float
    covariance: Tensor
    outcome: int
    columns: Tensor


def newton(ask: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], beta: Tensor) -> Found:
    """Newton's method with halved steps. ask: [p] -> log-likelihood, gradient, information.

    Where the maximum is at infinity (separated classes, a group without events), gradient and information vanish alike
    and the steps do not: then, and only then, the last of `STEPS` steps is not small.
    """
    value, gradient, information = ask(beta)
    none = torch.full_like(information, torch.nan)
    if (null := dependent(information)) is not None:
        return Found(beta, float(value), none, *null)
    step = torch.zeros_like(beta)
    for _ in range(STEPS):
        factor, failed = torch.linalg.cholesky_ex(information)
        if failed:
            break
        step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
        if step.abs().max() <= STEP:
            return Found(
                beta + step,
                float(value),
                torch.cholesky_inverse(factor),
                FINE,
                torch.zeros_like(beta, dtype=torch.bool),
            )
        share = 1.0
        while True:
            there = ask(beta + share * step)
            worst = value - 1e-9 * (1 + value.abs())  # rounding is no descent
            if all(bool(t.isfinite().all()) for t in there) and there[0] >= worst:
                break
            if (share := share / 2) < 1e-9:
                return Found(beta, float(value), none, ENDLESS, step.abs() > 0.1 * step.abs().max())
        beta, (value, gradient, information) = beta + share * step, there
    return Found(beta, float(value), none, ENDLESS, step.abs() > 0.1 * step.abs().max())


def dependent(information: Tensor) -> tuple[int, Tensor] | None:
    """(CONSTANT, columns that tell nothing) or (SINGULAR, the first that are combinations of one another), [p] bool."""
    diagonal, p = information.diagonal(), len(information)
    if bool((idle := diagonal <= 1e-11 * diagonal.max()).any()):
        return CONSTANT, idle
    alike = information / torch.outer(diagonal.sqrt(), diagonal.sqrt())
    if torch.linalg.eigvalsh(alike)[0] > DEPENDENT:
        return None
    first = next(k for k in range(2, p + 1) if k == p or torch.linalg.eigvalsh(alike[:k, :k])[0] <= DEPENDENT)
    null = torch.linalg.eigh(alike[:first, :first]).eigenvectors[:, 0].abs()
    return SINGULAR, torch.cat([null > 1e-3 * null.max(), torch.zeros(p - first, dtype=torch.bool)])


def dispersion(model: Model, value: float, n: int, p: int) -> float:
    """The factor on the inverse information: the residual variance of a linear regression, 1 for the others."""
    if model.name != "linear":
        return 1.0
    return -2 * value / (n - p) if n > p else 0.0


class Wire:
    """Asks all sites a question and weighs what is said: the ledger's row of a site has the bytes of its messages."""

    def __init__(self, sites: Sequence[Site]):
        self.sites, self.ledger, self.rounds = sites, Ledger(), 0

    def ask(self, answer: Callable[[Site], State], *down: Tensor) -> State:
        """Every site's answer, [sites, ...] each. down: the tensors that each of them received to give it."""
        replies, seconds = [], []
        for site in self.sites:
            start = time.perf_counter()
            replies.append({name: t[None] for name, t in answer(site).items()})
            seconds.append(time.perf_counter() - start)
        up, sent = np.array([row_bytes(r) for r in replies]), down_bytes(Down({str(k): t for k, t in enumerate(down)}))
        who = np.arange(len(self.sites))
        self.ledger.record(self.rounds, who, np.array(1), np.array(sent), up, np.array(0), np.array(seconds))
        self.rounds += 1
        return {name: torch.cat([r[name] for r in replies]) for name in replies[0]}

    def took(self, ledger: Ledger, rounds: int) -> None:
        """Add what another method's run exchanged."""
        book = ledger.array().copy()
        book[:, 0] += self.rounds
        both = np.concatenate([self.ledger.array(), book])
        self.ledger.restore(torch.as_tensor(both))
        self.rounds += rounds


@checked
def fit(
    sites: Federation | Sequence[Any],
    model: str = "logistic",
    *,
    ties: str = "efron",
    names: Sequence[str | int] | None = None,
    columns: Sequence[str | int] | None = None,
    level: Annotated[float, Limits(gt=0, lt=1)] = 0.95,
    method: Algorithm | None = None,
    **settings: Any,
) -> ClinicalFit:
    """Fit a regression over the rows of all sites, none of which leaves its site.

    Parameters
    ----------
    sites : Federation or sequence of tuple
        The training samples of a federation, or a tuple per site: (x, y); (x, count, exposure) for Poisson; (x, time,
        event) for Cox. x: [N, columns], an array or a DataFrame.
    model : str
        "logistic", "poisson", "linear", or "cox", whose risk sets are those of each site (it is stratified by site).
    ties : str
        "efron" or "breslow", for Cox.
    names : sequence of str or None
        Of the sites.
    columns : sequence of str or None
        Of x.
    level : float
        Of the confidence intervals.
    method : Algorithm or None
        None: Newton's method, which ends at the pooled fit. Or a method of polyfed that trains a common model.
    **settings
        Of `polyfed.fit`, for a method. One that has come to rest ends before its rounds are over.

    Returns
    -------
    ClinicalFit
        Coefficients with intervals, heterogeneity, the meta-analysis, and what it took.

    Raises
    ------
    DataError
        A column is constant or a combination of others, targets do not fit the model, or there is no finite estimate.
    ConfigError
        A name or setting is unknown or does not fit.
    """
    kind = named(model, ties)
    if method is None and settings:
        raise ConfigError(f"{next(iter(settings))}: a setting of a method; Newton's method has none")
    places, given = gathered(sites, kind, names)
    labels = _labels(columns or given, places[0].x.shape[1])
    for site in places:
        _check(site, kind, labels)
    wire = Wire(places)
    each = wire.ask(lambda site: site.sums(kind))
    sums = {name: t.sum(0) for name, t in each.items()}
    n, events = sums["n"], each["target"][:, 0 if kind.intercept else 1]
    if kind.name != "linear" and not events.sum() > 0:
        raise DataError("no site has an event; at least one is needed")
    if kind.name == "logistic" and events.sum() == n:
        raise DataError("every target is 1 at every site; both 0 and 1 are needed")
    design, coefficients = _designed(kind, each, labels), ["intercept"] * kind.intercept + labels
    at = start = _start(kind, sums, len(coefficients))
    if method is not None:
        at = design.standardised(_trained(wire, kind, loss(model, ties), design, start, method, settings))
    p, ask = len(start), _derivatives(wire, kind, design)
    result = newton(ask, at) if method is None else _evaluated(ask, at)
    spread = dispersion(kind, result.value, int(n), p)
    if result.outcome != FINE:
        raise DataError(_why(result, kind, coefficients, "all sites together"))
    if not spread > 0:
        raise DataError(f"{int(n)} rows for {p} coefficients leave no variance to measure; more rows are needed")
    beta, back = result.beta if method is None else at, design.back(kind.intercept)
    own = wire.ask(lambda site: site.own(kind, design, beta), beta)
    outcomes = [Found(beta, 0.0, back, int(o), bad) for o, bad in zip(own["outcome"], own["columns"], strict=True)]
    why = [_why(found, kind, coefficients) for found in outcomes]
    if kind.name != "linear":
        whole = events == each["n"] if kind.name == "logistic" else events < 0
        why = ["no event" if e == 0 else "events only" if w else y for e, w, y in zip(events, whole, why, strict=True)]
    return ClinicalFit.of(
        kind,
        coefficients,
        [site.name for site in places],
        each["n"].int().numpy(),
        None if kind.name == "linear" else events.int().numpy(),
        design.given(beta, kind.intercept),
        back @ result.covariance @ back.T * spread,
        result.value * design.unit**2,
        own["estimate"],
        own["se"],
        own.get("centre"),
        why,
        left=float(((result.beta - beta).abs() / (result.covariance.diagonal() * spread).sqrt()).max()),
        level=level,
        ledger=wire.ledger,
        rounds=wire.rounds,
        method="newton" if method is None else method.name,
    )


def _designed(kind: Model, each: Mapping[str, Tensor], labels: Sequence[str]) -> Design:
    """What all sites standardise with, by the sums that each has sent."""
    mean, scale = _pooled(each["n"], each["x"], each["squares"])
    if kind.intercept and bool((still := scale == 0).any()):
        raise DataError(f"column {labels[int(still.nonzero()[0])]!r} is constant over all sites; leave it out")
    unit = torch.zeros(0, dtype=torch.float64)
    if kind.name == "linear":
        unit = torch.cat(_pooled(each["n"], each["target"][:, :1], each["target squares"]))
        unit[1] = unit[1] if unit[1] > 0 else 1.0
    return Design(mean, torch.where(scale > 0, scale, 1.0), unit)


def _derivatives(wire: Wire, kind: Model, design: Design) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Asks all sites for the value, gradient and information at some coefficients; the design goes along once."""
    unsent = [t for t in design if len(t)]

    def ask(beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = wire.ask(lambda site: site.derivatives(kind, design, beta), beta, *unsent)
        unsent.clear()
        p = len(beta)
        above = torch.triu_indices(p, p)
        information = torch.zeros(p, p, dtype=torch.float64)
        information[above[0], above[1]] = found["information"].sum(0)
        return found["value"].sum(), found["gradient"].sum(0), information + information.triu(1).T

    return ask


def gathered(sites: Any, model: Model, names: Sequence[str | int] | None) -> tuple[list[Site], list[str] | None]:
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
    names = [f"site-{i}" for i in range(len(pairs))] if names is None else [str(name) for name in names]
    if len(names) != len(pairs) or len(set(names)) < len(names):
        raise ConfigError(f"names: found {len(names)} ({', '.join(names[:5])}), expected {len(pairs)} distinct ones")
    found: list[Site] = []
    for name, pair in zip(names, pairs, strict=True):
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
        if found and x.shape[1] != found[0].x.shape[1]:
            raise DataError(f"site {name!r}: {x.shape[1]} columns, {found[0].name!r} has {found[0].x.shape[1]}")
        found.append(Site(name, x, torch.stack(target, 1)))
    return found, columns


def _squares(x: Tensor) -> Tensor:
    """[columns]: squares about the mean."""
    return (x - x.mean(0)).square().sum(0)


def _pooled(n: Tensor, sums: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Means and deviations [columns], 0 where that is rounding, from what each site said: [sites], [sites, columns]
    twice. Chan, Golub and LeVeque (American Statistician 37, 1983)."""
    mean = sums.sum(0) / n.sum()
    between = (n[:, None] * (sums / n[:, None] - mean).square()).sum(0)
    scale = ((squares.sum(0) + between) / n.sum()).sqrt()
    return mean, torch.where(scale > CONSTANTS * mean.abs(), scale, 0.0)


def _numbers(values: Any, name: str) -> Tensor:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DataError(f"site {name!r}: not all values are numbers") from None
    return torch.from_numpy(array.copy())


def _labels(columns: Sequence[str | int] | None, width: int) -> list[str]:
    if columns is None:
        return [f"x{k + 1}" for k in range(width)]
    if len(columns) != width or len({*columns, "intercept"}) <= width:
        raise ConfigError(
            f"columns: found {len(columns)} names, expected {width} distinct ones, none of them intercept"
        )
    return [str(c) for c in columns]


def _check(site: Site, model: Model, columns: Sequence[str]) -> None:
    """Refuse what a site can see for itself: gaps, and targets that the model does not have."""
    where, (y, second) = f"site {site.name!r}", site.target.T
    if bool((bad := ~site.x.isfinite()).any()):
        row, column = (int(k) for k in bad.nonzero()[0])
        raise DataError(f"{where}, row {row + 1}: column {columns[column]!r} is missing or infinite")
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


def _start(model: Model, sums: Mapping[str, Tensor], p: int) -> Tensor:
    """Zero, but for an intercept that fits the mean."""
    beta = torch.zeros(p, dtype=torch.float64)
    mean = sums["target"][0] / sums["target"][1]
    if model.name == "logistic":
        beta[0] = mean.logit()
    if model.name == "poisson":
        beta[0] = mean.log()
    return beta


def _evaluated(ask: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], beta: Tensor) -> Found:
    """The likelihood at beta, with where Newton's next step would lead in place of beta."""
    value, gradient, information = ask(beta)
    if not bool(information.isfinite().all()):
        raise Diverged("the method ended where the likelihood is not finite; try a smaller lr")
    nan = torch.full_like(information, torch.nan)
    if (null := dependent(information)) is not None:
        return Found(beta, float(value), nan, *null)
    covariance = torch.linalg.inv(information)
    return Found(beta + covariance @ gradient, float(value), covariance, FINE, torch.zeros_like(beta, dtype=torch.bool))


def _trained(
    wire: Wire, kind: Model, criterion: Loss, design: Design, start: Tensor, method: Algorithm, settings: dict[str, Any]
) -> Tensor:
    """[p]: where a method of polyfed ends. Every client's loss is weighed so that their mean is the pooled one's."""
    net = nn.Linear(len(start), 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    net.weight.data[0] = start
    total = sum(len(site.x) for site in wire.sites)

    def federation(even: bool) -> Federation:
        pairs = []
        for site in wire.sites:
            weight = len(wire.sites) * len(site.x) / total if even else 1.0
            y = torch.cat([site.target, torch.full((len(site.x), 1), weight, dtype=torch.float64)], 1)
            pairs.append((design.rows(site.x, kind.intercept), y))
        return Federation.from_arrays(pairs, names=[s.name for s in wire.sites], test_fraction=0.0)

    def still(progress: Progress) -> bool:
        now = progress.run.common
        if now is None:
            raise ConfigError(f"method: {method.name} has no common model; expected one such as fedcet or fedavg")
        moved, last[0] = (now - last[0]).abs().max() if last else torch.inf, now.clone()
        return bool(moved <= STILL * now.abs().max().clamp(min=1))

    last = [start]
    trial = rehearse(method, Task(net, criterion, device="cpu"), federation(False), Work(batch_size=None))
    weighted = any("weighted" in kinds for of in trial.kinds.values() for kinds in of.values())
    run = fit_method(
        net,
        federation(even=not weighted),
        method,
        callbacks=[*settings.pop("callbacks", ()), still],
        loss=criterion,
        **{"batch_size": None, "rounds": 2000, "device": "cpu", "evaluate_every": 0} | settings,
    )
    wire.took(run.trained.ledger, run.rounds)
    assert run.common is not None
    return run.common


def _why(found: Found, model: Model, names: Sequence[str], who: str = "") -> str:
    """In one line, why there is no estimate; nothing where there is one."""
    columns = [name for name, blame in zip(names, found.columns, strict=True) if blame]
    slopes = [c for c in columns if c != "intercept"]
    listed, who = ", ".join(slopes), f"{who}: " if who else ""
    if found.outcome == FINE:
        return ""
    if found.outcome == ENDLESS and model.name == "linear":
        return f"{who}no estimate within rounding; {listed} too nearly a combination of other columns"
    if found.outcome == ENDLESS:
        verb = "separate" if len(slopes) > 1 else "separates"
        return f"{who}no finite estimate; {listed or 'nothing'} {verb} those with events from those without"
    if not slopes:
        return f"{who}as many rows as coefficients"
    if len(slopes) == 1 or found.outcome == CONSTANT:
        verb = "column {} is" if len(slopes) == 1 else "columns {} are"
        return f"{who}{verb.format(listed)} constant {'within every site' if who else 'there'}"
    return f"{who}the columns {listed} are combinations of one another{'; leave one out' if who else ''}"
