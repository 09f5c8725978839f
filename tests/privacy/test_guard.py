"""The door of a private run: two requests have unrelated noise, and no sum leaves for too few."""

from itertools import combinations

import numpy as np
import pytest
import torch

from polyfed.base.errors import RunError
from polyfed.compute.batches import Batch
from polyfed.compute.split import Split
from polyfed.core.messages import Round
from polyfed.runs.privacy import Privacy
from polyfed_privacy.guard import Guard, Rows, clipped_words, digest_of, lengths
from polyfed_privacy.ledger import Entry, Ledger, Spent
from polyfed_privacy.planned import Planned

N = 2000
NAMES = ("bern", "oslo", "riga", "wien")
WANTED = {"w": {"plain", "weighted"}, "v": {"plain"}}
SECRET = bytes(range(32))


def guard(noise="shared", secret=SECRET, counts=(1, 1, 1, 1), rounds=5, cohort=4, ledger=None, **given) -> Guard:
    privacy = Privacy(**({"sums": "secure", "epsilon": 2.0, "clip": 1.0, "unit": "site", "noise": noise} | given))
    n = len(counts)
    x, offsets = torch.zeros(sum(counts), 3), np.array([0, *np.cumsum(counts)])
    plan = Planned(privacy, rounds=rounds, releases=rounds, numbers=2 * N, rate=0.1, cohort=cohort)
    names = [*NAMES, *(f"site-{k}" for k in range(n - 4))][:n]
    split = Split(x, torch.zeros(sum(counts)).long(), offsets)
    return Guard(plan, names, np.array(counts), secret, ledger or Ledger(), "hospitals", split)


def asked(ids=(0,), t=0, phase=0) -> Round:
    at = torch.tensor(ids)
    return Round(t, 4, phase, at, torch.ones(len(at)), torch.full((len(at),), t))


def message(level: float = 0.0, **more) -> dict[str, torch.Tensor]:
    """The same for all: a view, as the engine has it."""
    return {"w": torch.full((1, N), level).expand(1, N), **more}


def up(received) -> dict[str, torch.Tensor]:
    """A client that has not moved, so that what leaves is noise alone."""
    return {"w": received["w"][:1].clone().contiguous(), "v": torch.zeros(1, N)}


def unrelated(found: dict[str, np.ndarray]) -> None:
    for (one, a), (other, b) in combinations(found.items(), 2):
        a, b = a.astype(float), b.astype(float)
        assert a.std() > 0
        assert b.std() > 0
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.12, f"{one} and {other}: one noise for two messages"  # 5 deviations


REQUESTS = {  # what differs from the first
    "the first": {},
    "another model": {"level": 0.5},
    "a model that differs in one bit": {"level": 1e-30},
    "another tensor beside it": {"more": {"c": torch.ones(1, 2)}},
    "one of another name": {"more": {"d": torch.ones(1, 2)}},
    "another round": {"t": 1},
    "another exchange of the round": {"phase": 1},
    "another site": {"ids": (1,)},
    "another run": {"secret": bytes(32)},
    "another budget": {"epsilon": 3.0},
    "another question at the same model": {"asked_for": b"other local steps"},
}  # fmt: skip


def leaving(noise, level=0.0, more=None, t=0, phase=0, ids=(0,), asked_for=b"", **how) -> dict[str, np.ndarray]:
    """The noise in everything that one request makes leave, by tensor and sum."""
    door, received, round = guard(noise, **how), message(level, **(more or {})), asked(ids, t, phase)
    door.asked = asked_for
    sums = door.leave(up(received), received, round, WANTED, 4)
    if noise == "server":
        base = {key: words.clone() for key, words in sums.items()}
        opened = door.opened(sums, received, round._replace(samples=torch.ones(1)))
        scale = 2.0**30
        return {
            f"{n} {kind}": ((opened[n, kind].double() - (level if n == "w" else 0)) * scale).numpy() for n, kind in base
        }
    return {f"{n} {kind}": words.numpy() for (n, kind), words in sums.items()}


