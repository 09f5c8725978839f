"""The command that this package adds to polyfed; what it does is in command.py."""

from pathlib import Path
from typing import Literal

from polyfed.cli.options import Command, argument, option


class Export(Command, module="command"):
    """Export one client's model: FILE.safetensors (named tensors) and FILE.json (model, shapes, origin).

    Of a comparison, that of the method which leads in its answer.

    [dim]polyfed export runs/a/runs/ditto-seed0 --client cleveland[/dim]

    polyfed_export.factorised.load(FILE, model, sparse) turns a factorised file back into a module, whose size and speed
    the command prints: dense; "merged", where layers with a sparse part are dense again; "beside", where that part is a
    sparse matrix, which is slower than dense for convolutions and small layers.
    """

    run: Path = argument("Folder of a run or of a comparison; at a site, its vault.")
    client: str | None = option("Of a run: the client's name, or its number from 0.")
    out: Path | None = option(
        "File to write. Default: <client>.safetensors here.", None, "FILE.safetensors|FILE.onnx|DIR"
    )
    form: Literal["dense", "factorised", "merged", "peft", "onnx"] = option(
        "factorised: low-rank layers as two factors and a sparse part (FedSLR); merged: an adapter's updates in the "
        "weights; peft: a folder that PeftModel.from_pretrained opens; onnx: columns of a CSV file go in by name.",
        "dense",
    )
