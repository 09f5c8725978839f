"""Inference from estimates and their covariance: Wald's intervals and joint tests, likelihood ratios, meta-analysis."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from polyfed_clinical.models import Model


class LikelihoodRatio(NamedTuple):
    """A likelihood-ratio test."""

    statistic: float  # twice the difference of log-likelihoods
    df: int  # coefficients more
    p: float

    @classmethod
    def of(cls, model: Model, small: float, large: float, n: int, df: int) -> "LikelihoodRatio":
        """The test of two log-likelihoods of `n` rows; a linear model's variance is at its maximum."""
        statistic = n * np.log(small / large) if model.name == "linear" else 2 * (large - small)
        statistic = max(float(statistic), 0.0)
        return cls(statistic, df, float(stats.chi2.sf(statistic, df)))


def wald(
    names: Sequence[str], estimate: np.ndarray, se: np.ndarray, model: Model, level: float, df: int | None = None
) -> pd.DataFrame:
    """Estimates with standard errors, intervals and two-sided p values; Student's t with `df`, else normal."""
    law = stats.norm if df is None else stats.t(df)
    half = law.ppf(0.5 + level / 2) * se
    table = {"estimate": estimate, "se": se, "lower": estimate - half, "upper": estimate + half}
    if model.ratio:
        with np.errstate(over="ignore"):
            table |= {"ratio": np.exp(estimate)} | {f"ratio_{end}": np.exp(table[end]) for end in ("lower", "upper")}
    return pd.DataFrame(table | {"p": 2 * law.sf(np.abs(estimate / se))}, index=list(names))


def joint(estimate: pd.Series, covariance: pd.DataFrame, curves: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Wald's tests of splines, {column: its terms, the straight one first}.

    Two rows per column, `all terms` and `beyond a line`: chi2, df, p.
    """
    rows = {}
    for column, terms in curves.items():
        for test, which in (("all terms", [*terms]), ("beyond a line", [*terms[1:]])):
            b, v = estimate[which].to_numpy(), covariance.loc[which, which].to_numpy()
            chi2 = float(b @ np.linalg.solve(v, b))
            rows[column, test] = {"chi2": chi2, "df": len(which), "p": float(stats.chi2.sf(chi2, len(which)))}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["chi2", "df", "p"])


def meta_analysis(
    names: Sequence[str], own: np.ndarray, se: np.ndarray, centre: np.ndarray | None, model: Model, level: float
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the sites' own fits combined by their inverse variances, the heterogeneity between them).

    `own` and `se` are [sites, p], NaN for none. With an intercept, `centre` [sites, 2] has the intercepts at the pooled
    means of the columns with their errors, which decide the intercepts' heterogeneity.
    """
    kept = np.isfinite(se).all(1)
    weight = se[kept] ** -2.0
    with np.errstate(invalid="ignore", divide="ignore"):
        total = weight.sum(0)
        mean = (weight * own[kept]).sum(0) / total
        at, by = own[kept], weight.copy()
        if centre is not None:
            at[:, 0], by[:, 0] = centre[kept, 0], centre[kept, 1] ** -2.0
        gap = at - (by * at).sum(0) / by.sum(0)
        Q, df = (by * gap**2).sum(0), max(int(kept.sum()) - 1, 0)
        combined = wald(names, mean, total**-0.5, model, level)
        differ = {"sites": kept.sum(), "Q": Q, "df": df, "p": stats.chi2.sf(Q, df) if df else np.nan}
        differ["I2"] = np.where(Q > 0, np.clip((Q - df) / Q, 0, 1), 0.0) if df else np.nan
    return combined, pd.DataFrame(differ, index=list(names))
