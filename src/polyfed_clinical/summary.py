"""Result of a federated regression: coefficients with intervals, heterogeneity, meta-analysis and cost, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from polyfed.base.arguments import checked
from polyfed.report import Table, words
from polyfed.report.table import Cell
from polyfed_clinical import splines as curves
from polyfed_clinical.inference import LikelihoodRatio, joint
from polyfed_clinical.models import Model
from polyfed_clinical.sites import Design, Wire

ARRIVED = 0.01  # standard errors to the maximum, at most, for intervals and p values to be given


@checked
@dataclass(frozen=True, eq=False)
class ClinicalFit:
    """A federated regression; `fit` makes one."""

    model: str
    # A row per coefficient, or slope where each site has an intercept: estimate, se, lower, upper, ratio, ratio_lower,
    # ratio_upper (odds, rate or hazard ratio; none for linear), p (Wald; Student's t for linear). Of a method that has
    # not arrived limits and p are NaN.
    coefficients: pd.DataFrame
    covariance: pd.DataFrame  # [p, p] with sites' intercepts: the inverse of the summed information, or the sandwich
    loglik: float  # for Cox partial, for linear with the variance at its maximum
    # A row per coefficient: sites, Q (Cochran's, between the sites' own fits), df, p, I2 (share of the variation that
    # is not chance). Intercepts are compared at the pooled means of the columns: elsewhere they are extrapolations.
    heterogeneity: pd.DataFrame
    meta: pd.DataFrame  # as `coefficients`: the own fits combined by their inverse variances (fixed effect)
    # A row per site: patients, events, left_out (rows with gaps), intercept and intercept_se, baseline (the expected
    # target at the means of all columns), meta (True if its own fit exists and counts), why (it does not).
    sites: pd.DataFrame
    own: pd.DataFrame  # a row per site and coefficient: estimate, se
    left: float  # Newton's next step, at most, in standard errors; above 0.01 the method has not arrived
    ledger: pd.DataFrame  # bytes and seconds by round and client, as that of a run
    rounds: int  # exchanges with all sites, the last of which asks for their own fits
    bytes: pd.DataFrame  # a row per site: down, up
    method: str  # "newton", or a method of polyfed
    level: float  # of the intervals
    ratio: str = ""  # name of exp(estimate)
    about: str = ""  # the target, and the categories that others are compared with, as read from files
    intercepts: str = ""  # "site", "common", or "" for Cox and a single site
    test: LikelihoodRatio | None = None  # of one intercept for all sites against one for each
    untested: str = ""  # the reason for having no test
    knots: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])  # of each spline
    joint: pd.DataFrame = field(default_factory=pd.DataFrame)  # see `inference.joint`
    errors: str = "model"  # "model", "robust", or "robust, 250 clusters"
    totals: Mapping[str, int] = field(default_factory=dict[str, int])  # patients, events and left_out over all sites
    sums: str = "plain"  # "secure": the server had sums alone, and `sites` and `own` hold nothing of any site

    def table(self) -> Table:
        """Every coefficient with its interval, beside the meta-analysis and the heterogeneity between sites."""
        percent = f"{100 * self.level:g} %"
        shown = ("ratio", "ratio_lower", "ratio_upper") if self.ratio else ("estimate", "lower", "upper")
        rows, metas, differs = [], self.meta.to_dict("index"), self.heterogeneity.to_dict("index")
        for name, row in self.coefficients.to_dict("index").items():
            meta, differ = metas[name], differs[name]
            rows.append(
                (
                    Cell(str(name)),
                    _cell(row, "estimate"),
                    _cell(row, "se"),
                    *((_cell(row, "ratio"),) if self.ratio else ()),
                    _range(row, shown),
                    Cell(_p(row["p"]), {"p": row["p"]}),
                    Cell(_meta(meta, shown), {"meta": meta[shown[0]]}),
                    Cell(_p(differ["p"]), {"Q": differ["Q"], "heterogeneity_p": differ["p"]}),
                    Cell("–" if np.isnan(differ["I2"]) else f"{100 * differ['I2']:.0f} %", {"I2": differ["I2"]}),
                )
            )
        ratio = (self.ratio,) if self.ratio else ()
        columns = ("coefficient<", "estimate", "SE", *ratio, f"interval, {percent}", "p")
        columns += (f"meta-analysis ({percent})", "p of Q", "I²")
        title = f"{self.model}, {words.count(len(self.sites), 'site')}, {self.totals['patients']:,} patients"
        return Table(title, columns, tuple(rows), self.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes beside the table: what was modelled, the sites left out, how far it came, its price."""
        without = [
            f"{name} ({row['why']})" for name, row in self.sites.to_dict("index").items() if not row.get("meta", True)
        ]
        up, down = (int(self.bytes[way].to_numpy().max()) for way in ("up", "down"))
        lines = [*([self.about] if self.about else []), *self._model(), f"log-likelihood {self.loglik:.4f}"]
        if self.left > 1e-4:
            step = f"the next Newton step is {words.figures(self.left)} standard errors"
            lines.append(f"{self.method} has not arrived: {step}" if self.arrived else self.unfinished)
        if "intercept" in self.coefficients.index and self.heterogeneity["df"].iloc[0] > 0:
            lines.append("heterogeneity of the intercept: at the mean of every column")
        if without:
            lines.append(f"no fit of their own, so not in the meta-analysis: {'; '.join(without)}")
        if self.sums == "secure":
            fits = f"{int(self.heterogeneity['sites'].iloc[0])} have fits of their own, which the meta-analysis sums"
            lines.append(
                f"secure sums over {words.count(len(self.sites), 'site')}, of which {fits}; no site's numbers are known"
            )
        cost = f"{words.count(self.rounds, 'exchange')} with every site, at most {words.size(up)} up"
        return (*lines, f"{self.method}: {cost} and {words.size(down)} down per site")

    def _model(self) -> list[str]:
        """Lines about intercepts, rows, curves and errors."""
        lines, sites = list[str](), self.sites.to_dict("index")
        rows: Mapping[Any, Mapping[Any, Any]] = self.joint.to_dict("index")
        if self.intercepts:
            lines.append("an intercept per site" if self.intercepts == "site" else "one intercept for all sites")
        if self.test is not None:
            lines[0] += (
                f"; likelihood ratio of one per site against one for all: {words.figures(self.test.statistic)} on "
                f"{words.count(self.test.df, 'degree')} of freedom, p {_p(self.test.p, '= ')}"
            )
        elif self.untested:
            lines[0] += f"; no test against one per site: {self.untested}"
        own = {name: row.get("why") for name, row in sites.items() if np.isnan(row.get("intercept", 0.0))}
        if silent := [f"{name} ({reason})" for name, reason in own.items()]:
            lines.append(f"left out, as one outcome beside an intercept of its own says nothing: {'; '.join(silent)}")
        if "left_out" in self.totals:
            gone, kept = (self.totals[key] for key in ("left_out", "patients"))
            each = [f"{name} {row['left_out']:,}" for name, row in sites.items() if row.get("left_out")]
            lines.append(
                f"complete cases: {kept:,} of {kept + gone:,} rows" + (f"; left out: {', '.join(each)}" if each else "")
            )
        for column, knots in self.knots.items():
            tests = [rows[column, test] for test in ("all terms", "beyond a line")]
            chi2 = [f"chi² {words.figures(t['chi2'])} on {t['df']:.0f}, p {_p(t['p'], '= ')}" for t in tests]
            at = ", ".join(f"{k:g}" for k in knots)
            lines.append(f"{column}: a restricted cubic spline with knots at {at}; all terms jointly {chi2[0]}; "
                         f"beyond a straight line {chi2[1]}")  # fmt: skip
        if self.errors != "model":
            lines.append(f"standard errors by the sandwich ({self.errors})")
        return lines

    @property
    def single(self) -> list[str]:
        """Names of the coefficients that mean something by themselves: slopes of columns, not terms of a spline."""
        bent = {column + "'" * k for column, knots in self.knots.items() for k in range(len(knots) - 1)}
        return [str(name) for name in self.coefficients.index if name != "intercept" and name not in bent]

    @property
    def arrived(self) -> bool:
        """True where `left` is at most 0.01 standard errors: else there are no intervals and p values."""
        return self.left <= ARRIVED

    @property
    def unfinished(self) -> str:
        """One line about a method that has not arrived."""
        return (
            f"{self.method} has not arrived: the next Newton step is {words.figures(self.left)} standard errors, so no "
            "intervals and p values are given; Newton's method says whether there is a finite estimate"
        )

    def __repr__(self) -> str:
        return f"<ClinicalFit {self.table().title}>"

    def __str__(self) -> str:
        return self.table().to("markdown")

    def _repr_html_(self) -> str:
        return self.table().to("html")


