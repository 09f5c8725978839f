"""Six hospitals as they send their files, made up: one model of risk behind all of them, another fault in each."""

import numpy as np
import pandas as pd

SIZES = {"bern": 260, "graz": 140, "koeln": 120, "lyon": 180, "oslo": 160, "wien": 130}
REPAIRS = """
[columns]
target = "outcome"
labels = ["well", "ill"]
gaps = ["-9"]
limits = ["crp"]
group = "patient"
missing-target = "drop"

[columns.site.graz]
temp = "(x - 32) / 1.8"

[columns.site.koeln]
encoding = "latin-1"
sex = {"männlich" = "m", "weiblich" = "f"}

[columns.site.lyon]
glucose = "x / 18.02"
"""


def patients(name, n, rng):
    """[n] rows in one unit and one spelling."""
    frame = pd.DataFrame({"patient": [f"{name[0].upper()}{i:04d}" for i in range(n)]})
    frame["age"] = rng.integers(30, 91, n)
    frame["sex"] = rng.choice(["m", "f"], n)
    frame["glucose"] = np.exp(rng.normal(np.log(6), 0.3, n)).round(1)
    frame["crea"] = np.exp(rng.normal(np.log(85), 0.25, n)).round()
    frame["crp"] = np.exp(rng.normal(2.5, 0.9, n)).round(1)
    frame["temp"] = rng.normal(37.2, 0.7, n).round(1)
    risk = 0.4 * (frame["age"] - 60) / 10 + 0.35 * (frame["glucose"] - 6) + 0.8 * (frame["sex"] == "m") - 0.4
    risk += 0.6 * np.log(frame["crp"] / 12) + 0.8 * (frame["temp"] - 37.2)
    frame["outcome"] = np.where(rng.logistic(size=n) < risk, "ill", "well")
    return frame


def clean(seed=0):
    rng = np.random.default_rng(seed)
    found = {name: patients(name, n, rng) for name, n in SIZES.items()}
    found["oslo"]["patient"] = [f"O{i // 2:04d}" for i in range(SIZES["oslo"])]  # each patient came twice
    return found


def write(folder, seed=0):
    """Write the six files; returns the rows without the faults."""
    folder.mkdir()
    rows = clean(seed)
    bern = rows["bern"].copy()
    bern.loc[::13, "crea"] = -9  # never measured
    bern.to_csv(folder / "bern.csv", index=False)
    graz = rows["graz"].assign(temp=(rows["graz"]["temp"] * 1.8 + 32).round(2))  # in °F, between tabs
    graz.to_csv(folder / "graz.csv", index=False, sep="\t")
    koeln = rows["koeln"].assign(sex=rows["koeln"]["sex"].map({"m": "männlich", "f": "weiblich"}))
    koeln.to_csv(folder / "koeln.csv", index=False, sep=";", decimal=",", encoding="latin-1")
    lyon = rows["lyon"].assign(glucose=(rows["lyon"]["glucose"] * 18.02).round(2))  # in mg/dl
    lyon[lyon.columns[::-1]].to_csv(folder / "lyon.csv", index=False)
    rows["oslo"].to_csv(folder / "oslo.csv", index=False, encoding="utf-8-sig")
    wien = rows["wien"].astype({"crp": object, "outcome": object})
    wien["crp"] = [f"{v:.1f}".replace(".", ",") if v >= 5 else "<5" for v in rows["wien"]["crp"]]
    wien.loc[::10, "outcome"] = ""  # not known yet
    wien.to_csv(folder / "wien.csv", index=False, sep=";", decimal=",")
    return rows


def repaired(rows):
    """The same rows after the repairs: what is gone with a fault is gone."""
    found = {name: frame.copy() for name, frame in rows.items()}
    found["bern"].loc[::13, "crea"] = np.nan
    low = found["wien"]["crp"] < 5
    found["wien"].loc[low, "crp"] = 5 / np.sqrt(2)
    found["wien"] = found["wien"].drop(index=range(0, SIZES["wien"], 10)).reset_index(drop=True)
    return found
