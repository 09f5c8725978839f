"""Adapters as peft's folders and as merged weights: the same outputs in other hands."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError
from polyfed.models import adapted, merged

RNG = np.random.default_rng(0)
SITES = [(RNG.normal(size=(12, 6)).astype(np.float32), np.arange(12) % 3) for _ in range(2)]
X = torch.as_tensor(RNG.normal(size=(5, 6))).float()
LORA = ("lora:r=2", "lora:r=4,targets=up,train=factors,alpha=3,scale=rs", "lora:r=2,train=residual")
KINDS = (*LORA, "dora:r=2,alpha=3", "ia3:targets=up,inputs=down", "ia3")


class Net(nn.Module):
    """Layers of unlike widths, so that ranks differ, and names that end alike."""

    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"up": nn.Linear(6, 9), "down": nn.Linear(9, 3)})
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.norm(self.block["down"](self.block["up"](x).tanh())))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def trained(words: str, out) -> pf.Run:
    method = pf.FedExLoRA(lr=0.5) if "residual" in words else pf.Ditto(lr=0.5)
    fed = pf.Federation.from_arrays(SITES, names=["bern", "oslo"])
    return pf.fit(net(), fed, method, adapter=words, rounds=4, out=out)


@pytest.mark.parametrize("words", LORA)
def test_the_folder_says_what_the_client_computes(words, tmp_path):
    """W0 + alpha / r B A, by the rank and alpha that the configuration has for each layer, and the saved modules."""
    run = trained(words, tmp_path / "run")
    folder = run.peft("oslo", tmp_path / "oslo")
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    model, used = net(), set()
    for name in config["target_modules"]:
        A, B = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        assert config["rank_pattern"][name] == len(A) == B.shape[1]
        model.get_submodule(name).weight.data += config["alpha_pattern"][name] / len(A) * B @ A
        used |= {f"base_model.model.{name}.lora_{part}.weight" for part in "AB"}
    for name in config["modules_to_save"]:
        for own in ("weight", "bias"):
            getattr(model.get_submodule(name), own).data = tensors[f"base_model.model.{name}.{own}"]
            used.add(f"base_model.model.{name}.{own}")
    assert used == tensors.keys()
    with torch.no_grad():
        assert torch.allclose(model(X), run.model("oslo")(X), rtol=0, atol=1e-6)


@pytest.mark.parametrize("words", KINDS)
def test_peft_opens_it_with_the_same_logits(words, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    run = trained(words, tmp_path / "run")
    opened = peft.PeftModel.from_pretrained(net(), str(run.peft("oslo", tmp_path / "oslo"))).eval()
    with torch.no_grad():
        assert torch.allclose(opened(X), run.model("oslo")(X), rtol=0, atol=1e-6)
        assert torch.allclose(opened.merge_and_unload()(X), run.model("oslo")(X), rtol=0, atol=1e-6)


@pytest.mark.parametrize("words", KINDS)
def test_merged_weights_are_of_the_model_as_it_was(words, tmp_path):
    run = trained(words, tmp_path / "run")
    path, about = run.export("bern", tmp_path / "bern.safetensors", "merged")
    model = net()
    model.load_state_dict(load_file(path))
    with torch.no_grad():
        assert torch.allclose(model(X), run.model("bern")(X), rtol=0, atol=1e-6)
        assert torch.allclose(model(X), merged(run.model("bern"))(X), rtol=0, atol=1e-6)
    assert "adapter" not in json.loads(about.read_text())["model"]
    assert not [*tmp_path.glob("backbone-*")]


def test_predictions_of_merged_weights_are_the_clients(cli, tmp_path):
    words = ["--data", "data", "--target", "y", "--model", "mlp", "--adapter", "lora:r=2", "--algorithm", "fedavg"]
    (tmp_path / "data").mkdir()
    for i, (x, y) in enumerate(SITES):
        rows = "\n".join(
            ",".join(f"{v:.3f}" for v in row) + f",{'abc'[label]}" for row, label in zip(x, y, strict=True)
        )
        (tmp_path / "data" / f"{i}.csv").write_text("a,b,c,d,e,f,y\n" + rows + "\n")
    assert cli("run", *words, "--rounds", 3, "--seeds", 1, "--out", "run", "-q").status == 0
    answers = []
    for form in ("dense", "merged"):
        assert cli("export", "run", "--client", "1", "--form", form, "--out", "one.safetensors").status == 0
        answers.append(cli("predict", "one.safetensors", "data/0.csv").out)
    assert len(answers[0].splitlines()) == 13
    columns = [np.array([row.split(",")[2:] for row in a.splitlines()[1:]], dtype=float) for a in answers]
    assert np.allclose(*columns, rtol=0, atol=1e-6)
    assert cli("export", "run", "--client", "1", "--form", "peft", "--out", "folder").status == 0
    assert (tmp_path / "folder" / "adapter_config.json").is_file()


def test_inputs_and_outputs_are_told_apart_by_whole_names(tmp_path):
    """peft takes the end of a name from a list: what multiplies the inputs of "up" would be one for those of "sup"."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = nn.Sequential()
    for name, (k, m) in {"sup": (6, 5), "up": (5, 4), "head": (4, 3)}.items():
        model.add_module(name, nn.Linear(k, m))
    whole = adapted(model, "ia3:targets=sup,inputs=up")
    run = pf.fit(whole, pf.Federation.from_arrays(SITES), pf.FedAvg(lr=0.5), rounds=2)
    opened = peft.PeftModel.from_pretrained(model, str(run.peft(0, tmp_path / "one"))).eval()
    with torch.no_grad():
        assert torch.allclose(opened(X), run.model(0)(X), rtol=0, atol=1e-6)


def test_a_model_without_updates_is_refused(tmp_path):
    fed = pf.Federation.from_arrays(SITES)
    run = pf.fit(adapted(net(), "probe"), fed, pf.FedAvg(), rounds=1, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="peft: found a model without updates"):
        run.peft(0, tmp_path / "out")
    with pytest.raises(ConfigError, match="merged: found a model without low-rank updates"):
        run.export(0, tmp_path / "a.safetensors", "merged")
