"""The appendix: A.6, what the duals gamma give away and poisoned clients; A.2 and A.3, other ways and structures."""

from typing import Any, ClassVar

import numpy as np

from polyfed import GPGD, LPGD, Algorithm, Ditto, FedAvg, FedSLR, Progress, Server
from polyfed.data import load
from polyfed.models import build
from polyfed.report.table import Cell, Table
from polyfed.studies.compare import Comparison
from polyfed_papers.fedslr import few, followed, gigabytes, lam, last, method, train
from polyfed_papers.fedslr.stated import NOTES, PAPER_MINUTES, RUNS, settings, several
from polyfed_papers.recipes.recipe import Bench, Outcome, metric_of, recipe
from polyfed_papers.recipes.said import Setting, ordered, ours, points
from polyfed_threats import GaussianNoise, LabelFlip, SignFlip

ATTACKS = {"none": None, "sign flip": SignFlip(1.0), "noise": GaussianNoise(0.1), "label flip": LabelFlip(1.0)}
ROWS = ("FedAvg", "FedSLR, GKR", "FedSLR, mixed", "Ditto")
STEPS, ROUNDS = (1, 10, 100), 10  # local steps, and rounds before the server looks


class Noted(FedAvg, abstract=True):
    """FedAvg whose server notes the last upload of every client, as any server can."""

    name: ClassVar[str] = "fedavg-noted"

    def init_server(self, task, w0, n):
        return Server({"w": w0}, each={"sent": w0.expand(n, -1).clone()})

    def aggregate(self, server, up, round):
        sent = server["sent"].index_copy(0, round.ids, up["w"])
        return server | super().aggregate({"w": server["w"]}, up, round) | {"sent": sent}


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[p] of softmax regression's mean loss, weights [classes, inputs] and then biases, as the model has them."""
    classes = len(w) // (x.shape[1] + 1)
    z = x @ w[:-classes].reshape(classes, -1).T + w[-classes:]
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x / len(x)).ravel(), p.mean(0)])


# gradient: FedSLR's gamma for grad f_i(w_i); FedAvg's (w - w_i) / (lr steps) for grad f_i(w)
# image: for each of its classes, the gradient's row of weights over its bias, for the client's mean image of it
def guessed(bench: Bench, algorithm: FedAvg | FedSLR, steps: int, seed: int) -> dict[str, float]:
    """Relative errors of the server's guesses from uploads, mean over clients."""
    data = load("digits", flat=True).partition("pathological:2", 10, seed)
    model, before = build("linear", (64,), 10, init="zeros").double(), dict[str, np.ndarray]()
    errors: dict[str, list[float]] = {"gradient": [], "image": []}
    rounds = bench.rounds(ROUNDS, ROUNDS)

    def look(progress: Progress) -> None:
        now = {k: t.cpu().numpy().copy() for k, t in progress.run.server.items() if k in ("w", "g", "sent")}
        if progress.round == rounds:
            judge(now)
        before.update(now)

    def judge(now: dict[str, np.ndarray]) -> None:
        w = before.get("w", np.zeros(650))
        for i in range(data.n):
            x, y = (t.numpy() for t in data.train.client(i))
            if isinstance(algorithm, FedSLR):
                guess = now["g"][i]
                at = w - algorithm.eta_g * (guess - before.get("g", np.zeros((data.n, 650)))[i])
            else:
                guess, at = (w - now["sent"][i]) / (algorithm.lr * steps), w
            true = gradient(at, x.astype(float), y)
            errors["gradient"].append(float(np.linalg.norm(guess - true) / np.linalg.norm(true)))
            rows, biases = guess[:-10].reshape(10, -1), guess[-10:]
            for c in np.unique(y):
                mean = x[y == c].mean(0)
                errors["image"].append(float(np.linalg.norm(rows[c] / biases[c] - mean) / np.linalg.norm(mean)))

    bench.fit(model, data, algorithm, rounds=rounds, local_steps=steps, batch_size=None, seed=seed, callbacks=[look],
              evaluate_every=0, dtype="float64")  # fmt: skip
    return {name: float(np.median(values)) for name, values in errors.items()}


def poisoned(bench: Bench) -> dict[str, Comparison]:
    """attack -> every method, a fifth of the clients attacking."""
    methods: dict[str, Algorithm] = {
        "FedAvg": FedAvg(0.1), "FedSLR": method(bench), "FedSLR-gkr": method(bench, deploy="gkr", personal_epochs=0),
        "Ditto": Ditto(0.1, lam=0.1),
    }  # fmt: skip
    return {
        name: train(bench, f"attack-{name.replace(' ', '-')}", methods, attack=attack)
        for name, attack in list(ATTACKS.items())[: 2 if bench.rehearse else None]
    }


LABELS = {"FedSLR, GKR": "FedSLR-gkr", "FedSLR, mixed": "FedSLR"}


def benign(runs: Comparison, row: str) -> np.ndarray:
    """[seeds] mean accuracy over the clients that do not attack; 0 for a run that diverged: it has no model to use."""
    return np.nan_to_num(metric_of(runs, LABELS.get(row, row)))


@recipe("fedslr/a6", "A.6: what gamma gives away; a poisoned low-rank part", minutes=(4, several(16)), **RUNS,
        settings=settings(
            Setting("gamma", f"digits, 10 clients of two classes, softmax regression from zero, {ROUNDS} rounds of all "
                    "clients, full-batch steps of lr 0.1, eta_g 10, lambda 0", "ours"),
            Setting("attackers", "a fifth of the clients: -|c| w with c ~ N(0, 1); N(0, 0.01 I); labels y -> 9 - y",
                    "ours"),
            Setting("accuracy", "of the clients that do not attack", "ours"),
        ))  # fmt: skip
