"""Are the numbers still the same? Every method in every setting that could change them, as digests and short summaries.

    python tools/same_numbers.py record FILE.json             run everything and write what came out
    python tools/same_numbers.py compare FILE.json            run everything again and compare it with FILE.json
    python tools/same_numbers.py compare FILE.json --against OTHER.json         compare two files, run nothing

`compare` prints one line per case that is not equal to the bit, and exits with 1 where anything differs by more than
1e-6, relative to its norm, or where a case that ran is refused. `--only WORD` takes the cases whose name contains WORD,
`--ignore 'server.samples'` leaves out quantities (a pattern; for what a redesign moves elsewhere).
Bits are those of one machine and one build of torch: record and compare on the same one.

It uses what a user of the package sees and nothing deeper, so that it survives a change of everything below; what might
not survive is in `fit`, `private` and `server`.
"""

import argparse
import fnmatch
import gzip
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import polyfed as pf
import polyfed.algorithms
from polyfed.algorithms import shipped
from polyfed.models.memory import Memory
from polyfed.models.mixture import Mixture

TOLERANCE = 1e-6
SIZES = (24, 5, 26, 13, 30, 12)  # ragged: the second client has less than a batch
NAMES = ("oslo", "bern", "lima", "kyiv", "riga", "cork")
NEWCOMERS = ("rome", "wien")
CLASSES, PIXELS, BATCH, ROUNDS = 3, 6, 8, 3
BODY = {"FedRep", "FedPer", "FedBABU", "LGFedAvg", "FedRoD"}  # they split a model into layers: "linear" has two of them
VARIANTS: dict[str, list[dict[str, Any]]] = {  # settings that take another path; of the other methods the defaults
    "APFL": [{}, {"adaptive": True}],
    "CFL": [{}, {"eps1": 10.0, "eps2": 0.01, "gamma_max": 0.9}],
    "Ditto": [{}, {"personal_epochs": 2}],
    "FedACS": [{}, {"quantile": None, "pool": "all"}, {"quantile": 0.5, "pool": "all"}],
    "FedAvg": [{}, {"weighted": False}],
    "Recalibrated": [{}, {"slope": True}],
    "FedBABU": [{}, {"tune": "head"}],
    "FedCET": [{}, {"lr": 0.05}, {"lr": "paper", "smoothness": 2.0, "convexity": 1.0}],
    "FedLin": [{}, {"keep_up": 0.3}, {"keep_down": 0.1}, {"keep_up": 0.3, "keep_down": 0.1}],
    "FedSLR": [
        {},
        {"lam": 0.02, "form": "all-duals", "deploy": "gkr"},
        {"lam": 0.02, "p_init": "weights", "structure": "LR+LR"},
        {"structure": "S+S", "p_weight_decay": 0.1},
    ],
    "FedSpa": [{}, {"search": "rsm"}],
    "FPFC": [
        {},
        {"lam": 0.05},
        {"lam": 0.05, "nu": 0.5, "penalty": "l1"},
        {"lam": 0.05, "merge": False},
        {"lam": 0.05, "shared_layers": "body"},
        {"lam": 0.05, "solver": "device-dual"},
        {"lam": 0.05, "merge": False, "shared_layers": "body", "solver": "device-dual"},
    ],
    "GPGD": [{}, {"lam": 0.02, "steps": 4}],
    "IFCA": [{}, {"averaging": "gradient"}, {"weighted": True, "init_scale": 0.5}],
    "LPGD": [{}, {"lam": 0.02}],
    "PACFL": [{}, {"threshold": 60.0}, {"angle": "sum", "threshold": 200.0, "linkage": "complete"}],
    "PerFedAvg": [{}, {"order": "hf"}, {"order": "exact"}],
    "Scaffold": [{}, {"option": 1}],
    "APPLE": [{}, {"form": "cosine"}],
    "FedExP": [{}, {"weighted": True, "averaged": False}],
    "FedFomo": [{}, {"validation": 0.0, "models": 2}],
    "FedNova": [{}, {"mu": 0.1}],
    "FedSoft": [{}, {"k": 3, "tau": 1}],
    "FlexCFL": [{}, {"between": 0.01}],
    "QFedAvg": [{}, {"form": "afl", "q": 0.1}],
}
RULES = ("Median", "TrimmedMean", "Krum", "MultiKrum", "GeometricMedian", "NormClipping")
ATTACKS = ("SignFlip", "SameValue", "GaussianNoise", "ScaledUpdate", "LabelFlip")
WITH_CNN = ("FedAvg", "Scaffold", "FedRep", "FPFC", "FedSLR", "IFCA")


