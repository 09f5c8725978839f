"""Real pretrained weights, of packages that ship them: MiniLM and EfficientNet-Lite0."""

import numpy as np
import pytest
import torch
from torch import nn

from polyfed.models import build, pretrained
from polyfed_adapters.backbone import digest_of
from polyfed_papers.adapters import (
    PIXELS,
    Picture,
    Sentence,
    absent,
    efficientnet,
    enlarged,
    lite0,
    minilm,
    read_pictures,
    read_sentences,
)

RNG = np.random.default_rng(0)
TOKENS = 8


def needs(kind):
    missing = absent(kind)
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


SENTENCES, IMAGES = needs("sentences"), needs("images")


def tokens(n):
    """[n, 2, T] ids and masks."""
    mask = (np.arange(TOKENS) < RNG.integers(3, TOKENS + 1, n)[:, None]).astype(np.int64)
    return np.stack([RNG.integers(1000, 20000, (n, TOKENS)) * mask, mask], 1)


def images(n):
    return RNG.integers(0, 256, (n, 3, 32, 32)).astype(np.uint8)


@pytest.fixture(scope="module")
def bert():
    return build("transformers", (2, TOKENS), 3, backbone=str(minilm()), pool="first").eval()


@SENTENCES
def test_a_run_on_minilm_has_its_digest(cli, tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("bern", "oslo"):
        np.savez(tmp_path / "data" / f"{name}.npz", x=(x := tokens(8)), y=x[:, 0, 0] % 2)
    (tmp_path / "study.toml").write_text(
        f'rounds = 1\n[data]\nname = "./data"\n[model]\nbackbone = "{minilm()}"\nadapter = "probe"\n'
        '[algorithm]\nname = "fedavg"\n'
    )
    cli("run", "study.toml", "--out", "run").done()
    assert f'backbone-digest = "{digest_of(minilm())}"' in (tmp_path / "run/config.toml").read_text()


@IMAGES
def test_lite0_s_weights_are_those_of_its_file():
    net, given = efficientnet(10), torch.load(lite0(), weights_only=True)
    other = [name for name, t in net.state_dict().items() if not torch.equal(t, given[name])]
    assert other == ["_fc.weight", "_fc.bias"]


@SENTENCES
def test_minilm_is_what_lies_below_the_cut_and_above(bert):
    x = torch.as_tensor(tokens(5))
    top = Sentence(bert, 3)
    top.head = bert.head
    with torch.no_grad():
        torch.testing.assert_close(top(torch.as_tensor(read_sentences(bert, x)[1])), bert(x), atol=1e-5, rtol=0)


@IMAGES
def test_lite0_is_what_lies_below_the_cut_and_above():
    net, x = efficientnet(3).eval(), images(4)
    top = Picture(net, 3)
    assert isinstance(net._fc, nn.Linear)
    top.head = net._fc
    with torch.no_grad():
        found = top(torch.as_tensor(read_pictures(net, x)[1]))
        torch.testing.assert_close(found, net(enlarged(x)), atol=1e-4, rtol=1e-4)
    assert enlarged(x).shape == (4, 3, PIXELS, PIXELS)
    assert pretrained(net, lite0()) is net
