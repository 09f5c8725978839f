# %% [markdown]
# # Images
#
# Handwritten digits among eight clients who have few classes each: one common model, personal ones, and what they cost.

# %%
import torch

import polyfed as pf

fed = pf.data.load("digits").partition(pf.data.Dirichlet(0.3), clients=8, seed=0)
fed

# %% [markdown]
# Any `nn.Module`. With BatchNorm in it, `pf.models.replace_batchnorm` puts GroupNorm in its place.

# %%
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(72, 10)
)
methods = [pf.Local(0.1), pf.FedAvg(0.1), pf.Ditto(lr=0.1, lam=0.1)]
found = pf.compare(net, fed, methods, seeds=1, rounds=15)
found

# %%
found.clients.pivot(index="client", columns="label", values="test_accuracy").round(3)