# what a change of the package's face would touch


def fit(model: nn.Module, federation: pf.Federation, method: Any, **settings: Any) -> pf.Run:
    adapter = f"lora:r=2,train={method.adapter_train}" if method.adapter_train else None
    return pf.fit(model, federation, method, adapter=adapter, **settings)


def private(run: pf.Run) -> dict[str, torch.Tensor]:
    """{name: [n, ...]} the clients' private tensors."""
    rows = run.trained.engine.rows
    return {name: rows.read(name, torch.arange(run.federation.n)) for name in rows.names()}


def server(run: pf.Run) -> dict[str, torch.Tensor]:
    return dict(run.server)


# the cases


def federation(names: tuple[str, ...] = NAMES, seed: int = 7) -> pf.Federation:
    """Clients with unequal numbers of 6 x 6 images, labels skewed by client."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(1).normal(size=(CLASSES, 1, PIXELS, PIXELS))

    def draw(i: int, size: int):
        y = rng.choice(CLASSES, size, p=np.roll([0.6, 0.3, 0.1], i))
        return (centres[y] + rng.normal(size=(size, 1, PIXELS, PIXELS))).astype(np.float32), y

    train = [draw(i, size) for i, size in zip(range(len(names)), SIZES, strict=False)]
    return pf.Federation.from_arrays(train, [draw(i, 7) for i in range(len(names))], names=names, classes=CLASSES)


def model(kind: str, split: bool) -> nn.Module:
    d = PIXELS**2
    torch.manual_seed(5)
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)
        )
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    layers = [nn.Linear(d, 8), nn.Linear(8, CLASSES)] if split else [nn.Linear(d, CLASSES)]
    return nn.Sequential(nn.Flatten(), *layers)


def normalised(kind: str, split: bool) -> nn.Module:
    """The model with a layer norm before its last layer, for methods of normalisation layers."""
    net = model(kind, split)
    return nn.Sequential(*net[:-1], nn.LayerNorm(net[-1].in_features), net[-1])


def mixed(kind: str, split: bool, by_class: bool = False) -> nn.Module:
    """Two nets whose probabilities are mixed, for methods of mixtures; the second starts from the first's negative."""
    nets = model(kind, split), model(kind, split)
    with torch.no_grad():
        for parameter in nets[1].parameters():
            parameter.neg_()
    return Mixture(*nets, classes=CLASSES if by_class else None)


def remembering(kind: str, split: bool) -> nn.Module:
    """A net with a memory, for kNN-Per."""
    net = model(kind, split)
    assert isinstance(net, nn.Sequential)
    return Memory(net, rows=20, k=5)


