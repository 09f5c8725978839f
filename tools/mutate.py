"""Change one thing in a method, run its tests, see whether any of them notices: `make mutate`, or

    python tools/mutate.py [FILE ...] [--count N] [--seed S] [--minutes M] [--timeout SECONDS] [--again] [--by-hand]

FILE is a file of methods, of the core or beside it, as ifca or fpfc/pairs, of `CORE`, or native/train (none: all);
--count mutants of each are drawn, one kind after the other, the first of each file first. Every result is
appended to --out, where the numbers of lines that have moved are brought up to date; what stands there is not run
again: after an interruption, or --minutes, the same command goes on. --again repeats those that survived.

Sources and tests are copied to a temporary folder, so that the checkout is never touched. Every mutant meets first the
certificates that its methods name, then the rest of their files and of the traps, then the methods' rows of the
conformance table; the first test that fails ends it, and is then run without the mutation: one that fails there too
says nothing and is left out. A test that runs for longer than --timeout counts as caught only where it takes less than
a quarter of that undisturbed; otherwise the mutant is undecided. Left alone are settings and their checks, what a
method says about itself, shapes, devices and error messages. Kills are not repeated per mutant. Mutations of the
compiled kernel are listed in mutate_native.py. What survived is judged in docs/notes/mutations.md.
"""

import argparse
import ast
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest
from pathlib import Path

import certificates
import mutate_native

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "src/polyfed/algorithms"  # of methods
BESIDE = "src/polyfed_adapters", "src/polyfed_exact", "src/polyfed_groups"
CORE = {  # file -> the methods whose rows of the shared tables show it, and its own tests
    "uplinks": ({"fedavg", "scaffold", "ifca", "pacfl", "fedbuff"}, [
        "tests/threats/test_threatened.py", "tests/algorithms/test_pacfl.py", "tests/algorithms/test_drift.py",
        "tests/algorithms/test_fedavg.py", "tests/algorithms/test_asynchronous.py",
    ]),
    "solvers": ({"fedavg", "scaffold", "fedcet", "fpfc"}, ["tests/compute/test_solvers.py"]),
    "newcomer": ({"fedavg", "scaffold", "ditto", "fedamp", "ifca"}, ["tests/members/test_admit.py"]),
}  # fmt: skip
KERNEL = "native/train"  # the file of mutate_native.py
SOUND = "tests/algorithms/test_identities.py::test_a_lone_client_trains_alone"  # which passes where nothing is changed
STAGES = ("certificates", "other certificates", "conformance")
ENDS = (*STAGES, "timed out", "undecided", "equivalent", "survived")
EQUIVALENT = {  # (file, function, what was there, what is) -> why nothing can tell; these are not run
    ("fpfc/devicedual", "_outsiders", "nodes.size > 1", "nodes.size >= 1"):
        "a node of one client has no spread, and its one client is its pivot, which never leaves",
    ("fedlin", "aggregate", "len(server['w'])", "len(server['e'])"): "both vectors are as long as the model",
    ("fedspa", "erdos_renyi_kernel", "scale * sum(shapes[k]) >= sizes[k]", "scale * sum(shapes[k]) > sizes[k]"):
        "at equality the rule asks for exactly all of a layer, which both give",
    ("clove", "aggregate", "100", "101"): "k-means of a cohort has settled long before",
    ("newcomer", "downlink", "self.rows[KNOWN].any", "self.rows[KNOWN].all"): "there is one newcomer, hence one row",
}  # fmt: skip
HEAVY = ("pandas", "pytest", "scipy.optimize", "scipy.cluster.hierarchy", "scipy.sparse.csgraph", "torch", "sympy",
         "matplotlib.figure", "hypothesis", "pydantic", "rich.console", "safetensors.torch")  # fmt: skip
