"""Hospitals of unlike kinds, clean: twenty columns that hang together, and an outcome of any kind."""

import numpy as np
import pandas as pd

from polyfed.base.columns import Columns
from polyfed.data.csv_files import sheet_of
from polyfed.data.tables import surveyed
from polyfed_audit.findings import audit
from polyfed_audit.findings import flags as parts_flags
from polyfed_audit.parts import told, withheld

KINDS = {  # mean of age, its deviation, sickness, share of women, least and largest age
    "ward": (66, 14, 0.0, 0.48, 18, 98), "surgery": (58, 16, -0.1, 0.5, 18, 95),
    "practice": (52, 18, -0.7, 0.56, 18, 95), "icu": (64, 14, 1.5, 0.4, 18, 95),
    "screening": (55, 7, -1.2, 0.6, 40, 75), "children": (7, 4.5, -0.3, 0.48, 0.5, 17.9),
    "maternity": (31, 5, -0.8, 1.0, 17, 47),
}  # fmt: skip
LIKE, ADULT, ALL = ["ward"], ["surgery", "ward", "practice", "icu", "screening"], [*KINDS]
OUTCOMES = {  # settings of [columns]
    "died": {"target": "died"}, "grade": {"target": "grade"}, "stay": {"target": "stay", "task": "regression"},
    "score": {"target": "score", "task": "regression"}, "change": {"target": "change", "task": "regression"},
    "event": {"task": "survival", "time": "days", "event": "event"},
}  # fmt: skip


def hospital(rng, n, kind, outcome="died", lab=0.25):
    """Patients of one hospital, whose laboratory and habits differ by `lab` from those of others."""
    mean, sd, sick, women, low, high = KINDS[kind]
    b, child = iter(rng.normal(size=40) * lab), kind == "children"

    def e():
        return rng.normal(size=n)

    age = np.clip(mean + sd * next(b) + sd * e(), low, high)
    f = rng.random(n) < women
    s = sick + next(b) + e()
    grow = np.clip(0.3 + 0.7 * (age / 17) ** 0.62, 0.3, 1) if child else 1
    height = (np.where(f, 165, 178) + 7 * e()) * grow
    bmi = (15.5 + 0.35 * np.maximum(age - 5, 0) if child else 26) * np.exp(0.17 * e() + 0.05 * next(b))
    sbp = (90 + 1.9 * age if child else 124 + 0.4 * (age - 50)) - 5 * s + 13 * e() + 5 * next(b)
    crea = np.log(78) + 0.22 * s + 0.004 * (np.maximum(age, 18) - 50) - 0.2 * f + 0.2 * e() + 0.1 * next(b)
    crea = np.exp(crea - (0.9 * (1 - age / 18) if child else 0))
    diabetes = (rng.random(n) < 1 / (1 + np.exp(2.2 - 0.03 * (age - 50) - 0.3 * s - next(b)))).astype(int)
    risk = -1.6 + 0.8 * s + (0 if child else 0.025 * (age - 60)) + 0.3 * np.log(crea / 80) + 0.35 * diabetes
    risk = risk + 0.8 * next(b)
    table = pd.DataFrame({
        "age": age.round(), "sex": np.where(f, "f", "m"), "height": height.round(),
        "weight": (bmi * (height / 100) ** 2).round(1),
        "hr": (78 + 7 * s + (40 * (1 - age / 18) if child else 0) + 11 * e() + 4 * next(b)).round(),
        "sbp": sbp.round(), "dbp": (0.5 * sbp + 16 + 7 * e() + 3 * next(b)).round(),
        "temp": (36.8 + 0.25 * s + 0.4 * e() + 0.1 * next(b)).round(1),
        "hb": (13.8 - 0.9 * s - 0.8 * f + 1.2 * e() + 0.4 * next(b)).round(1),
        "wbc": np.exp(np.log(7.5) + 0.22 * s + 0.3 * e() + 0.1 * next(b)).round(1),
        "crp": np.exp(np.log(5) + s + 0.8 * e() + 0.5 * next(b)).round(1),
        "lactate": np.exp(np.log(1.2) + 0.3 * s + 0.25 * e() + 0.15 * next(b)).round(1),
        "crea": crea.round(),
        "glucose": np.exp(np.log(5.8) + 0.08 * s + 0.003 * (age - 50) + 0.2 * e() + 0.08 * next(b)).round(1),
        "sodium": (139 - 0.7 * s + 3 * e() + next(b)).round(),
        "potassium": (4.2 + 0.05 * s + 0.4 * e() + 0.1 * next(b)).round(1),
        "chol": np.clip((4.0 if child else 5.1) - 0.25 * s + e() + 0.3 * next(b), 1.5, None).round(1),
        "excess": (-1.2 * s + 2.5 * e() + 0.5 * next(b)).round(1),  # of base, which has either sign
        "smoker": (0 if child else rng.random(n) < np.clip(0.25 + 0.1 * next(b), 0.02, 0.9)) * np.ones(n, dtype=int),
        "diabetes": diabetes,
    })  # fmt: skip
    logistic = risk + rng.logistic(size=n)
    if outcome == "died":
        return table.assign(died=(logistic > 0).astype(int))
    if outcome == "grade":
        return table.assign(grade=np.digitize(logistic, [-2.2, -0.7, 0.8]) + 1)
    if outcome == "stay":  # days in hospital
        return table.assign(stay=np.ceil(np.exp(1.9 + 0.35 * risk + 0.6 * e())))
    if outcome == "score":  # of health, 0 to 100
        return table.assign(score=np.clip(62 - 12 * risk + 14 * e(), 0, 100).round())
    if outcome == "change":  # of either sign
        return table.assign(change=(0.8 * risk + 1.2 * e()).round(2))
    time, end = rng.exponential(900 * np.exp(-0.9 * risk)), rng.uniform(90, 1100 + 400 * next(b), n)
    return table.assign(days=np.ceil(np.minimum(time, end)), event=(time <= end).astype(int))


def hospitals(rng, kinds, must=(), outcome="died", least=12, most=2000, sites=(2, 8)):
    """Two to eight hospitals of any of these kinds, or of those that there must be: {name: table}, and their kinds."""
    n = int(rng.integers(sites[0], sites[1] + 1))
    sizes = np.exp(rng.uniform(np.log(least), np.log(most), n)).astype(int)
    of = [*must, *(str(rng.choice(kinds)) for _ in range(n))][:n]
    return {
        f"s{k}": hospital(rng, int(m), kind, outcome) for k, (m, kind) in enumerate(zip(sizes, of, strict=True))
    }, of


def surveyed_of(tables, **columns):
    """The table of all sites, as a folder of them is read."""
    return surveyed([sheet_of(t, name, name, [], None) for name, t in tables.items()], Columns(**columns), [])[0]


def flags(tables, **columns):
    """What the audit flags."""
    return audit(surveyed_of(tables, **columns)).flags


def told_by(tables, least=5, **columns):
    """What the audit flags at real sites, which say no more than a policy of quantiles and `least` lets out."""
    table = surveyed_of(tables, **columns)
    c, target = table.columns, table.outcome[-1]
    said = {s.name: {n: withheld(p, least, True) for n, p in told(s, c, target).items()} for s in table.sheets}
    parts = {n: {site: of[n] for site, of in said.items()} for n in said["s0"]}
    return parts_flags(parts, c, table.outcome)
