# %% [markdown]
# # Survival
#
# Times and events at three sites: a Cox model, stratified by site, with the numbers of a pooled fit and no row exchanged.

# %%
import numpy as np
import pandas as pd

import polyfed_clinical

rng = np.random.default_rng(0)
sites = []
for size, base in ((80, 0.05), (120, 0.10), (60, 0.02)):
    x = pd.DataFrame({"age": rng.normal(0, 1, size), "treated": rng.integers(0, 2, size).astype(float)})
    death = rng.exponential(1 / (base * np.exp(0.7 * x["age"] - 0.5 * x["treated"])))
    lost = rng.uniform(5, 60, size)
    sites.append((x, np.minimum(death, lost), (death <= lost).astype(float)))

# %% [markdown]
# The truth behind these patients: hazard ratios exp(0.7) = 2.01 for age and exp(-0.5) = 0.61 for treatment, and another
# base rate at every site, which a stratified model needs not know.

# %%
fit = polyfed_clinical.fit(sites, model="cox")
fit.coefficients.round(3)

# %% [markdown]
# Do the sites agree? And what does a meta-analysis of their own fits say?

# %%
fit.heterogeneity.round(3)

# %% [markdown]
# `polyfed regress FOLDER --model cox --time days --event died` does it with files, and writes a page.