BY_HAND = (  # mutations that once survived every test: file, what was there, what is
    ("fedamp", "self.lam / self.step(n)", "self.lam * self.step(n)"),
    ("fedamp", "self.lam / self.alpha", "self.lam * self.alpha"),
    ("fedamp", "local_sgd(task, u,", "local_sgd(task, client['w'] if type(self) is FedAMP else u,"),
    ("fedamp", "local_sgd(task, u,", "local_sgd(task, client['w'] if type(self) is HeurFedAMP else u,"),
    ("fedspa", "change / s", "change / unpack(server['mask'][round.ids], len(w)).sum(0).clamp(min=1)"),
    ("cfl", "dim=1).max() <= self.eps2", "dim=1).mean() <= self.eps2"),
    ("fedcet", "self.safety / L.max()", "self.safety / L.mean()"),
    ("fedcet", "0.98 * L[round.ids]", "1.0 * L[round.ids]"),
)
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&"}
COMPARISONS = {ast.Lt: ("<=", ">"), ast.LtE: ("<", ">="), ast.Gt: (">=", "<"), ast.GtE: (">", "<="),
               ast.Eq: ("!=",), ast.NotEq: ("==",)}  # fmt: skip
SWAPS = {"min": "max", "mean": "sum", "argmin": "argmax", "amin": "amax", "minimum": "maximum", "any": "all"}
SWAPS |= {v: k for k, v in SWAPS.items()} | {"cos": "sin", "nansum": "nanmean", "logical_and": "logical_or"}
STALENESS = {"round.sent": "round.t", "round.t": "(round.t + 1)", "round.n": "len(round.ids)"}
WEIGHTS = {"round.samples": "torch.ones_like(round.samples)", "round.ids": "torch.arange(len(round.ids))"}
SHAPES = {"view", "reshape", "expand", "new_zeros", "zeros", "unsqueeze", "squeeze", "flatten", "unflatten", "require",
          "norm", "stack", "cat", "softmax", "triu_indices", "size", "getattr", "to", "empty"}  # fmt: skip
SPOKEN = {"__post_init__", "report", "plan", "memory", "in_step", "averages", "__repr__"}


