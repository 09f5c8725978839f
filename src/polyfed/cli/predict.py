"""polyfed predict: raw rows of a CSV file into predictions, by an exported model or a run's client."""

from polyfed.base.columns import ENCODING, Columns, together
from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Predict
from polyfed.cli.screen import say, stderr
from polyfed.data.repairs import read
from polyfed.face import Run
from polyfed.runs.folder import csv_text
from polyfed.runs.ownership import put_out, spare
from polyfed.studies.predict import Predictor, predicted, predictor


def predict(o: Predict) -> None:
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
        deployed = predictor(opened, which)
    elif client is not None and model.exists():
        raise ConfigError(f"--client: for the folder of a run; {model} is one client's model")
    else:
        deployed = Predictor.open(model)
    encoding = together(deployed.preparation.repairs, deployed.client).get(ENCODING)
    sheet = read(o.rows, Columns(encoding=o.encoding or encoding))
    answers, remarks = predicted(deployed, sheet, o.strict)
    for line in remarks:
        say(line, stderr)
    if out is None:
        print(csv_text(answers), end="")
        return
    put_out(out, csv_text(answers).encode())
    say(f"{len(sheet.lines)} predictions: {out}", stderr)
