"""Partitions: every sample to exactly one client, the same for the same seed, and each kind's own law."""

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import polyfed as pf
from polyfed.base.errors import ConfigError, DataError
from polyfed.data import (
    IID,
    Corruption,
    Dataset,
    Dirichlet,
    DirichletPrior,
    LabelSwap,
    Natural,
    Noise,
    Pathological,
    QuantitySkew,
    Rotation,
    Shards,
    Source,
    parse,
)


def source(size=600, classes=10, seed=0, shape=(1, 4, 4)):
    labels = np.random.default_rng(seed).permutation(np.arange(size) % classes)
    return Source(size, labels, classes, shape=shape, name="toy")


KINDS = [
    IID(),
    Dirichlet(0.3),
    Dirichlet(1e-4),
    Dirichlet(0.3, capped=True),
    Dirichlet(1.0, capped=True, least=3),
    DirichletPrior(0.1),
    DirichletPrior(1e-4),
    Pathological(2),
    Pathological(3, sizes="random"),
    Pathological(2, sizes="rest", order="label"),
    Shards(2),
    QuantitySkew(0.2),
    QuantitySkew(sigma=2.0),
    LabelSwap(Dirichlet(1.0)),
    Rotation(degrees=(0, 90)),
    Noise(sigma=0.3),
    Corruption(severity=3),
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 40), st.integers(10, 600), st.sampled_from([2, 10]), st.integers(0, 3))
def test_true_partition(kind, clients, size, classes, seed):
    """Union of the clients' samples = all samples, disjoint, at least two each, the same again for the same seed."""
    data = source(size, classes)
    try:
        dealt = kind.assign(data, clients, seed)
    except DataError:
        reject()
    assert len(dealt.indices) == clients
    assert np.array_equal(np.sort(np.concatenate(dealt.indices)), np.arange(size))
    assert min(len(index) for index in dealt.indices) >= 2
    again = kind.assign(data, clients, seed)
    assert all(np.array_equal(a, b) for a, b in zip(dealt.indices, again.indices, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_seed_matters_and_too_many_clients_are_refused(kind, refused):
    a, b = kind.assign(source(), 10, 0).indices, kind.assign(source(), 10, 1).indices
    assert any(not np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    for clients, *words in ((301, "600 samples", "301 clients"), (None, "number of clients"), (0, "clients: found 0")):
        with refused(*words):
            kind.assign(source(), clients)


def test_sizes_and_classes_of_the_simple_kinds():
    sizes = [len(index) for index in IID().assign(source(), 7).indices]
    assert max(sizes) - min(sizes) <= 1
    data = source(6000)
    for index in Shards(2).assign(data, 100).indices:
        assert len(index) == 60
        assert len(np.unique(data.labels[index])) <= 4
    sizes = sorted(len(index) for index in QuantitySkew(0.2).assign(data, 20).indices)
    assert sizes[0] == 2  # topped up
    assert sizes[-1] > 3 * 300


@pytest.mark.parametrize(
    ("kind", "clients", "words"),
    [
        (lambda: Pathological(2), 4, ("4 clients", "2 classes", "all 10")),
        (lambda: Pathological(11), 40, ("only 10 classes",)),
        (lambda: Pathological(2, sizes="some"), 4, ("'some'",)),
        (lambda: Pathological(2, order="alphabet"), 4, ("'alphabet'", "'label'")),
        (lambda: Dirichlet(0.01, least=29), 20, ("dirichlet:0.01", "20 clients", "29 of the 600 samples")),
        (lambda: LabelSwap(clusters=5), 20, ("10 classes", "at most 4")),
        (lambda: LabelSwap(), 3, ("4 clusters", "3")),
        (lambda: LabelSwap(pairs=((0, 10),)), 20, ("labels 0 to 9",)),
        (lambda: Rotation(degrees=(0, 45)), 8, ("multiples of 90",)),
        (lambda: Natural(), None, ("toy has no natural clients", "dirichlet:0.5")),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(kind, clients, words, refused):
    with refused(*words):
        kind().assign(source(), clients)


def test_images_and_labels_are_needed(refused):
    for shape in ((60,), (1, 4, 5)):
        with refused("square images", f"{list(shape)}"):
            Rotation().assign(source(shape=shape), 8)
    Rotation(degrees=(0, 180)).assign(source(shape=(1, 4, 5)), 8)
    regression = Source(100, name="school")
    for kind in (Dirichlet(), DirichletPrior(), Pathological(), Shards(), LabelSwap()):
        with refused(f"'{kind.word}'", "class labels", "school"):
            kind.assign(regression, 5)
    assert len(IID().assign(regression, 5).indices) == 5


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_marginals(alpha):
    """A client's share of a class has mean 1/n and variance (1/n)(1 - 1/n)/(n alpha + 1)."""
    n, data = 5, source(5000)
    dealt = [index for seed in range(60) for index in Dirichlet(alpha).assign(data, n, seed, min_samples=1).indices]
    shares = np.array([np.bincount(data.labels[index], minlength=10) / 500 for index in dealt])  # 3000
    variance = (1 / n) * (1 - 1 / n) / (n * alpha + 1)
    assert shares.mean() == pytest.approx(1 / n)
    assert shares.var() == pytest.approx(variance, rel=0.15)


def test_dirichlet_prior_sizes_are_equal_and_priors_have_their_variance():
    for size, sizes in ((6000, {100}), (605, {10, 11})):
        assert {len(index) for index in DirichletPrior(0.5).assign(source(size), 60, 0).indices} == sizes
    # with ample stock no class runs out, and a client's class counts are Dirichlet-multinomial
    plenty, m, C, alpha = source(200_000), 50, 10, 0.5
    few = DirichletPrior(alpha, samples=m).assign(plenty, 400, 0).indices
    assert {len(index) for index in few} == {m}
    assert len(np.unique(np.concatenate(few))) == 400 * m
    counts = np.array([np.bincount(plenty.labels[index], minlength=C) for index in few])
    variance = m * (1 / C) * (1 - 1 / C) * (m + C * alpha) / (1 + C * alpha)
    assert counts.mean() == pytest.approx(m / C)
    assert counts.var() == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("classes", [10, 100])
def test_dirichlet_prior_uses_an_image_once_and_with_restart_leaves_some_out(classes):
    """CIFAR's sizes: 100 clients of 500, priors Dirichlet(0.1).

    With restart a class with a stock of S is asked for D times, so max(0, S - D) of its images are used by nobody,
    D the sum of the clients' multinomial draws; the mean over seeds is that of the law."""
    data, seeds = source(50_000, classes), 8
    once = DirichletPrior(0.1).assign(data, 100, 0)
    assert {len(index) for index in once.indices} == {500}
    assert len(np.unique(np.concatenate(once.indices))) == 50_000
    unused = []
    for seed in range(seeds):
        dealt = DirichletPrior(0.1, restart=True).assign(data, 100, seed)
        assert {len(index) for index in dealt.indices} == {500}
        left = 50_000 - len(np.unique(np.concatenate(dealt.indices)))
        assert str(left) in dealt.notes[0]
        unused.append(left / 50_000)
    rng = np.random.default_rng(1)
    asked = [
        sum(rng.multinomial(500, rng.dirichlet(np.full(classes, 0.1)), 1)[0] for _ in range(100)) for _ in range(60)
    ]
    law = np.array([np.maximum(0, 50_000 / classes - d).sum() / 50_000 for d in asked])
    error = law.std() * (1 / seeds + 1 / len(law)) ** 0.5
    assert abs(np.mean(unused) - law.mean()) < 4 * error
    assert 0.04 < law.mean() < 0.15


@pytest.mark.parametrize(("k", "clusters"), [(1, 10), (2, 5), (5, 2), (3, None), (10, 1)])
@pytest.mark.parametrize("sizes", ["equal", "random", "rest"])
def test_pathological_gives_exactly_k_classes(k, clusters, sizes):
    data = source(6000)
    dealt = Pathological(k, sizes=sizes).assign(data, 20)
    held = [frozenset(data.labels[index].tolist()) for index in dealt.indices]
    assert ({len(h) for h in held}, dealt.clusters is None) == ({k}, clusters is None)
    if clusters:
        assert len(set(held)) == clusters
        assert len(set(zip(held, dealt.clusters.tolist(), strict=True))) == clusters


def test_pathological_of_pfllib():
    """Blocks of four clients: three get a tenth of the equal share to the whole, uniformly, the fourth what is left."""
    data, drawn = source(70_000), []
    for seed in range(40):
        dealt = parse("pathological:2,sizes=rest,order=label").assign(data, 20, seed)
        counts = np.stack([np.bincount(data.labels[index], minlength=10) for index in dealt.indices])
        blocks = counts.reshape(5, 4, 10)
        for b in range(5):
            assert (blocks[b].sum(0) == np.where(np.arange(10) // 2 == b, 7000, 0)).all()
            drawn.append(blocks[b, :3, 2 * b : 2 * b + 2].ravel())
            assert blocks[b, 3, 2 * b : 2 * b + 2].min() > 7000 / 4
    drawn = np.concatenate(drawn)
    assert 175 <= drawn.min() < drawn.max() < 1750
    assert drawn.mean() == pytest.approx((175 + 1750) / 2, rel=0.03)
    assert drawn.std() == pytest.approx((1750 - 175) / 12**0.5, rel=0.05)


def test_dirichlet_of_pfllib():
    """Whoever has an equal share already gets no further class, and all is drawn again until everyone has `least`."""
    data = source(70_000)
    for seed in range(5):
        dealt = parse("dirichlet:0.1,capped=true,least=40").assign(data, 20, seed)
        counts = np.stack([np.bincount(data.labels[index], minlength=10) for index in dealt.indices])
        assert counts.sum(1).min() >= 40
        before = np.cumsum(counts, axis=1)[:, :-1]
        assert (counts[:, 1:][before >= 3500] == 0).all()
        assert (before >= 3500).any()
    first = [Dirichlet(0.1, capped=True).assign(data, 20, seed).indices for seed in range(20)]
    short = [seed for seed, parts in enumerate(first) if min(map(len, parts)) < 200]
    kept = Dirichlet(0.1, capped=True, least=200)
    for seed in range(20):  # only what is too small is drawn again
        same = all(np.array_equal(a, b) for a, b in zip(kept.assign(data, 20, seed).indices, first[seed], strict=True))
        assert same == (seed not in short)
    assert 0 < len(short) < 20


def test_steps_compose_and_their_clusters_multiply():
    both = LabelSwap(Rotation(degrees=(0, 90)), clusters=4).assign(source(), 8)
    assert both.turns.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(set(both.clusters.tolist())) == 4
    blocks = Rotation(Pathological(5), degrees=(0, 180)).assign(source(), 6)
    assert len(set(blocks.clusters.tolist())) == 2
    twice = LabelSwap(LabelSwap(pairs=((0, 1),)), pairs=((1, 2),)).assign(source(), 2)
    assert twice.relabel[0, :3].tolist() == [2, 0, 1]  # 0 -> 1 -> 2
    three = Noise(LabelSwap(Rotation(degrees=(0, 180)))).assign(source(), 8)  # label, feature and concept at once
    assert all(getattr(three, name) is not None for name in ("relabel", "turns", "noise", "clusters"))


def test_noise_grows_from_client_to_client():
    """Its variance is sigma (i + 1) / n, in training and test samples alike; labels and samples are the base's."""
    rng = np.random.default_rng(0)
    data = Dataset("toy", rng.normal(size=(4000, 30)).astype(np.float32), np.arange(4000) % 4, classes=4)
    clean, noisy = (data.partition(how, clients=5, seed=1) for how in ("dirichlet:5", "dirichlet:5+noise:0.5"))
    assert noisy.clusters is None
    for a, b in ((clean.train, noisy.train), (clean.test, noisy.test)):
        assert torch.equal(a.y, b.y)
        added = [(b.client(i)[0] - a.client(i)[0]).numpy() for i in range(5)]
        np.testing.assert_allclose([v.var() for v in added], 0.1 * np.arange(1, 6), rtol=0.1)
    again = data.partition("dirichlet:5+noise:0.5", clients=5, seed=1)
    assert torch.equal(again.train.x, noisy.train.x)
    assert not torch.equal(data.partition("dirichlet:5+noise:0.5", clients=5, seed=2).train.x, noisy.train.x)


def test_corruptions_by_group(refused):
    """Each image as the formulas say, training and test alike; the groups are known."""
    data = pf.data.load("digits")
    clean = data.partition("iid", clients=10, seed=1)
    fed = data.partition("iid+corruption:clean/noise/blur/contrast/inverted,severity=2", clients=10, seed=1)
    assert fed.clusters.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    for part in ("train", "test"):
        pairs = [(getattr(clean, part).client(i)[0], getattr(fed, part).client(i)[0]) for i in range(10)]
        assert torch.equal(*pairs[0])
        before, after = (x.flatten(1) for x in pairs[2])
        gap = (after - before) / (before.amax(1) - before.amin(1))[:, None]
        assert gap.std() == pytest.approx(0.2, rel=0.1)
        kernel = torch.tensor([1, 4, 6, 4, 1.0]) / 16  # two passes inside an image
        inside = torch.nn.functional.conv2d(pairs[4][0], torch.outer(kernel, kernel)[None, None])
        assert torch.allclose(pairs[4][1][..., 2:-2, 2:-2], inside, atol=1e-5)
        before, after = (x.flatten(1) for x in pairs[6])
        assert torch.allclose(after.std(1), before.std(1) / 4, rtol=1e-4)
        assert torch.allclose(after.mean(1), before.mean(1), atol=1e-5)
        total = (pairs[8][0] + pairs[8][1]).flatten(1)
        assert torch.allclose(total, total[:, :1].expand_as(total), atol=1e-5)
    with refused("expected images", "[64]"):
        pf.data.load("digits", flat=True).partition("iid+corruption", clients=10)
    with refused("found 'corruption' twice"):
        data.partition("iid+corruption+corruption", clients=10)


def test_natural_clients(refused):
    data = Source(6, groups=np.array([1, 0, 1, 2, 2, 2]), group_names=("a", "b", "c"), name="toy")
    dealt = Natural().assign(data, None)
    assert [index.tolist() for index in dealt.indices] == [[1], [0, 2], [3, 4, 5]]
    assert dealt.names == ("a", "b", "c")
    Natural().assign(data, 3)
    with refused("toy has 3 natural clients", "5"):
        Natural().assign(data, 5)


@pytest.mark.parametrize(
    "kind", [*KINDS, Natural(), DirichletPrior(0.5, samples=50), LabelSwap(pairs=((0, 1), (2, 3)))]
)
def test_string_form_round_trip(kind):
    assert parse(str(kind)) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("iid", IID()),
        ("dirichlet:0.5", Dirichlet(0.5)),
        ("dirichlet:1e+1", Dirichlet(10.0)),
        ("dirichlet-prior:0.1,restart=true", DirichletPrior(0.1, restart=True)),
        ("pathological:2,sizes=rest,order=label", Pathological(2, "rest", "label")),
        ("dirichlet:0.1,capped=true,least=40", Dirichlet(0.1, True, 40)),
        ("pathological:classes-per-client=3", Pathological(3)),
        ("quantity:sigma=1.5", QuantitySkew(sigma=1.5)),
        ("dirichlet:1.0+label-swap:4", LabelSwap(Dirichlet(1.0))),
        ("label-swap", LabelSwap(IID())),
        ("iid + rotation:0/180", Rotation(degrees=(0, 180))),
        ("iid+corruption:clean/blur,severity=3", Corruption(kinds=("clean", "blur"), severity=3)),
        ("iid+label-swap:pairs=0-1/2-3", LabelSwap(pairs=((0, 1), (2, 3)))),
    ],
)
def test_parse(text, kind):
    assert parse(text) == kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dirichlt:0.5", ("'dirichlt'", "did you mean 'dirichlet'", "pathological")),
        ("", ("expected one of", "dirichlet")),
        ("dirichlet:a", ("'a'", "alpha")),
        ("dirichlet:0", ("alpha", "above 0")),
        ("dirichlet:0.1,least=0", ("least", "at least 1")),
        ("dirichlet:nan", ("alpha", "above 0")),
        ("dirichlet:0.5,beta=1", ("'beta=1'", "settings of Dirichlet: alpha, capped, least")),
        ("iid:3", ("'3'", "none")),
        ("pathological:2.5", ("'2.5'", "classes-per-client")),
        ("pathological:0", ("at least 1",)),
        ("dirichlet:0.5,alpha=1", ("'alpha=1'", "alpha")),
        ("dirichlet:0.1,least=18446744073709551616", ("least", "below 2^63")),
        (f"rotation:{'[' * 3000}", ("nested brackets",)),
        (f"shards:{'9' * 3900}", ("'9999", "an integer")),
        ("label-swap+iid", ("'iid'", "cannot follow")),
        ("dirichlet-prior:0.1,restart=maybe", ("restart",)),
        ("iid+rotation:0/x", ("degrees",)),
    ],
)
def test_parse_refuses(text, words, refused):
    with refused(*words):
        parse(text)
    for endless in (f"{text}{'9' * 5000}", f"{text}\0"):
        with pytest.raises(ConfigError, match="at most 4000 characters and none of them NUL"):
            parse(endless)
