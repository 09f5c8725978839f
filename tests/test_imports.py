"""Dependencies point one way: a room imports from the floors below it alone, also inside functions."""

import ast
from pathlib import Path

import pytest

import polyfed
import polyfed.algorithms
from graph import SRC, circles, own
from polyfed.base.plugins import SIBLINGS
from polyfed.cli.describe import citation

ROOT = Path(polyfed.__file__).parent
ORDER = """
base; metrics; native; compute; core; algorithms engines yardsticks; data; models; runs; report;
studies; face; cli
"""
FLOORS = [floor.split() for floor in ORDER.split(";")]
BESIDE = tuple(sorted(path.parent.name for path in ROOT.parent.glob("polyfed_*/__init__.py")))
FACES = [ROOT / f"{at}.py" for at in ("__init__", "algorithms/__init__", "data/__init__", "models/__init__", "face")]
# the faces have names of packages beside the core
UNDER = {  # may import
    "polyfed_sites": ("polyfed_privacy", "polyfed_audit", "polyfed_export"),
    "polyfed_attack": ("polyfed_sites",),
    "polyfed_clinical": ("polyfed_privacy", "polyfed_sites"),
    "polyfed_flower": ("polyfed_sites",),
    "polyfed_export": ("polyfed_adapters",),
    "polyfed_papers": ("polyfed_adapters", "polyfed_exact", "polyfed_export", "polyfed_threats", "polyfed_tuning"),
    "polyfed_testing": ("polyfed_members", "polyfed_threats"),
}


def modules(path: Path, root: Path = ROOT, of: tuple[str, ...] = ("polyfed",)) -> set[str]:
    """Modules of polyfed, and names in its packages, that a file imports, also inside functions and for types.

    of: other packages than polyfed"""
    names, tree = [], ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["polyfed", *path.relative_to(root).parts][: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return {name for name in names if name.split(".")[0] in of}


def test_no_files_import_each_other_in_a_circle():
    graph = {p.relative_to(SRC).as_posix(): own(p, late=False) for p in sorted(SRC.rglob("*.py"))}
    assert circles(graph) == []


LATE = {  # files that import our own inside functions, and why
    "runs/training.py": "torch, which --help does not wait for",
    "cli/options.py": "a command's module, by `late`, which --help does not wait for",
    "cli/complete.py": "names for the shell, by `late`, which --help does not wait for",
}
LOADER = "from polyfed.cli.late import"  # which the command line imports by, as by a statement inside a function


def test_imports_inside_functions_are_few_and_listed():
    files = {p.relative_to(ROOT).as_posix(): p for p in ROOT.rglob("*.py")}
    found = {name for name, path in files.items() if own(path, late=True) or LOADER in path.read_text()}
    assert found == LATE.keys()


def imported(path: Path) -> set[str]:
    """Folders of polyfed that a file imports from; "" for the package itself."""
    return {[*name.split("."), ""][1] for name in modules(path)}


@pytest.mark.parametrize("level", range(len(FLOORS)))
def test_a_room_imports_from_the_floors_below_it_alone(level):
    below = {room for floor in FLOORS[:level] for room in floor} | {"", "__version__"}
    for room in FLOORS[level]:
        files = sorted((ROOT / room).rglob("*.py")) or [ROOT / f"{room}.py"]
        for path in files:
            wrong = imported(path) - below - {room}
            assert not wrong, f"{path.relative_to(ROOT)} imports polyfed.{'/'.join(sorted(wrong))}"


def test_every_room_has_its_floor():
    found = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert set(BESIDE) == SIBLINGS.keys()
    rooms = found - {"__init__", "__main__"}
    assert rooms == {room for floor in FLOORS for room in floor}


@pytest.mark.parametrize("package", ["polyfed", *BESIDE])
def test_packages_beside_the_core_are_imported_by_none_that_is_not_listed_and_not_by_the_core(package):
    others = tuple(name for name in BESIDE if name not in (package, *UNDER.get(package, ())))
    for path in sorted((ROOT.parent / package).rglob("*.py")):
        wrong = set() if path in FACES else modules(path, of=others)
        assert not wrong, f"{path.relative_to(ROOT.parent)} imports {', '.join(sorted(wrong))}"


def test_packages_beside_the_core_do_not_reach_into_the_command_line():
    for path in sorted(path for package in BESIDE for path in (ROOT.parent / package).rglob("*.py")):
        allowed = {"cli"} if path.stem in ("command", "commands") or path.parent.name == "cli" else set()
        assert imported(path).isdisjoint({"cli"} - allowed), path


HOMES = {"polyfed.algorithms.": ROOT / "algorithms", "polyfed_adapters.": ROOT.parent / "polyfed_adapters",
         "polyfed_exact.": ROOT.parent / "polyfed_exact",
         "polyfed_groups.": ROOT.parent / "polyfed_groups"}  # fmt: skip
SHARED = {
    "__init__",
    "__pycache__",
    "_shared",
    "adapters",
    "backbone",
    "lora",
    "loop",
    "unbiased",
    "py.typed",
}  # no papers


def papers(names: set[str]) -> set[str]:
    """The papers that modules are of; a paper is a file or a folder of a home."""
    return {name.removeprefix(h).split(".")[0] for h in HOMES for name in names if name.startswith(h)} - SHARED


def test_no_paper_imports_another():
    for file in (file for home in HOMES.values() for file in home.rglob("*.py") if file.parent / "__init__.py" != file):
        home = next(home for home in HOMES.values() if file.is_relative_to(home))
        own = file.relative_to(home).parts[0].removesuffix(".py")
        assert papers(modules(file, of=("polyfed", *(home.split(".")[0] for home in HOMES)))) <= {own}, file


def test_one_paper_one_file():
    """Every public file or folder has methods, and they cite one paper; what is shared defines none."""
    cited = {}
    for cls in polyfed.algorithms.shipped().values():
        for paper in papers({cls.__module__}) or {cls.__module__}:
            cited.setdefault(paper, set()).add(citation(cls))
    assert cited.keys() == {p.name.removesuffix(".py") for home in HOMES.values() for p in home.iterdir()} - SHARED
    assert {paper for paper, texts in cited.items() if len(texts) > 1} == set()


def test_nothing_is_unpickled():
    """No file and no message; Ray's own processes pass each other a run's objects, and torch reads tensors alone."""
    for path in sorted(path for package in ("polyfed", *BESIDE) for path in (ROOT.parent / package).rglob("*.py")):
        text = path.read_text().replace('torch.load(path, map_location="cpu", weights_only=True)', "")
        for word in ("import pickle", "torch.load(", "allow_pickle=True", "joblib.load", "cloudpickle"):
            if (path.parent.name, word) == ("polyfed_ray", "cloudpickle"):
                continue
            assert word not in text, f"{path.relative_to(ROOT.parent)}: {word}"
