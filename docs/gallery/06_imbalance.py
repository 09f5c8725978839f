# %% [markdown]
# # Class imbalance
#
# One patient in twenty is ill. Accuracy hides it; class weights find more of the ill and make probabilities wrong.

# %%
import numpy as np
import torch

import polyfed as pf

rng = np.random.default_rng(0)
sites = []
for n in (300, 500, 200):
    x = rng.normal(size=(n, 4))
    sites.append((x, (x @ [1.5, 1.0, 0.0, 0.0] + rng.logistic(size=n) > 4.0).astype(int)))
fed = pf.Federation.from_arrays(sites, names=["bern", "oslo", "rome"], test_fraction=0.4)
print(fed.summary()[["client", "class_0", "class_1"]].to_string(index=False))

# %% [markdown]
# Calling nobody ill is right in nineteen cases of twenty. Balanced accuracy and the Brier score say two different things: how
# many of both classes are found, and whether a probability can be believed.

# %%
import pandas as pd

judged = {}
for name, weights in {"all samples alike": None, "class_weights=balanced": "balanced"}.items():
    torch.manual_seed(0)
    run = pf.fit(
        torch.nn.Linear(4, 2), fed, pf.FedAvg(0.1), rounds=40,
        class_weights=weights, metrics="accuracy,balanced-accuracy,auc,brier",
    )  # fmt: skip
    judged[name] = {score: values.mean() for score, values in run.final["test"].items() if score != "loss"}
pd.DataFrame(judged).round(3)

# %% [markdown]
# Use weights where only the order matters (AUC hardly moves), and none where a decision rests on the probability.
