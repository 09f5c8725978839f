"""One client's adapter as a folder that peft's `PeftModel.from_pretrained` opens, beside the model that was adapted."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyfed.base.checkpoint import reason
from polyfed.base.errors import ConfigError, RunError
from polyfed.base.typed import named_modules
from polyfed.runs.folder import safe
from polyfed.runs.ownership import spare
from polyfed.runs.result import Result, position
from polyfed_adapters.adapters import IA3, Beside, DoRA, LoRA
from polyfed_adapters.backbone import Pretrained
from polyfed_adapters.lora import product

BEFORE = "base_model.model."  # peft's names of the parameters of the model that it wraps


def export_peft(run: Result, client: int | str, out: Path | None) -> Path:
    """Write the folder of one client's adapter; the head and other trained modules are its "modules to save"."""
    names = run.outline.names
    if isinstance(client, str) and client not in names and client.isdecimal():
        client = int(client)
    name = names[position(client, names)]
    model, task = run.model(name).to("cpu"), None
    if isinstance(model, Pretrained) and model.pool == "words":  # transformers' class and names, with its own head
        model, task = model.base, "CAUSAL_LM"
    layers = {key: m for key, m in named_modules(model) if isinstance(m, Beside)}
    if not layers:
        raise ConfigError("peft: found a model without updates, expected one trained with an adapter lora, dora or ia3")
    folder = out or Path(f"{safe(name)}-peft")
    spare(folder / "adapter_config.json", *([] if run.folder is None else [run.folder]))
    factors = {key: m for key, m in layers.items() if isinstance(m, IA3)}
    own, tensors = _factors(factors) if factors else _low_rank(layers)
    saved = _trained(model, [*layers])
    tensors |= {f"{key}.{own}": t for key, m in saved.items() for own, t in m.state_dict().items()}
    config: dict[str, Any] = own | {
        "task_type": task,
        "base_model_name_or_path": None,
        "target_modules": [*layers],
        "modules_to_save": [*saved] or None,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {f"{BEFORE}{key}": t.detach().contiguous() for key, t in tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_bytes(json.dumps(config, indent=1).encode() + b"\n")
    except OSError as e:
        raise RunError(f"cannot write {folder}: {reason(e)}") from None
    return folder


def _factors(layers: Mapping[str, IA3]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration of (IA)3 and its tensors: rows [1, k] for inputs, columns [m, 1] for outputs."""
    inputs = "|".join(re.escape(key) for key, m in layers.items() if m.inputs)  # by whole names, which a list is not
    tensors = {f"{key}.ia3_l": m.l[None] if m.inputs else m.l[:, None] for key, m in layers.items()}
    return {"peft_type": "IA3", "feedforward_modules": inputs or []}, tensors


def _low_rank(layers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration of LoRA or DoRA and its tensors."""
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for key, layer in layers.items():
        A, B = _product(layer)
        tensors |= {f"{key}.lora_A.weight": A, f"{key}.lora_B.weight": B}
        if isinstance(layer, DoRA):
            tensors[f"{key}.lora_magnitude_vector"] = layer.g
        ranks[key], alphas[key] = len(A), layer.scale * len(A)
    config = {
        "peft_type": "LORA",
        "r": next(iter(ranks.values())),
        "lora_alpha": next(iter(alphas.values())),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": any(isinstance(layer, DoRA) for layer in layers.values()),
    }
    return config, tensors


def _product(layer: LoRA | DoRA) -> tuple[Tensor, Tensor]:
    """A [r, k] and B [m, r] of all that is beside the frozen weight."""
    A, B = layer.A.detach(), layer.B.detach()
    if isinstance(layer, DoRA) or layer.R is None:
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
