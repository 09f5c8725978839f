"""One client's adapter as a folder that peft's `PeftModel.from_pretrained` opens, beside the model that was adapted."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from polyfed.algorithms._shared.lora import product
from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.typed import named_modules
from polyfed.models.adapters import LoRA
from polyfed.models.backbone import Pretrained
from polyfed.runs.folder import safe
from polyfed.runs.ownership import spare
from polyfed.runs.result import Result, position

BEFORE = "base_model.model."  # peft's names of the parameters of the model that it wraps


def export_peft(run: Result, client: int | str, out: Path | None) -> Path:
    """Write the folder of one client's adapter.

    The head and whatever else is trained are "modules to save". A language model with its own head is the library
    transformers' own class, for which the names are. The matrix of a residual is part of the factors, whose
    rank is then higher.
    """
    names = run.outline.names
    if isinstance(client, str) and client not in names and client.isdecimal():
        client = int(client)
    name = names[position(client, names)]
    model, task = run.model(name).to("cpu"), None
    if isinstance(model, Pretrained) and model.pool == "words":  # transformers' own class, with its own head
        model, task = model.base, "CAUSAL_LM"
    layers = {key: m for key, m in named_modules(model) if isinstance(m, LoRA)}
    if not layers:
        raise ConfigError("peft: found a model without low-rank updates, expected one trained with an adapter lora")
    folder = out or Path(f"{safe(name)}-peft")
    spare(folder / "adapter_config.json", *([] if run.folder is None else [run.folder]))
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for key, layer in layers.items():
        A, B = _factors(layer)
        tensors |= {f"{BEFORE}{key}.lora_A.weight": A, f"{BEFORE}{key}.lora_B.weight": B}
        ranks[key], alphas[key] = len(A), layer.scale * len(A)
    saved = _trained(model, [*layers])
    tensors |= {f"{BEFORE}{key}.{own}": t for key, m in saved.items() for own, t in m.state_dict().items()}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": None,
        "r": next(iter(ranks.values())),
        "lora_alpha": next(iter(alphas.values())),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": [*layers],
        "modules_to_save": [*saved] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({key: t.detach().contiguous() for key, t in tensors.items()}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    except OSError as e:
        raise RunError(f"cannot write {folder}: {reason(e)}") from None
    return folder


def _factors(layer: LoRA) -> tuple[Tensor, Tensor]:
    """A [r, k] and B [m, r] of all that is beside the frozen weight."""
    A, B = layer.A.detach(), layer.B.detach()
    if layer.R is None:
        return A, B
    own = torch.eye(len(layer.R)).to(A)
    left, right = product(torch.cat([B, own], 1), torch.cat([A, layer.R.detach()]))
    return (right, left) if len(right) else (A, B)


def _trained(model: nn.Module, layers: list[str]) -> dict[str, nn.Module]:
    """The modules outside of the adapted layers that own trained parameters, by name."""
    return {
        key: m
        for key, m in named_modules(model)
        if key not in layers and any(q.requires_grad for q in m.parameters(recurse=False))
    }