def mutations(node: ast.AST, personal: bool):
    """(kind, what to put in place of the node) for one node."""
    text = ast.unparse
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        a, b = f"({text(node.left)})", f"({text(node.right)})"
        kind = "sign" if isinstance(node.op, ast.Add | ast.Sub) else "weight"
        yield kind, f"{a} {OPERATORS[type(node.op)]} {b}"
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
            yield "dropped", a
        if isinstance(node.op, ast.Add | ast.Mult):
            yield "dropped", b
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert | ast.Not):
        yield "sign", f"({text(node.operand)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in COMPARISONS.get(type(node.ops[0]), ()):
            yield "comparison", f"({text(node.left)}) {other} ({text(node.comparators[0])})"
    elif isinstance(node, ast.BoolOp):
        yield (
            "comparison",
            (" or " if isinstance(node.op, ast.And) else " and ").join(f"({text(v)})" for v in node.values),
        )
    elif isinstance(node, ast.IfExp):
        yield "comparison", f"({text(node.orelse)}) if {text(node.test)} else ({text(node.body)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", repr(node.value + 1 if isinstance(node.value, int) or not node.value else 2 * node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", repr(not node.value)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        if (whole := text(node)) in STALENESS:
            yield "staleness", STALENESS[whole]
        if whole in WEIGHTS:
            yield "index" if whole.endswith("ids") else "weight", f"__import__('torch').{WEIGHTS[whole][6:]}"
        if node.attr in SWAPS and whole not in ("up.mean", "up.sum"):  # the whole call is changed below
            yield "min/max/mean", f"({text(node.value)}).{SWAPS[node.attr]}"
    elif isinstance(node, ast.Call) and text(node.func) in ("min", "max"):
        yield "min/max/mean", f"{SWAPS[text(node.func)]}({', '.join(map(text, node.args + node.keywords))})"
    elif isinstance(node, ast.Call) and text(node.func) in ("up.mean", "up.sum"):
        name, within = text(node.args[0]), [k for k in node.keywords if k.arg in ("within", "out")]
        weighted = len(node.args) + len(node.keywords) - len(within) > 1
        if weighted:
            rest = [name] + [text(k) for k in within]
            yield "weight", f"{text(node.func)}({', '.join(rest)})"
        elif text(node.func) == "up.mean":
            yield "weight", f"up.mean({name}, round.samples)"
        if within:
            yield "dropped", f"up.mean({', '.join(text(a) for a in node.args)})"
        else:
            other = "up.sum" if text(node.func) == "up.mean" else "up.mean"
            rest = [text(a) for a in node.args] + [text(k) for k in node.keywords]
            yield "min/max/mean", f"{other}({', '.join(rest)})"
    elif isinstance(node, ast.Call) and text(node.func) == "mean" and len(node.args) > 1:
        yield "weight", f"mean({text(node.args[0])})"
    if isinstance(node, ast.Call) and "sgd" in text(node.func) and len(node.args) > 1:
        rest = [text(a) for a in node.args[2:]] + [text(k) for k in node.keywords]
        starts = ["task.w0.expand_as({0})", "0 * {0}"] + ["client['w']"] * personal
        for start in starts:
            call = [text(node.args[0]), start.format(f"({text(node.args[1])})"), *rest]
            yield "start-point", f"{text(node.func)}({', '.join(call)})"
        for gone in node.keywords:
            left = [text(a) for a in node.args] + [text(k) for k in node.keywords if k is not gone]
            yield "dropped", f"{text(node.func)}({', '.join(left)})"


def keys_of(tree: ast.AST) -> dict[str, set[str]]:
    """The string keys by which each name is indexed in a function: one may be taken for another."""
    found = defaultdict(set)
    for node in ast.walk(tree):
        key = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found[ast.unparse(node.value)].add(key.value)
        if (key := upload(node)) is not None:
            found["up"].add(key.value)
    return found


def upload(node: ast.AST) -> ast.Constant | None:
    """The name of the upload that `up.mean` or `up.sum` is asked for."""
    asked = isinstance(node, ast.Call) and ast.unparse(node.func) in ("up.mean", "up.sum")
    return node.args[0] if asked and isinstance(node.args[0], ast.Constant) else None


def mutants(file: str) -> list[dict]:
    """Every mutant of one file: its line, kind, what was there and what is."""
    if file == KERNEL:
        return mutate_native.jobs()
    source = source_of(ROOT, file).read_text()
    found, personal = {}, "Personal" in source
    order = list(ast.walk(ast.parse(source)))
    skipped, inside = set(), {}
    for node in order:
        if isinstance(node, ast.FunctionDef):
            skipped |= {id(child) for child in ast.walk(node.returns)} if node.returns else set()
            inside.update({id(child): node for child in ast.walk(node)})
        spoken = isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.Assert) or (
            isinstance(node, ast.FunctionDef) and (node.name in SPOKEN)
        )
        if isinstance(node, ast.If) and all(isinstance(s, ast.Raise) for s in node.body):
            skipped |= {id(child) for child in ast.walk(node.test)}  # a check
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.require":
            skipped |= {id(child) for child in ast.walk(node)}
        shape = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SHAPES
        if spoken or isinstance(node, ast.ClassDef):
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            parts = [p for p in parts if not (isinstance(node, ast.ClassDef) and isinstance(p, ast.FunctionDef))]
            skipped |= {id(child) for part in parts for child in ast.walk(part)}
        if shape:
            skipped |= {id(a) for a in node.args if isinstance(a, ast.Constant | ast.UnaryOp)}
            skipped |= {id(a.operand) for a in node.args if isinstance(a, ast.UnaryOp)}
        if isinstance(node, ast.keyword) and node.arg in (
            "dim",
            "dtype",
            "device",
            "keepdim",
            "keepdims",
            "stable",
            "need_loss",
        ):
            skipped |= {id(child) for child in ast.walk(node)}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SWAPS:
            skipped |= {id(a) for a in node.args if isinstance(a, ast.Constant)}  # the axis
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            skipped |= {id(child) for child in ast.walk(node.annotation)}
    for at, node in enumerate(order):
        if id(node) in skipped or id(node) not in inside:
            continue
        changes = list(mutations(node, personal))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.ctx, ast.Load):
            name, own = ast.unparse(node.value), node.slice.value
            changes += [("index", f"{name}[{k!r}]") for k in sorted(keys_of(inside[id(node)])[name]) if k != own]
        if (key := upload(node)) is not None:
            rest = [ast.unparse(a) for a in node.args[1:]] + [ast.unparse(k) for k in node.keywords]
            for k in sorted(keys_of(inside[id(node)])["up"] - {key.value}):
                changes.append(("index", f"{ast.unparse(node.func)}({', '.join([repr(k), *rest])})"))
        statement = isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        )
        if statement:
            changes.append(("dropped", "pass"))
        for kind, text in changes:
            was, put = ast.unparse(node), ast.unparse(ast.parse(text))
            if was != put:
                found[node.lineno, node.col_offset, was, put] = {
                    "file": file, "line": node.lineno, "in": inside[id(node)].name, "kind": kind,
                    "was": was, "is": put, "at": at,
                }  # fmt: skip
    return list(found.values())


