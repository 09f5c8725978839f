"""The federated fit: Newton's method on summed gradients and information matrices, or any method of polyfed; then
standard errors, and every site's own fit for the meta-analysis. All that a site says is a message, and billed.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.errors import ConfigError, DataError
from polyfed.base.values import Limits
from polyfed.compute.batches import Work
from polyfed.compute.task import Task
from polyfed.core.algorithm import Algorithm
from polyfed.data.federation import Federation
from polyfed.runs.rehearsal import rehearse
from polyfed.runs.trainer import fit as fit_method
from polyfed.runs.watching import Progress
from polyfed_clinical import splines as curves
from polyfed_clinical.columns import Units, designed, started
from polyfed_clinical.inference import meta_analysis, wald
from polyfed_clinical.likelihood import Best, maximum
from polyfed_clinical.models import Loss, Model, loss, named
from polyfed_clinical.newton import INTERCEPT, Optimum, why
from polyfed_clinical.secured import fit_sums
from polyfed_clinical.sites import Design, Site, Wire, check, correction, dispersion, gathered, labelled
from polyfed_clinical.summary import ARRIVED, ClinicalFit, loglik_of, told

STILL = 1e-12  # a round of another method that moves no coefficient by more is the last


@checked
def fit(
    sites: Federation | Sequence[Any],
    model: str = "logistic",
    *,
    intercepts: Literal["site", "common"] | None = None,
    missing: Literal["refuse", "complete"] = "refuse",
    per: Mapping[str, float | str] | None = None,
    splines: Mapping[str, Any] | None = None,
    errors: Literal["model", "robust"] | None = None,
    clusters: Sequence[Any] | None = None,
    ties: str = "efron",
    names: Sequence[str | int] | None = None,
    columns: Sequence[str | int] | None = None,
    level: Annotated[float, Limits(gt=0, lt=1)] = 0.95,
    sums: Literal["plain", "secure"] = "plain",
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
        "logistic", "poisson", "linear", or "cox", stratified by site.
    intercepts : str or None
        "site": one per site; "common": one for all; None: "site", or "common" with a method of polyfed. Both are fitted
        and compared by a likelihood-ratio test. A site whose outcomes are all alike is left out beside an intercept of
        its own.
    missing : str
        "refuse" rows with gaps (NaN), or "complete": leave them out, counted by site.
    per : mapping or None
        Units of coefficients: {"age": 10} is per ten years, {"age": "sd"} per pooled standard deviation.
    splines : mapping or None
        Columns that enter as restricted cubic splines: {"age": 4} with 4 knots (3 to 7) at quantiles of the pooled
        rows, {"age": [40, 55, 70]} with these.
    errors : str or None
        "model": standard errors from the information; "robust": from the sandwich (HC0), right even if the likelihood
        is not; None: "model", or "robust" with clusters.
    clusters : sequence of array [N] or None
        Labels of each site's rows for robust errors: rows of one label, such as a patient, are not independent.
    ties : str
        "efron" or "breslow", for Cox.
    names, columns : sequence of str or None
        Names of the sites, and of the columns of x.
    level : float
        Level of the confidence intervals.
    sums : str
        "secure": the server reads only sums over all sites, at least three; intercepts and own fits stay at the sites.
    method : Algorithm or None
        None: Newton's method, which ends at the pooled fit; or a method of polyfed that trains a common model.
    **settings
        Settings of `polyfed.fit`, for a method, which ends early once it has come to rest.

    Returns
    -------
    ClinicalFit
        Coefficients with intervals, heterogeneity, the meta-analysis, and the cost.

    Raises
    ------
    DataError
        A column is constant or a combination of others, targets do not fit the model, or there is no finite estimate.
    ConfigError
        A name or setting is unknown or does not fit.
    """
    kind = named(model, ties)
    _refuse(kind, intercepts, method, settings, errors if clusters is not None else None, sums)
    robust = errors == "robust" or clusters is not None
    places, given = gathered(sites, kind, names, clusters)
    labels = labelled(columns or given, places[0].x.shape[1])
    places, left_out = _complete(places, kind, labels, missing)
    if sums == "secure":
        how: dict[str, Any] = {"intercepts": intercepts, "per": per or {}, "splines": splines or {}, "level": level}
        return fit_sums(places, kind, labels, robust=robust, clustered=clusters is not None, left_out=left_out, **how)
    wire = Wire(places)
    knots, labels = _bent(wire, labels, splines or {})
    each = wire.ask(lambda site, _: site.sums(kind))
    design, deviation, alike = designed(kind, labels, each)
    units = Units.read(per or {}, labels, knots, deviation)
    start = started(kind, each["target"].sum(0), len(labels) + kind.intercept)
    if method is not None:
        start = design.standardised(_trained(wire, kind, loss(model, ties), design, start, method, settings))
    speak = [i for i, silent in enumerate(alike) if not silent]
    best = maximum(wire, kind, design, labels, start, speak, intercepts, method is not None)
    layout, beta, k = best.layout, best.beta, best.layout.intercepts
    by_site = kind.intercept and len(places) > 1 and intercepts != "common" and method is None
    n, p = int(each["n"][layout.who].sum()), layout.size
    covariance, kept = _covariance(kind, best, n), "model"
    left = float(((best.optimum.beta - beta).abs() / covariance.diagonal().sqrt()).max())
    mine = best.each(len(places))
    if robust:
        covariance, groups = _sandwich(wire, kind, design, best, mine, n, clusters is not None)
        kept = "robust" if clusters is None else f"robust, {groups:,} clusters"
    own = wire.ask(lambda site, b: site.own(kind, design, b, robust), mine)
    who, terms = [site.name for site in places], [units.names.get(c, c) for c in labels]
    firsts = [f"{INTERCEPT} {who[i]}" for i in layout.who] if by_site else [INTERCEPT] * k
    back = units.of(k)[:, None] * design.back(k)
    spread = (back @ covariance @ back.T).numpy()
    estimate, se = (units.of(k) * design.given(beta, k)).numpy(), np.sqrt(spread.diagonal())
    table = wald([*firsts, *terms], estimate, se, kind, level, n - p if kind.name == "linear" and not robust else None)
    if left > ARRIVED:
        table.loc[:, [c for c in table.columns if c == "p" or c.endswith(("lower", "upper"))]] = np.nan
    mine_named = [INTERCEPT] * kind.intercept + terms
    fits, fits_se = (own[key].numpy() * units.of(int(kind.intercept)).numpy() for key in ("estimate", "se"))
    centre = own["centre"].numpy() if kind.intercept else None
    meta, heterogeneity = meta_analysis(mine_named, fits, fits_se, centre, kind, level)
    about = _about(kind, who, each, left_out)
    if by_site:
        baseline = kind.mean(beta[:k] * design.unit + design.zero).numpy()
        columns_of = {"intercept": estimate[:k], "intercept_se": se[:k], "baseline": baseline}
        about = about.join(pd.DataFrame(columns_of, index=[who[i] for i in layout.who]))
    about["meta"] = [bool(np.isfinite(row).all()) for row in fits_se]
    about["why"] = _why(kind, labels, start, own, alike)
    totals = {key: int(about[key].sum()) for key in ("patients", "events", "left_out") if key in about}
    at = pd.MultiIndex.from_product([who, mine_named], names=["site", "coefficient"])
    return told(
        wire, kind, knots, table, coefficients=table.iloc[k * by_site :],
        covariance=pd.DataFrame(spread, index=table.index, columns=table.index),
        loglik=loglik_of(kind, best.optimum.value, n, design), heterogeneity=heterogeneity, meta=meta, sites=about,
        own=pd.DataFrame({"estimate": fits.ravel(), "se": fits_se.ravel()}, index=at), left=left, level=level,
        method="newton" if method is None else method.name,
        intercepts="" if not kind.intercept or len(places) < 2 else "site" if by_site else "common",
        test=best.test, untested=best.untested, errors=kept, totals=totals,
    )  # fmt: skip


