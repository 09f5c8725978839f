"""polyfed predict: raw rows of a CSV file into predictions, by an exported model or a run's client."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option


def predict(
    model: Annotated[
        Path,
        Argument(help="A model that polyfed export wrote (.safetensors), or the folder of a run.", show_default=False),
    ],
    rows: Annotated[Path, Argument(help="CSV file with the columns of the training files.", show_default=False)],
    client: Annotated[str | None, Option(help="Of a run: the client's name, or its number from 0.")] = None,
    out: Annotated[
        Path | None, Option(help="File for the predictions. Default: print them.", metavar="FILE.csv")
    ] = None,
) -> int:
    """Predict the target of new rows, which are prepared as the training rows were.

    A row per row: prediction, and for classes a probability each; for a regression a number in the target's unit.

    [dim]polyfed export answer/runs/ditto-seed0 --client west
    polyfed predict west.safetensors new-patients.csv --out predictions.csv[/dim]
    """
    from polyfed.base.errors import ConfigError
    from polyfed.cli.screen import stderr
    from polyfed.data.sheets import read
    from polyfed.face import Run
    from polyfed.runs.folder import csv_text
    from polyfed.runs.ownership import put_out, spare
    from polyfed.studies.predict import Predictor, predictor

    if out is not None:
        spare(out, model, model.with_suffix(".json"), rows)
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
    sheet = read(rows)
    text = csv_text(found.answers(sheet))
    for line in found.remarks(sheet):
        stderr.print(line, soft_wrap=True, markup=False)
    if out is None:
        print(text, end="")
        return 0
    put_out(out, text.encode())
    stderr.print(f"{len(sheet.lines)} predictions: {out}", soft_wrap=True, markup=False)
    return 0
