"""All that a borrowed GPU should tell, in one go of at most 40 minutes, written to a file section by section.

    make bench-gpu                       # on a machine with a CUDA device and a torch for it
    python benchmarks/gpu.py [--out FILE] [--pfl FOLDER] [--only tests adapters ...]
    make bench-gpu DRY=1                 # small sizes on the processor, under a minute: that it works, and no more

tests: `tests/engines/test_cuda.py`     convolutions: unfolded or grouped, and their memory (`accelerator.py`)
adapters: 64 of them on a transformer of MiniLM's size, at once and in the serial loop; memory planned and taken
billion: the same on 1.0 billion random numbers in bfloat16, made on the device, one sample of 64 tokens each
cifar: pfl-research's benchmark, CIFAR-10 among 1,000 clients of 50 images, 50 a round, batches of 10, 1,500 rounds;
images are random, which costs the same seconds. --pfl: the folder `benchmarks` of a checkout of pfl-research with its
data prepared, to run its own beside it
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerator import PRECISIONS, compare, synchronize
from torch import nn

import polyfed as pf
from polyfed.base.typed import seeded
from polyfed.compute.batches import Batch
from polyfed.compute.check import check
from polyfed.compute.split import Split
from polyfed.engines.local import memory_of

HERE = Path(__file__).parent
MINUTES = {"tests": 12, "cifar": 10}  # that a section may take which another process runs


class Sizes(NamedTuple):
    """Of everything that is timed."""

    models: tuple[str, ...]
    clients: tuple[int, ...]
    batch: int
    repeats: int
    adapters: int
    width: int
    layers: int
    tokens: int
    federation: int
    samples: int
    cohort: int
    rounds: int
    large: tuple[int, int]  # width and layers


FULL = Sizes(("cnn", "resnet18"), (10, 50), 20, 20, 64, 384, 6, 64, 1000, 50, 50, 150, (2048, 20))
SMALL = Sizes(("lenet",), (2,), 4, 2, 4, 16, 1, 8, 20, 20, 4, 4, (32, 2))


class Transformer(nn.Module):
    """Encoder layers on embedded tokens, their mean, a head."""

    def __init__(self, width: int, layers: int, words: int = 1000):
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


class Layer(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.before, self.after = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wide, self.narrow = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.heads = max(1, d // 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for f in (self.query, self.key, self.value))
        x = self.before(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)))
        return self.after(x + self.narrow(F.gelu(self.wide(x))))


def tests(device: torch.device, sizes: Sizes, pfl: str | None) -> Iterator[str]:
    path = "tests/engines/test_cuda.py" if device.type == "cuda" else "tests/compute/test_elsewhere.py"
    command = [sys.executable, "-m", "pytest", "-n", "0", path]
    if device.type != "cuda":
        command += ["-k", "would_wait"]
    run = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, timeout=60 * MINUTES["tests"])
    lines = run.stdout.strip().splitlines()
    yield f"`{path}`: {lines[-1] if lines else run.stderr.strip()[-200:]}"
    yield from (line for line in lines if line.startswith("FAILED"))
    if run.returncode:
        raise RuntimeError(f"pytest ended with {run.returncode}")


def convolutions(device: torch.device, sizes: Sizes, pfl: str | None) -> Iterator[str]:
    for model in sizes.models:
        for precision in PRECISIONS:
            for clients in sizes.clients:
                with redirect_stdout(text := StringIO()):
                    compare(model, clients, sizes.batch, sizes.repeats, device, precision)
                yield text.getvalue().strip()


def adapters(device: torch.device, sizes: Sizes, pfl: str | None) -> Iterator[str]:
    """One step of every adapter: at once as `check` chose, at once in one pass of the base, and in the serial loop."""
    with seeded(0):
        base = Transformer(sizes.width, sizes.layers)
    yield from raced(base, device, sizes.adapters, sizes.batch, sizes.tokens, sizes.repeats)


def billion(device: torch.device, sizes: Sizes, pfl: str | None) -> Iterator[str]:
    """As `adapters`, with products in bfloat16; the base is never on the processor."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device), seeded(0):
            base = Transformer(*sizes.large)
    finally:
        torch.set_default_dtype(torch.float32)
    yield from raced(base, device, sizes.adapters, 1, sizes.tokens, max(2, sizes.repeats // 4), bf16=True)


def raced(
    base: nn.Module, device: torch.device, clients: int, b: int, tokens: int, repeats: int, bf16: bool = False
) -> Iterator[str]:
    """The three ways of a step of `clients` adapters, each on b samples."""
    with seeded(0):
        x = torch.randint(0, 1000, (clients * b, tokens))
        y = torch.randint(0, 2, (len(x),))
    model = pf.models.adapted(base, "lora:r=8,targets=query+value")
    split = Split(x, y, np.arange(clients + 1) * b)
    numbers, held = (sum(f(q) for q in base.parameters()) for f in (torch.numel, lambda q: q.nbytes))
    yield f"the base: {numbers:,} numbers, {held / 2**30:.2f} GiB"
    ends, moved, chosen = dict[str, float](), list[torch.Tensor](), ""
    for way in ("vmapped", "grouped", "serial"):
        task = pf.Task(model, device=device, bf16=bf16)
        task.net.vectorised = way != "serial"
        there = task.place(split)
        check(task, there, 2)
        chosen = chosen or ("grouped" if task.net.grouped else "vmapped")
        task.net.grouped = way == "grouped"
        batch = Batch(there.x.view(clients, b, -1), there.y.view(clients, -1))
        w = task.w0.expand(clients, -1).clone()
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            ends[way] = timed(lambda task=task, w=w, batch=batch: task.descend_(w, batch, 0.01), device, repeats)
        except RuntimeError as e:  # attention has no way back out of vmap in bfloat16
            yield f"{way}: {str(e).splitlines()[0]}"
            continue
        moved.append(w)
        if way == "grouped":
            planned = clients * (8 * w.element_size() * task.p + 2 * b * task.net.sample_bytes)
            taken = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
            yield (
                f"memory of the grouped step: planned {planned / 2**30:.2f} GiB, taken "
                + ("unknown" if taken is None else f"{taken / 2**30:.2f} GiB")
            )
    gap = max(float((w - moved[-1]).norm() / moved[-1].norm()) for w in moved)
    yield (
        f"{clients} adapters of {w.shape[1]:,} numbers, batches of {b} x {tokens} tokens: "
        + ", ".join(f"{way} {ms:.1f} ms" for way, ms in ends.items())
        + f"; `check` chose {chosen}; apart by {gap:.1e}"
    )


def timed(step: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Milliseconds, the median of `repeats` after three that choose kernels."""
    times = list[float]()
    for k in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        if k >= 3:
            times.append(1000 * (time.perf_counter() - start))
    return median(times)


def cifar(device: torch.device, sizes: Sizes, pfl: str | None) -> Iterator[str]:
    """The network of pfl-research's benchmark: 3 x 3 convolutions of 32 and 64 channels, a hidden layer of 128."""
    with seeded(0):
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip
    rng, n = np.random.default_rng(0), sizes.federation
    parts = [
        [(rng.random((m, 3, 32, 32), dtype=np.float32), rng.integers(0, 10, m)) for _ in range(n)]
        for m in (sizes.samples, 10)
    ]
    fed = pf.Federation.from_arrays(*parts, classes=10)
    at = list[float]()
    method, every = pf.FedAvg(lr=0.1, weighted=False), 10
    run = pf.fit(
        net, fed, method, rounds=sizes.rounds, fraction=sizes.cohort / n, batch_size=10, evaluate_every=every,
        device=str(device), callbacks=[lambda progress: at.append(time.perf_counter())],
    )  # fmt: skip
    each = (at[-1] - at[0]) / sizes.rounds  # the first is of the start
    yield f"polyfed: {1500 * each:.0f} s for 1,500 rounds, {1000 * each:.1f} ms each, evaluation of every 10th included"
    task, plan = run.trained.task, run.trained.engine.plan
    memory, samples = memory_of(method, task, n, sizes.cohort, True, plan, 10, 10), fed.train.x.nbytes
    taken = f"{(torch.cuda.max_memory_allocated(device) - samples) / 2**30:.2f}" if device.type == "cuda" else "unknown"
    yield (
        f"chunks of {plan.chunk}; besides {samples / 2**30:.2f} GiB of samples planned {memory.more / 2**30:.2f} GiB, "
        f"taken {taken}"
    )
    if pfl is None:
        yield "pfl-research: not asked for (--pfl FOLDER)"
        return
    train = ["image_classification/pytorch/train.py", "--args_config", "image_classification/configs/baseline.yaml"]
    ends = list[float]()
    for rounds in (10, 10 + sizes.rounds):  # the difference leaves the start out
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, *train, "--central_num_iterations", str(rounds)],
            cwd=pfl, check=True, capture_output=True, timeout=60 * MINUTES["cifar"],
        )  # fmt: skip
        ends.append(time.perf_counter() - start)
    yield f"pfl-research: {1500 * (ends[1] - ends[0]) / sizes.rounds:.0f} s for 1,500 rounds"


SECTIONS = {f.__name__: f for f in (tests, convolutions, adapters, billion, cifar)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="small sizes on the processor")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "gpu.md")
    parser.add_argument("--pfl", help="folder `benchmarks` of a checkout of pfl-research")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    asked = parser.parse_args()
    if not asked.dry and not torch.cuda.is_available():
        print("bench-gpu: this torch finds no CUDA device; DRY=1 tries it on the processor", file=sys.stderr)
        return 2
    if asked.dry:
        torch.set_num_threads(1)
    device = torch.device("cpu" if asked.dry else "cuda:0")
    where = "a dry run on the processor: no figure of it says anything" if asked.dry else torch.cuda.get_device_name(0)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    failed = list[str]()
    with asked.out.open("w") as out:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=out, flush=True)  # what was measured stays if the machine is taken away

        say(f"# {where}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
        for name in asked.only:
            say(f"## {name}\n")
            start = time.perf_counter()
            try:
                for line in SECTIONS[name](device, SMALL if asked.dry else FULL, asked.pfl):
                    say(f"- {line}")
            except Exception as e:  # the other sections are worth having
                failed.append(name)
                say(f"- failed: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}")
            say(f"- {time.perf_counter() - start:.0f} s\n")
    print(
        f"{asked.out}: {len(asked.only) - len(failed)} of {len(asked.only)} sections"
        + f"; failed: {failed}" * bool(failed)
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
