"""FLamby (Ogier du Terrail et al., NeurIPS 2022 Datasets and Benchmarks): two of its federations on its fixed splits,
by its protocol and then with every method trained to its end, with rows that it lacks and intervals over patients.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import polyfed as pf
from polyfed.base import plugins
from polyfed.base.errors import Diverged
from polyfed.base.typed import seeded
from polyfed.base.values import Limits
from polyfed.report import read
from polyfed.report.table import Cell, Table
from polyfed.report.verdicts import Study
from polyfed.runs.trainer import fit
from polyfed.studies.compare import Comparison
from polyfed_papers.recipes.recipe import Bench, Outcome, Size
from polyfed_papers.recipes.said import Claim, Setting, decided, paper
from polyfed_tuning.ladder import At, Ladder

OWN, POOLED, EXACT = "Local", "pooled", "exact"
STEPS = 5  # of full batches, between two exchanges of the second part
GRID = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
TRIALS = 12  # steps, of every method
UNCOUNTED = 1000  # the first seed of the draws that steps are chosen by
HELD = 0.25  # of the training patients, to choose the step
Printed = Mapping[str, Sequence[float | str | None]]
Model = Callable[[int], nn.Module]


def regression(sites: Any, model: str) -> list[float]:
    """The coefficients of all patients together, by whatever package `polyfed regress` uses."""
    one = {} if model == "cox" else {"intercepts": "common"}
    fitted = plugins.sibling("polyfed_clinical", "fed-tcga").fit(sites, model, **one)
    return fitted.coefficients["estimate"].tolist()


@dataclass(frozen=True)
class Case:
    """One of FLamby's federations, with its protocol and its printed results."""

    name: str
    names: tuple[str, ...]
    train: list[tuple[np.ndarray, np.ndarray]]  # (x, y) of every centre, unscaled
    test: list[tuple[np.ndarray, np.ndarray]]
    metric: str
    classes: int | None
    protocol_scale: str  # of the protocol, see `federation`
    outputs: tuple[int, int]  # of the protocol's model, and of the second part's
    losses: tuple[Any, Any]
    bias: bool
    batch: int
    rounds: int
    epochs: int
    adam: float  # step size of its own and pooled models
    federated: Mapping[str, pf.Algorithm]  # its methods
    printed: Printed  # its results by centre
    exact: Callable[[pf.Federation], nn.Module]  # the converged regression, as a model of the second part

    def federation(self, scale: str, pooled: bool = False) -> pf.Federation:
        """Centres (or one `pooled` client), with inputs standardised by "centre", "pooled", or not."""
        every = np.concatenate([x for x, _ in self.train])

        def scaled(x: np.ndarray, by: np.ndarray) -> np.ndarray:
            by = every if scale == "pooled" else by
            return x if scale == "none" else (x - by.mean(0)) / (by.std(0, ddof=1) + 1e-9)

        parts: list[Any] = [
            [(scaled(x, own), y) for (x, y), (own, _) in zip(split, self.train, strict=True)]
            for split in (self.train, self.test)
        ]
        names = self.names
        if pooled:
            parts, names = [[tuple(np.concatenate(p) for p in zip(*rows, strict=True))] for rows in parts], (POOLED,)
        meta = {"dataset": self.name, "partition": "natural", "notes": [NOTE]}
        return pf.Federation.from_arrays(*parts, names=names, classes=self.classes, meta=meta)

    def model(self, part: int) -> Model:
        """seed -> the start, torch's; part: 0 the protocol's, 1 the second part's."""

        def make(seed: int) -> nn.Module:
            with seeded(seed):
                return nn.Linear(self.train[0][0].shape[1], self.outputs[part], bias=self.bias)

        return make


NOTE = "FLamby's fixed split of this data set: every seed tests the same patients"


def protocol(bench: Bench, case: Case) -> list[Study]:
    """Every method of FLamby at its steps, its budget and its scaling; pooled training with other inputs is apart."""
    data, rounds = case.federation(case.protocol_scale), bench.rounds(case.rounds, case.rounds)
    common = {"batch_size": case.batch, "loss": case.losses[0], "metrics": case.metric, "evaluate_every": 0}
    alone = {**common, "rounds": 1, "local_epochs": 1 if bench.rehearse else case.epochs, "optimizer": "adam"}
    steps = 2 if bench.rehearse else 100
    parts = [
        bench.compare("protocol", case.model(0), data, case.federated, rounds=rounds, local_steps=steps, **common),
        bench.compare("protocol-own", case.model(0), data, {OWN: pf.Local(case.adam)}, **alone),
    ]
    scale = "none" if case.protocol_scale == "none" else "pooled"
    together = case.federation(scale, pooled=True)
    starts = bench.by_seed(
        "pooled", lambda seed: numbers(fit(case.model(0)(seed), together, pf.Local(case.adam), seed=seed, **alone))
    )
    models = dict(zip(bench.seeds, (given(case.model(0)(0), w) for w in starts), strict=True))
    last = as_it_is(bench, "protocol-pooled", POOLED, models.__getitem__, case.federation(scale), common)
    return [folder_of([*parts, last])] if scale == case.protocol_scale else [folder_of(parts), folder_of([last])]