def changed(source: str, m: dict) -> str:
    """The source with one mutation made."""
    if m["kind"] == "by hand":
        assert source.count(m["was"]) == 1, m
        return source.replace(m["was"], m["is"])
    tree = ast.parse(source)
    old, new = list(ast.walk(tree))[m["at"]], ast.parse(m["is"]).body[0]

    class Swap(ast.NodeTransformer):
        def visit(self, node):
            put = new.value if isinstance(new, ast.Expr) else new
            return put if node is old else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Swap().visit(tree)))


def drawn(all_of_them: list[dict], count: int, seed: str) -> list[dict]:
    """`count` of the mutants, one kind after the other, by chance within a kind."""
    rng, kinds = random.Random(seed), defaultdict(list)
    for m in rng.sample(all_of_them, len(all_of_them)):
        kinds[m["kind"]].append(m)
    queues, out = [kinds[k] for k in rng.sample(sorted(kinds), len(kinds))], []
    while len(out) < count and any(queues):
        out += [q.pop() for q in queues if q]
    return out[:count]


class Rows:
    """A pytest plugin: of shared tables the rows of some methods, without kills; tests that caught something before
    come first. Writes down the test at work, then the first that failed."""

    def __init__(self, methods: set[str], notes: Path, skip: set[str], catches: Counter[str]):
        self.methods, self.notes, self.skip, self.catches = methods, notes, skip, catches

    def wanted(self, item) -> bool:
        """Tables have a row per method; a trap may be any method's."""
        test = item.nodeid.split("[")[0]
        if {item.nodeid, test} & self.skip or {"graves", "undisturbed"} & set(item.fixturenames):
            return False
        params = item.callspec.params if hasattr(item, "callspec") else {}
        row = params.get("method", params.get("cls", params.get("name")))
        if "conformance/" not in test and (row is None or "test_traps" not in test):
            return True
        return str(getattr(row, "name", row)).split("(")[0].replace("-", "") in self.methods

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((i for i in items if self.wanted(i)), key=lambda i: -self.catches[i.nodeid])

    def pytest_runtest_logstart(self, nodeid):
        (self.notes / "now").write_text(nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed and not (self.notes / "failed").exists():
            (self.notes / "failed").write_text(report.nodeid)

    def pytest_collectreport(self, report):
        self.pytest_runtest_logreport(report)


def sources(root: Path) -> list[Path]:
    """The files of methods and of what they share."""
    beside = [p for at in BESIDE for p in (root / at).glob("*.py") if p.stem not in ("adapters", "backbone")]
    return sorted(p for p in [*(root / FOLDER).rglob("*.py"), *beside] if p.name != "__init__.py")


def named(path: Path, root: Path) -> str:
    """A file's name among them, "fpfc/pairs"."""
    home = next(root / at for at in (*BESIDE, FOLDER) if path.is_relative_to(root / at))
    return path.relative_to(home).with_suffix("").as_posix()


def related(copy: Path) -> dict[str, tuple[set[str], list[str]]]:
    """For every file: the methods of its paper, or of those that use it, and their certificates."""
    papers, files = defaultdict(lambda: (set(), [], set())), [named(path, copy) for path in sources(copy)]
    marks = certificates.marked(copy)
    for path, file in zip(sources(copy), files, strict=True):
        text = path.read_text()
        methods, proofs, uses = papers[_paper(file)]
        classes = re.findall(r"^@dataclass.*\nclass (\w+)(?!.*abstract)", text, re.M)
        methods |= {c.lower() for c in classes}
        proofs += [test for c in classes for test, _ in marks.get(c, ())]
        uses |= {f"_shared/{name}" for name in re.findall(r"polyfed\.algorithms\._shared\.(\w+)", text)}
        uses |= {*re.findall(r"polyfed_\w+\.(lora|loop|unbiased)", text)}
    found = {}
    for file in files:
        users = {_paper(file)}
        while more := {p for p in papers if papers[p][2] & users} - users:
            users |= more
        methods = set().union(*(papers[p][0] for p in users if papers[p][1]))
        first = ["tests/members/test_admit.py"] if file.endswith("/newcomer") else []
        found[file] = (methods, first + [n for p in sorted(users) for n in papers[p][1]])
    found |= {f: (methods, list(tests)) for f, (methods, tests) in CORE.items()}
    return found | {KERNEL: ({"fedavg", "scaffold", "fpfc"}, mutate_native.TESTS)}


def _paper(file: str) -> str:
    """The paper of a file; what is shared stands for itself."""
    return file if file.startswith("_shared/") else file.split("/")[0]


def source_of(root: Path, file: str) -> Path:
    if file == KERNEL:
        return root / mutate_native.FOLDER / "train.inc"
    folder = FOLDER if file not in CORE else "src/polyfed/compute" if file == "solvers" else "src/polyfed/core"
    return next(p for at in (folder, *BESIDE) if (p := root / at / f"{file}.py").is_file())


@contextmanager
def copied():
    """A folder with a copy of the sources and tests."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("src", "tests", "docs"):
            shutil.copytree(ROOT / part, Path(folder, part), ignore=shutil.ignore_patterns("images"))
        for file in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / file, folder)
        yield Path(folder)


def child(copy: Path, what: list[str], plugin: Rows) -> int:
    """Run tests on the copy, in a process of its own."""
    import pytest

    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / "src")
    sys.path[:0] = [str(copy / "src"), str(copy / "tests" / "conformance")]
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1), os.dup2(null.fileno(), 2)
    words = ("--all", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(copy))
    return int(pytest.main([*words, *dict.fromkeys(what)], plugins=[plugin]))


def fails(copy: Path, what: list[str], plugin: Rows, timeout: float) -> tuple[str, bool]:
    """The first test that fails, or "" if none does; and whether it was stopped after `timeout` seconds."""
    notes = plugin.notes
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        status = 70
        try:
            status = child(copy, what, plugin)
        finally:
            os._exit(status)
    now, since = "import", time.monotonic()
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if (at := notes / "now").exists() and (test := at.read_text()) != now:
            now, since = test, time.monotonic()
        if time.monotonic() > since + timeout:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return now, True
        time.sleep(0.05)
    if os.waitstatus_to_exitcode(ended[1]) in (0, 5):
        return "", False
    return (notes / "failed").read_text() if (notes / "failed").exists() else "import", False


@cache
def undisturbed(test: str, timeout: float) -> float:
    """Seconds that a test takes without a mutation; infinite if it fails or takes longer than `timeout`."""
    began = time.monotonic()
    with copied() as copy:
        rows = {name for methods, _ in related(copy).values() for name in methods}
        plugin = Rows(rows, copy / "notes", set(), Counter())
        failed = fails(copy, [SOUND if test == "import" else test], plugin, timeout)[0]
    return float("inf") if failed else time.monotonic() - began


@contextmanager
def made(m: dict, copy: Path):
    """A mutation, in the copy."""
    path = source_of(copy, m["file"])
    if path.suffix != ".py":
        with mutate_native.made(m, copy):
            yield
    else:
        path.write_text(changed(path.read_text(), m))
        yield


def run(m: dict, timeout: float, skip: set[str], catches: Counter[str]) -> tuple[str, str]:
    """Which stage notices a mutant, and by which test. Tests that fail without it are added to `skip`."""
    with copied() as copy, made(m, copy):
        methods, named = related(copy)[m["file"]]
        files = list(dict.fromkeys([n.split("::")[0] for n in named] + ["tests/algorithms/test_traps.py"]))
        for stage, what in zip(STAGES, (named, files, ["tests/conformance"]), strict=True):
            while True:
                before = set(named) if stage == "other certificates" else set()
                plugin = Rows(methods, copy / "notes", skip | before, catches)
                test, stopped = fails(copy, what, plugin, timeout)
                if not test:
                    break
                seconds = undisturbed(test, timeout)
                if stopped:
                    return "timed out" if seconds < timeout / 4 else "undecided", test
                if seconds < float("inf"):
                    return stage, test
                print(f"left out, as it fails without a mutation: {test}", flush=True)
                skip.add(test)
    return "survived", ""


def by_hand() -> list[dict]:
    jobs = []
    for file, was, put in BY_HAND:
        line = source_of(ROOT, file).read_text().split(was)[0].count("\n") + 1
        jobs.append({"file": file, "line": line, "in": "", "kind": "by hand", "was": was, "is": put})
    return jobs


def key(m: dict) -> tuple:
    return tuple(m[k] for k in ("file", "line", "kind", "was", "is"))


def moved(known: list[dict], ways: dict[str, list[dict]]) -> list[dict]:
    """The results at the lines where their mutants are now; of mutants that are no more, none."""
    out, by = [], [*by_hand(), *(m for f in ways for m in ways[f])]
    same = defaultdict(list)
    for m in by:
        same[tuple(m[k] for k in ("file", "in", "kind", "was", "is"))].append(m["line"])
    for r in known:
        lines = same[tuple(r[k] for k in ("file", "in", "kind", "was", "is"))]
        if lines:
            out.append(r | {"line": min(lines, key=lambda line: abs(line - r["line"]))})
    return out


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("files", nargs="*")
    ask.add_argument("--count", type=int, default=5)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--minutes", type=float, default=float("inf"))
    ask.add_argument("--timeout", type=float, default=300.0)
    ask.add_argument("--again", action="store_true")
    ask.add_argument("--by-hand", action="store_true")
    ask.add_argument("--out", type=Path, default=ROOT / "tools" / "mutations.jsonl")
    given = ask.parse_args()
    os.environ.setdefault("POLYFED_DATA", str(ROOT.parent / "shared" / "data"))
    os.environ["OMP_NUM_THREADS"] = "1"
    for heavy in HEAVY:
        importlib.import_module(heavy)  # once, for all children
    everything = [named(path, ROOT) for path in sources(ROOT)] + [*sorted(CORE), KERNEL]
    files = given.files or everything
    ways = {f: mutants(f) for f in everything}
    drafts = [drawn(ways[f], given.count, f"{given.seed} {f}") for f in files]
    jobs = by_hand() if given.by_hand else [m for turn in zip_longest(*drafts) for m in turn if m]
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    results = {key(r): r for r in moved(known, ways)}
    if known:
        given.out.write_text("".join(json.dumps(r) + "\n" for r in results.values()))
    if undisturbed(SOUND, given.timeout) == float("inf"):
        print(f"{SOUND} fails without a mutation: nothing can be said", file=sys.stderr)
        return 1
    skip: set[str] = set()
    until = time.monotonic() + 60 * given.minutes
    for m in jobs:
        if time.monotonic() > until:
            break
        if key(m) in results and not (given.again and results[key(m)]["caught"] in ("survived", "undecided")):
            continue
        began = time.monotonic()
        if (why := EQUIVALENT.get((m["file"], m["in"], m["was"], m["is"]))) is not None:
            caught, test = "equivalent", why
        else:
            caught, test = run(m, given.timeout, skip, Counter(r["by"] for r in results.values()))
        results[key(m)] = {k: m[k] for k in ("file", "line", "in", "kind", "was", "is")} | {
            "caught": caught,
            "by": test,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as out:
            out.write(json.dumps(results[key(m)]) + "\n")
        where = f"{m['file']}:{m['line']} {m['in']}"
        print(f"{caught:18} {time.monotonic() - began:5.0f} s  {where}: {m['was']}  ->  {m['is']}   {test}", flush=True)

    made = [results[key(m)] for f in everything for m in drawn(ways[f], given.count, f"{given.seed} {f}")
            if key(m) in results]  # fmt: skip
    print("\n| file | possible | made | " + " | ".join(ENDS) + " |\n|---" + "|---" * (2 + len(ENDS)) + "|")
    for f in [*everything, "all"]:
        mine = [r["caught"] for r in made if f in (r["file"], "all")]
        size = sum(len(ways[g]) for g in everything if f in (g, "all"))
        print(f"| {f} | {size} | {len(mine)} | " + " | ".join(str(mine.count(end)) for end in ENDS) + " |")
    print("\n| by hand | caught by |\n|---|---|")
    for m in by_hand():
        r = results.get(key(m), {"caught": "not run", "by": ""})
        print(f"| {m['file']}: `{m['was']}` to `{m['is']}` | {r['caught']}: `{r['by']}` |")
    for r in made:
        if r["caught"] in ENDS[len(STAGES) :]:
            print(f"{r['caught']}: {r['file']}:{r['line']} {r['in']}: {r['was']}  ->  {r['is']}   {r['by']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
