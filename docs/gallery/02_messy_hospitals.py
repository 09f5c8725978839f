# %% [markdown]
# # Messy hospitals
#
# Semicolons and decimal commas, gaps written as -9, and a site that measures in other units: what is read by itself, and
# what has to be looked at first.

# %%
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import polyfed as pf

rng = np.random.default_rng(0)
folder = Path("hospitals")
folder.mkdir()
for name, size in {"bern": 120, "oslo": 120, "rome": 120}.items():
    glucose, age = rng.normal(6.0, 1.5, size).clip(3), rng.integers(30, 90, size)
    ill = 2 * (glucose - 6) + (age - 60) / 15 + rng.logistic(size=size) > 0
    table = pd.DataFrame(
        {"age": age.astype(float), "glucose": glucose.round(1), "outcome": np.where(ill, "ill", "well")}
    )
    if name == "oslo":
        table["glucose"] = (18.02 * table["glucose"]).round()  # mg/dl, where the others have mmol/l
    table["age"] = table["age"].mask(rng.random(size) < 0.1, -9)  # a gap, as the registry writes it
    german = {"sep": ";", "decimal": ","} if name == "rome" else {}
    table.to_csv(folder / f"{name}.csv", index=False, **german)
print((folder / "rome.csv").read_text()[:60])

# %% [markdown]
# Separators and decimal commas are read by themselves. Whether a number means the same everywhere is not a property of a
# file, so the sites are held against each other before anything is trained: mg/dl against mmol/l, and codes for gaps.

# %%
data = pf.data.load("hospitals", target="outcome")
print(*(note for note in data.notes if note.startswith("check")), sep="\n")


# %% [markdown]
# The same rows and splits before and after the repairs that the notes propose.


# %%
def accuracy(**columns):
    data = pf.data.load("hospitals", target="outcome", **columns)
    scores = []
    for seed in range(3):
        fed = data.partition("natural", seed=seed)
        torch.manual_seed(0)
        run = pf.fit(torch.nn.Linear(fed.input_shape[0], 2), fed, pf.FedAvg(0.1), rounds=30, seed=seed)
        scores.append(run.final["test"]["accuracy"].mean())
    return np.mean(scores)


before = accuracy()
repaired = accuracy(gaps=["-9"], site={"oslo": {"glucose": "x / 18.02"}})
print(f"as they came: {before:.3f}, repaired: {repaired:.3f}")
