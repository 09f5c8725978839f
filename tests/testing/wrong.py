"""FedAvg spoilt in one way after the other: for each row of the conformance table a method that it must catch."""

import sys
from dataclasses import dataclass

import torch

import polyfed as pf
from polyfed.engines.local import LocalEngine
from polyfed_testing import rows


@dataclass(frozen=True)
class Base(pf.Algorithm, abstract=True):
    """FedAvg, to be spoilt."""

    lr: float = pf.setting(0.1, ge=0, source="ours", doc="Step size of local SGD.")

    def local_update(self, task, client, down, data, round):
        return {}, {"w": pf.local_sgd(task, down["w"], data, self.lr)}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples)}


@dataclass(frozen=True)
class HidesASetting(Base):
    """With a setting mu."""

    mu: float = 0.1


class HidesItsAxes(Base):
    def init_server(self, task, w0, n):
        return {"w": w0, "all": w0.expand(n, -1).clone()}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w"), "all": server["all"].index_copy(0, round.ids, up["w"])}


class KeepsStateInItself(Base):
    def aggregate(self, server, up, round):
        kept = self.__dict__.setdefault("kept", [])
        kept.append(up.mean("w", round.samples))
        return {"w": torch.stack(kept).mean(0)}


class DrawsUnkeyed(Base):
    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {}, {"w": w + 1e-3 * torch.randn_like(w)}


class NeverTrains(Base):
    def local_update(self, task, client, down, data, round):
        return {}, {"w": down["w"].clone()}


class WeighsByPosition(Base):
    def aggregate(self, server, up, round):
        return {"w": up.mean("w", 1.0 + round.ids.to(up["w"].dtype))}


class MixesItsChunk(Base):
    """What its clients remember is the mean over their chunk: the sum over all clients does not show it."""

    def init_client(self, task, w0):
        return {"d": torch.zeros_like(w0)}

    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        d = (w - down["w"]).mean(0).expand_as(w).clone()
        return {"d": d}, {"w": w + client["d"]}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w")}


class LooksAtTestSamples(Base):
    def local_update(self, task, client, down, data, round):
        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), LocalEngine):
            frame = frame.f_back
        seen = frame.f_locals["self"].data["test"].x.double().mean().to(down["w"].dtype)
        return {}, {"w": pf.local_sgd(task, down["w"], data, self.lr) + 1e-3 * seen}


class TakesTheSamplesAsTheyAre(Base):
    def local_update(self, task, client, down, data, round):
        every, w = data.whole(), down["w"].clone()
        for _ in range(4):
            w -= self.lr * task.gradient(w, every._replace(weight=None, sizes=None))[0]
        return {}, {"w": w}


class SendsWhatItKeeps(Base, pf.Personal):
    """Right, as long as the worker copies what is kept."""

    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {"w": w}, {"w": w}


class CountsItsRounds(Base):
    def downlink(self, server, round):
        return pf.Down(shared={"w": server["w"] + 1e-3 * len(self.__dict__.setdefault("seen", []))})

    def aggregate(self, server, up, round):
        self.__dict__.setdefault("seen", []).append(0)
        return {"w": up.mean("w", round.samples)}


class LeaksItsModel(Base, pf.Personal):
    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, client["w"], data, self.lr)
        return {"w": w}, {"w": 0.9 * w + 0.1 * down["w"]}


class LosesItsSum(Base):
    def init_client(self, task, w0):
        return {"c": torch.zeros_like(w0)}

    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {"c": client["c"] + w - down["w"]}, {"w": w}

    def conserved(self, server, clients):
        return {"sum c_i = 0": clients["c"].sum(0)}


class Unweighed(dict):
    def values(self):
        return []


class SendsPastTheLedger(Base):
    def downlink(self, server, round):
        return pf.Down(shared=Unweighed(w=server["w"]))


class GoesThroughFloat32(Base):
    def aggregate(self, server, up, round):
        return {"w": up.mean("w", round.samples).float()}


class DrawsInThePrecisionOfTheRun(Base):
    def init_server(self, task, w0, n):
        draws = torch.Generator().manual_seed(0)
        return {"w": w0, "drawn": torch.rand(32, generator=draws, dtype=w0.dtype)}

    def aggregate(self, server, up, round):
        return server | {"w": up.mean("w", round.samples)}


class DropsSmallClients(Base):
    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {}, {"w": torch.where(round.samples[:, None] >= 8, w, down["w"])}


class StartsFromNothing(Base, pf.Personal):
    def init_client(self, task, w0):
        return {"w": w0 * float("nan")}

    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {"w": w}, {"w": w.clone()}


class HidesItsDivergence(Base):
    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {}, {"w": w.nan_to_num().clamp(-1, 1)}


class RootsOfAge(Base):
    def aggregate(self, server, up, round):
        fresh = (1.0 - (round.t - round.sent)).sqrt()
        return {"w": server["w"] + fresh.mean() * (up.mean("w") - server["w"])}


class RootsOfUploads(Base):
    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {}, {"w": w, "v": w**2}

    def aggregate(self, server, up, round):
        return {"w": up.mean("w") + 1e-3 * up["v"].sqrt().mean(0)}


class DeploysInPlace(Base):
    def deployment(self, server, round):
        server["w"].mul_(0.9)
        return self.downlink(server, round)


class DeploysTheMean(Base, pf.Personal):
    def local_update(self, task, client, down, data, round):
        w = pf.local_sgd(task, down["w"], data, self.lr)
        return {"w": w}, {"w": w.clone()}

    def personal(self, task, client, down):
        return (client["w"] + client["w"].mean(0)) / 2


WRONG = (
    (HidesASetting(), rows.every_setting_has_a_meaning),
    (HidesItsAxes(), rows.the_server_state_says_its_axes),
    (DrawsUnkeyed(), rows.same_seed_same_bits),
    (KeepsStateInItself(), rows.same_seed_same_bits),
    (NeverTrains(), rows.same_seed_same_bits),
    (WeighsByPosition(), rows.relabelling_the_clients_relabels_the_result),
    (MixesItsChunk(), rows.chunks_and_workers_do_not_change_the_models),
    (LooksAtTestSamples(), rows.test_samples_are_for_metrics_alone),
    (TakesTheSamplesAsTheyAre(), rows.a_sample_of_weight_two_counts_twice),
    (SendsWhatItKeeps(), rows.no_message_lies_in_the_memory_of_a_private_row),
    (CountsItsRounds(), rows.the_downlink_is_a_function_of_the_server_state_alone),
    (LeaksItsModel(), rows.a_personal_model_is_either_the_uplink_or_unknown_to_it),
    (LosesItsSum(), rows.sums_over_clients_hold_with_any_cohort),
    (SendsPastTheLedger(), rows.every_byte_is_billed),
    (GoesThroughFloat32(), rows.numbers_stay_in_the_precision_of_the_run),
    (DrawsInThePrecisionOfTheRun(), rows.a_start_is_the_same_in_both_precisions),
    (DropsSmallClients(), rows.a_client_smaller_than_a_batch_trains),
    (StartsFromNothing(), rows.a_client_that_is_never_picked_is_evaluated),
    (KeepsStateInItself(), rows.a_stopped_run_resumes_to_the_same_bits),
    (HidesItsDivergence(), rows.divergence_is_loud),
    (RootsOfAge(), rows.late_replies_are_taken_or_refused),
    (RootsOfUploads(), rows.means_are_protected_by_a_robust_rule),
    (DeploysInPlace(), rows.it_admits_a_newcomer),
    (DeploysTheMean(), rows.newcomers_do_not_see_each_other),
)
