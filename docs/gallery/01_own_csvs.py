# %% [markdown]
# # Own CSV files
#
# A folder with one file per site: what each column becomes, whether federating pays, and predictions for new rows.

# %%
from pathlib import Path

import numpy as np
import pandas as pd

import polyfed as pf

rng = np.random.default_rng(0)
folder = Path("sites")
folder.mkdir()
for name, size, more in (("bern", 60, 0.0), ("oslo", 90, 0.5), ("rome", 40, -0.5)):
    table = pd.DataFrame({"age": rng.integers(30, 90, size), "ward": rng.choice(["icu", "surgery"], size)})
    table["crp"] = rng.gamma(2.0, 20.0, size).round(1)
    risk = (table["age"] - 60) / 10 + (table["ward"] == "icu") + more + rng.logistic(size=size)
    table["crp"] = table["crp"].where(rng.random(size) > 0.1)  # gaps
    table["outcome"] = np.where(risk > 0, "ill", "well")
    table.to_csv(folder / f"{name}.csv", index=False)
table.head(3)

# %% [markdown]
# `pf.data.load` types the columns. `partition` cuts each site's rows into training and test samples, and learns medians,
# means and categories from training rows alone.

# %%
data = pf.data.load("sites", target="outcome", labels=["well", "ill"])
fed = data.partition("natural", seed=0)
fed

# %% [markdown]
# Two methods on three splits: each site alone, and one common model. `polyfed run --data sites --target outcome` does the
# same from the command line, with a report.

# %%
import torch

torch.manual_seed(0)
model = torch.nn.Linear(fed.input_shape[0], fed.outputs)
found = pf.compare(
    model, lambda seed: data.partition("natural", seed=seed), [pf.Local(0.1), pf.FedAvg(0.1)], seeds=3, rounds=20
)
found

# %% [markdown]
# A run predicts rows as they are in a file: gaps are filled and categories encoded as in training.

# %%
run = pf.fit(model, fed, pf.FedAvg(0.1), rounds=20)
run.predict("bern", pd.DataFrame({"age": [35, 81], "ward": ["surgery", "icu"], "crp": [12.0, 90.0]}))
