"""A regression through secure sums: the server has sums over all sites, and no site's counts, gradient or matrix.

A site's intercept stays at home; Cochran's Q and the meta-analysis are sums over the own fits, too.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from polyfed.base.errors import ConfigError, DataError, Refusal
from polyfed.core.algorithm import State
from polyfed_clinical import splines as curves
from polyfed_clinical.columns import Units, designed, started
from polyfed_clinical.inference import LikelihoodRatio, wald
from polyfed_clinical.models import Model
from polyfed_clinical.newton import FINE, INTERCEPT, Derivatives, Optimum, newton, why
from polyfed_clinical.sites import CONSTANTS, Design, Site, Wire, correction, dispersion, full, upper
from polyfed_clinical.summary import ClinicalFit, loglik_of, told
from polyfed_privacy.fixed import narrow, wide

try:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    from polyfed_privacy import secure
except ImportError:
    secure = X25519PrivateKey = None

FEWEST = 3  # sites: of two, each knows the other's numbers by subtraction


@dataclass(eq=False)
class Sealed(Wire):
    """A wire that reads only sums of answers over all sites, by the keys and masks of real sites."""

    _ends: dict[str, Any] = field(default_factory=dict[str, Any])
    _run: str = field(default_factory=lambda: secrets.token_hex(16))

    def __post_init__(self) -> None:
        if secure is None or X25519PrivateKey is None:
            raise ConfigError("sums = 'secure' needs cryptography: pip install cryptography")
        if len(self.sites) < FEWEST:
            raise ConfigError(f"sums = 'secure': found {len(self.sites)} sites, expected at least {FEWEST}")
        keys = {site.name: X25519PrivateKey.generate() for site in self.sites}
        public = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
        for name, key in keys.items():
            others = {j: k for j, k in public.items() if j != name}
            self._ends[name] = secure.Site(name, key, secrets.token_bytes(32), others, {}, FEWEST)

    def total(self, answer: Callable[[Site, Tensor], State], beta: Tensor | None = None) -> State:
        given = torch.zeros(0, dtype=torch.float64) if beta is None else beta
        digest = sha256(given.numpy().tobytes()).digest()
        names = sorted(self._ends)
        context = secure.Context(self._run, str(self.rounds), tuple(names), digest, len(names), limbs=2)  # pyrefly: ignore[missing-attribute]
        server, messages, form, seconds = None, dict[str, Any](), State(), dict[str, float]()
        for site in self.sites:
            start = time.perf_counter()
            form = answer(site, given)
            try:
                q = wide([v for name in sorted(form) for v in form[name].double().flatten().tolist()])
            except Refusal as e:
                raise DataError(f"site {site.name!r}: {e}") from None
            messages[site.name] = masked = self._ends[site.name].mask(context, q)
            server = server or secure.Server(context, len(q))  # pyrefly: ignore[missing-attribute]
            server.take(site.name, masked)
            seconds[site.name] = time.perf_counter() - start
        assert server is not None
        opened = {name: self._ends[name].open(context, names, server.sealed(name)) for name in names}
        total = narrow(server.sum(opened))
        down = np.array([8 * len(given) + size(server.sealed(site.name)) for site in self.sites])
        sent = {n: messages[n].words.nbytes + sum(map(size, messages[n][1:])) + size(opened[n].shares) for n in names}
        up = np.array([sent[site.name] for site in self.sites])
        who, took = np.arange(len(self.sites)), np.array([seconds[site.name] for site in self.sites])
        self.ledger.record(self.rounds, who, np.array(2), down, up, np.array(0), took)
        self.rounds += 1
        sums, at = State(), 0
        for name in sorted(form):
            n = form[name].numel()
            sums[name] = torch.tensor(total[at : at + n], dtype=torch.float64).view(form[name].shape)
            at += n
        return sums

    def moments(self, values: Callable[[Site], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        def first(site: Site, _: Tensor) -> State:
            x = values(site)
            return {"n": torch.tensor(float(len(x))), "x": x.sum(0), "size": x.abs().sum(0)}

        sums = self.total(first)
        mean, unit = sums["x"] / sums["n"], sums["size"] / sums["n"]
        unit = torch.where(unit > 0, unit, 1.0)

        def second(site: Site, sent: Tensor) -> State:
            middle, unit = sent.view(2, -1)
            return {"squares": ((values(site) - middle) / unit).square().sum(0)}

        spread = self.total(second, torch.cat([mean, unit]))["squares"]
        scale = (spread / sums["n"]).sqrt() * unit
        return sums["n"], mean, torch.where(scale > CONSTANTS * mean.abs(), scale, 0.0)


def size(of: Mapping[str, bytes]) -> int:
    """Bytes of shares, keys or hashes."""
    return sum(map(len, of.values()))


@dataclass(eq=False)
class Home:
    """One site with its own intercept, if it stands `apart`."""

    site: Site
    model: Model
    design: Design
    apart: bool = False
    intercept: float = 0.0

    @property
    def silent(self) -> bool:
        """True if all outcomes are alike, which says nothing beside an intercept of its own."""
        y = self.site.target[:, 0]
        return self.model.name != "linear" and bool(
            (y == 0).all() or (self.model.name == "logistic" and (y == 1).all())
        )

    def derivatives(self, beta: Tensor) -> Derivatives:
        """Log-likelihood, gradient [q] and information [q, q]; of the profile where the intercept is the site's."""
        x, y = self.design.rows(self.site.x, self.model.intercept), self.design.targets(self.site.target)
        if not self.apart:
            return self.model.derivatives(beta, x, y)
        if self.silent:
            return beta.new_zeros(()), torch.zeros_like(beta), beta.new_zeros(len(beta), len(beta))
        # the profile l_i(b) = max_a l_i(a, b), dl_i/db, I_bb - I_ba I_ab / I_aa: its sums over sites are those of the
        # pooled likelihood with an intercept per site, and give its maximum and the covariance of the slopes
        rest = x[:, 1:] @ beta

        def alone(a: Tensor) -> Derivatives:
            parts = self.model.parts(a + rest, y)
            return parts.value, parts.slope.sum()[None], parts.weight.sum()[None, None]

        best = newton(alone, beta.new_tensor([self.intercept]))
        self.intercept = float(best.beta)
        value, gradient, whole = self.model.derivatives(torch.cat([best.beta, beta]), x, y)
        if best.outcome != FINE:
            value = value * torch.nan
        return value, gradient[1:], whole[1:, 1:] - torch.outer(whole[0, 1:], whole[0, 1:]) / whole[0, 0]

    def answer(self, beta: Tensor) -> State:
        """The derivatives as they are sent; where a trial step has left all bounds, zeros and a 1 that says so."""
        value, gradient, information = self.derivatives(beta)
        sent = {"value": value, "gradient": gradient, "information": upper(information)}
        lost = not all(bool((t.abs() < 2.0**50).all()) for t in sent.values())
        return {k: torch.zeros_like(t) if lost else t for k, t in sent.items()} | {"lost": torch.tensor(float(lost))}

    def coefficients(self, beta: Tensor) -> Tensor:
        """[q + 1] with the site's own intercept before slopes, where it has one."""
        return torch.cat([beta.new_tensor([self.intercept]), beta]) if self.apart else beta

    def meat(self, beta: Tensor) -> State:
        """The middle of the sandwich, for slopes: scores less their part along the intercept's."""
        q, mine = len(beta), self.coefficients(beta)
        if self.apart and self.silent:
            return {"meat": beta.new_zeros(q * (q + 1) // 2), "clusters": beta.new_zeros(())}
        own = self.site.meat(self.model, self.design, mine)
        middle = full(own["meat"], len(mine))
        if self.apart:
            x, y = self.design.rows(self.site.x, True), self.design.targets(self.site.target)
            whole = self.model.derivatives(mine, x, y)[2]
            less = torch.cat([-whole[1:, :1] / whole[0, 0], torch.eye(q, dtype=beta.dtype)], 1)
            middle = less @ middle @ less.T
        return {"meat": upper(middle), "clusters": own["clusters"].double()}

    def own(self, beta: Tensor, pooled: tuple[Tensor, Tensor], robust: bool) -> State:
        """The own fit's part of the meta-analysis, in units of the federated standard errors.

        `pooled` has estimates and standard errors, with an intercept also that at the means of the columns, last.
        """
        own = self.site.own(self.model, self.design, self.coefficients(beta), robust)
        theta, se = own["estimate"][int(self.apart) :], own["se"][int(self.apart) :]
        if self.model.intercept and not self.apart:
            centre, error = own["centre"]
            theta, se = torch.cat([theta, centre[None]]), torch.cat([se, error[None]])
        there = bool(se.isfinite().all()) and int(own["outcome"]) == FINE
        weight = (pooled[1] / se).square() if there else torch.zeros_like(se)
        gap = (theta - pooled[0]) / pooled[1] if there else torch.zeros_like(se)
        return {"sites": beta.new_tensor(float(there)), "w": weight, "wd": weight * gap, "wdd": weight * gap.square()}


@dataclass(eq=False)
class Sums:
    """A regression from sums over `rows` rows of all sites."""

    wire: Sealed
    model: Model
    labels: Sequence[str]
    design: Design
    rows: int

    def __post_init__(self) -> None:
        self.homes = {site.name: Home(site, self.model, self.design) for site in self.wire.sites}

    def asked(self, beta: Tensor) -> Derivatives:
        """The pooled derivatives."""
        sums = self.wire.total(lambda site, b: self.homes[site.name].answer(b), beta)
        value = sums["value"] if not sums["lost"] else sums["value"] * torch.nan
        return value, sums["gradient"], full(sums["information"], len(beta))

    def part(self) -> None:
        """Give every site an intercept of its own."""
        for home in self.homes.values():
            home.apart = True

    def refuse(self, optimum: Optimum, firsts: int) -> None:
        """Raise DataError for a fit that has no maximum."""
        if optimum.outcome != FINE:
            raise DataError(why(optimum, self.model, [INTERCEPT] * firsts + [*self.labels], "all sites together"))

    def maximum(self, start: Tensor, speak: int, intercepts: str | None) -> tuple[Optimum, LikelihoodRatio | None, str]:
        """(the fit that was asked for, the test of one intercept for all, the reason for having none).

        At `speak` sites outcomes are not all alike.
        """
        one = newton(self.asked, start)
        self.refuse(one, int(self.model.intercept))
        if not self.model.intercept:
            return one, None, ""
        if not speak:
            if intercepts == "common":
                return one, None, "every site's outcomes are all alike"
            raise DataError("every site's outcomes are all alike; intercepts = 'common' fits one for all")
        for home in self.homes.values():
            home.intercept = float(one.beta[0])
        self.part()
        other = newton(self.asked, one.beta[1:])
        if intercepts != "common":
            self.refuse(other, 0)
        tested = other.outcome == FINE
        test = (
            LikelihoodRatio.of(self.model, one.value, other.value, self.rows, len(self.homes) - 1) if tested else None
        )
        if intercepts != "common":
            return other, test, ""
        for home in self.homes.values():
            home.apart = False
        return one, test, "" if tested else why(other, self.model, self.labels, "an intercept per site")

    def sandwich(self, optimum: Optimum, p: int, clustered: bool) -> tuple[Tensor, int]:
        """Robust covariance of the `p` coefficients, those of the sites too, and the number of clusters."""
        sums = self.wire.total(lambda site, b: self.homes[site.name].meat(b), optimum.beta)
        groups = int(sums["clusters"])
        if groups <= p:
            raise DataError(f"found {groups} clusters for {p} coefficients; robust errors need more than that")
        covariance = optimum.covariance @ full(sums["meat"], len(optimum.beta)) @ optimum.covariance
        return covariance * correction(self.model, clustered, groups, self.rows, p), groups

    def combined(
        self,
        names: Sequence[str],
        beta: Tensor,
        pooled: tuple[Tensor, Tensor],
        units: np.ndarray,
        level: float,
        robust: bool,
    ) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(meta-analysis, heterogeneity) as in `inference.meta_analysis`; for `pooled` see `Home.own`."""
        q = len(beta)

        def answer(site: Site, sent: Tensor) -> State:
            estimates = sent[q:].view(2, -1)
            return self.homes[site.name].own(sent[:q], (estimates[0], estimates[1]), robust)

        sums = {k: t.numpy() for k, t in self.wire.total(answer, torch.cat([beta, *pooled])).items()}
        m, there = len(names), int(sums["sites"])
        df = max(there - 1, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            shift, error = sums["wd"] / sums["w"], sums["w"] ** -0.5
            Q = sums["wdd"] - sums["wd"] * shift
            at = [len(Q) - 1, *range(1, m)] if len(Q) > m else [*range(m)]  # an intercept's is that at the means
            Q = np.maximum(Q[at], 0.0)
            theta, se = (t[:m].numpy() for t in pooled)
            meta = wald(names, units * (theta + se * shift[:m]), units * se * error[:m], self.model, level)
            differ = {"sites": there, "Q": Q, "df": df, "p": stats.chi2.sf(Q, df) if df else np.nan}
            differ["I2"] = np.where(Q > 0, np.clip((Q - df) / Q, 0, 1), 0.0) if df else np.nan
        return meta, pd.DataFrame(differ, index=list(names))


def fit_sums(
    places: Sequence[Site], kind: Model, labels: Sequence[str], *, intercepts: str | None,
    per: Mapping[str, float | str], splines: Mapping[str, Any], robust: bool, clustered: bool, level: float,
    left_out: Sequence[int] | None,
) -> ClinicalFit:  # fmt: skip
    """`regression.fit` through secure sums; `left_out` counts each site's rows with gaps, None if gaps were refused."""
    wire = Sealed(places)
    knots = curves.placed(wire, labels, splines) if splines else {}
    gone = dict(zip((s.name for s in places), left_out or [0] * len(places), strict=True))
    wire.sites = [curves.bent(site, labels, knots) for site in places] if knots else places
    labels = [term for c in labels for term in (curves.terms_of(c, knots[c]) if c in knots else [c])]
    linear = kind.name == "linear"
    n, mean, scale = wire.moments(lambda s: torch.cat([s.x, s.target[:, :1]], 1) if linear else s.x)

    def counts(site: Site, _: Tensor) -> State:
        heard = not Home(site, kind, Design(mean, scale, mean[:0])).silent
        of = [float(heard), float(heard * len(site.x)), float(gone[site.name])]
        return {"of": torch.tensor(of, dtype=torch.float64), "target": site.target.sum(0)}

    counted, c = wire.total(counts), len(labels)
    speak, rows, left = (int(v) for v in counted["of"])
    each = {"n": n[None], "x": mean[None, :c] * n, "squares": scale[None, :c] ** 2 * n}
    each |= {"target": counted["target"][None], "target squares": scale[None, c:] ** 2 * n}
    design, deviation, _ = designed(kind, labels, each)
    units = Units.read(per, labels, knots, deviation)
    by_site = kind.intercept and intercepts != "common"
    sums = Sums(wire, kind, labels, design, rows if by_site else int(n))
    optimum, test, untested = sums.maximum(started(kind, counted["target"], c + kind.intercept), speak, intercepts)
    k = int(kind.intercept and not by_site)
    p = c + (speak if by_site else k)
    if not (variance := dispersion(kind, optimum.value, sums.rows, p)) > 0:
        raise DataError(f"{sums.rows} rows for {p} coefficients leave no variance to measure; more rows are needed")
    covariance, kept = optimum.covariance * variance, "model"
    if robust:
        covariance, groups = sums.sandwich(optimum, p, clustered)
        kept = f"robust, {groups:,} clusters" if clustered else "robust"
    back = design.back(k)
    estimate, spread = design.given(optimum.beta, k), back @ covariance @ back.T
    names = [INTERCEPT] * k + [units.names.get(label, label) for label in labels]
    pooled = estimate, spread.diagonal().sqrt()
    if k:
        centre = optimum.beta[:1] * design.unit + design.zero, covariance[:1, 0].sqrt() * design.unit
        pooled = torch.cat([pooled[0], centre[0]]), torch.cat([pooled[1], centre[1]])
    unit = units.of(k).numpy()
    meta, differ = sums.combined(names, optimum.beta, pooled, unit, level, robust)
    matrix = pd.DataFrame(spread.numpy() * np.outer(unit, unit), index=names, columns=names)
    degrees = sums.rows - p if linear and not robust else None
    table = wald(names, unit * estimate.numpy(), np.sqrt(np.diag(matrix)), kind, level, degrees)
    totals = {"patients": int(n)} | ({} if linear else {"events": int(counted["target"][0 if kind.intercept else 1])})
    return told(
        wire, kind, knots, table, covariance=matrix, loglik=loglik_of(kind, optimum.value, float(n), design),
        heterogeneity=differ, meta=meta, sites=pd.DataFrame(index=[site.name for site in places]),
        own=pd.DataFrame(columns=["estimate", "se"]), left=0.0, method="newton", level=level,
        intercepts="" if not kind.intercept else "site" if by_site else "common", test=test, untested=untested,
        errors=kept, totals=totals | ({} if left_out is None else {"left_out": left}), sums="secure",
    )  # fmt: skip
