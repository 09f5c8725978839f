"""Predictions: a new patient's row goes in as it is in a file, a probability per class or a number comes out."""

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from polyfed.base.arguments import checked
from polyfed.base.checkpoint import reason
from polyfed.base.columns import MISSING, together
from polyfed.base.errors import ConfigError, DataError, PolyfedError, RunError
from polyfed.base.settings import is_table, table_in
from polyfed.base.text import nfc
from polyfed.compute.losses import LOSSES, tokens
from polyfed.compute.split import restored
from polyfed.data.csv_files import Sheet, canonical, sheet_of
from polyfed.data.preparation import UNSEEN, Preparation
from polyfed.data.raw import Images, Text, following
from polyfed.data.repairs import repaired
from polyfed.metrics.metric import Predictions
from polyfed.metrics.scores import named
from polyfed.runs.build import make_model
from polyfed.runs.config import Where, model_of
from polyfed.runs.folder import safe
from polyfed.runs.result import Result, position


@checked
class Predictor:
    """One client's model, with the preparation of its rows.

    Parameters
    ----------
    model : nn.Module
        The model, put into evaluation mode.
    preparation : Preparation
        Preparation learnt from training rows.
    client : str
        Name of the client.
    """

    def __init__(self, model: nn.Module, preparation: Preparation, client: str):
        self.model, self.preparation, self.client = model.eval(), preparation, client

    @classmethod
    def open(cls, path: str | Path) -> "Predictor":
        """The model that `polyfed export` wrote; nothing is unpickled.

        Parameters
        ----------
        path : str or Path
            The safetensors file, with its JSON file beside it.

        Returns
        -------
        Predictor
            A predictor.
        """
        target = Path(path)
        about = target.parent / f"{target.stem}.json"
        try:
            facts = table_in(about.read_bytes())
            tensors = load_file(target)
            if "backbone" in facts:
                tensors |= load_file(target.parent / safe(str(facts["backbone"])))
        except (OSError, ValueError, SafetensorError) as e:
            raise RunError(f"{target}: no exported model with {about.name} beside it ({reason(e)})") from None
        if not is_table(facts.get("model")) or not isinstance(facts.get("client"), str):
            raise RunError(f"{about}: not what polyfed export writes")
        if not is_table(facts.get("preparation")):
            raise ConfigError(f"{about}: was not trained on CSV files, so raw rows cannot be prepared for it")
        if not is_table(facts.get("data")) or "name" not in facts["data"]:
            raise ConfigError(f"{about}: its model was given in Python, which no file holds; use Run.predict")
        preparation = Preparation.read(facts["preparation"], str(about))
        _known(facts.get("loss"), preparation, str(about))
        if "factorised" in facts:
            raise ConfigError(f"{about}: holds factors; export the model without --form factorised")
        try:
            table = {k: v for k, v in facts["model"].items() if k != "parameters"}
            shape = tuple(int(k) for k in facts["inputs"])
            model = make_model(model_of(table, Where(about, {}, {})), shape, int(facts["outputs"]), facts["seed"])
            model.to(getattr(torch, facts["dtype"])).load_state_dict(tensors)
        except PolyfedError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as e:
            raise RunError(f"{target}: does not fit the model that {about.name} describes ({_line(e)})") from None
        return cls(model, preparation, facts["client"])

    def predict(self, rows: pd.DataFrame, strict: bool = False) -> pd.DataFrame:
        """Answers for new rows, with warnings by column for gaps and for rows unlike all training rows.

        Parameters
        ----------
        rows : DataFrame
            [N] rows with the columns of the training files, in any order; others are not used.
        strict : bool
            Refuse rows beyond the range of the training rows, with a category that none had, or gaps as none had them.

        Returns
        -------
        DataFrame
            [N]: row (from 1), prediction, and a column of probabilities per class; written_here is the prediction as
            the client's own file writes it, where its repairs change that. A language model predicts the likeliest
            next token, beside the text's perplexity and number of tokens.
        """
        raw = self.preparation.raw
        used = {i.name for i in self.preparation.inputs} if raw is None else {raw.column}
        unread = [name for c in getattr(rows, "columns", ()) if (name := nfc(str(c))) not in used]
        sheet = sheet_of(rows, unread=unread, files=raw.column if isinstance(raw, Images) else None)
        answers, remarks = predicted(self, sheet, strict)
        for line in remarks:
            warnings.warn(line, stacklevel=3)  # in the line that calls this, behind `checked`
        return answers


def predicted(by: Predictor, sheet: Sheet, strict: bool = False) -> tuple[pd.DataFrame, list[str]]:
    """Answers for a file's rows, as of `Predictor.predict`, and lines on gaps and rows unlike those trained on."""
    if not sheet.lines:
        raise DataError(f"{sheet.where}: found a header and no rows")
    prep = by.preparation
    sheet = prep.repaired(sheet, by.client)
    codes = prep.codes(sheet)
    remarks = [*_remarks(prep, by.client, codes, sheet)]
    if strict and (outside := [line for line, unlike in remarks if unlike]):
        raise DataError(f"{sheet.where}: {'; '.join(outside)}")
    like = max(by.model.parameters(), key=lambda q: q.element_size())  # of trained numbers; frozen ones may be narrower
    x = torch.as_tensor(prep.transform(codes, by.client))
    x = x.to(like.device, like.dtype if x.is_floating_point() else None)
    if prep.tokens is not None:
        return _followed(by, x, sheet), []
    with torch.no_grad():
        output: Tensor = by.model(x).cpu().double()
    table = pd.DataFrame({"row": np.arange(1, len(x) + 1)})
    lines = [line for line, _ in remarks]
    own = _written(prep, by.client)
    if prep.labels is None:
        target = prep.at(by.client).target
        unit = None if target is None else torch.tensor([target], dtype=torch.float64)
        more = [f"{prep.target}: predictions are after the repair of {by.client}, {own['']}"] if own else []
        return table.assign(prediction=restored(output, unit).reshape(-1).numpy()), lines + more
    p = output.softmax(1)[:, : len(prep.labels)].numpy()
    table["prediction"] = np.array(prep.labels)[p.argmax(1)]
    if own:
        table["written_here"] = table["prediction"].map(own)
        each = ", ".join(f"{own[label]} for {label}" for label in prep.labels if label in own)
        lines.append(f"{prep.target}: predictions are the federation's classes; {by.client}'s file writes {each}")
    return table.assign(**{f"probability_{label}": p[:, k] for k, label in enumerate(prep.labels)}), lines


