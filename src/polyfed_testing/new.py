"""polyfed new: a project that runs as it is, with files to put one's own in the place of."""

import csv
import io

import numpy as np

from polyfed.runs.config import METHODS

MODEL = '''"""The model: any nn.Module. input_shape and outputs are filled in; other arguments are keys of [model]."""

from torch import nn


class Net(nn.Module):
    """One hidden layer."""

    def __init__(self, input_shape, outputs, width=16):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, x):
        return self.layers(x)
'''
EXPERIMENT = """# polyfed run experiment.toml
rounds = 30
seeds = 5

[data]
name = "./sites"  # one CSV file for each site

[columns]
target = "outcome"

[model]
file = "model.py"
width = 16

"""
EXPERIMENT += METHODS
SITES = {"north": (60, 0.0), "south": (40, 1.0)}  # rows, and how much more often the outcome happens


def project() -> dict[str, str]:
    """The files of a project, by their places in its folder."""
    return {"experiment.toml": EXPERIMENT, "model.py": MODEL} | {f"sites/{site}.csv": _rows(site) for site in SITES}


def _rows(site: str) -> str:
    """A made-up site's table, the same in every project: its rows, a gap among them, and an outcome that follows."""
    n, more = SITES[site]
    rng = np.random.default_rng(len(site) + n)
    age, pressure, ward = rng.integers(30, 86, n), rng.normal(135, 18, n), rng.choice(["medicine", "surgery"], n)
    risk = (age - 58) / 12 + (pressure - 135) / 30 + (ward == "surgery") + more
    ill = risk + rng.logistic(size=n) > 0
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["age", "pressure", "ward", "outcome"])
    for i in range(n):
        measured = "" if i % 15 == 7 else f"{pressure[i]:.0f}"
        table.writerow([age[i], measured, ward[i], "ill" if ill[i] else "well"])
    return text.getvalue()