def told(wire: Wire, kind: Model, knots: Mapping[str, Any], table: pd.DataFrame, **attributes: Any) -> ClinicalFit:
    """The result, with the cost of a fit through `wire`; `table` has all coefficients, `attributes` the others."""
    who = [site.name for site in wire.sites]
    moved = wire.ledger.by_client(len(who))
    ends = {column: curves.terms_of(column, at) for column, at in knots.items()}
    rest: dict[str, Any] = {"coefficients": table} | attributes
    return ClinicalFit(
        model=kind.name,
        ratio=kind.ratio,
        knots=knots,
        joint=joint(table["estimate"], rest["covariance"], ends),
        ledger=wire.ledger.frame(),
        rounds=wire.rounds,
        bytes=pd.DataFrame({"down": moved["down_bytes"], "up": moved["up_bytes"]}, index=who),
        **rest,
    )


def loglik_of(kind: Model, value: float, n: float, design: Design) -> float:
    """The log-likelihood of n rows at its maximum `value`; a linear model's variance is at its maximum."""
    if kind.name != "linear":
        return float(value)
    return float(-n / 2 * (np.log(2 * np.pi * -2 * value * design.unit**2 / n) + 1))


def _cell(row: Any, key: str) -> Cell:
    return Cell(words.figures(row[key]), {key: row[key]})


def _range(row: Any, keys: Sequence[str]) -> Cell:
    low, high = (row[k] for k in keys[1:])
    text = "–" if np.isnan(low) else f"{words.figures(low)} to {words.figures(high)}"
    return Cell(text, dict(zip(keys[1:], (low, high), strict=True)))


def _meta(row: Any, keys: Sequence[str]) -> str:
    value = row[keys[0]]
    return "–" if np.isnan(value) else f"{words.figures(value)} ({_range(row, keys).text})"


def _p(value: float, equal: str = "") -> str:
    return "–" if np.isnan(value) else "< 0.001" if value < 0.001 else f"{equal}{value:.3f}"
