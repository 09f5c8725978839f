"""Files of sites, and what sites with these files settle, that say no more than their schema."""

from polyfed.base.columns import Columns
from polyfed.data.prepare import Cut
from polyfed.data.schema import File, settle


def written(folder, frames, **options):
    folder.mkdir(exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False, **options)
    return folder


def settled(folder, **columns):
    asked = Columns(**columns)
    files = {p.stem: File(p, p.stem, asked, Cut(0, 0.2, 0.0)) for p in sorted(folder.iterdir())}
    return settle({name: file.schema() for name, file in files.items()}, asked), files
