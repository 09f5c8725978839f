"""The door: every answer that a site computes leaves through `out`, whatever made it, and through nothing else.

Here a policy is held against what was found: no sum or class of too few rows, no tensor but those of the terms, updates
clipped, scores rounded or kept. Whatever else is to be done to an answer before it leaves is done here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polyfed.base.errors import Refusal
from polyfed.base.part import Strict
from polyfed.core.messages import Form, State
from polyfed_audit.parts import withheld
from polyfed_sites import wire as m
from polyfed_sites.consent import Consent
from polyfed_sites.policy import Policy
from polyfed_sites.wire import Message, misfit


@dataclass(frozen=True)
class Door:
    """What may leave by a site's policy, and by the consent of its operator."""

    policy: Policy
    consent: Consent
    # makes the numbers of an answer a part of a sum, where sums are secure
    hide: Callable[[Message[Any], Message[Strict]], Message[Strict]] | None = None

    def out(
        self,
        asked: Message[Any],
        found: Message[Strict],
        forms: Mapping[str, Form] | None = None,  # of the tensors of an exchange
        rows: int = 0,  # of the part that scores are of
    ) -> Message[Strict]:
        """The answer as it leaves. Raises Refusal for what may not leave."""
        found = self._allowed(asked, found, forms or {}, rows)
        if self.hide is not None and isinstance(found.head, m.Sums | m.Labelled | m.Trained | m.Measured):
            return self.hide(asked, found)
        return found

    def _allowed(
        self, asked: Message[Any], found: Message[Strict], forms: Mapping[str, Form], rows: int
    ) -> Message[Strict]:
        head = found.head
        match head:
            case m.Sums():
                self._sums(asked.head, found.tensors)
            case m.Audited():
                keep = self.policy.audit == "quantiles"
                columns = {n: withheld(p, self.policy.least_count, keep) for n, p in head.columns.items()}
                return Message(m.Audited(columns=columns))
            case m.Labelled():
                self.policy.counts({"target": min((n for n in head.rows if n), default=0)}, "rows of each class of")
            case m.Trained():
                if wrong := misfit(found.tensors, forms):
                    raise Refusal(wrong)
                return Message(head, self.policy.clipped(found.tensors, asked.tensors))
            case m.Measured():
                return Message(self._scores(head, rows))
            case _:
                pass
        return found

    def _sums(self, asked: m.Request, found: State) -> None:
        """Refuse sums of columns of which fewer rows have a number than `least_count`."""
        if isinstance(asked, m.Pooled) and asked.settled.preparation is not None and "n" in found:
            numbers = [i.name for i in asked.settled.preparation.inputs if i.values is None]
            names = [name for name in numbers if asked.what != "counts" or name in asked.columns]
            self.policy.counts(dict(zip(names, found["n"].tolist(), strict=True)), "sums of column")

    def _scores(self, found: m.Measured, rows: int) -> m.Measured:
        if self.consent.metrics == "none" or found.metrics is None:
            return m.Measured(metrics=None, parameters=found.parameters)
        metrics = self.policy.rounded(found.metrics, rows)
        return found.model_copy(update={"metrics": metrics, "aggregate": self.consent.metrics == "aggregate"})
