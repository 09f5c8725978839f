"""What privacy costs where a patient's survival is hidden, and where each of a thousand clients is. Simulations.

    python benchmarks/privacy_cost.py survival|clients DATA        # the folder that holds tcga_brca and mnist

survival: six regions of TCGA-BRCA, by concordance, a row hidden. Cox's likelihood compares patients with each other, so
that no gradient is one patient's alone and row privacy is not to be had with it. Death at a constant rate, y_i ~
Poisson(t_i exp(x_i w)), adds up over patients; its risks are ranked as Cox's are. Age comes in units of 100 years and
time of ten, bounds that are no one's; nothing was tuned.

clients: MNIST dealt to 1,000 clients at random, softmax regression by one step a round of each, all that a client has
hidden; the server adds the noise, and the clip follows the median of what clients send.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

import polyfed as pf
from polyfed_clinical import concordance

ROUNDS = 50


def regions(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """(x, [died, decades]) of each region."""
    table = pd.read_csv(folder / "brca.csv").merge(pd.read_csv(folder / "train_test_split.csv"), on="pid")
    x = table.drop(columns=["pid", "E", "T", "fold", "fold2"])
    age = [c for c in x if x[c].max() > 1]
    x[age] = x[age] / 100
    y = np.stack([table["E"], table["T"].clip(lower=1) / 3652.5], 1)
    return [(x.loc[at].to_numpy(float), y[at]) for at in table.groupby(table["fold2"].str[-1]).groups.values()]


def rate(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Minus the log-likelihood of a constant rate, over patients. target: [b, 2] died, decades"""
    eta = output.reshape(-1).clamp(max=3.0)  # 20 deaths a decade; the rehearsal's targets are any numbers
    return (target[:, 1].abs() * eta.exp() - target[:, 0] * eta).mean()


def ordered(y: np.ndarray) -> bool:
    """True where a patient died while another was at risk."""
    return bool(y[y[:, 0] > 0, 1].min(initial=np.inf) < y[:, 1].max())


def risk(sites: list[tuple[np.ndarray, np.ndarray]], epsilon: float | None, seed: int) -> float:
    """Concordance within regions, over the pairs of test patients of all regions."""
    rng, train, test = np.random.default_rng(seed), [], []
    for x, y in sites:
        order = rng.permutation(len(x))
        cut = round(0.7 * len(x))
        train.append((x[order[:cut]], y[order[:cut]]))
        test.append((x[order[cut:]], y[order[cut:]]))
    privacy = None if epsilon is None else {"sums": "secure", "epsilon": epsilon, "delta": 1e-5, "clip": 0.5}
    model = torch.nn.Linear(sites[0][0].shape[1], 1, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.constant_(model.bias, -2.0)
    fed = pf.Federation.from_arrays(train, test_fraction=0)
    run = pf.fit(
        model, fed, pf.FedAvg(lr=1.0), rounds=ROUNDS, local_steps=1, batch_size=None, evaluate_every=0,
        dtype="float64", loss=rate, privacy=privacy, seed=seed,
    )  # fmt: skip
    w = run.common.numpy()[: sites[0][0].shape[1]]
    found = [(len(x), concordance(y[:, 1], y[:, 0], x @ w)) for x, y in test if ordered(y)]
    return float(np.average([c for _, c in found], weights=[n for n, _ in found]))


def digits(data: Path, epsilon: float | None, seed: int) -> float:
    """Accuracy over all test images."""
    fed = pf.data.load("mnist", str(data)).partition("iid", clients=1000, test_fraction=0.15, seed=seed)
    central = {"unit": "site", "noise": "server", "epsilon": epsilon, "delta": 1e-5, "clip": 0.5, "quantile": 0.5}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    run = pf.fit(
        model, fed, pf.FedAvg(lr=0.5, weighted=False), rounds=20, local_steps=1, batch_size=None, evaluate_every=0,
        dtype="float64", privacy=None if epsilon is None else central, seed=seed,
    )  # fmt: skip
    return float(run.clients["test_accuracy"].mean())


def main() -> None:
    what, data = sys.argv[1], Path(sys.argv[2])
    sites = regions(data / "tcga_brca") if what == "survival" else []
    splits, share = (20, 0.3 / 0.7) if what == "survival" else (5, 0.15 / 0.85)
    each = {
        e: np.array([risk(sites, e, s) if sites else digits(data, e, s) for s in range(splits)])
        for e in (None, 8.0, 4.0, 2.0, 1.0)
    }
    print(f"{what}: {splits} splits; none: {each[None].mean():.3f}")
    for e, found in each.items():
        if e is not None:
            gap = found - each[None]
            half = stats.t.ppf(0.975, splits - 1) * gap.std(ddof=1) * (1 / splits + share) ** 0.5  # Nadeau and Bengio
            low, high = gap.mean() - half, gap.mean() + half
            print(f"epsilon {e:g}: {found.mean():.3f}, {gap.mean():+.4f} ({low:+.4f} to {high:+.4f})", flush=True)


if __name__ == "__main__":
    main()