def scenarios() -> dict[str, dict[str, Any]]:
    """Settings of `fit`, made when they are needed."""
    late = pf.Asynchronous(pf.Delays("uniform", 1, 10), concurrency=4)
    attacked = {
        f"{a}+Median": {"attack": getattr(pf.threats, a)(ratio=0.4), "robust": pf.threats.Median()} for a in ATTACKS
    }
    return {
        "full": {},
        "partial": {"fraction": 0.5, "rounds": 4},
        "asynchronous": {"schedule": late, "rounds": 9},
        "resumed": {"fraction": 0.5, "rounds": 4},
        "decay": {"lr_schedule": "exponential:0.8,2", "rounds": 4},
        "full-batch": {"batch_size": None, "local_epochs": 3},
        "chunks": {"chunk": 2, "workers": 2, "weight_decay": 0.01},
        "started": {},
        "admitted": {},
        **{f"rule {r}": {"robust": getattr(pf.threats, r)()} for r in RULES},
        **attacked,
    }


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    methods = {cls.__name__ for cls in shipped().values()}
    for cls in sorted(methods):
        for at, variant in enumerate(VARIANTS.get(cls, [{}])):
            name = f"{cls}({', '.join(f'{k}={v}' for k, v in variant.items())})"
            split = cls in BODY or "shared_layers" in variant
            net = partial(
                {
                    "FedBN": normalised,
                    "FedEM": mixed,
                    "FedRC": partial(mixed, by_class=True),
                    "KNNPer": remembering,
                }.get(cls, model),
                split=split,
            )
            for scenario, settings in scenarios().items():
                kinds = [("linear", "float32"), ("mlp", "float64")]
                if scenario in ("full", "partial") and not at:
                    kinds += [("mlp", "float32"), ("linear", "float64")]
                if scenario == "full" and not at and cls in WITH_CNN:
                    kinds += [("cnn", "float32")]
                if "+Median" in scenario:  # whom a rule suits is asked above
                    kinds = kinds[-1:] if not at else []
                for kind, dtype in kinds:
                    given = (cls, variant, scenario, settings, net(kind), getattr(torch, dtype))
                    yield f"{name} | {scenario} | {kind} {dtype}", lambda given=given: case(*given)


