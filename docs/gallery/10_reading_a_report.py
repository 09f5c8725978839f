# %% [markdown]
# # Reading a report
#
# Four hospitals, three methods, five splits: the answer, its intervals, and the same numbers as tables.

# %%
import torch

import polyfed as pf

torch.manual_seed(0)
data = pf.data.load("heart-disease")
methods = [pf.Local(0.1), pf.FedAvg(0.1), pf.Recalibrated(0.1)]
found = pf.compare(
    torch.nn.Linear(10, 2), lambda seed: data.partition("natural", seed=seed), methods, seeds=5, rounds=20, out="answer"
)
found

# %% [markdown]
# The sentences above are what can be claimed. `answer/report.html` is the page; `pf.report.read` gives what it is made of.

# %%
study = pf.report.read(["answer"])
pf.report.compare_table(study)

# %% [markdown]
# Then who gains. The interval of a client is of the paired difference to its own model, jointly over all clients; look at
# the number of test samples before anything else.

# %%
pf.report.client_table(study)

# %% [markdown]
# And what it costs:

# %%
pf.report.cost_table(study)
