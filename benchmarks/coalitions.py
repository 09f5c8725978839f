"""Who gains from whom, on three federations: the tables and pictures of docs/coalitions.md.

    python benchmarks/coalitions.py hospitals planted swapped --out FOLDER [--docs docs]

hospitals  UCI Heart Disease as `polyfed run` has it: all 15 coalitions, FedAvg, ten splits
planted    two groups of three sites with rules of their own and a poisoner whose labels contradict both; all 127
           coalitions, five seeds
swapped    20 clients of scikit-learn's digits in four groups, each with a pair of labels swapped: sampled coalitions

FPFC runs with several lam, IFCA with the true number of groups (two for the hospitals), FedACS as it is. Folders that
are there are read back, so that it can be interrupted. --docs replaces the marked part of coalitions.md in that folder
and the pictures in images/; run tools/tables.py on the page afterwards.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

import polyfed as pf
from polyfed.report.style import save
from polyfed_games.show import answer

MARKS = ("<!-- measured by benchmarks/coalitions.py -->\n", "<!-- end -->\n")
LAMS = (0.1, 0.3, 0.6, 0.7, 0.8, 1.0)


def against(lr: float, groups: int) -> dict[str, pf.Algorithm]:
    """The methods that find clusters or mix models."""
    fused = {f"fpfc-lam={lam:g}": pf.FPFC(lr, lam=lam) for lam in LAMS}
    mixed = {"fedacs": pf.FedACS(lr), "fedacs-quantile=0.25": pf.FedACS(lr, quantile=0.25)}
    return {**fused, f"ifca-k={groups}": pf.IFCA(lr, k=groups), **mixed}


def linear(inputs: int, classes: int) -> torch.nn.Module:
    """Starts from the same parameters every time."""
    torch.manual_seed(0)
    return torch.nn.Linear(inputs, classes)


def hospitals(out: Path) -> pf.Coalitions:
    """Draws the split anew with every seed."""
    data = pf.data.load("heart-disease")

    def federation(seed: int) -> pf.Federation:
        return data.partition(seed=seed, test_fraction=0.34, validation_fraction=0.2)

    return pf.coalitions(
        linear(10, 2), federation, pf.FedAvg(0.1), rounds=60, local_steps=5, batch_size=None, seeds=10,
        against=against(0.1, 2), out=out, resume=True,
    )  # fmt: skip


NAMES = ("north-1", "north-2", "north-3", "south-1", "south-2", "south-3", "poisoner")


def planted_sites(train: int = 25, test: int = 200, inputs: int = 8) -> pf.Federation:
    """Sites of a group share a rule, sign(w x); the rules of the groups are orthogonal, the poisoner's is their sum,
    turned around."""
    rng = np.random.default_rng(0)
    w = np.linalg.qr(rng.normal(size=(inputs, 2)))[0].T
    rules = [w[0]] * 3 + [w[1]] * 3 + [-(w[0] + w[1])]

    def draw(rule: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.normal(size=(n, inputs)).astype(np.float32)
        return x, (x @ rule + 0.2 * rng.normal(size=n) > 0).astype(int)

    pairs = [(draw(rule, train), draw(rule, test)) for rule in rules]
    clusters = [0, 0, 0, 1, 1, 1, 2]
    return pf.Federation.from_arrays(
        [a for a, _ in pairs], [b for _, b in pairs], names=NAMES, classes=2, clusters=clusters
    )


def planted(out: Path) -> pf.Coalitions:
    """The validation split alone differs between seeds."""
    return pf.coalitions(
        linear(8, 2), planted_sites(), pf.FedAvg(0.3), rounds=20, local_steps=5, batch_size=None, seeds=5,
        against=against(0.3, 3), out=out, resume=True,
    )  # fmt: skip


def swapped_clients() -> pf.Federation:
    """About 45 samples to train and as many to test on for each client."""
    how = "iid+label-swap:4"
    return pf.data.load("digits", flat=True).partition(how, 20, 0, "own", test_fraction=0.5, validation_fraction=0.2)


def swapped(out: Path) -> pf.Coalitions:
    """One seed: what is uncertain is the choice of coalitions and the test samples."""
    return pf.coalitions(
        linear(64, 10), swapped_clients(), pf.FedAvg(0.5), rounds=20, local_steps=5, batch_size=None, seeds=1,
        samples=5, against=against(0.5, 4), out=out, resume=True,
    )  # fmt: skip


def truth(name: str, found: pf.Coalitions) -> list[str]:
    """What was planted, and whether it came out."""
    if name == "hospitals":
        return []
    m, n = found.matrix.to_numpy(), len(found.names)
    clusters = (planted_sites() if name == "planted" else swapped_clients()).clusters
    assert clusters is not None
    same = (clusters[:, None] == clusters) & ~np.eye(n, dtype=bool)
    other = clusters[:, None] != clusters
    groups = [c.split(" + ") for c in found.partitions.iloc[0]["coalitions"].split(" | ")]
    labels = [next(k for k, g in enumerate(groups) if name in g) for name in found.names]
    said = [
        f"Planted groups against the partition found: adjusted Rand index {adjusted_rand_score(clusters, labels):.2f}. "
        f"Values within groups {100 * m[same].min():+.1f} to {100 * m[same].max():+.1f} points, between groups "
        f"{100 * m[other].min():+.1f} to {100 * m[other].max():+.1f}."
    ]
    if name == "planted":
        column = found.help[(found.help["from"] == "poisoner")]
        low, high = 100 * column.shapley.min(), 100 * column.shapley.max()
        said.append(
            f"The poisoner's value is negative for all six others ({low:+.1f} to {high:+.1f} points), clearly so for "
            f"{int((column.clear & (column.shapley < 0)).sum())}."
        )
    else:
        errors, drawn = 100 * found.help.error, found.help.drawn
        said.append(
            f"Each value rests on {drawn.min()} to {drawn.max()} joinings (mean {drawn.mean():.1f}); standard error of "
            f"the sampling: median {errors.median():.1f} points, largest {errors.max():.1f}."
        )
    return said


TITLES = {
    "hospitals": "## The four hospitals",
    "planted": "## Two groups of three and a poisoner",
    "swapped": "## Twenty clients with swapped labels",
}


def section(name: str, found: pf.Coalitions, seconds: float) -> str:
    """One federation in Markdown."""
    parts = [TITLES[name], f"> {answer(found)}", f"![Who helps whom](images/coalitions-{name}.png)"]
    runs = f"{found.trainings} trainings, {found.seconds:.0f} s of training; {seconds:.0f} s from start to page"
    parts.append(f"{runs}.")
    parts += truth(name, found)
    shown = [t for t in found.tables() if len(found.names) < 10 or t.title != "What each client should do"]
    parts += [t.to("markdown").replace("−", "-") for t in shown]
    return "\n\n".join(p.strip() for p in parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=list(TITLES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    kept, texts = given.out / "seconds.json", []
    given.out.mkdir(parents=True, exist_ok=True)
    spent = json.loads(kept.read_text()) if kept.exists() else {}
    for name in given.which:
        start = time.monotonic()
        found = {"hospitals": hospitals, "planted": planted, "swapped": swapped}[name](given.out / name)
        seconds, trainings = spent.get(name, (0.0, 0))
        if found.trainings > trainings:  # otherwise all was read back
            spent[name] = seconds + time.monotonic() - start, found.trainings
            kept.write_text(json.dumps(spent))
        parts = section(name, found, spent[name][0]).split("\n\n")
        texts.append("\n\n".join(p for p in parts if len(p.split()) < 8 or p not in "".join(texts)))  # captions once
        print(texts[-1], flush=True)
        if given.docs:
            save(found.figure(), given.docs / "images" / f"coalitions-{name}.png")
    if given.docs:
        page = given.docs / "coalitions.md"
        before, rest = page.read_text().split(MARKS[0])
        page.write_text(f"{before}{MARKS[0]}\n{chr(10).join(texts)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


if __name__ == "__main__":
    main()
