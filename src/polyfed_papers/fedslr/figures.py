"""Figures 2 to 5, drawn from the runs of Table 1: curves, violins, the last hidden layer, seconds of communication."""

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor, nn

from polyfed.base import plugins
from polyfed.compute.layout import Layout
from polyfed.report.style import INK, QUIET, SERIES, VERMILLION, categories
from polyfed.report.table import Cell, Table
from polyfed.runs.opened import opened
from polyfed.studies.compare import Comparison
from polyfed_papers.fedslr import federation, network, resnet
from polyfed_papers.fedslr.progress import column, over_rounds
from polyfed_papers.fedslr.stated import GKR, LABELS, MIXED
from polyfed_papers.recipes.drawing import Panel, curve_panels, panes
from polyfed_papers.recipes.recipe import Bench, Outcome
from polyfed_papers.recipes.said import Claim, Setting, ordered, ours, points

COMMON = ("SCAFFOLD", "FedAvg", "FedDyn", GKR)
PERSONAL = (
    "LG-FedAvg", "FedAvg-FT", "FedRep", "Local", "APFL", "FedSpa", "Ditto", "FedRep, released", "Per-FedAvg", MIXED,
)  # fmt: skip

FORM = ("polyfed_sites.wire", "fedslr: Figure 5's messages")  # as a real network has them
RATE, LATENCY = 50e6, 5e-3  # bits per second of the common medium, seconds per message
SETTINGS = (
    Setting("Figure 3", "accuracy less FedAvg's, in points, of every client; clients of all seeds together", "ours"),
    Setting("Figure 4", "the last round's models, for a client of the first seed, drawn among those with ten test "
            "images of three classes or more; exact t-SNE, perplexity 30 or a third of the images", "ours"),
    Setting("Figure 5", f"{RATE / 1e6:.0f} Mbit/s shared by the clients of a round, and {1e3 * LATENCY:.0f} ms per "
            "message; the paper measures in a WLAN whose rate it does not give", "ours"),
)  # fmt: skip


# ---- Figure 2 -------------------------------------------------------------------------------------------------------


def curve(runs: Comparison, row: str) -> tuple[list[float], list[list[float]]]:
    """(rounds, [seed][evaluated round]) test accuracy in per cent of a row of Table 1, without the start."""
    label = LABELS.get(row, row)
    at, values = over_rounds(runs, label, "accuracy") if row == GKR else column(runs, label, runs.metric.name)
    trained = np.array(at) > 0
    return np.array(at)[trained].tolist(), (100 * np.array(values)[:, trained]).tolist()


def figure2(runs: Mapping[str, Comparison]) -> Outcome:
    """Test accuracy over the rounds; `runs` maps a panel's title to its runs."""
    figures = {
        f"figure2-{kind}": curve_panels(
            [Panel(title, "round", "test accuracy, %", {row: curve(f, row) for row in rows})
             for title, f in runs.items()], min(2, len(runs)), 2.9, 3,
        )
        for kind, rows in (("common", COMMON), ("personal", PERSONAL))
    }  # fmt: skip
    claims = []
    for title, found in runs.items():
        values = {row: np.array(curve(found, row)[1]) / 100 for row in (GKR, "FedAvg", MIXED, "Local")}
        claims += [
            points(f"{title}: mean accuracy over the rounds, {a} above {b}", values[a].mean(1), values[b].mean(1))
            for a, b in ((GKR, "FedAvg"), (MIXED, "Local"))
        ]  # fmt: skip
        first = f"{title}: the GKR starts more slowly than FedAvg (round {curve(found, GKR)[0][0]:g})"
        claims.append(points(first, values["FedAvg"][:, 0], values[GKR][:, 0]))
    return Outcome(figures=figures, claims=claims)


# ---- Figure 3 -------------------------------------------------------------------------------------------------------