def _written(prep: Preparation, client: str) -> dict[str, str]:
    """What a client's file writes for each class, where repairs change that; {"": the repair} of a number."""
    repair = together(prep.repairs, client).get(prep.target)
    if repair is None:
        return {}
    if prep.labels is None:
        return {"": str(repair)}
    cells = list(dict.fromkeys([*(repair if is_table(repair) else ()), *prep.labels]))
    sheet = Sheet("classes", [*range(len(cells))], {prep.target: cells})
    try:
        classes = repaired(sheet, prep.repairs, client, (), prep.gaps, [prep.target]).columns[prep.target]
    except DataError:  # arithmetic that takes other columns
        return {}
    own: dict[str, str] = {}
    for cell, text in zip(cells, classes, strict=True):
        own.setdefault(next((label for label in prep.labels if canonical(label) == canonical(text)), text), cell)
    return own if any(own.get(label, label) != label for label in prep.labels) else {}


def _followed(by: Predictor, x: Tensor, sheet: Sheet) -> pd.DataFrame:
    """Tokens of each text, as far as they go in, their perplexity, and the likeliest next token."""
    raw = by.preparation.raw
    assert isinstance(raw, Text)
    ids = raw.ids(sheet.columns[raw.column], lambda k: sheet.at(k, raw.column))
    targets = torch.as_tensor(following(ids, raw.length, pack=False)[1])
    rows: list[dict[str, Any]] = []
    for k in range(len(ids)):
        one, target = x[k : k + 1], targets[k : k + 1]
        with torch.no_grad():
            output: Tensor = by.model(one).cpu().double()
        n = int(one[0, 1].sum())
        after = raw.word(int(output[0, n - 1].argmax()))
        score = named("perplexity").of(Predictions(output, target))
        rows.append({"row": k + 1, "prediction": after, "perplexity": score, "tokens": n})
    return pd.DataFrame(rows)


def _remarks(prep: Preparation, client: str, codes: np.ndarray, sheet: Sheet) -> Iterator[tuple[str, bool]]:
    """Lines on gaps, categories and ranges by column, and whether the rows are unlike all training rows."""
    at, n, numbers = prep.at(client), len(codes), [i.name for i in prep.inputs if i.values is None]
    lacking = together(prep.repairs, client).get(MISSING, ())
    ends = dict(zip(numbers, zip(at.low or (), at.high or (), strict=True), strict=False))
    for k, (column, x) in enumerate(zip(prep.inputs, codes.T, strict=False)):
        if gaps := int(np.isnan(x).sum()):
            how = (
                f"filled with the training {prep.missing}"
                if column.values is None
                else "taken for none of the known values"
            )
            share = at.gaps[k] if at.gaps and column.gap else float(column.gap)
            then = "" if share == 1 else f"; training rows had {f'{share:.1%}' if column.gap else 'none'} there"
            more = gaps > n * share + 4 * math.sqrt(n * share) + 4 and column.name not in lacking  # beyond chance
            yield f"{column.name}: {gaps} of {n} are missing, {how}{then}", more or not column.gap
        if column.values is not None and (unseen := x == UNSEEN).any():
            cells = sheet.columns[column.name]
            values = ", ".join(sorted({cells[i] for i in np.flatnonzero(unseen)})[:5])
            rest = f"no training row had {values}; taken for none of the known values"
            yield f"{column.name}: {unseen.sum()} of {n} rows are outside the known values: {rest}", True
        low, high = ends.get(column.name, (None, None))
        if low is not None and high is not None and len(out := x[(x < low) | (x > high)]):
            rest = f"{low:g} to {high:g}, the range of the training rows; they are {out.min():g} to {out.max():g}"
            yield f"{column.name}: {len(out)} of {n} rows are outside {rest}", True
    if numbers and not ends:
        yield "ranges of the training rows are unknown, so numbers are not checked against them", True


def predictor(run: Result, client: int | str) -> Predictor:
    """The predictor of a run's client. Raises ConfigError where the run was not trained on CSV files."""
    prepared = run.outline.meta.get("preparation")
    if prepared is None:
        raise ConfigError("predict: this run was not trained on CSV files, so raw rows cannot be prepared for it")
    preparation = Preparation.read(prepared, "predict")
    _known(run.settings.loss, preparation, "predict")
    name = run.outline.names[position(client, run.outline.names)]
    return Predictor(run.model(name), preparation, name)


def _known(loss: Any, preparation: Preparation, where: str) -> None:
    if loss not in LOSSES and not (preparation.tokens is not None and loss == tokens.__name__):
        raise ConfigError(
            f"{where}: found the loss {loss!r}; what outputs mean is known for {' and '.join(LOSSES)} only"
        )


def _line(e: Exception) -> str:
    return " ".join(str(e).split())[:200]
