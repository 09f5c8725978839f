"""Adapters: what is trained, by formula; the chart, an isometry; merged models; methods on a small transformer."""

import numpy as np
import pytest
import torch
from torch import nn

import polyfed as pf
from polyfed.base.errors import ConfigError, ModelError
from polyfed.models import adapted, merged
from polyfed.report.words import size as words_size
from polyfed_adapters.adapters import DoRA, LoRA

D, T = 12, 5  # width, tokens


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / D**0.5
        return self.norm(x + self.out(scores.softmax(-1) @ self.value(x)))


class Transformer(nn.Module):
    """Two blocks on integer tokens, a mean over them, a head."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, D)
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.head = nn.Linear(D, 3)

    def forward(self, x):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer().double()


RNG = np.random.default_rng(0)
SITES = [(RNG.integers(0, 20, (12, T)), np.arange(12) % 3) for _ in range(4)]
FED = pf.Federation.from_arrays(SITES)
TOKENS = torch.as_tensor(SITES[0][0])
HEAD = D * 3 + 3

COUNTS = {
    "probe": HEAD,
    "biases": 2 * 5 * D + HEAD,
    "norms": 2 * 2 * D + HEAD,
    "ia3": 2 * 4 * D + HEAD,
    "last:2": HEAD + 2 * D,
    "lora:r=4,targets=query+value": 4 * 4 * D + HEAD,
    "lora:r=4,targets=query+value,train=factors": 4 * 4 * 2 * D + HEAD,
    "lora:r=3": 8 * 3 * D + HEAD,
    "dora:r=4,targets=query+value": 4 * (4 * 2 * D + D) + HEAD,
}


@pytest.mark.parametrize(("words", "numbers"), COUNTS.items())
def test_what_is_trained_is_what_is_sent(words, numbers):
    model = adapted(transformer(), words)
    assert torch.equal(model(TOKENS), transformer()(TOKENS)), "it begins as the model"
    run = pf.fit(model, FED, pf.FedAvg(lr=0.1), rounds=1, dtype=torch.float64)
    assert run.trained.task.p == numbers
    assert (run.ledger["up_bytes"] == 8 * numbers).all()
    exported = run.model(0)
    assert torch.allclose(merged(exported)(TOKENS), exported(TOKENS), rtol=0, atol=1e-12)
    assert merged(exported).state_dict().keys() == transformer().state_dict().keys()


def layers(model: nn.Module) -> dict[str, LoRA]:
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRA)}


def test_the_chart_is_an_isometry_and_the_same_at_every_site():
    model = adapted(transformer(), "lora:r=4,targets=query+value", seed=3)
    again = layers(adapted(transformer(), "lora:r=4,targets=value+query", seed=3))
    found = layers(model)
    assert len(found) == 4
    for name, layer in found.items():
        assert torch.equal(layer.A, again[name].A)
        assert torch.allclose(layer.A @ layer.A.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-14)
        b = torch.randn(2, D, 4, dtype=torch.float64)
        apart, updates = (b[0] - b[1]).norm(), (b[0] @ layer.A - b[1] @ layer.A).norm()
        assert abs(apart / updates - 1) < 1e-12
    assert not torch.equal(*[layer.A for layer in found.values()][:2]), "drawn by the layer's name"
    other = layers(adapted(transformer(), "lora:r=4,targets=query", seed=4))
    assert not torch.equal(other["blocks.0.query"].A, found["blocks.0.query"].A)


@pytest.mark.parametrize(("words", "exact"), [("lora:r=4", True), ("lora:r=4,train=factors", False)])
def test_the_mean_of_vectors_is_the_mean_of_updates_on_the_chart_alone(words, exact):
    run = pf.fit(adapted(transformer(), words), FED, pf.Local(lr=0.5), rounds=3, dtype=torch.float64)
    task, w = run.trained.task, run.personal

    def query(w: torch.Tensor) -> torch.Tensor:
        return merged(task.module(w)).get_submodule("blocks.0.query").weight

    wanted = torch.stack([query(one) for one in w]).mean(0)
    error = (query(w.mean(0)) - wanted).norm() / (wanted - transformer().blocks[0].query.weight).norm()
    assert (error < 1e-12) == exact


def test_rs_lora_is_lora_at_alpha_times_the_root_of_the_rank():
    torch.manual_seed(1)
    outs = []
    for words in ("lora:r=4,train=factors,scale=rs,alpha=3", "lora:r=4,train=factors,alpha=6"):
        model = adapted(transformer(), words)
        for layer in layers(model).values():
            layer.B.data.fill_(0.1)
        outs.append(model(TOKENS))
    assert torch.allclose(*outs, rtol=0, atol=1e-14)


def test_what_is_frozen_is_in_memory_once_and_what_is_trained_is_not_the_models():
    plain = transformer()
    there = {q.data_ptr() for q in plain.parameters()}
    for words in ("norms", "lora:r=2", "last:2"):
        for q in adapted(plain, words).parameters():
            assert q.requires_grad != (q.data_ptr() in there) or q.shape[0] == 2, "but for A, which is new"
    assert all(q.requires_grad for q in plain.parameters())


def test_ia3_is_its_definition():
    """Keys and values times l, and what enters the layer behind them times l: Liu et al. (2022), section 3.3."""
    plain, generator = transformer(), torch.Generator().manual_seed(0)
    model = adapted(plain, "ia3:targets=key+value,inputs=out")
    assert torch.equal(model(TOKENS), plain(TOKENS))
    scales = {name: q for name, q in model.named_parameters() if name.endswith(".l")}
    assert len(scales) == 6
    x = plain.tokens(TOKENS)
    for q in scales.values():
        q.data = torch.rand(q.shape, generator=generator, dtype=q.dtype)
    for k, block in enumerate(plain.blocks):
        key, value, out = (scales[f"blocks.{k}.{name}.l"] for name in ("key", "value", "out"))
        scores = block.query(x) @ (key * block.key(x)).transpose(-1, -2) / D**0.5
        x = block.norm(x + block.out(out * (scores.softmax(-1) @ (value * block.value(x)))))
    expected = plain.head(x.mean(1))
    torch.testing.assert_close(model(TOKENS), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(merged(model)(TOKENS), expected, rtol=0, atol=1e-14)


def drawn_dora(**options: str) -> nn.Module:
    words = ",".join(["dora:r=4", "targets=query+value", *(f"{key}={value}" for key, value in options.items())])
    model, generator = adapted(transformer(), words), torch.Generator().manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, DoRA):
            for q in (layer.A, layer.B, layer.g):
                q.data += torch.rand(q.shape, generator=generator, dtype=q.dtype)
    return model


def test_dora_is_its_definition():
    """Equation 5: each row of the weight has the length g and the direction of W + alpha / r B A; the bias stays."""
    model = drawn_dora(alpha="6")
    found = {name: m for name, m in model.named_modules() if isinstance(m, DoRA)}
    assert len(found) == 4
    x = torch.randn(3, T, D, dtype=torch.float64)
    for name, layer in found.items():
        plain = transformer().get_submodule(name)
        V = plain.weight + 6 / 4 * layer.B @ layer.A
        expected = layer.g[:, None] * V / V.norm(dim=1, keepdim=True)
        torch.testing.assert_close(layer.weight, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(layer.weight.norm(dim=1), layer.g, rtol=0, atol=1e-13)
        torch.testing.assert_close(layer(x), x @ expected.T + plain.bias, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged(model)(TOKENS), model(TOKENS), rtol=0, atol=1e-12)


def test_doras_gradient_is_the_losss():
    """Along every trained number, by differences; at equal rows of zero too, whose lengths have no derivative."""
    layer = next(m for m in drawn_dora().modules() if isinstance(m, DoRA))
    x, names = torch.randn(2, D, dtype=torch.float64), ("A", "B", "g")

    def output(*parts: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parts, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, tuple(getattr(layer, n).detach().clone().requires_grad_() for n in names))
    empty = nn.Linear(3, 2).double()
    empty.weight.data[0] = 0
    zero = DoRA(empty.requires_grad_(False), torch.randn(2, 3, dtype=torch.float64), 1.0)
    assert torch.equal(zero(x[:, :3]), empty(x[:, :3]))
    grads = torch.autograd.grad(zero(x[:, :3]).sum(), [zero.A, zero.B, zero.g])
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    "method", [pf.FPFC(), pf.FedACS(), pf.Scaffold(), pf.FedCET(), pf.FlexLoRA()], ids=lambda m: m.name
)
def test_methods_that_need_linear_updates_refuse_dora(method):
    model = adapted(transformer(), "dora:r=2,targets=query")
    with pytest.raises(ConfigError, match=rf"found dora, as in layer 'blocks.0.query'.* expected .* for {method.name}"):
        pf.fit(model, FED, method, rounds=1)
    mean = pf.fit(model, FED, pf.FedAvg(lr=0.1), rounds=1)
    assert np.isfinite(mean.final["train"]["loss"]).all()


def test_the_adapter_as_a_setting_of_fit(tmp_path):
    words = "lora:r=2,targets=query"
    run = pf.fit(transformer(), FED, pf.FedAvg(lr=0.1), adapter=words, rounds=1, seed=5, out=tmp_path / "a")
    other = pf.fit(adapted(transformer(), words, seed=5), FED, pf.FedAvg(lr=0.1), rounds=1, seed=5)
    assert torch.equal(run.personal, other.personal)
    opened = pf.Run.open(tmp_path / "a", model=transformer())
    assert torch.equal(opened.personal, run.personal)
    assert torch.equal(opened.model(1)(TOKENS), run.model(1)(TOKENS))
    own, all_of_it = 2 * 2 * D + HEAD, sum(q.numel() for q in transformer().parameters()) + 2 * 2 * 2 * D
    assert (
        f"({own} parameters trained, {words_size(8 * own)} of {words_size(8 * all_of_it)})"
        in run.report(tmp_path / "page.html").read_text()
    )
    with pytest.raises(ModelError, match="has an adapter"):
        adapted(adapted(transformer(), words), words)


REFUSED = {
    "lorra": "found 'lorra' (did you mean 'lora'?), expected lora, dora, probe, biases, norms, last",
    "lora:rank=3": "has no option 'rank'",
    "lora:r=0": "adapter.r: found '0', expected an integer of at least 1",
    "lora:targets=qury": "no linear layer ends in 'qury'",
    "lora:alpha=3": "are for train=factors",
    "last": "expected last:K",
    "last:x": "adapter.k: found 'x'",
}


@pytest.mark.parametrize(("words", "text"), REFUSED.items())
def test_words_that_mean_nothing_are_refused_in_one_line(words, text):
    with pytest.raises(ConfigError) as error:
        adapted(transformer(), words)
    assert text in str(error.value)
