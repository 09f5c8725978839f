"""Folders as hospitals have them, made up: strings, gaps, dates, identifiers, columns in another order, decimal commas,
one class only at a site."""

import csv

import numpy as np

WARDS = ("surgery", "medicine", "icu")


def patients(rng, n, gaps=("",), risk=0.0):
    """[n] rows as dicts: what is written, without an outcome, and the risk behind it."""
    age, chol, crp = rng.integers(30, 91, n), rng.normal(5.5, 1.0, n), rng.gamma(2.0, 20.0, n)
    ward, sex = rng.choice(WARDS, n), rng.choice(["m", "f"], n)
    score = (age - 60) / 10 + (chol - 5.5) + (crp - 40) / 30 + (ward == "icu") + risk + rng.logistic(size=n) / 2
    rows = [
        {"age": str(age[i]), "chol": f"{chol[i]:.2f}", "crp": f"{crp[i]:.1f}", "ward": str(ward[i]), "sex": str(sex[i])}
        for i in range(n)
    ]
    for row in rows:
        for name in ("chol", "crp"):
            if rng.random() < 0.1:
                row[name] = str(rng.choice(gaps))
    return rows, score


def write(path, rows, semicolons=False, order=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    names = order or list(rows[0])
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, names, delimiter=";" if semicolons else ",")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: row[k].replace(".", ",") if semicolons else row[k] for k in names})


def clinic(folder):
    """Strings, gaps written in five ways, columns in another order, a file with semicolons and decimal commas."""
    rng = np.random.default_rng(1)
    for k, (name, n) in enumerate({"north": 60, "south": 90, "west": 30}.items()):
        rows, score = patients(rng, n, ("", "NA", "NaN", "?", "n/a"))
        rows = [row | {"outcome": "ill" if s > 0 else "well"} for row, s in zip(rows, score, strict=True)]
        order = ["outcome", "ward", "crp", "sex", "age", "chol"] if k == 1 else None
        write(folder / f"{name}.csv", rows, semicolons=k == 2, order=order)
    return ("--target", "outcome")


def admissions(folder):
    """Dates, patient numbers, free text and a column with one value, to be left out; one class only at a site."""
    rng = np.random.default_rng(2)
    for name, n, risk in (("city", 80, 0.0), ("coast", 30, 20.0), ("hill", 50, -1.0)):
        rows, score = patients(rng, n, risk=risk)
        for i, row in enumerate(rows):
            row |= {"patient": f"{name[0].upper()}-{i:04d}", "admitted": f"2021-{1 + i % 12:02d}-{1 + i % 28:02d}"}
            row |= {"remark": f"seen by {rng.integers(0, 60)}", "study": "A12", "died": str(int(score[i] > 0))}
        write(folder / f"{name}.csv", rows)
    return ("--drop", "patient,admitted,remark")
