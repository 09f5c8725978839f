"""The board: its budget, its groups, and that a cell comes out again."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from authors import five, har, leaf, office, speeches, written
from matplotlib.text import Text
from scipy.stats import t

from polyfed.algorithms import shipped
from polyfed.base.errors import DataError
from polyfed.compute import compiled, solvers, steps
from polyfed.compute import gradients as torch_gradients
from polyfed.core.algorithm import REGISTRY
from polyfed.data import load
from polyfed.models import build
from polyfed.report.pairs import Interval
from polyfed.report.style import canvas, styled
from polyfed.runs.trainer import fit
from polyfed.runs.userfile import algorithms_of
from polyfed_papers import natural
from polyfed_papers.board import (
    APART,
    BESIDE,
    FULL,
    HELD,
    LAST,
    NATURAL,
    PARTS,
    SECOND,
    SMALL,
    UNCOUNTED,
    WORK,
    agreed,
    cell,
    contenders,
    evaluated,
    gradients,
    images,
    made,
    refusal,
    rounds_within,
    score,
    start,
)
from polyfed_papers.board import board as boards
from polyfed_papers.recipes import Bench, find

MINE = """
from dataclasses import dataclass
from polyfed.algorithms import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    "FedAvg of another name."
    name = "mine"
"""


@pytest.fixture
def counted(monkeypatch):
    """Gradients of batches that are taken, by torch alone; of a whole client as many as its samples make batches."""
    found, plain = [0.0], torch_gradients.undecayed

    def count(net, w, batch, need_loss=False, also=None):
        sizes = [1.0] * len(w) if batch.live is None else batch.live.reshape(-1).tolist()
        if (longest := batch.x.shape[1]) > WORK["batch_size"]:
            whole = [longest] * len(w) if batch.sizes is None else batch.sizes
            sizes = [float(size) / WORK["batch_size"] for size in whole]
        found[0] += sum(sizes)
        return plain(net, w, batch, need_loss, also)

    for module in (torch_gradients, steps):
        monkeypatch.setattr(module, "undecayed", count)
    for module, name in ((solvers, "gradient_on"), (solvers, "descent_on"), (steps, "descent_on")):
        monkeypatch.setattr(module, name, lambda *args: None)
    for name in ("gradient", "descend_", "train"):
        monkeypatch.setattr(compiled, name, lambda *args, **given: None)
    return found


@pytest.mark.parametrize("name", [
    "fedavg", "ditto", "fedrep", "fedala", "fedpac", "apfl", "fedem", "fedrc", "fedrod", "pfedme", "per-fedavg",
    "fedlin", "fedtrack", "fedspa",
])  # fmt: skip
def test_gradients_are_counted(name, counted):
    """Between one round and three, so that what a rehearsal takes is left out; a chunk of one waits for nobody."""
    data, kind = load("digits", flat=True).partition("iid", 4, seed=0), "mixture" if name in PARTS else "mlp"
    model = build(kind, (64,), 10, seed=0, hidden=4, **({"by_class": True} if name == "fedrc" else {}))
    method, spent = made(REGISTRY.find(name), start(REGISTRY.find(name))), []
    for rounds in (1, 3):
        counted[0] = 0.0
        run = fit(model, data, method, rounds=rounds, evaluate_every=0, seed=0, chunk=1, **WORK)
        spent.append((counted[0], data.n * gradients(method, run)))
    (before, said), (after, said_after) = spent
    nets = PARTS.get(name, 1)  # a gradient of a mixture is one of each of its nets
    unused = 2 * sum(data.train.counts) / WORK["batch_size"] if name in LAST else 0.0  # steps that nobody deploys
    assert nets * (after - before) - unused == pytest.approx(said_after - said, rel=1e-6)


@pytest.mark.parametrize(("name", "each"), [("fedavg-ft", 5), ("fedbabu", 5), ("per-fedavg", 10)])
def test_of_steps_for_deployment_alone_the_last_ones_count(name, each):
    data, cls = load("digits", flat=True).partition("iid", 4, seed=0), REGISTRY.find(name)
    method, spent = made(cls, start(cls)), []
    for rounds in (1, 3):
        run = fit(build("mlp", (64,), 10, seed=0, hidden=4), data, method, rounds=rounds, evaluate_every=0, **WORK)
        spent.append(gradients(method, run))
    epochs = start(cls)[1] if name == "fedbabu" else 1
    assert spent[1] - spent[0] == pytest.approx(2 * each)
    assert spent[0] - each == pytest.approx(epochs * 18, rel=0.01)  # 360 samples make 18 batches


def test_an_edge_gives_all_methods_of_a_setting_more_trials(monkeypatch, tmp_path):
    """The best step size lies beyond the ladder for one method: the other, whose search was over, goes on as well."""
    tried = Counter()

    def counting(bench, name, setting, cls, budget, at):
        tried[cls.name] += 1
        return -abs(at[0] - (20.0 if cls.name == "fedavg" else 0.1))

    monkeypatch.setattr("polyfed_papers.board.score", counting)
    methods = [REGISTRY.find("fedavg"), REGISTRY.find("local")]
    trials = agreed(Bench(tmp_path), "hospitals", SMALL["hospitals"], methods, 1, 4)
    assert trials == 8  # 0.03, 0.1, 0.3, 1, 3, 9, 27 and one more between them
    assert tried["fedavg"] == tried["local"] == 4 + 8


@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "fedrep", "fedlin"])
def test_the_budget_is_used_up_and_not_exceeded(name):
    setting, cls = SMALL["hospitals"], REGISTRY.find(name)
    method, budget = made(cls, start(cls)), 200
    rounds, said = rounds_within(setting, method, budget)
    run = fit(
        setting.model(cls, 1000), setting.federation(1000), method, rounds=rounds, evaluate_every=0, seed=1000, **WORK
    )
    spent = gradients(method, run)
    assert spent == pytest.approx(said)
    assert budget - spent / rounds < spent <= budget
    trial = evaluated(setting, setting.federation(1000), method, rounds, 1000, "test")
    assert ([*trial.final], trial.trained.digest()) == (["test"], run.trained.digest()), "and nothing else is looked at"


def test_a_value_that_one_round_cannot_afford_is_no_choice_and_clients_without_validation_do_not_count(tmp_path):
    """Fine-tuning that is counted once could otherwise grow for ever."""
    cls, bench = REGISTRY.find("fedbabu"), Bench(tmp_path)
    affordable, longer = (score(bench, "hospitals", SMALL["hospitals"], cls, 60, (0.1, k)) for k in (1, 50))
    assert affordable > longer == -float("inf")
    setting, cls = FULL["cohorts"], REGISTRY.find("local")
    assert 0 in setting.federation(UNCOUNTED, HELD).validation.counts
    assert 0 <= score(bench, "cohorts", setting, cls, 20, start(cls)) <= 1


def test_all_methods_are_there_or_left_out_by_name(tmp_path):
    ours = {*shipped()}
    assert set(contenders(Bench(tmp_path))) | set(APART) == ours
    assert not set(contenders(Bench(tmp_path))) & set(APART)
    assert set(SECOND) <= ours
    assert len(FULL) == 10
    assert boards.worst_decile([0.5, 0.9, 0.1]) == 0.1, "a mean of whole clients"
    assert boards.worst_decile([k / 20 for k in range(20)]) == pytest.approx(0.025)
    fpfc = REGISTRY.find("fpfc")
    assert made(fpfc, start(fpfc)).shared_layers == "body", "as in its paper"


def test_a_row_beside_a_method_is_that_method_by_other_settings_and_asks_the_others_for_nothing(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(boards.common, "agreed", lambda bench, name, setting, known, *_: asked.extend(known) or 1)
    bench = Bench(tmp_path, seeds=1)
    methods = {name: REGISTRY.find(name) for name in ("local", "fedavg-ft", "fedem")}
    found = boards.compared(bench, {"mixtures": SMALL["hospitals"]}, boards.Budget(60, 1), methods)
    assert {row[0].text for row in found.tables[1].rows} == {*methods, *BESIDE["mixtures"]}
    assert asked == [*methods.values()]
    for name in ("fedem", "fedrc"):
        made_of = [p.read_text() for p in tmp_path.rglob("config.toml") if f"{name}-following" in str(p)]
        assert made_of
        assert all(f'name = "{name}"' in text and 'responsibilities = "following"' in text for text in made_of)
    plain = [p.read_text() for p in tmp_path.rglob("config.toml") if "fedem-seed" in str(p)]
    assert all("following" not in text for text in plain)


def test_a_group_is_whoever_is_not_clearly_below_its_leader(monkeypatch):
    """b is not below a, c is; d is below both a and c. That b and c are not told apart does not join them."""
    clear = {("b", "a"): False, ("c", "a"): True, ("d", "a"): True, ("d", "c"): True}
    monkeypatch.setattr(boards, "gain", lambda _, one, over: Interval(-1, -2, -1 if clear[one, over] else 1, 3))
    verdicts = SimpleNamespace(ranked=["a", "b", "c", "d", "e"], means=dict.fromkeys("abcd", 0.0))
    assert boards.groups(SimpleNamespace(verdicts=verdicts)) == {"a": "A", "b": "A", "c": "B", "d": "C"}


def test_settings_are_chosen_by_the_mean_of_three_draws(monkeypatch, tmp_path):
    """One lucky draw chooses nothing, and a value that fails under one is never chosen; none of the draws counts."""
    values = {0.1: (0.9, 0.2, 0.2), 0.2: (0.5, 0.6, 0.4), 0.3: (0.9, None, 0.9)}
    asked = []

    def told(bench, setting, cls, budget, planned, draw):
        asked.append(draw)
        return values[planned()[0].lr][draw - UNCOUNTED]

    monkeypatch.setattr("polyfed_papers.board.drawn", told)
    cls, setting = REGISTRY.find("fedavg"), SMALL["hospitals"]
    scores = {lr: score(Bench(tmp_path), "hospitals", setting, cls, 1, (lr,)) for lr in values}
    assert max(scores, key=scores.get) == 0.2
    assert scores[0.3] == -np.inf
    assert len(asked) == 3 + 3 + 2  # what fails under one is not trained under the next
    counted = {seed for name in ("small", "full", "clusters", "natural") for seed in find(f"board/{name}").counted}
    assert not counted & set(asked)


def test_methods_are_ordered_by_their_mean_gain_and_not_by_their_group(monkeypatch):
    """A method of wide spread is in every first group, and stands where its mean puts it."""
    rng = np.random.default_rng(0)
    means = {"local": np.full(10, 0.7), "fedavg-ft": np.full(10, 0.72), "wide": 0.6 + 0.3 * rng.normal(size=10),
             "narrow": 0.75 + 0.01 * rng.normal(size=10)}  # fmt: skip
    grids = {k: SimpleNamespace(per_seed=lambda v=v: dict(enumerate(v))) for k, v in means.items()}
    of = SimpleNamespace(verdicts=SimpleNamespace(grids=grids), labels=[*means])
    study, errors = (SimpleNamespace(**vars(of), metric=SimpleNamespace(name=name)) for name in ("accuracy", "rmse"))
    monkeypatch.setattr(boards, "groups", lambda _: {"wide": "A", "narrow": "B", "local": "B", "fedavg-ft": "B"})
    monkeypatch.setattr(boards, "gain", lambda *_: Interval(0, -1, 1, 10))
    table = boards.over_all({"one": study, "two": study, "in points of another kind": errors})
    assert [row[0].text for row in table.rows] == ["narrow", "fedavg-ft", "local", "wide"]
    gaps = means["narrow"] - means["local"]
    half = t.ppf(1 - 0.025 / 3, 9) * np.sqrt(gaps.var(ddof=1) * (1 / 10 + 0.2 / 0.8))  # joint over three differences
    shown = next(cell.values for cell in table.rows[0] if "over_local" in cell.values)
    expected = (gaps.mean() - half, gaps.mean() + half)
    assert (shown["over_local_low"], shown["over_local_high"]) == pytest.approx(expected)


@pytest.mark.parametrize(("sign", "best"), [(1, 0.9), (-1, 0.5)])
def test_the_best_round_is_of_the_seeds_that_the_mean_is_of(sign, best, monkeypatch):
    rounds = pd.DataFrame({"seed": [0, 0, 1, 1], "merit": [0.5, 0.9, 0.1, 0.95]})  # under seed 1 it diverged
    monkeypatch.setattr(boards, "curves", lambda _: rounds)
    part = SimpleNamespace(metric=SimpleNamespace(name="merit", sign=sign))
    assert boards._best_rounds(part, [0]) == [best]


def test_a_cell_has_one_digest_and_a_new_method_joins_by_one_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    names = algorithms_of(tmp_path / "mine.py")

    def one(folder, name):
        bench = Bench(tmp_path / folder, seeds=2, rehearse=True, joining=names)
        return boards.digest(cell(bench, "hospitals", SMALL["hospitals"], contenders(bench)[name], 1, 1))

    first = one("one", "fedavg")
    assert one("two", "fedavg") == one("one", "mine") == first
    assert one("one", "fedavg-ft") != first
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("summary.json")}
    assert one("one", "fedavg") == first
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_only_boards_take_further_methods(cli, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    said = cli("reproduce", "fedslr/table2", "--algorithm", str(tmp_path / "mine.py"))
    assert said.status == 2
    assert said.err.splitlines() == [
        "polyfed: --algorithm: fedslr/table2 takes no further method; the boards do: polyfed reproduce board/small"
    ]


def users(name, root):
    rng = np.random.default_rng(0)
    if name == "femnist":
        made = {f"f{k}": written(*rng.integers(0, 62, 12).tolist()) for k in range(3)}
    else:
        texts = [["".join(rng.choice([*natural.LETTERS], 81)) for _ in range(12)] for _ in range(3)]
        made = {f"role-{k}": ([t[:80] for t in some], [t[80] for t in some]) for k, some in enumerate(texts)}
    leaf(root / name / "data" / "all_data" / "all_data_0.json", made)


def pupils(root):
    x, y = np.random.default_rng(0).normal(size=(30, 3)), np.arange(30.0)
    root.mkdir()
    np.savez(root / "school.npz", X=x, y=y, school=np.repeat([1, 2, 3], 10))


MADE = {
    "har": lambda root: har(root, ((1, 2, 3) * 9, (1, 2, 3)), ((1, 6, 2) * 9, (3, 4, 5))),
    "femnist": lambda root: users("femnist", root),
    "digit-5": lambda root: five(root / "Digit-Five", 10),
    "office-caltech10": lambda root: office(root / "office_caltech_10"),
    "shakespeare": lambda root: users("shakespeare", root),
    "tiny-shakespeare": lambda root: speeches(root, ("All", "First Citizen")),
    "school": pupils,
}


@pytest.mark.parametrize("name", MADE)
def test_the_natural_board_takes_what_the_folder_has_and_names_the_rest(name, tmp_path, monkeypatch):
    digits = replace(NATURAL["digit-5"], options=(("samples", 4),))  # of ten images that `five` makes
    monkeypatch.setitem(NATURAL, "digit-5", digits)
    MADE[name](tmp_path / "data")
    bench = Bench(tmp_path / "out", "small", 1, data_dir=tmp_path / "data", rehearse=True)
    outcome = find("board/natural").run(bench)
    assert [table.title.partition(":")[0] for table in outcome.tables[1:-1]] == [name]
    absent = [note for note in outcome.notes if note.startswith("Left out: ")]
    assert [note.split(": ")[1] for note in absent] == [other for other in NATURAL if other not in (name, "hospitals")]


def test_the_natural_board_of_an_empty_folder_has_the_hospitals(tmp_path):
    outcome = find("board/natural").run(Bench(tmp_path / "out", "small", 1, data_dir=tmp_path, rehearse=True))
    assert outcome.tables[1].title == "hospitals: 4 clients"
    assert sum(note.startswith("Left out: ") for note in outcome.notes) == len(NATURAL) - 1


def test_data_that_are_not_there_are_no_method_s_reason_to_refuse(tmp_path):
    """Else a recipe whose folder is missing says that every method refuses."""
    with pytest.raises(DataError, match="school"):
        refusal(replace(NATURAL["school"], folder=str(tmp_path)), REGISTRY["fedavg"])


@pytest.mark.parametrize("clients", [90, 12])  # of one batch each, and of two to seven
def test_fedavg_by_torch_alone_is_fedavg(clients):
    """Equal scores of uneven clients."""
    data = load("digits").partition("dirichlet:1.0", clients, seed=0, test_fraction=0.5)
    net = build("mlp", data.input_shape, 10, seed=0, hidden=16)
    run = fit(net, data, REGISTRY.find("fedavg")(0.3), rounds=20, evaluate_every=0, seed=0, **WORK)
    ours, alone = float(np.mean(run.final["test"]["accuracy"])), images.plain(net, data, 0.3, 20, 0, **WORK)
    assert ours > 0.3
    assert alone == pytest.approx(ours, abs=2e-3)


def test_the_board_of_images_needs_fashion_mnist(tmp_path, refused):
    with refused("fashion-mnist", tmp_path):
        find("board/images").run(Bench(tmp_path / "out", data_dir=tmp_path))


@pytest.mark.parametrize("sign", [1, -1])
def test_names_of_a_picture_of_bytes_cover_neither_each_other_nor_a_point(sign):
    """Ten methods, seven of which are dearer and better by a hair, and two that are worse."""
    with styled():
        figure, (axes,) = canvas(5.6, 3.6)
        front = {f"method-{k}": (1e6 * 1.001**k, sign * (90 + k * (0.01 if k else 1))) for k in range(8)}
        points = [*front.values(), (3e6, sign * 80), (2e5, sign * 85)]
        axes.plot(*zip(*points, strict=True), "o")
        axes.set_xscale("symlog", linthresh=1e5)
        axes.yaxis.set_inverted(sign < 0)
        boards._named(figure, axes, front)
        figure.draw_without_rendering()
    boxes = [Text.get_window_extent(name) for name in axes.texts]  # without their lines
    assert len(boxes) == 8
    assert not any(one.overlaps(other) for k, one in enumerate(boxes) for other in boxes[:k])
    assert not any(box.contains(*axes.transData.transform(at)) for box in boxes for at in points)