@pytest.mark.parametrize("noise", ["shared", "server"])
def test_two_requests_that_differ_in_anything_have_unrelated_noise_and_one_request_has_one(noise):
    """Sites' rows have the same sizes, so that no deviation tells two sums apart."""
    found = {}
    for name, given in REQUESTS.items():
        if not (noise == "server" and name == "another site"):  # it adds noise once, whoever has sent
            found |= {f"{name}, {at}": of for at, of in leaving(noise, **given).items()}
    unrelated(found)
    again = leaving(noise)
    assert all(np.array_equal(of, found[f"the first, {at}"]) for at, of in again.items())


def test_sites_that_train_in_one_call_add_the_noise_that_each_adds_alone():
    one, two = (leaving("shared", ids=(k,)) for k in (0, 1))
    received = message()
    both = guard().leave({k: t.expand(2, N).clone() for k, t in up(received).items()},
                         {"w": torch.zeros(1, N).expand(2, N)}, asked((0, 1)), WANTED, 4)  # fmt: skip
    for (name, kind), words in both.items():
        assert np.array_equal(words.numpy(), one[f"{name} {kind}"] + two[f"{name} {kind}"])


def test_a_sites_noise_is_made_of_a_secret_of_its_own():
    """In a simulation of the run's, and not of names and numbers that the server has."""
    made = {guard(secret=secret).site(i) for secret in (SECRET, bytes(32)) for i in range(4)}
    assert len(made) == 8
    assert {guard().run, guard(secret=bytes(32)).run} & {key.hex()[:16] for key in made} == set()


def rows_noise(level=0.0, t=0, phase=0, i=0, secret=SECRET, steps=1, at=0, asked_for=b"", **given) -> np.ndarray:
    """What a site's own noise adds to the sum of its clipped gradients, in its step number `at`."""
    door = guard("own", secret, unit="row", sums="open", **given)
    door.asked = asked_for
    received = {"w": torch.full((1, N), level).expand(1, N)}
    rows = Rows(door, None, received, asked((i,), t, phase))
    for k in range(steps):
        rows._calls[i] += 1
        found = rows._noisy(torch.zeros(N, dtype=torch.float64), 0, 1.0).numpy()
        if k == at:
            kept = found
    return kept


def test_the_noise_of_a_sites_own_steps_is_unrelated_from_step_to_step_and_request_to_request():
    found = {
        "first": rows_noise(), "second step": rows_noise(steps=2, at=1), "another model": rows_noise(0.5),
        "another round": rows_noise(t=1), "another exchange": rows_noise(phase=1), "another site": rows_noise(i=1),
        "another run": rows_noise(secret=bytes(32)), "another question": rows_noise(asked_for=b"other local steps"),
    }  # fmt: skip
    unrelated(found)
    assert np.array_equal(found["first"], rows_noise())


def test_every_byte_of_what_a_client_received_decides_its_digest_and_no_other_clients():
    shared, own = torch.arange(4.0)[None].expand(3, 4), torch.arange(6.0).view(3, 2)
    first = digest_of({"w": shared, "c": own}, 3)
    assert len(set(first)) == 3
    for k in range(4):
        changed = shared[:1].clone()
        changed[0, k] += 1e-3
        assert not set(digest_of({"w": changed.expand(3, 4), "c": own}, 3)) & set(first)
    for i in range(3):
        for k in range(2):
            changed = own.clone()
            changed[i, k] += 1e-3
            found = digest_of({"w": shared, "c": changed}, 3)
            assert [a == b for a, b in zip(first, found, strict=True)] == [j != i for j in range(3)]
    assert not set(digest_of({"w": shared, "d": own}, 3)) & set(first)
    assert not set(digest_of({"v": shared, "c": own}, 3)) & set(first)


# what leaves, and for whom


@pytest.mark.parametrize("sums", ["secure", "open"])
@pytest.mark.parametrize("threshold", [2, 3, 5])
@pytest.mark.parametrize("absent", [0, 1, 4, 6])
def test_no_sum_leaves_for_fewer_sites_than_agreed_nor_for_as_few_as_may_be_against_us(sums, threshold, absent):
    """Also where only some of the cohort train in this call."""
    noise = "shared" if sums == "secure" else "server"
    for cohort in range(1, 9):
        door = guard(noise, counts=(1,) * 8, sums=sums, threshold=threshold, absent=absent, rounds=50, cohort=8)
        least = max(absent + 1, threshold if sums == "secure" else 1)
        try:
            door.leave(up(message()), message(), asked(), WANTED, cohort)
            left = True
        except RunError:
            left = False
        assert left == (cohort >= least), cohort
        assert (door.ledger.spent("bern", "hospitals") > 0) == left