def _covariance(kind: Model, best: Best, n: int) -> Tensor:
    """Covariance [p, p] by the information of `n` rows. Raises DataError where nothing is left to measure it by."""
    variance, p = dispersion(kind, best.optimum.value, n, best.layout.size), best.layout.size
    if not variance > 0:
        raise DataError(f"{n} rows for {p} coefficients leave no variance to measure; more rows are needed")
    return best.optimum.covariance * variance


def _complete(places: list[Site], kind: Model, labels: list[str], missing: str) -> tuple[list[Site], list[int] | None]:
    """The sites, checked, and how many rows with gaps are left out of each, where that is asked for."""
    kept = [site.complete() for site in places] if missing == "complete" else places
    for site in kept:
        check(site, kind, labels)
    left = [len(site.x) - len(rest.x) for site, rest in zip(places, kept, strict=True)]
    return kept, left if missing == "complete" else None


def _bent(wire: Wire, labels: list[str], splines: Mapping[str, Any]) -> tuple[curves.Knots, list[str]]:
    """The knots of columns that enter as splines, and the labels with their terms, which the sites then have."""
    knots = curves.placed(wire, labels, splines) if splines else {}
    if knots:
        wire.sites = [curves.bent(site, labels, knots) for site in wire.sites]
    return knots, [term for c in labels for term in (curves.terms_of(c, knots[c]) if c in knots else [c])]