def a6(bench: Bench) -> Outcome:
    """Do uploads give a client's gradient and images away, and what does poison do to either model?"""
    rows, claims = [], []
    for steps in few(bench, STEPS):
        kinds: dict[str, Any] = {
            "FedAvg": Noted(0.1),
            "FedSLR": FedSLR(0.1, lam=0.0, personal_epochs=0, form="all-duals"),
        }
        guesses = {
            label: bench.by_seed(f"{label}-{steps}", lambda seed, m=m, s=steps: guessed(bench, m, s, seed))
            for label, m in kinds.items()
        }
        cells = (ours((r[kind] for r in guesses[label]), 100, 1) for kind in ("gradient", "image") for label in kinds)
        rows.append((Cell(f"{steps}"), *cells))
        for kind, text in (("gradient", "the gradient"), ("image", "a class's mean image")):
            far, near = (np.array([r[kind] for r in guesses[label]]) for label in kinds)
            text = f"{steps} local steps: FedSLR's uploads give {text} away more nearly than FedAvg's"
            claims.append(ordered(text, far, near, 100, " % of its length"))
    leak = Table("Error of what the server works out, % of its length",
                 ("local steps", "gradient, FedAvg", "gradient, FedSLR", "image, FedAvg", "image, FedSLR"),
                 tuple(rows))  # fmt: skip
    runs, shown = poisoned(bench), ROWS
    table = []
    for attack, own in runs.items():
        size = last(own, "FedSLR", "gkr_parameters")
        table.append((Cell(attack), *(ours(benign(own, row), 100) for row in shown), ours(size / 1e3)))
        if attack != "none":
            claims += [
                points(f"{attack}: the mixed model loses less than {row}",
                        (benign(own, "FedSLR, mixed") - benign(runs["none"], "FedSLR, mixed")),
                        (benign(own, row) - benign(runs["none"], row)))
                for row in shown if row != "FedSLR, mixed"
            ]  # fmt: skip
    heads = ("a fifth attacks<", *shown, "GKR, thousand numbers")
    notes = ["w_i, which the client uploads, and (5) give gamma to the server in any form of FedSLR",
             "clients without attackers are more in the first row: all of them"]  # fmt: skip
    return Outcome(
        [leak, Table("Accuracy of the clients that do not attack, %", heads, tuple(table))], {}, claims, notes
    )


DECOMPOSITIONS = 17_000  # minutes at paper scale: of 21 layers at each of 500 000 (LPGD) + 2 x 250 000 steps, 1 s each
STRUCTURES = ("S+S", "S+LR", "LR+LR")


def methods(bench: Bench) -> dict[str, Algorithm]:
    """LPGD takes a decomposition of every layer at every local step, S+LR and LR+LR one at every personal step."""
    steps = bench.pick(16, 50)  # local steps of a client
    return {
        "FedSLR": method(bench),
        **{structure: method(bench, structure=structure) for structure in STRUCTURES},
        "LPGD": LPGD(0.1, lam=lam(bench)),
        "GPGD": GPGD(0.1, lam=lam(bench)),
        f"GPGD-{steps}-steps": GPGD(0.1, lam=lam(bench), steps=steps),
    }


def ranks(runs: Comparison, label: str) -> str:
    """Ranks of the layers after the last round, mean over seeds."""
    rows = [run[-1]["ranks"] for run in followed(runs, label) if run]
    if not rows or rows[0] is None:
        return "–"
    return ", ".join(f"{np.mean([r[name] for r in rows]):.0f}" for name in rows[0])


@recipe("fedslr/variants", "A.2 and A.3: LPGD, GPGD, and other structures",
        minutes=(3, 5 * (7 * PAPER_MINUTES + DECOMPOSITIONS)), **RUNS,
        settings=settings(
            Setting("structures", "common + personal part; LR+S is FedSLR, S sparse, LR low rank", "paper"),
            Setting("thresholds", "lambda eta_g and lr mu whatever the norms", "paper"),
            Setting("GPGD, k steps", "threshold lr lambda k, as long as the way that the mean has moved", "ours"),
        ))  # fmt: skip
def variants(bench: Bench) -> Outcome:
    """Is the server's proximal step on dual-corrected models the better way, and low rank + sparse the better pair?"""
    runs = train(bench, "runs", methods(bench))
    rows = []
    for label in methods(bench):
        own = label == "FedSLR" or label in STRUCTURES
        numbers = last(runs, label, "gkr_parameters") if label != "LPGD" else last(runs, label, "parameters")
        rows.append(
            (
                Cell(f"{label} (LR+S)" if label == "FedSLR" else label, {"method": label}),
                ours(last(runs, label), 100),
                ours(metric_of(runs, label) if own else [], 100),
                Cell(ranks(runs, label)),
                ours(numbers / 1e3, decimals=1),
                ours(last(runs, label, "parameters") / 1e3 if own else [], decimals=1),
                ours(gigabytes(runs, label), 1e3),
            )
        )  # fmt: skip
    heads = ("method<", "common, %", "mixed, %", "ranks", "common, thousand", "mixed, thousand", "sent, MB")
    common, mixed = last(runs, "FedSLR"), metric_of(runs, "FedSLR")
    claims = [
        *(points(f"FedSLR's common model is better than {k}'s", common, last(runs, k))
          for k in methods(bench) if "PGD" in k),
        *(points(f"low rank + sparse is better than {k}, mixed", mixed, metric_of(runs, k))
          for k in STRUCTURES),
    ]  # fmt: skip
    notes = [
        "the released code has none of these, and the paper's figures of them are not known to us: order only",
        "the same lambda and mu mean other things in other norms and methods; none was tuned for its own",
        *NOTES,
    ]
    return Outcome([Table("Alternatives and structures", heads, tuple(rows))], {}, claims, notes)