@pytest.mark.parametrize("clip", [0.01, 1.0, 30.0])
def test_no_change_that_leaves_is_longer_than_the_clip_and_a_shorter_one_is_left_as_it_is(clip):
    """Exactly, in steps of the lattice: the account rests on it. A number that is none counts as no change."""
    rng, steps = torch.Generator().manual_seed(0), int(clip * 2**30)
    for long in (0.0, 0.2, 0.999999, 1.0, 1.000001, 3.0, 1e6):
        changes = {"w": torch.randn(5, 40, generator=rng).double(), "b": torch.randn(5, 3, 2, generator=rng).double()}
        scale = long * clip / lengths(changes)
        changes = {name: t * scale.view(-1, *[1] * (t.dim() - 1)) for name, t in changes.items()}
        words = clipped_words(changes, steps)
        squares = [sum(int(v) ** 2 for t in words.values() for v in t[i].flatten().tolist()) for i in range(5)]
        assert max(squares) <= steps**2, long
        shorter = min(1.0, 1 / max(long, 1e-9))
        off = max(float((words[name].double() / 2**30 - changes[name] * shorter).abs().max()) for name in words)
        assert off <= (0.51 if long < 1 else 20) / 2**30, long
    spoiled = {"w": torch.tensor([[float("nan"), 0.0], [float("inf"), 0.5], [0.25 * clip, 0.0]]).double()}
    words = clipped_words(spoiled, steps)["w"]
    assert words.double().square().sum(1).sqrt().max() <= steps
    assert words[2].tolist() == [steps // 4, 0]


@pytest.mark.parametrize("noise", ["shared", "server"])
def test_a_run_begins_where_the_budget_holds_all_its_releases_and_not_where_it_lacks_a_thousandth_of_one(noise):
    """Of 5 rounds, `done` of them are booked by this run, the rest of the budget by earlier ones."""
    for done in (0, 2, 5):
        for over in (-1e-3, 1e-3):
            door = guard(noise, cohort=4, ledger=Ledger())
            once, run = door._once(2 * N, 0, 4), door.run
            mine = [Entry("bern", "hospitals", f"{run} {t}.0", "a", once) for t in range(done)]
            spare = door.limit - 5 * once + over * once
            before = [Entry("bern", "hospitals", "earlier 0.0", "a", max(0.0, spare))]
            door.ledger.book([*mine, *before], door.plan.budget, 2 * door.limit)
            if over < 0 or (done == 5 and spare <= 0):
                door.check_budget(0)
                door.check_budget(1)  # whose data are its own
            else:
                left = "is spent" if done == 5 else f"does not hold {5 - done} rounds"
                with pytest.raises(Spent, match=rf"'bern': its privacy budget of epsilon 2 at delta 1e-05 {left} \("):
                    door.check_budget(0)


def test_the_plan_of_a_run_spends_the_budget_and_no_more():
    for rounds in (1, 5, 300):
        for noise in ("shared", "server"):
            door = guard(noise, rounds=rounds)
            assert 0.999 * door.limit < rounds * door._once(2 * N, 0, 4) <= door.limit * (1 + 1e-6)


def test_a_row_is_counted_as_often_as_it_is_used():
    door = guard("own", counts=(4, 3, 1, 1), unit="row", sums="open")
    rows = Rows(door, None, {"w": torch.zeros(2, N)}, asked((0, 1)))
    for places in ([[0, 1], [4, 5]], [[1, 2], [5, 6]], [[3, 0], [5, 4]]):
        batch = Batch(torch.zeros(2, 2, 3), torch.zeros(2, 2).long(), places=np.array(places))
        for k in range(2):
            rows._use(k, batch)
    assert [rows.most(0), rows.most(1)] == [2, 3]