def _about(kind: Model, who: list[str], each: Mapping[str, Tensor], left_out: list[int] | None) -> pd.DataFrame:
    """Numbers of rows, of events and of rows left out, by site."""
    about = pd.DataFrame({"patients": each["n"].int().numpy()}, index=who)
    if kind.name != "linear":
        about["events"] = each["target"][:, 0 if kind.intercept else 1].int().numpy()
    if left_out is not None:
        about["left_out"] = left_out
    return about


def _why(kind: Model, labels: list[str], start: Tensor, own: Mapping[str, Any], alike: Sequence[str]) -> list[str]:
    """The trouble with each site's own fit, if any."""
    ends = [Optimum(start, 0.0, start, int(o), bad) for o, bad in zip(own["outcome"], own["columns"], strict=True)]
    names = [INTERCEPT] * kind.intercept + labels
    return [reason or why(end, kind, names) for reason, end in zip(alike, ends, strict=True)]


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
    how: dict[str, Any] = {"batch_size": None, "rounds": 2000, "device": "cpu", "evaluate_every": 0} | settings
    run = fit_method(
        net,
        federation(even=not weighted),
        method,
        callbacks=[*settings.pop("callbacks", ()), still],
        loss=criterion,
        **how,
    )
    wire.took(run.trained.ledger, run.rounds)
    assert run.common is not None
    return run.common


def _refuse(
    kind: Model,
    intercepts: str | None,
    method: Algorithm | None,
    settings: Mapping[str, Any],
    clustered: str | None,
    sums: str,
) -> None:
    """Raise ConfigError for settings that do not fit together; `clustered` are errors asked for with clusters."""
    if method is None and settings:
        raise ConfigError(f"{next(iter(settings))}: a setting of a method; Newton's method has none")
    if not kind.intercept and intercepts == "common":
        raise ConfigError("intercepts: found 'common'; cox is stratified by site, as risk sets never cross sites")
    if method is not None and intercepts == "site":
        raise ConfigError(f"intercepts: found 'site', expected 'common': {method.name} trains one model for all sites")
    if sums == "secure" and method is not None:
        raise ConfigError(f"sums: found 'secure' with {method.name}, expected Newton's method")
    if clustered == "model":
        raise ConfigError("errors: found 'model', expected 'robust', which clusters are for")


def _sandwich(
    wire: Wire, kind: Model, design: Design, best: Best, mine: Tensor, n: int, clustered: bool
) -> tuple[Tensor, int]:
    """Robust covariance [p, p] from `n` rows and each site's coefficients `mine` [sites, q]; number of clusters."""
    layout = best.layout
    sums = wire.ask(lambda site, b: site.meat(kind, design, b), mine[layout.who], layout.who)
    groups, p = int(sums["clusters"].sum()), layout.size
    if groups <= p:
        raise DataError(f"found {groups} clusters for {p} coefficients; robust errors need more than that")
    covariance = best.optimum.covariance @ layout.added(sums["meat"]) @ best.optimum.covariance
    return covariance * correction(kind, clustered, groups, n, p), groups