def per_client(runs: Comparison, row: str, of: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """[seeds, n] test accuracy of every client, from the results of `hidden` per seed."""
    if row == GKR:
        return np.array([seed["accuracy"]["global, global"] for seed in of])
    name, label = f"{runs.split}_{runs.metric.name}", LABELS.get(row, row)
    frames = [r.clients for r in runs.results if r.label == label and r.clients is not None]
    return np.array([f[name].to_numpy(dtype=float) for f in frames])


def figure3(runs: Comparison, of: Sequence[Mapping[str, Any]]) -> Outcome:
    """Every client's gain over FedAvg."""
    base = per_client(runs, "FedAvg", of)
    gains = {
        row: 100 * (per_client(runs, row, of) - base) for row in (*COMMON, *PERSONAL[::-1]) if row != "FedAvg"
    }  # fmt: skip
    rows = tuple(
        (
            Cell(row, {"method": row}),
            *(Cell(f"{q:+.1f}", {f"quantile {k}": float(q)})
              for k, q in zip((25, 50, 75), np.quantile(v, (0.25, 0.5, 0.75)), strict=True)),
            Cell(f"{100 * (v > 0).mean():.0f}", {"ahead": float((v > 0).mean())}),
        )
        for row, v in gains.items()
    )  # fmt: skip
    heads = ("method<", "first quartile", "median", "third quartile", "clients ahead of FedAvg, %")
    table = Table("Figure 3: accuracy of a client less FedAvg's, points", heads, rows)
    middle = {row: np.median(v, axis=1) for row, v in gains.items()}
    claims = [
        ordered("the median client is better off with the mixed model than with FedAvg's", middle[MIXED],
                np.zeros(len(base)), unit=" points"),
        ordered("and with the GKR", middle[GKR], np.zeros(len(base)), unit=" points"),
    ]  # fmt: skip
    return Outcome([table], {"figure3": violins(gains)}, claims)


def violins(gains: Mapping[str, np.ndarray]) -> Figure:
    """A violin per method; the line of FedAvg is red, the medians are marked."""
    with panes(6.4, 0.42 * len(gains) + 0.8) as (figure, ((ax,),)):
        values, at = [v.ravel() for v in gains.values()], np.arange(len(gains))
        drawn: Any = ax.violinplot(values, at, orientation="horizontal", widths=0.85, showextrema=False)
        for body, row in zip(drawn["bodies"], gains, strict=True):
            body.set(facecolor=SERIES[0] if row in (GKR, MIXED) else QUIET, edgecolor=INK, linewidth=0.6, alpha=0.55)
        ax.plot([np.median(v) for v in values], at, "|", color=INK, markersize=11, markeredgewidth=2, label="median")
        ax.axvline(0, color=VERMILLION, linewidth=1.4, label="FedAvg")
        ax.set_yticks(at, list(gains))
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("test accuracy of a client less FedAvg's, points")
        figure.legend(loc="outside upper left", ncols=2)
    return figure


# ---- Figure 4 -------------------------------------------------------------------------------------------------------

FEW = 10  # test images of a class that is counted
PAIRS = [(e, c) for e in ("personal", "global") for c in ("personal", "global")]  # extractor, classifier


# personal: low rank + sparse; global: low rank alone; silhouettes are those of the true labels in the last hidden layer
def hidden(bench: Bench, folder: Path, seed: int, data: str, show: bool) -> dict[str, Any]:
    """Accuracies of a run of FedSLR by extractor and classifier, silhouettes by extractor, one client's pictures."""
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    model = network(bench, data)(seed)
    run = opened(folder, federation(bench, data)(seed), model)
    common, head = run.common, run.trained.task.layout.mask("head")
    assert common is not None
    of = {"personal": run.personal.cpu(), "global": common.cpu().expand(run.trained.n, -1)}
    pairs = {(e, c): torch.where(head, of[c], of[e]) for e, c in PAIRS}
    accuracy = {f"{e}, {c}": run.evaluate(w)["accuracy"].tolist() for (e, c), w in pairs.items()}
    test = run.federation.test
    assert test is not None
    samples = [tuple(t.cpu() for t in test.client(i)) for i in range(run.trained.n)]
    counts = [np.unique(y, return_counts=True)[1] for _, y in samples]
    apart: dict[str, list[float]] = {"personal": [], "global": []}
    for i, (x, y) in enumerate(samples):
        for e, values in apart.items():
            if len(counts[i]) > 1 and (counts[i] > 1).any():
                values.append(float(silhouette_score(features(model, of[e][i], x)[0], y)))
    if not show:
        return {"accuracy": accuracy, "silhouette": apart}
    several = [i for i, c in enumerate(counts) if (c >= FEW).sum() > 2] or [int(np.argmax([len(c) for c in counts]))]
    client = int(np.random.default_rng(seed).choice(several))
    x, y = samples[client]
    place = TSNE(perplexity=min(30, len(x) / 3), init="random", method="exact", random_state=seed,
                 max_iter=250 if bench.rehearse else 1000)  # fmt: skip
    shown = {e: place.fit_transform(features(model, of[e][client], x)[0].astype(float)) for e in apart}
    predicted = {f"{e}, {c}": features(model, w[client], x)[1] for (e, c), w in pairs.items()}
    picture = {"client": client, "labels": y.numpy(), "places": shown, "predicted": predicted}
    return {"accuracy": accuracy, "silhouette": apart, "picture": picture}


@torch.no_grad()
def features(model: nn.Module, w: Tensor, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """([samples, width] what the last layer is given, [samples] predicted classes) under the parameters w: [p]."""
    layout, inputs = Layout(model), []
    layout.load_(model.eval(), w)
    named = zip(layout.entries, torch.split(layout.mask("head"), layout.sizes), strict=True)
    layer = next(e.name for e, inside in named if inside.all()).rpartition(".")[0]
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    try:
        answers = model(x.float())
    finally:
        hook.remove()
    return inputs[0].numpy(), answers.argmax(1).numpy()


def figure4(of: Sequence[Mapping[str, Any]]) -> Outcome:
    """One client's last hidden layer under the four pairs; accuracy and silhouette over all clients."""
    mean = {pair: np.array([np.mean(seed["accuracy"][pair]) for seed in of]) for pair in of[0]["accuracy"]}
    clear = {e: np.array([np.mean(seed["silhouette"][e]) for seed in of]) for e in ("personal", "global")}
    rows = tuple(
        (Cell(e), Cell(c), ours(mean[f"{e}, {c}"], 100), ours(clear[e], decimals=3)) for e, c in PAIRS
    )  # fmt: skip
    table = Table("Figure 4: all clients", ("extractor<", "classifier<", "accuracy, %", "silhouette"), rows)
    claims = [
        ordered("a personal extractor separates the labels better than the global one (silhouette)",
                clear["personal"], clear["global"]),
        *(points(f"{c} classifier: a personal extractor is better", mean[f"personal, {c}"], mean[f"global, {c}"])
          for c in ("personal", "global")),
    ]  # fmt: skip
    return Outcome([table], {"figure4": four(of[0]["picture"])}, claims)


def four(picture: Mapping[str, Any]) -> Figure:
    """Places by t-SNE of the extractor, a row each; colour: the class that the classifier says; crosses: wrong."""
    labels = np.array(picture["labels"])
    classes = np.unique(np.concatenate([labels, *(np.array(p) for p in picture["predicted"].values())]))
    many = len(classes) > len(SERIES)
    palette = [colormaps["tab20"](k % 20) for k in range(len(classes))] if many else categories(len(classes))
    colour = dict(zip(classes.tolist(), palette, strict=True))
    with panes(7.2, 6.2, 2, 2) as (figure, axes):
        for ax, (e, c) in zip(axes.flat, PAIRS, strict=True):
            xy, predicted = np.array(picture["places"][e]), np.array(picture["predicted"][f"{e}, {c}"])
            for k in classes.tolist():
                for right, marker in ((True, "o"), (False, "x")):
                    some = (predicted == k) & ((predicted == labels) == right)
                    ax.scatter(xy[some, 0], xy[some, 1], s=18, marker=marker, color=colour[k], linewidths=1.1)
            ax.set_title(f"{e} extractor,\n{c} classifier: {(predicted != labels).sum()} of {len(labels)} wrong")
            ax.set(xticks=[], yticks=[])
        handles = [axes[0, 0].scatter([], [], s=18, color=colour[k], label=f"class {k}") for k in classes.tolist()]
        handles.append(axes[0, 0].scatter([], [], s=18, marker="x", color=INK, label="wrong"))
        figure.legend(handles=handles, loc="outside upper left", ncols=6, title="said to be")
    return figure


# ---- Figure 5 -------------------------------------------------------------------------------------------------------

TIMED = ("SCAFFOLD", "FedAvg", "FedSLR")


def seconds(found: Comparison, label: str) -> np.ndarray:
    """[seeds, rounds] seconds of communication: the round's bytes over the common medium, and the latencies."""
    runs = []
    for r in (r for r in found.results if r.label == label and r.folder is not None):
        rounds = pd.read_csv((r.folder or Path()) / "ledger.csv").groupby("round")
        sent = (rounds["down_bytes"].sum() + rounds["up_bytes"].sum()).to_numpy(dtype=float)
        runs.append(8 * sent / RATE + 2 * LATENCY * rounds["exchanges"].max().to_numpy(dtype=float))
    return np.array(runs)


def exchange(down: dict[str, Tensor], up: dict[str, Tensor], repeats: int) -> list[float]:
    """Seconds of sending one message to another thread by TCP, of its answer, and of packing and unpacking both."""
    form = plugins.sibling(*FORM)

    def send(wire: socket.socket, tensors: dict[str, Tensor]) -> None:
        data = form.pack({}, tensors)
        wire.sendall(len(data).to_bytes(8, "little") + data)

    def receive(wire: socket.socket) -> None:
        with wire.makefile("rb") as stream:
            data = stream.read(int.from_bytes(stream.read(8), "little"))
        form.unpack(data, len(data), "the other side")

    def answer() -> None:
        with door.accept()[0] as wire:
            for _ in range(repeats):
                receive(wire)
                send(wire, up)

    taken = []
    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor(1) as other:
        served = other.submit(answer)
        with socket.create_connection(door.getsockname()) as wire:
            for _ in range(repeats):
                start = time.perf_counter()
                send(wire, down)
                receive(wire)
                taken.append(time.perf_counter() - start)
        served.result()
    return taken


def measured(repeats: int, share: float) -> dict[str, dict[str, Any]]:
    """Messages of the paper's sizes on CIFAR-100 (or a share of them) through a real socket."""
    dense, size = Layout(resnet("CIFAR-100")).p, plugins.sibling(*FORM).size
    sizes = {"SCAFFOLD": (2 * dense, 2 * dense), "FedAvg": (dense, dense), "FedSLR, first round": (dense, dense),
             "FedSLR, last round": (int(5.54e6), dense)}  # fmt: skip
    rows = {}
    for label, way in sizes.items():
        down, up = ({"w": torch.zeros(int(share * k))} for k in way)
        rows[label] = {"bytes": size(down) + size(up), "seconds": exchange(down, up, repeats)}
    return rows


def figure5(bench: Bench, runs: Comparison) -> Outcome:
    """Seconds of communication per round: by the ledger's bytes, and by a real socket."""
    times = {m: np.array(bench.once(f"seconds-{m}", lambda m=m: seconds(runs, m))) for m in TIMED}
    series = {label: ((1.0 + np.arange(v.shape[1])).tolist(), v.tolist()) for label, v in times.items()}
    wire = bench.once("socket", lambda: measured(*((1, 0.01) if bench.rehearse else (5, 1.0))))
    rows = tuple(
        (Cell(label), Cell(f"{row['bytes'] / 1e6:.1f}"), Cell(f"{8 * row['bytes'] / RATE + 2 * LATENCY:.2f}"),
         Cell(f"{1e3 * median(row['seconds']):.0f}", {"seconds": median(row["seconds"])}))
        for label, row in wire.items()
    )  # fmt: skip
    heads = ("paper's sizes<", "MB, both ways", f"s at {RATE / 1e6:.0f} Mbit/s", "ms by a socket")
    tables = [
        Table(
            "Figure 5: seconds of communication", ("method<", "first round", "half way", "last round"),
            tuple((Cell(label), *(ours(v[:, k], decimals=3) for k in (0, v.shape[1] // 2, -1)))
                  for label, v in times.items()),
        ),
        Table("Figure 5: one client's messages through a real socket of this machine", heads, rows),
    ]  # fmt: skip
    slr, avg, scaffold = (times[k] for k in ("FedSLR", "FedAvg", "SCAFFOLD"))
    flat = max(float(np.ptp(v, axis=1).max()) for v in (avg, scaffold))
    ratio = float((scaffold / avg).mean())
    claims = [
        ordered("FedSLR's communication takes less time in the last round than in the first", slr[:, 0], slr[:, -1],
                unit=" s"),
        Claim("FedAvg's and SCAFFOLD's takes the same in every round", flat < 1e-6, f"range over rounds {flat:.1g} s"),
        Claim("SCAFFOLD's takes twice as long as FedAvg's", abs(ratio - 2) < 0.1, f"{ratio:.2f} times"),
    ]  # fmt: skip
    notes = ["Figure 5's socket is the loopback: it has no WLAN's rate, and shows that time goes with bytes"]
    figure = curve_panels([Panel("", "round", "seconds of communication", series)], 1, 2.9)
    figure.axes[0].set_ylim(0)
    return Outcome(tables, {"figure5": figure}, claims, notes)
