"""Early stopping at sites: the server goes by their scores, and each makes its own model of the best round."""

import pytest
from hospitals import CLIENT, Between, at_sites, on_one_machine, same, study

STOP = {"rounds": 40, "stop": "patience:5", "metrics": "log-loss", "evaluate-every": 1, "checkpoint-every": 3}
DITTO, ROWS = 'name = "ditto"\nlr = 0.5', "validation-fraction = 0.3\n"


class Killed(BaseException):
    """Nothing can be saved any more."""


def test_the_same_round_and_bits_as_on_one_machine_after_kills_on_both_sides(tmp_path):
    file, data, sites = study(tmp_path, DITTO, ROWS + CLIENT, **STOP)
    here = on_one_machine(file, data)
    best, last = here.trained.t, here.rounds
    assert 0 < best < last < 40
    left = {best + 1, last - 1}

    def kill(name, question):
        if (t := question.head.get("t")) in left:
            left.discard(t)
            sites.members.clear()
            raise Killed
        return question

    for again in (False, True):
        with pytest.raises(Killed):
            at_sites(file, sites, Between(sites, asked=kill), resume=again)
    wire = Between(sites)
    there = at_sites(file, sites, wire, resume=True)
    assert (there.rounds, there.trained.t, there.status) == (last, best, "finished")
    same(here, there, sites)
    assert here.final["test"]["log-loss"].tolist() == there.final["test"]["log-loss"].tolist()
    (*_, end) = [q.head for q in wire.asked() if q.head["kind"] == "end"]
    assert end["base"] == [best - 1, 0]
    assert len(list((tmp_path / "vaults" / "oslo").glob("*-0.safetensors"))) <= 5 + 2 * 3 + 1
