"""Inference with low-rank layers as pairs of thin layers, against the dense model: milliseconds per batch, and sizes.

    python benchmarks/factorised.py [--model resnet18] [--shape 3 32 32] [--batch 20] [--threads 1] [--layers]

Every layer is given a rank, a share of the largest one whose factors are smaller than the layer; dense and factorised
models take turns in one process, medians of `--repeats`. The column "mixed" has in each layer, beside the factors, a
sparse part of 4 % nonzeros, as FedSLR's clients have: it is run dense, so that only its size is less. `--layers` shows
why, layer by layer: factors and a sparse product with the unfolded input, against one dense convolution.
"""

import argparse
import time
import warnings
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyfed import models
from polyfed.algorithms._shared.lowrank import sheets
from polyfed.compute.layout import Layout
from polyfed_export.factorised import factorised, pack, size

SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
DENSITY = 0.04


def low_rank(model: nn.Module, share: float) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The model's vector with every layer at `share` of its largest saving rank, and the factors."""
    layout, g = Layout(model), torch.Generator().manual_seed(0)
    w, factors = layout.flatten(model), {}
    for name, sheet in sheets(layout).items():
        d1, d2 = sheet.shape
        r = max(1, int(share * ((d1 * d2 - 1) // (d1 + d2))))
        if sheet.smaller(r):
            U, V = (
                torch.randn(d1, r, generator=g) * float(w[sheet.span].std()),
                torch.randn(r, d2, generator=g) / r**0.5,
            )
            factors[name] = U, V
            w[sheet.span] = sheet.fold(U @ V)
    return w, factors


def milliseconds(functions: list, repeats: int) -> list[float]:
    """Medians of functions that take turns."""
    spent: list[list[float]] = [[] for _ in functions]
    for k in range(repeats + 1):
        for function, times in zip(functions, spent, strict=True):
            start = time.perf_counter()
            function()
            times += [1e3 * (time.perf_counter() - start)] * (k > 0)
    return [median(times) for times in spent]


def whole(args: argparse.Namespace) -> None:
    x = torch.randn(args.batch, *args.shape).contiguous(memory_format=torch.channels_last)
    dense = models.build(args.model, tuple(args.shape), 10).eval()
    layout = Layout(dense)
    print(
        f"{args.model}, batch {args.batch} of {args.shape}, {args.threads} thread(s); dense {4 * layout.p / 1e6:.2f} MB"
    )
    print("| share of the largest saving rank | MB | mixed, MB | dense, ms | pairs, ms | ratio | largest difference |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for share in SHARES:
        w, factors = low_rank(dense, share)
        common = layout.named(w)
        tensors = pack(common, common, factors)
        g = torch.Generator().manual_seed(1)
        mixed = w + 0.01 * (torch.rand(layout.p, generator=g) < DENSITY)
        beside = pack(layout.named(mixed), common, factors)
        layout.load_(dense, w)
        a, b = (m.to(memory_format=torch.channels_last) for m in (dense, factorised(dense, tensors)))
        gap = float((a(x) - b(x)).abs().max() / a(x).abs().max())
        one, two = milliseconds([lambda a=a: a(x), lambda b=b: b(x)], args.repeats)
        mb = f"{size(tensors) / 1e6:.2f} | {size(beside) / 1e6:.2f}"
        print(f"| {share} | {mb} | {one:.1f} | {two:.1f} | {one / two:.2f} | {gap:.0e} |", flush=True)


def by_layer(args: argparse.Namespace) -> None:
    print("| convolution 3x3 | rank | dense, ms | pair | sparse part alone, ms | pair and sparse |")
    print("|---|--:|--:|--:|--:|--:|")
    for channels, side in ((64, 32), (128, 16), (256, 8), (512, 4)):
        x = torch.randn(args.batch, channels, side, side).contiguous(memory_format=torch.channels_last)
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        w, factors = low_rank(conv, 0.25)
        named = Layout(conv).named(w)
        pair = factorised(conv, pack(named, named, factors)).to(memory_format=torch.channels_last)
        conv = conv.to(memory_format=torch.channels_last)
        n = channels * 9
        sparse = (torch.randn(channels, n) * (torch.rand(channels, n) < DENSITY)).to_sparse_csr()

        def product(x=x, sparse=sparse, n=n) -> Tensor:
            return sparse @ F.unfold(x, 3, padding=1).transpose(0, 1).reshape(n, -1)

        a, b, c = milliseconds([lambda m=conv, x=x: m(x), lambda m=pair, x=x: m(x), product], args.repeats)
        r = factors["weight"][0].shape[1]
        print(f"| {channels} channels, {side}x{side} | {r} | {a:.1f} | {b:.1f} | {c:.1f} | {b + c:.1f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--shape", type=int, nargs=3, default=[3, 32, 32])
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", action="store_true", help="single convolutions, with the sparse part as a product")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", message="Sparse CSR")
    with torch.no_grad():
        (by_layer if arguments.layers else whole)(arguments)
