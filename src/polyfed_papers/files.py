"""Where the files of named data sets lie, and what is said where they do not."""

from collections.abc import Sequence
from pathlib import Path

from polyfed.base.errors import DataError

FETCHED = ("mnist", "fashion-mnist", "cifar10", "cifar100")  # by polyfed data fetch


def there(data_dir: Path, name: str, places: Sequence[str], wanted: str, folders: Sequence[str] = ()) -> Path:
    """The first of the places in a folder of data_dir, which is called as the data set if not said, or in data_dir."""
    inside = [data_dir / folder for folder in folders or (name,)]
    for path in (folder / place for place in places for folder in (*inside, data_dir)):
        if path.exists():
            return path
    raise missing(name, f"no {wanted} in {data_dir} or {inside[0]}", data_dir)


def missing(name: str, problem: str, data_dir: Path) -> DataError:
    """An error that says what to do."""
    fetch = f"set POLYFED_DATA, or run: polyfed data fetch {name} --data-dir {data_dir}"
    return DataError(f"{name}: {problem}; put it there, {fetch if name in FETCHED else 'or set POLYFED_DATA'}")