def numbers(run: Any) -> list[float]:
    """The parameters of a run's first client."""
    return run.personal[0].tolist()


def given(model: nn.Module, w: Sequence[float]) -> nn.Module:
    """The model with these parameters."""
    nn.utils.vector_to_parameters(torch.tensor(w, dtype=torch.float32), model.parameters())
    return model


def as_it_is(bench: Bench, key: str, label: str, model: Model, data: pf.Federation, common: Mapping[str, Any]):
    """A model that is not trained any further, as a run that can be compared with others."""
    return bench.compare(key, model, data, {label: pf.FedAvg(0.0)}, rounds=0, **common)


def folder_of(parts: Iterable[Comparison]) -> Study:
    """The finished runs of several comparisons on the same clients, read back."""
    return read([r.folder for part in parts for r in part.finished if r.folder is not None])


# ---- the second part -------------------------------------------------------------------------------------------------


def methods(case: Case) -> dict[str, tuple[str, Callable[[float], pf.Algorithm]]]:
    """{label: (the setting that is tuned, the method at a value of it)}, all with `STEPS` full-batch steps a round."""
    makers: dict[str, tuple[str, Callable[[float], pf.Algorithm]]] = {
        OWN: ("lr", pf.Local),
        "FedAvg": ("lr", pf.FedAvg),
        "FedProx": ("lr", lambda lr: pf.FedProx(lr, mu=0.01)),
        "SCAFFOLD": ("lr", pf.Scaffold),
        "FedAdam": ("server_lr", lambda eta: pf.FedAdam(0.1, server_lr=eta)),
        "FedYogi": ("server_lr", lambda eta: pf.FedYogi(0.1, server_lr=eta)),
        "FedAdagrad": ("server_lr", lambda eta: pf.FedAdagrad(0.1, server_lr=eta)),
        "FedAvg-FT": ("lr", lambda lr: pf.FedAvgFT(lr, finetune_epochs=STEPS, finetune_lr=lr)),
        "Ditto": ("lr", lambda lr: pf.Ditto(lr, personal_epochs=STEPS)),
        "APFL": ("lr", pf.APFL),
        "pFedMe": ("personal_lr", lambda lr: pf.PFedMe(min(lr, 0.05), personal_lr=lr)),
        "Per-FedAvg": ("lr", lambda lr: pf.PerFedAvg(lr, alpha=min(lr, 0.1))),
        "FedAMP": ("lr", pf.FedAMP),
        "FedACS": ("lr", pf.FedACS),
        "IFCA": ("lr", lambda lr: pf.IFCA(k=2, lr=lr)),
        "CFL": ("lr", pf.CFL),
        "FPFC": ("lr", pf.FPFC),
    }
    recalibrated = getattr(pf, "Recalibrated", None)  # where this version of polyfed has it
    if recalibrated is not None and case.classes is not None:
        makers["recalibrated"] = "lr", recalibrated
    return makers


def converged(bench: Bench, case: Case) -> tuple[Study, dict[str, tuple[str, float]]]:
    """Every method at the step that validation patients prefer, and the exact regression; and the steps."""
    data, rounds = case.federation("pooled"), bench.rounds(100, 400)
    common = {"batch_size": None, "loss": case.losses[1], "metrics": case.metric, "evaluate_every": 0}
    work = {**common, "rounds": rounds, "local_steps": STEPS}
    draws = range(UNCOUNTED, UNCOUNTED + bench.pick(1, 5))
    tasks = [
        (label, UNCOUNTED, partial(best_step, bench, f"step-{label}".lower(), case, data, make, work, draws))
        for label, (_, make) in methods(case).items()
    ]
    chosen, final = {}, {}
    for (label, (setting, make)), best in zip(methods(case).items(), bench.all_of(tasks), strict=True):
        chosen[label], final[label] = (setting, best), make(best)
    model = case.model(1)
    parts = [bench.compare("converged", model, data, final, **work)]
    parts.append(as_it_is(bench, "converged-exact", EXACT, lambda _: case.exact(data), data, common))
    return folder_of(parts), chosen


def best_step(
    bench: Bench, key: str, case: Case, data: pf.Federation, make: Callable[[float], pf.Algorithm],
    work: Mapping[str, Any], draws: Iterable[int],
) -> float:  # fmt: skip
    """The step with the least loss per validation patient after all rounds, over the draws."""
    split = {draw: data.with_validation(HELD, draw) for draw in draws}

    def score(at: At) -> float:
        total = 0.0
        for draw, some in split.items():
            assert some.validation is not None
            try:
                losses = fit(case.model(1)(draw), some, make(at[0]), seed=draw, **work).final["validation"]["loss"]
            except Diverged:
                return -math.inf
            total -= float(np.average(losses, weights=some.validation.counts))
        return total if math.isfinite(total) else -math.inf

    return bench.choose(key, score, [Ladder(GRID, Limits(gt=0))], TRIALS)[0]


# ---- tables ----------------------------------------------------------------------------------------------------------


