"""Table 9: what low rank saves when the model is used."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from polyfed.algorithms._shared.lowrank import sheets
from polyfed.algorithms.fedslr import FedSLR
from polyfed.compute.layout import Layout
from polyfed.data import load
from polyfed.models import build
from polyfed.report.table import Cell, Table
from polyfed.runs.trainer import fit
from polyfed_export.factorised import factorised, measure, pack, size
from polyfed_papers.fedslr import resnet
from polyfed_papers.recipes.recipe import Bench, Outcome, Size, recipe
from polyfed_papers.recipes.said import Claim, Setting, beside, ordered, ours

PRINTED = {  # lambda -> (million parameters, milliseconds per batch of 20 on a Tesla M60)
    "0": (11.17, 10.98), "1e-5": (7.33, 10.12), "5e-5": (6.56, 9.30), "1e-4": (5.54, 9.24), "5e-4": (3.09, 7.62),
    "1e-3": (1.27, 6.53),
}  # fmt: skip


def settings(scale: Size):
    return (
        Setting("model, batch", "ResNet-18 as for CIFAR-100, 20 images of 32 x 32", "paper"),
        Setting("ranks", "in every layer the same share of its largest saving rank, such that the sizes are those "
                "printed; the paper takes its trained models, whose ranks per layer are not given", "ours"),
        Setting("machine", "this one, one thread (the paper: a Tesla M60); models take turns, medians", "ours"),
        Setting("trained", "digits, 10 clients of Dirichlet(0.5), mlp 64-256-256-10, 30 rounds of FedSLR, lr 0.1, "
                "lambda 0.01, mu 0.01, eta_g 5; batches of 20; client 0", "ours"),
        Setting("repeats", "3" if scale == "small" else "50", "ours"),
    )  # fmt: skip


def cut(model: nn.Module, target: float) -> dict[str, torch.Tensor]:
    """The tensors of a factorised model of about `target` numbers; random factors, as time does not depend on them."""
    layout, g = Layout(model), torch.Generator().manual_seed(0)
    layers, w = sheets(layout), layout.flatten(model)
    most = {name: (s.shape[0] * s.shape[1] - 1) // sum(s.shape) for name, s in layers.items()}

    def ranks(share: float) -> dict[str, int]:
        return {name: max(1, int(share * r)) for name, r in most.items()}

    def numbers(share: float) -> int:
        return layout.p - sum(s.shape[0] * s.shape[1] - s.numbers(ranks(share)[n]) for n, s in layers.items())

    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if numbers(middle) < target else (low, middle)
    factors = {}
    for name, r in ranks(high).items():
        sheet = layers[name]
        d1, d2 = sheet.shape
        U = torch.randn(d1, r, generator=g) * float(w[sheet.span].std())
        V = torch.randn(r, d2, generator=g) / r**0.5
        factors[name] = U, V
        w[sheet.span] = sheet.fold(U @ V)
    layout.load_(model, w)
    named = layout.named(w)
    return pack(named, named, factors)


@torch.no_grad()
def measured(repeats: int, lams: Sequence[str]) -> dict[str, dict[str, Any]]:
    """lambda -> million numbers, [repeats] milliseconds, largest relative difference to the dense model's output."""
    x = torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=torch.channels_last
    )
    models: dict[str, nn.Module] = {}
    rows: dict[str, dict[str, Any]] = {}
    for lam in lams:
        dense = resnet("CIFAR-100").eval()
        if lam == "0":
            models[lam], numbers, gap = dense, float(Layout(dense).p), 0.0
        else:
            tensors = cut(dense, 1e6 * PRINTED[lam][0])
            models[lam], numbers = factorised(dense, tensors), size(tensors) / 4
            same = dense(x[:2])
            gap = float((models[lam](x[:2]) - same).abs().max() / same.abs().max())
        rows[lam] = {"millions": numbers / 1e6, "gap": gap, "ms": []}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        placed = {lam: m.to(memory_format=torch.channels_last) for lam, m in models.items()}  # pyrefly: ignore[no-matching-overload]
        for k in range(repeats + 1):
            for lam, model in placed.items():
                start = time.perf_counter()
                model(x)
                rows[lam]["ms"] += [1e3 * (time.perf_counter() - start)] * (k > 0)
    finally:
        torch.set_num_threads(threads)
    return rows


