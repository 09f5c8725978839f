# %% [markdown]
# # Tokens
#
# Sequences of integers through an embedding and a recurrent network: integers of 16 bits or more are kept as they are.

# %%
import numpy as np
import torch
from torch import nn

import polyfed as pf

rng = np.random.default_rng(0)


def notes(n, sick):
    """[n, 12] words from 0 to 49; a note is urgent where it holds a word that its ward uses for it."""
    words = rng.integers(0, 50, (n, 12))
    return words, (words == sick).any(1).astype(int)


sites = [notes(150, sick) for sick in (7, 7, 8)]
fed = pf.Federation.from_arrays(sites, names=["icu", "surgery", "clinic"])
fed


# %% [markdown]
# Two wards share a word and the clinic has another, so its share of the common model is the worst.


# %%
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.memory, self.head = nn.Embedding(50, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.memory(self.words(x))[0].mean(1))


torch.manual_seed(0)
run = pf.fit(Reader(), fed, pf.FedAvg(0.01), rounds=12, local_epochs=3, optimizer="adam")
run