def level_table(
    title: str, case: Case, studies: Sequence[Study], printed: Printed, steps: Mapping[str, Any] | None = None
) -> Table:
    """Every method's score per centre and in the mean, the printed one before ours where there is one."""
    heads, rows = ["method<"], []
    for name in (*case.names, "mean of centres"):
        heads += [f"{name}, FLamby", f"{name}, ours"] if printed else [name]
    grids = {label: grid for study in studies for label, grid in study.verdicts.grids.items()}
    for label in dict.fromkeys((*printed, *grids)):
        grid = grids.get(label)
        cells = [Cell(label)]
        known_values = printed.get(label, (None,) * len(case.names))
        mean = None if any(not isinstance(v, float) for v in known_values) else f"{np.mean(known_values):.3f}"  # pyrefly: ignore[no-matching-overload]
        for k, name in enumerate((*case.names, "")):
            if printed:
                shown = known_values[k] if name else mean
                cells.append(paper(f"{shown:.3f}" if isinstance(shown, float) else shown))
            values = (
                np.empty(0) if grid is None else grid.of(name) if name else np.array(list(grid.per_seed().values()))
            )
            values = values[np.isfinite(values)]
            spread = f" ± {values.std(ddof=1):.3f}" if len(values) > 1 else ""
            cells.append(Cell(f"{values.mean():.3f}{spread}" if len(values) else "–"))
        if steps is not None:
            cells.append(Cell("{} {:g}".format(*steps[label]) if label in steps else "–"))
        rows.append(tuple(cells))
    return Table(title, (*heads, *(["step<"] if steps is not None else [])), tuple(rows))


def gain_table(title: str, case: Case, study: Study) -> Table:
    """Every method's gain over the own models, by centre and mean, with separate 95 % intervals."""
    rows = []
    for label in study.labels:
        if label == OWN:
            continue
        sites, whole = study.verdicts.evidence(label, OWN)
        cells = [Cell(label)]
        for e in (*(sites[name] for name in case.names), whole):
            g = replace(e, unit=math.inf).interval()  # shown however wide it is
            span = f" ({g.low:+.3f} to {g.high:+.3f})" if np.isfinite(g.low) else ""
            mark = "quiet" if not g.sign else "gain" if g.sign > 0 else "loss"
            raw = {"gain": g.mean, "low": g.low, "high": g.high}
            cells.append(Cell(f"{g.mean:+.3f}{span}" if np.isfinite(g.mean) else "–", raw, mark))
        rows.append(tuple(cells))
    return Table(title, ("method<", *case.names, "mean of centres"), tuple(rows))


def common_settings(case_settings: Sequence[Setting], scale: Size) -> tuple[Setting, ...]:
    """Those of both federations."""
    return (
        *case_settings,
        Setting("second part, inputs", "standardised by all centres' training patients", "ours"),
        Setting("second part, local work", f"{STEPS} full-batch steps a round, all centres, start as torch's", "ours"),
        Setting("second part, rounds", "100" if scale == "small" else "400", "ours"),
        Setting("second part, step", f"{TRIALS} trials of every method: {', '.join(f'{g:g}' for g in GRID)}, beyond "
                f"them while the first or the last is best, then between; by the loss per patient on {100 * HELD:.0f} "
                f"% of the training patients, over {1 if scale == 'small' else 5} draws that do not count", "ours"),
        Setting("second part, tuned", "server's step of FedAdam, FedYogi, FedAdagrad (local 0.1), else local", "ours"),
        Setting("other hyper-parameters", "the library's defaults; IFCA two clusters", "ours"),
    )  # fmt: skip


def claims_of(study: Study, pairs_of: Iterable[tuple[str, str]]) -> list[Claim]:
    """For each (one, other): is one better in the mean over centres?"""
    claims: list[Claim] = []
    for one, other in pairs_of:
        if one not in study.labels or other not in study.labels:
            continue
        g = replace(study.verdicts.evidence(one, other)[1], unit=math.inf).interval()
        text = f"{one} is better than {other}, mean of centres"
        claims.append(decided(text, g.low, g.high, g.p, digits="+.3f"))
    return claims


def reported(
    bench: Bench, case: Case, by_protocol: Iterable[tuple[str, str]], at_end: Iterable[tuple[str, str]], *notes: str
) -> Outcome:
    """Both parts, with the claims that the first of each pair is better than the second."""
    (first, *apart), (second, steps) = protocol(bench, case), converged(bench, case)
    tables = [
        level_table(f"By FLamby's protocol: {case.metric} on its test patients", case, [first, *apart], case.printed),
        gain_table("By FLamby's protocol: gain over the own model", case, first),
        level_table(f"Trained to the end: {case.metric} on the same test patients", case, [second], {}, steps),
        gain_table("Trained to the end: gain over the own model", case, second),
    ]
    common = (
        "FLamby: means of five seeds by its result files, averaged by us; its deviations over seeds are chance in "
        "training and say nothing about other patients. Intervals here are over test patients and seeds."
    )
    claims = [*claims_of(first, by_protocol), *claims_of(second, at_end)]
    return Outcome(tables, claims=claims, notes=[common, *notes])
