"""Pretrained models from files at hand: a folder of transformers, and weights for any module."""

import shutil
import socket

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import KINDS, tiny
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, ModelError, PolyfedError
from polyfed.models import build, pretrained
from polyfed_adapters.backbone import digest_of

RNG = np.random.default_rng(0)
PADDED = 8  # tokens


@pytest.fixture(scope="session", params=KINDS)
def folder(request, tmp_path_factory):
    """(kind, folder) of a small model of transformers with random weights."""
    return request.param, written(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    return written("bert", tmp_path_factory.mktemp("bert"))


def written(kind, place):
    torch.manual_seed(1)
    tiny(kind, 50).save_pretrained(place)
    return place


def tokens(n, real=None):
    """[n, 2, T] ids and masks of `real` tokens each, or of 3 to T."""
    length = RNG.integers(3, PADDED + 1, n) if real is None else np.full(n, real)
    mask = (np.arange(PADDED) < length[:, None]).astype(np.int64)
    return torch.as_tensor(np.stack([RNG.integers(1, 50, (n, PADDED)) * mask, mask], 1))


def inputs(kind, n):
    return torch.as_tensor(RNG.normal(size=(n, 3, 8, 8))).float() if kind == "vit" else tokens(n)


def test_a_folder_is_the_library_s_model_below_a_layer(folder, monkeypatch):
    kind, place = folder
    monkeypatch.setattr(socket, "socket", lambda *a, **k: pytest.fail("asked the network"))
    x = inputs(kind, 3)
    made = build("transformers", tuple(x.shape[1:]), 4, backbone=str(place)).eval()
    base = pytest.importorskip("transformers").AutoModel.from_pretrained(place)
    given = {"pixel_values": x} if kind == "vit" else {"input_ids": x[:, 0], "attention_mask": x[:, 1]}
    states = base(**given).last_hidden_state
    share = torch.ones(states.shape[:2]) if kind == "vit" else x[:, 1].float()
    pooled = (states * share[..., None]).sum(1) / share.sum(1, keepdim=True)
    torch.testing.assert_close(made(x), made.head(pooled))


@pytest.mark.parametrize("pool", ["mean", "first", "last"])
def test_padding_is_not_seen(bert, pool):
    net = build("transformers", (2, PADDED), 4, backbone=str(bert), pool=pool).eval()
    x = tokens(3, real=5)
    torch.testing.assert_close(net(x), net(x[:, :, :5]))
    other = x.clone()
    other[:, 0, 5:] = 7
    torch.testing.assert_close(net(x), net(other))


def test_features_are_kept_and_half_precision_stays_half(bert, tmp_path):
    made = build("transformers", (2, PADDED), 2, backbone=str(bert))
    made.base.half().save_pretrained(tmp_path)
    half = build("transformers", (2, PADDED), 2, backbone=str(tmp_path))
    assert {q.dtype for q in half.base.parameters()} == {torch.float16}
    fed = pf.Federation.from_arrays([(tokens(9).numpy(), np.arange(9) % 2) for _ in range(2)])
    trainer = pf.runs.trainer.prepare(pf.models.adapted(half, "probe"), fed, pf.FedAvg(), pf.Training())
    assert trainer.kept is not None
    assert trainer.kept.shape == (16,)


def net(outputs=3):
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, outputs))


@pytest.mark.parametrize("ending", ["safetensors", "pt", "nested.pth"])
def test_a_file_of_weights_fills_what_is_below_the_head(tmp_path, ending):
    path, source = tmp_path / f"w.{ending}", net(outputs=7)
    tensors = source.state_dict()
    if ending == "safetensors":
        save_file(tensors, path)
    else:
        torch.save(
            {"state_dict": {f"module.{k}": t for k, t in tensors.items()}} if "nested" in ending else tensors, path
        )
    made = net()
    head = made[3].weight.clone()
    assert pretrained(made, path) is made
    assert torch.equal(made[0].weight, source[0].weight)
    assert torch.equal(made[1].running_mean, source[1].running_mean)
    assert torch.equal(made[3].weight, head)


def test_what_does_not_fit_is_said(tmp_path):
    save_file({"0.weight": torch.zeros(5, 3)}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"for '0\.weight' of Sequential expected shape \[5, 4\], found one of shape"):
        pretrained(net(), tmp_path / "other.safetensors")
    torch.save(net(), tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match="found objects or no tensors, expected a state dict alone"):
        pretrained(net(), tmp_path / "pickled.pt")
    with pytest.raises(ConfigError, match=r"expected a folder with config\.json"):
        build("transformers", (2, 8), 2, backbone=str(tmp_path))


@pytest.fixture
def experiment(bert, tmp_path):
    """A file of an experiment on a backbone beside it, named relative to it."""
    shutil.copytree(bert, tmp_path / "bert")
    (tmp_path / "data").mkdir()
    for name in ("bern", "oslo"):
        x = tokens(20).numpy()
        np.savez(tmp_path / "data" / f"{name}.npz", x=x, y=x[:, 0, 0] % 2)
    path = tmp_path / "study.toml"
    path.write_text(
        'rounds = 2\n[data]\nname = "./data"\n[model]\nbackbone = "bert"\nadapter = "lora:r=2,targets=query+value"\n'
        '[algorithm]\nname = "fedavg"\nlr = 0.1\n'
    )
    return path


def test_a_run_goes_on_with_its_backbone_alone(cli, experiment, tmp_path):
    cli("run", str(experiment), "--out", "run").done()
    digest = digest_of(tmp_path / "bert")
    assert f'backbone-digest = "{digest}"' in (tmp_path / "run/config.toml").read_text()
    weights = build("transformers", (2, PADDED), 2, backbone="bert").base
    next(weights.parameters()).data += 1e-3
    weights.save_pretrained(tmp_path / "bert")
    said = cli("resume", "run")
    assert said.status != 0
    assert f"found digest {digest_of(tmp_path / 'bert')}, expected {digest}" in said.err


def test_sites_have_the_backbone_in_places_of_their_own(bert, tmp_path, experiment):
    hospitals = pytest.importorskip("hospitals")
    place, names = tmp_path / "oslo-has-it-here", ("bern", "oslo")
    shutil.copytree(bert, place)
    columns = '[columns]\nstandardise = "none"\n'
    text = experiment.read_text().replace('[data]\nname = "./data"\n', columns)
    sites = hospitals.Sites(tmp_path, tmp_path / "data", names=names)
    experiment.write_text(text)
    with pytest.raises(PolyfedError, match=f"bern: needs the backbone bert with digest {digest_of(place)}"):
        hospitals.at_sites(experiment, sites)
    for name in names:
        sites.members.pop(name, None)
        sites.member(name).backbone = place
    here = hospitals.at_sites(experiment, sites, out="at-sites")
    assert any(f"on the backbone bert ({digest_of(place)})" in line for line in sites.lines)
    assert here.trained.task.p == pf.Task(here.trained.task.model).p
    other = build("transformers", (2, PADDED), 2, backbone=str(place)).base
    next(other.parameters()).data += 1
    other.save_pretrained(tmp_path / "other")
    sites.members.clear()
    sites.member("bern").backbone, sites.member("oslo").backbone = place, tmp_path / "other"
    with pytest.raises(PolyfedError, match=r"oslo: needs the backbone bert .* and the one named with --backbone has"):
        hospitals.at_sites(experiment, sites, out="again")
