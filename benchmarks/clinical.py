"""Regressions over sites: how near the pooled fit, and what it took, by Newton, FedCET (adaptive step) and FedAvg.

    POLYFED_DATA=... python benchmarks/clinical.py

Three data sets per model: one shipped with polyfed or TCGA-BRCA (skipped where it is missing), a synthetic one (seed
0), one shipped with statsmodels or lifelines, both of which are needed. First the largest differences to statsmodels'
pooled fit (coefficients and standard errors in units of the standard error). Then exchanges and bytes until no
coefficient of a standardised column is farther than 1e-8 from that of Newton's method; 5 local steps, at most 3000
rounds, FedAvg 300. Its step is the best of 0.1, 0.3 and 1 times 1/L, L the largest curvature of a site's mean loss.
"""

import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import statsmodels.api as sm
import torch
from statsmodels.duration.hazard_regression import PHReg

import polyfed as pf
import polyfed_clinical as clinical
from polyfed.base.errors import Diverged
from polyfed_clinical.models import named

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "clinical"))
import test_pooled_fit as data

NEAR, TAU = 1e-8, 5


def standardised(sites):
    """The same sites with columns of mean 0 and deviation 1 over all of them."""
    x = np.concatenate([np.asarray(s[0], float) for s in sites])
    return [((np.asarray(s[0], float) - x.mean(0)) / x.std(0), *(np.asarray(c, float) for c in s[1:])) for s in sites]


def reference(sites, model, at):
    """statsmodels' estimates, standard errors, log-likelihood of the pooled rows; Cox: one Newton step from `at`."""
    x, y, *more = data.pooled(sites)
    X = np.c_[np.ones(len(x)), x]
    if model == "cox":
        fit = PHReg(y, x, more[0], ties="efron", strata=np.repeat(np.arange(len(sites)), [len(s[1]) for s in sites]))
        inverse = np.linalg.inv(-fit.hessian(at))
        return at + inverse @ fit.score(at), np.sqrt(np.diag(inverse)), fit.loglike(at)
    if model == "linear":
        found = sm.OLS(y, X).fit()
    else:
        family = {"logistic": sm.families.Binomial(), "poisson": sm.families.Poisson()}[model]
        found = sm.GLM(y, X, family=family, **({"exposure": more[0]} if more else {})).fit(
            tol=1e-14, tol_criterion="params"
        )
    return found.params, found.bse, found.llf


def smoothness(sites, model, beta):
    """The largest curvature of a site's mean loss at beta."""
    kind, found = named(model), []
    for x, *target in sites:
        both = np.stack([*target, np.ones(len(x))][:2], 1)
        design = np.c_[np.ones(len(x)), x] if kind.intercept else x
        information = kind.derivatives(*(torch.as_tensor(a) for a in (beta, design, both)))[2]
        found.append(float(torch.linalg.eigvalsh(information)[-1]) / len(x))
    return max(found)


def arrival(sites, model, method, optimum, rounds):
    """What a table says of it: exchanges and kB up per site until NEAR, or how near it came; and that number."""
    best, when = [np.inf], []

    def watch(progress):
        best[0] = min(best[0], float((progress.run.common - torch.as_tensor(optimum)).abs().max()))
        if best[0] <= NEAR:
            when.append(progress.round)
        return bool(when)

    settings = {"local_steps": TAU, "rounds": rounds, "callbacks": [watch]}
    try:
        found = clinical.fit(sites, model, method=method, **settings)
    except Diverged:
        return np.inf, "diverged"
    return best[0], took(found) if when else f"{best[0]:.0e} after {rounds} rounds"


def took(found):
    return f"{found.rounds}, {found.bytes['up'].max() / 1000:.1f} kB"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(", ".join(f"{p} {version(p)}" for p in ("torch", "statsmodels", "lifelines", "scikit-learn")), "\n")
    folder = Path(__import__("os").environ.get("POLYFED_DATA", "shared/data"))
    named_sets = {"logistic": "Fair's affairs", "poisson": "RAND health", "linear": "Longley", "cox": "Rossi"}
    todo = []
    for model, shipped in named_sets.items():
        first = "TCGA-BRCA" if model == "cox" else "four hospitals"
        makers = [lambda m=model: data.brca(lambda _: folder) if m == "cox" else data.sites_of(m, 0)]
        makers += [lambda m=model: data.synthetic(m), lambda m=model: data.shipped(m)]
        for name, make in zip((first, "synthetic", shipped), makers, strict=True):
            if name == "TCGA-BRCA" and not (folder / "tcga_brca").exists():
                continue
            sites = standardised(make())
            newton = clinical.fit(sites, model, intercepts=None if model == "cox" else "common")
            beta = newton.coefficients["estimate"].to_numpy()
            params, se, llf = reference(sites, model, beta)
            gaps = [
                np.abs((beta - params) / se).max(),
                np.abs(newton.coefficients["se"] / se - 1).max(),
                abs(newton.loglik - llf),
            ]
            n = newton.sites["patients"].sum()
            print(
                f"| {model} | {name} | {len(sites)} | {n:,} | {len(beta)} |", " | ".join(f"{g:.0e}" for g in gaps), "|"
            )
            todo.append((n, f"| {model} | {name} |", sites, model, newton, beta))
    print(flush=True)
    for _, about, sites, model, newton, beta in sorted(todo, key=lambda t: t[0]):
        L = smoothness(sites, model, beta)
        cet = arrival(sites, model, pf.FedCET(), beta, 3000)[1]
        avg = min(arrival(sites, model, pf.FedAvg(lr=k / L), beta, 300) for k in (0.1, 0.3, 1))[1]
        print(about, took(newton), "|", cet, "|", avg, "|", flush=True)


if __name__ == "__main__":
    main()