def trained(seed: int, rounds: int) -> dict[str, dict[str, Any]]:
    """A model that FedSLR trained: "GKR" and "mixed" in their forms -> bytes, ms, difference, see `measure`."""
    data = load("digits").partition("dirichlet:0.5", 10, seed)
    net = build("mlp", data.input_shape, 10, seed, hidden=(256, 256))
    run = fit(net, data, FedSLR(0.1, lam=0.01, mu=0.01, eta_g=5.0), rounds=rounds, batch_size=20, seed=seed)
    task, factors, x = (
        run.trained.task,
        run.trained.algorithm.describe(run.server).factors or {},
        data.test.to("cpu", torch.float32).x,
    )
    common, mixed = task.layout.named(run.server["w"]), task.layout.named(run.personal[0])
    rows = {}
    for label, named in (("GKR", common), ("mixed", mixed)):
        model = build("mlp", data.input_shape, 10, hidden=(256, 256))
        model.load_state_dict(named)
        forms = measure(model, pack(named, common, factors), x[:20], repeats=101)
        rows |= {f"{label}, {form}": row for form, row in forms.items()}
    return rows


@recipe("fedslr/table9", "Table 9: time and size of the factorised model", minutes=(0.5, 4), settings=settings, seeds=5)
def table9(bench: Bench) -> Outcome:
    """Does the low-rank model compute faster, and how much?"""
    repeats = 1 if bench.rehearse else bench.pick(3, 50)
    lams = ["0", "1e-3"] if bench.rehearse else list(PRINTED)
    runs = [bench.once(f"turns-{seed}", lambda: measured(repeats, lams)) for seed in bench.seeds]
    times = {lam: np.array([median(r[lam]["ms"]) for r in runs]) for lam in lams}
    dense = times["0"]
    rows = {
        lam: [
            (f"{m:.2f}", ours([runs[0][lam]["millions"]])),
            (f"{ms:.2f}", ours(times[lam], decimals=1)),
            (f"{PRINTED['0'][1] / ms:.2f}", ours(dense / times[lam])),
        ]
        for lam, (m, ms) in ((lam, PRINTED[lam]) for lam in lams)
    }
    own = [bench.once(f"trained-{seed}", lambda seed=seed: trained(seed, bench.rounds(30, 30))) for seed in bench.seeds]
    forms = {form: [r[form] for r in own if form in r] for form in ("GKR, dense", "GKR, merged", "mixed, dense",
             "mixed, merged", "mixed, beside")}  # fmt: skip
    gap = max(r[lam]["gap"] for r in runs for lam in lams)
    gap = max([gap, *(row["difference"] for found in forms.values() for row in found)])
    claims = [
        *(ordered(f"the model of {PRINTED[lam][0]} M is faster than the dense one", dense, times[lam], unit=" ms")
          for lam in lams[1:]),
        Claim("factorised models compute what the dense ones do", gap <= 1e-5,
              f"largest relative difference {gap:.0e}, of 1e-5"),
    ]  # fmt: skip
    notes = ["repeats in place of seeds: every one times all models, which take turns", "the first table is of "
             "random factors, as ranks decide the time; a mixed model has nonzeros too: the second table"]  # fmt: skip
    notes.append("merged: layers with nonzeros are dense again; beside: a pair and a sparse matrix (kB: positions too)")
    printed = beside("Table 9", ("M", "ms per batch", "times faster"), rows, first="lambda")
    body = tuple(
        (
            Cell(form, {"model": form}),
            ours([r["bytes"] for r in found], 1e-3, 1),
            ours([r["ms"] for r in found], decimals=3),
        )
        for form, found in forms.items()
    )
    table = Table("A model that FedSLR trained (digits)", ("model<", "kB in memory", "ms per batch"), body)
    return Outcome([printed, table], {}, claims, notes)