def case(cls: str, variant: dict, scenario: str, settings: dict, net: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """{quantity: its digest and summary}, or {"refused": why}."""
    equal = {"local_steps": 4} if variant.get("lr") == "paper" else {}
    settings = {
        "rounds": ROUNDS, "local_epochs": 2, "batch_size": BATCH, "seed": 3, "workers": 1, "dtype": dtype,
    } | equal | settings  # fmt: skip
    found: dict[str, Any] = {}
    try:
        method = getattr(pf, cls)(**variant)
        if scenario == "resumed":
            run = resumed(net, method, settings)
        elif scenario == "started":
            run = fit(net, federation(), method, start=fit(net, federation(), method, **settings), **settings)
        else:
            run = fit(net, federation(), method, **settings)
        found = quantities(run)
        if scenario == "admitted":
            taken = pf.admit(run, federation(NEWCOMERS, seed=8), 2)
            found = {"admitted.personal": summary(taken.personal)} | table("admitted", taken.table)
            found["admitted.clusters"] = summary(None if taken.clusters is None else np.asarray(taken.clusters))
    except Exception as e:
        if not type(e).__module__.startswith("polyfed."):
            raise
        return {"refused": f"{type(e).__name__}: {e}"}
    return found


class Stop(Exception):
    pass


def resumed(net: nn.Module, method: Any, settings: dict[str, Any]) -> pf.Run:
    """Broken off after two rounds, and taken up again from the folder."""

    def stop(progress: Any) -> None:
        if progress.round == 2:
            raise Stop

    with tempfile.TemporaryDirectory() as folder:
        settings = settings | {"out": folder, "checkpoint_every": 1}
        try:
            fit(net, federation(), method, callbacks=[stop], **settings)
        except Stop:
            return fit(net, federation(), method, resume=True, **settings)
    raise AssertionError("the run was to be broken off")


# what is kept of a number


def quantities(run: pf.Run) -> dict[str, Any]:
    found = {f"server.{k}": summary(v) for k, v in server(run).items()}
    found |= {f"private.{k}": summary(v) for k, v in private(run).items()}
    found |= {"personal": summary(run.personal), "common": summary(run.common), "clusters": summary(run.clusters)}
    return found | table("history", run.history) | table("ledger", run.ledger) | table("clients", run.clients)


def table(name: str, frame: pd.DataFrame) -> dict[str, Any]:
    """One quantity per column of numbers; texts and seconds are left out."""
    numbers = frame.drop(columns="seconds", errors="ignore").select_dtypes("number")
    return {f"{name}.{c}": summary(numbers[c].to_numpy(float, na_value=np.nan)) for c in numbers}


def summary(values: Any) -> list[Any] | None:
    """[digest of type, shape and bytes; norm; three projections], of whole numbers the digest alone; None for None."""
    if values is None:
        return None
    array = np.ascontiguousarray(values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values)
    digest = hashlib.sha256(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()[:12]
    flat = np.nan_to_num(array.astype(np.float64).ravel(), nan=0, posinf=0, neginf=0)
    if (flat == flat.round()).all() and flat.any():
        return [digest]
    return [digest, *(float(f"{v:.9g}") for v in (np.linalg.norm(flat), *(projections(flat.size) @ flat)))]


@cache
def projections(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal((3, size))


def distance(a: list[Any] | None, b: list[Any] | None) -> float:
    """0: equal to the bit or in value; else the largest difference of norms and projections, relative to the norm."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if a[0] == b[0]:
        return 0.0
    if len(a) != len(b) or len(a) == 1:
        return float("inf")
    one, two = np.array(a[1:]), np.array(b[1:])
    return float(np.abs(one - two).max() / max(one[0], two[0], 1e-12))


# the two commands


def record(only: str) -> dict[str, Any]:
    start, found = time.perf_counter(), {}
    for name, run in cases():
        if only in name:
            found[name] = run()
    print(f"{len(found)} cases in {time.perf_counter() - start:.0f} s")
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "cases": found}


def compare(before: dict[str, Any], after: dict[str, Any], ignore: list[str]) -> bool:
    """Print what differs; whether all is well."""
    if before["torch"] != after["torch"]:
        print(f"torch was {before['torch']} and is {after['torch']}")
    before, after = before["cases"], after["cases"]
    good, same, close, worst = True, 0, 0, 0.0
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            print(f"{name}: only {'after' if name in after else 'before'}")
            continue
        a, b = before[name], after[name]
        if "refused" in a or "refused" in b:
            if a.keys() != b.keys():
                good &= "refused" in a
                print(f"{name}: " + ("no longer refused" if "refused" in a else f"now refused: {b['refused']}"))
            same += a.keys() == b.keys()
            continue
        keys = [k for k in {**a, **b} if not any(fnmatch.fnmatch(k, p) for p in ignore)]
        lone = [k for k in keys if k not in a or k not in b]
        far = {k: distance(a[k], b[k]) for k in keys if k not in lone}
        bits = all(a[k] == b[k] for k in far)
        if bits and not lone:
            same += 1
            continue
        key = max(far, key=far.__getitem__)
        worst = max(worst, far[key])
        fine = far[key] <= TOLERANCE and not lone
        close += fine
        good &= fine
        text = f"{far[key]:.1e} in {key}" if not bits else "equal to the bit"
        missing = [f"{k} only {'before' if k in a else 'after'}" for k in lone]
        print(f"{name}: {'; '.join([text, *missing])}{'' if fine else '   <<<'}")
    print(f"{same} equal to the bit, {close} within {TOLERANCE:g}; largest difference {worst:.1e}")
    return good


def read(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--ignore", action="append", default=[])
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.command == "record":
        text = json.dumps(record(given.only), separators=(",", ":")).replace('},"', '},\n"').encode()
        given.file.write_bytes(gzip.compress(text, 9, mtime=0) if given.file.suffix == ".gz" else text)
        return
    before = read(given.file)
    after = read(given.against) if given.against else record(given.only)
    before["cases"] = {k: v for k, v in before["cases"].items() if given.only in k}
    after["cases"] = {k: v for k, v in after["cases"].items() if given.only in k}
    sys.exit(0 if compare(before, after, given.ignore) else 1)


if __name__ == "__main__":
    main()
