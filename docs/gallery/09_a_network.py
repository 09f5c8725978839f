# slow: a server and two sites are processes of their own
# %% [markdown]
# # A network in one notebook
#
# A server and two sites on this machine, as they would be on three: keys, TLS, a model for each site. Needs
# `pip install '.[sites]'`.

# %%
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

import polyfed as pf

rng = np.random.default_rng(0)
for name in ("bern", "oslo"):
    table = pd.DataFrame({"age": rng.integers(30, 90, 80), "crp": rng.gamma(2.0, 20.0, 80).round(1)})
    table["ill"] = ((table["age"] - 60) / 10 + rng.logistic(size=80) > 0).astype(int)
    table.to_csv(f"{name}.csv", index=False)
Path("experiment.toml").write_text("""
rounds = 30
batch-size = "full"
[columns]
target = "ill"
labels = ["0", "1"]
standardise = "client"
[model]
name = "linear"
[algorithm]
name = "ditto"
""")
COMMAND = str(Path(sys.executable).with_name("polyfed"))


def polyfed(*words):
    return subprocess.run([COMMAND, *words], check=True, capture_output=True, text=True).stdout


# %% [markdown]
# The server's operator makes a certificate and a key for each site.

# %%
polyfed("keys", "init", f"127.0.0.1:{random.randrange(20000, 30000)}")
polyfed("keys", "add", "bern")
polyfed("keys", "add", "oslo")
print(polyfed("keys", "list"))

# %% [markdown]
# The sites take part, each with its own file; the server waits for both. Without `--yes policy` a site is shown what will
# leave it, and asked.

# %%
sites = [
    subprocess.Popen(
        [
            COMMAND,
            "client",
            "--key",
            f"{name}.key",
            "--data",
            f"{name}.csv",
            "--vault",
            name,
            "--yes",
            "policy",
            "--quiet",
        ]
    )
    for name in ("bern", "oslo")
]
polyfed("server", "experiment.toml", "--host", "127.0.0.1", "--sites", "2", "--out", "run", "--quiet")
[site.wait(60) for site in sites]

# %% [markdown]
# The server has the scores; the models are at the sites.

# %%
print((Path("run") / "log.txt").read_text()[-200:])
pf.Run.open("run").clients[["client", "train_samples", "test_accuracy", "up_bytes"]]

# %%
polyfed("export", "bern")
pf.Predictor.open("bern.safetensors").predict(pd.DataFrame({"age": [40, 80], "crp": [20.0, 20.0]}))
