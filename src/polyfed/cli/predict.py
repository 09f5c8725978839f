"""polyfed predict: raw rows of a CSV file into predictions, by an exported model or a run's client."""

from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Predict
from polyfed.cli.screen import stderr
from polyfed.data.sheets import read
from polyfed.face import Run
from polyfed.runs.folder import csv_text
from polyfed.runs.ownership import put_out, spare
from polyfed.studies.predict import Predictor, predictor


def predict(o: Predict) -> int:
    """Predict the rows of a file."""
    model, client, out = o.model, o.client, o.out
    if out is not None:
        spare(out, model, model.with_suffix(".json"), o.rows)
    if model.is_dir():
        opened = Run.open(model)
        if client is None:
            raise ConfigError(
                f"--client: missing; {model} is a run, with the clients {', '.join(opened.outline.names)}"
            )
        names = opened.outline.names
        which = int(client) if client not in names and client.isdecimal() else client
        found = predictor(opened, which)
    elif client is not None:
        raise ConfigError(f"--client: for the folder of a run; {model} is one client's model")
    else:
        found = Predictor.open(model)
    sheet = read(o.rows, Columns(encoding=o.encoding).encoding)
    text = csv_text(found.answers(sheet))
    for line in found.remarks(sheet):
        stderr.print(line, soft_wrap=True, markup=False)
    if out is None:
        print(text, end="")
        return 0
    put_out(out, text.encode())
    stderr.print(f"{len(sheet.lines)} predictions: {out}", soft_wrap=True, markup=False)
    return 0
