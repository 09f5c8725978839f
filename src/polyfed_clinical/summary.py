"""Result of a federated regression: coefficients with intervals, heterogeneity, meta-analysis and cost, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from torch import Tensor

from polyfed.base.arguments import checked
from polyfed.core.ledger import Ledger
from polyfed.report import Table, words
from polyfed.report.table import Cell
from polyfed_clinical.models import Model

ARRIVED = 0.01  # standard errors to the maximum, at most, for intervals and p values to be given


@checked
@dataclass(frozen=True, eq=False)
class ClinicalFit:
    """A federated regression; `fit` makes one.

    Attributes
    ----------
    model : str
        What was fitted.
    coefficients : DataFrame
        A row per coefficient: estimate, se (standard error), lower, upper, ratio, ratio_lower, ratio_upper (odds, rate
        or hazard ratio; none for linear), p (Wald; Student's t for linear, else normal). Of a method that has not
        arrived limits and p are NaN.
    covariance : DataFrame
        [p, p] of the estimates: the inverse of the summed information.
    loglik : float
        Log-likelihood; for Cox partial, for linear with the variance at its maximum.
    heterogeneity : DataFrame
        A row per coefficient: sites, Q (Cochran's, between the sites' own fits), df, p, I2 (share of the variation that
        is not chance). The intercept's is that at the pooled means of the columns: where they are 0, which may be an
        age, sites' intercepts are extrapolations that agree within errors of any size.
    meta : DataFrame
        As `coefficients`: the sites' own fits combined by their inverse variances (fixed effect).
    sites : DataFrame
        A row per site: patients, events, meta (whether its own fit exists and counts), why (it does not).
    own : DataFrame
        A row per site and coefficient: estimate, se of the site's own fit.
    left : float
        How far Newton's next step would move a coefficient, at most, in standard errors; 0 at the maximum. Above 0.01
        the method has not arrived.
    ledger : DataFrame
        Bytes and seconds by round and client, as that of a run.
    rounds : int
        Exchanges with all sites, the last of which asks for their own fits.
    bytes : DataFrame
        A row per site: down, up.
    method : str
        "newton", or the method of polyfed that was used.
    level : float
        Of the intervals.
    ratio : str
        What exp(estimate) is called.
    about : str
        What the target is and what categories are compared with, where `polyfed regress` read them from files.
    """

    model: str
    coefficients: pd.DataFrame
    covariance: pd.DataFrame
    loglik: float
    heterogeneity: pd.DataFrame
    meta: pd.DataFrame
    sites: pd.DataFrame
    own: pd.DataFrame
    left: float
    ledger: pd.DataFrame
    rounds: int
    bytes: pd.DataFrame
    method: str
    level: float
    ratio: str = ""
    about: str = ""

    @classmethod
    def of(
        cls,
        model: Model,
        names: list[str],
        sites: list[str],
        patients: np.ndarray,
        events: np.ndarray | None,
        estimate: Tensor,
        covariance: Tensor,
        value: float,
        own: Tensor,
        own_se: Tensor,
        centre: Tensor | None,
        why: Sequence[str],
        *,
        left: float,
        level: float,
        ledger: Ledger,
        rounds: int,
        method: str,
    ) -> "ClinicalFit":
        """From what `fit` computed.

        value: log-likelihood as `models` has it     own, own_se: [sites, p], NaN for none
        centre: [sites, 2] the sites' intercepts at the pooled means, and their errors; None without an intercept
        """
        n, p = int(patients.sum()), len(names)
        if model.name == "linear":
            value = -n / 2 * (np.log(2 * np.pi * -2 * value / n) + 1)
        each, se = own.numpy(), own_se.numpy()
        kept = np.isfinite(se).all(1)
        weight = se[kept] ** -2.0
        with np.errstate(invalid="ignore", divide="ignore"):
            total = weight.sum(0)
            mean = (weight * each[kept]).sum(0) / total
            at, by = each[kept], weight.copy()
            if centre is not None:
                at[:, 0], by[:, 0] = centre.numpy()[kept, 0], centre.numpy()[kept, 1] ** -2.0
            gap = at - (by * at).sum(0) / by.sum(0)
            Q, df = (by * gap**2).sum(0), max(int(kept.sum()) - 1, 0)
            table = wald(names, mean, total**-0.5, model, level)
            differ = {"sites": kept.sum(), "Q": Q, "df": df, "p": stats.chi2.sf(Q, df) if df else np.nan}
            differ["I2"] = np.where(Q > 0, np.clip((Q - df) / Q, 0, 1), 0.0) if df else np.nan
        about = {"patients": patients} | ({} if events is None else {"events": events}) | {"meta": kept, "why": why}
        index = pd.MultiIndex.from_product([sites, names], names=["site", "coefficient"])
        moved = ledger.by_client(len(sites))
        degrees = n - p if model.name == "linear" else None
        found = wald(names, estimate.numpy(), covariance.diagonal().sqrt().numpy(), model, level, degrees)
        if left > ARRIVED:
            claims = [c for c in map(str, found) if c == "p" or c.endswith(("lower", "upper"))]
            found.loc[:, claims] = np.nan
        return cls(
            model.name,
            found,
            pd.DataFrame(covariance.numpy(), index=names, columns=names),
            float(value),
            pd.DataFrame(differ, index=names),
            table,
            pd.DataFrame(about, index=list(sites)),
            pd.DataFrame({"estimate": each.ravel(), "se": se.ravel()}, index=index),
            left,
            ledger.frame(),
            rounds,
            pd.DataFrame({"down": moved["down_bytes"], "up": moved["up_bytes"]}, index=list(sites)),
            method,
            level,
            model.ratio,
        )

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
        columns = (
            "coefficient<",
            "estimate",
            "SE",
            *((self.ratio,) if self.ratio else ()),
            f"interval, {percent}",
            "p",
        )
        columns += (f"meta-analysis ({percent})", "p of Q", "I²")
        title = f"{self.model}, {words.count(len(self.sites), 'site')}, {self.sites['patients'].sum():,} patients"
        return Table(title, columns, tuple(rows), self.notes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes beside the table: what was modelled, the sites left out, how far it came, its price."""
        without = [f"{name} ({row['why']})" for name, row in self.sites.to_dict("index").items() if not row["meta"]]
        up, down = (int(self.bytes[way].to_numpy().max()) for way in ("up", "down"))
        found = [*([self.about] if self.about else []), f"log-likelihood {self.loglik:.4f}"]
        if self.left > 1e-4:
            step = f"the next Newton step is {words.figures(self.left)} standard errors"
            found.append(f"{self.method} has not arrived: {step}" if self.arrived else self.unfinished)
        if "intercept" in self.heterogeneity.index and self.heterogeneity["df"].iloc[0] > 0:
            found.append("heterogeneity of the intercept: at the mean of every column")
        if without:
            found.append(f"no fit of their own, so not in the meta-analysis: {'; '.join(without)}")
        cost = f"{words.count(self.rounds, 'exchange')} with every site, at most {words.size(up)} up"
        return (*found, f"{self.method}: {cost} and {words.size(down)} down per site")

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


def wald(
    names: Sequence[str], estimate: np.ndarray, se: np.ndarray, model: Model, level: float, df: int | None = None
) -> pd.DataFrame:
    """Estimates with standard errors, intervals and two-sided p values; Student's t with `df`, else normal."""
    law = stats.norm if df is None else stats.t(df)
    half = law.ppf(0.5 + level / 2) * se
    found = {"estimate": estimate, "se": se, "lower": estimate - half, "upper": estimate + half}
    if model.ratio:
        with np.errstate(over="ignore"):
            found |= {"ratio": np.exp(estimate)} | {f"ratio_{end}": np.exp(found[end]) for end in ("lower", "upper")}
    return pd.DataFrame(found | {"p": 2 * law.sf(np.abs(estimate / se))}, index=list(names))


def _cell(row: Any, key: str) -> Cell:
    return Cell(words.figures(row[key]), {key: row[key]})


def _range(row: Any, keys: Sequence[str]) -> Cell:
    low, high = (row[k] for k in keys[1:])
    text = "–" if np.isnan(low) else f"{words.figures(low)} to {words.figures(high)}"
    return Cell(text, dict(zip(keys[1:], (low, high), strict=True)))


def _meta(row: Any, keys: Sequence[str]) -> str:
    found = row[keys[0]]
    return "–" if np.isnan(found) else f"{words.figures(found)} ({_range(row, keys).text})"


def _p(value: float) -> str:
    return "–" if np.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.3f}"
