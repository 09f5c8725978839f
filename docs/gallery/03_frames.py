# %% [markdown]
# # A frame of pandas
#
# One table with a column that names the site: an estimator of scikit-learn that trains over sites, in a pipeline and in
# cross-validation.

# %%
import numpy as np
import pandas as pd
import sklearn
from sklearn.compose import make_column_transformer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import polyfed as pf

rng = np.random.default_rng(0)
n = 300
table = pd.DataFrame({"site": rng.choice(["north", "south", "west"], n), "age": rng.integers(30, 90, n)})
table["ward"] = rng.choice(["icu", "surgery"], n)
sign = np.where(table["site"] == "west", -1, 1)  # in the west the ward means the opposite
risk = (table["age"] - 60) / 20 + 2 * sign * np.where(table["ward"] == "icu", 1, -1)
table["outcome"] = np.where(risk + rng.logistic(size=n) > 0, "ill", "well")
table.head(3)

# %% [markdown]
# The encoder is fitted to all rows, as in any pipeline. `sites` is routed to the estimator, which makes each site a client.

# %%
sklearn.set_config(enable_metadata_routing=True)
columns = make_column_transformer((OneHotEncoder(), ["ward"]), remainder="passthrough")


def score(method):
    estimator = pf.FederatedClassifier(method).set_fit_request(sites=True).set_score_request(sites=True)
    pipeline = make_pipeline(columns, estimator)
    x, y = table[["age", "ward"]], table["outcome"]
    return cross_val_score(pipeline, x, y, params={"sites": table["site"]}, cv=3).mean()


pd.Series({"one common model": score(pf.FedAvg()), "a model for each site": score(pf.Ditto(lam=0.1))}).round(3)

# %%
sklearn.set_config(enable_metadata_routing=False)
