"""Change one thing in a method, run its tests, see whether any of them notices: `make mutate`, or

    python tests/mutate.py [FILE ...] [--count N] [--seed S] [--timeout SECONDS] [--jobs J] [--out results.json]

FILE is a file of src/polyfed/algorithms, as ifca or fpfc/pairs (none: all); --count mutants of each are drawn, one kind
after the other. Sources and tests are copied to a temporary folder, so that the checkout is never touched. Every mutant
meets first the certificates that its methods name, then the rest of their files and of the traps, then the methods'
rows of the conformance table; the first test that fails ends it. Left alone are settings and their checks, what a
method says about itself, shapes, devices and error messages. Kills are not repeated per mutant. A mutant may also run
out of time: on a busy machine that says nothing, so it counts for itself. What survived is judged in docs/mutations.md.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "src/polyfed/algorithms"
STAGES = ("certificates", "other certificates", "conformance")
ENDS = (*STAGES, "timed out", "survived")
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&"}
COMPARISONS = {ast.Lt: ("<=", ">"), ast.LtE: ("<", ">="), ast.Gt: (">=", "<"), ast.GtE: (">", "<="),
               ast.Eq: ("!=",), ast.NotEq: ("==",)}  # fmt: skip
SWAPS = {"min": "max", "mean": "sum", "argmin": "argmax", "amin": "amax", "minimum": "maximum", "any": "all"}
SWAPS |= {v: k for k, v in SWAPS.items()} | {"cos": "sin", "nansum": "nanmean", "logical_and": "logical_or"}
STALENESS = {"round.sent": "round.t", "round.t": "(round.t + 1)", "round.n": "len(round.ids)"}
WEIGHTS = {"round.samples": "torch.ones_like(round.samples)", "round.ids": "torch.arange(len(round.ids))"}
SHAPES = {"view", "reshape", "expand", "new_zeros", "zeros", "unsqueeze", "squeeze", "flatten", "unflatten", "require",
          "norm", "stack", "cat", "softmax", "triu_indices", "size", "getattr", "to", "empty"}  # fmt: skip
SPOKEN = {"__post_init__", "report", "plan", "in_step", "averages", "__repr__"}


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
        if node.attr in SWAPS:
            yield "min/max/mean", f"({text(node.value)}).{SWAPS[node.attr]}"
    elif isinstance(node, ast.Call) and text(node.func) in ("min", "max"):
        yield "min/max/mean", f"{SWAPS[text(node.func)]}({', '.join(map(text, node.args + node.keywords))})"
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
    return found


def mutants(path: Path) -> list[dict]:
    """Every mutant of one file: its line, kind, what was there and what is."""
    source = path.read_text()
    found, personal = {}, "Personal" in source
    order = list(ast.walk(ast.parse(source)))
    skipped, inside = set(), {}
    for node in order:
        if isinstance(node, ast.FunctionDef):
            inside.update({id(child): node for child in ast.walk(node)})
        spoken = isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments | ast.Assert) or (
            isinstance(node, ast.FunctionDef) and (node.name in SPOKEN)
        )
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
        statement = isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        )
        if statement:
            changes.append(("dropped", "pass"))
        for kind, text in changes:
            was, put = ast.unparse(node), ast.unparse(ast.parse(text))
            if was != put:
                found[node.lineno, node.col_offset, was, put] = {
                    "file": named(path, ROOT), "line": node.lineno, "in": inside[id(node)].name, "kind": kind,
                    "was": was, "is": put, "at": at,
                }  # fmt: skip
    return list(found.values())


def changed(source: str, m: dict) -> str:
    """The source with one mutation made."""
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
    return sorted(out[:count], key=lambda m: m["line"])


class Rows:
    """A pytest plugin: of shared tables the rows of some methods, without kills; notes the first failure."""

    def __init__(self, methods: set[str], note: Path, skip: set[str]):
        self.methods, self.note, self.skip = methods, note, skip

    def of(self, item) -> str | None:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        found = params.get("method", params.get("cls", params.get("name")))
        return getattr(found, "name", found)

    def rival(self, item) -> bool:
        """A trap's row for another method."""
        return "test_traps" in item.nodeid and self.of(item) is not None

    def pytest_collection_modifyitems(self, items):
        items[:] = [
            i
            for i in items
            if i.nodeid.split("[")[0] not in self.skip
            and (
                str(self.of(i)).split("(")[0].replace("-", "") in self.methods
                or ("conformance/" not in i.nodeid and not self.rival(i))
            )
            and not {"graves", "undisturbed"} & set(i.fixturenames)
        ]

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.note.exists():
            self.note.write_text(report.nodeid)

    def pytest_collectreport(self, report):
        self.pytest_runtest_logreport(report)


def sources(root: Path) -> list[Path]:
    """The files of methods and of what they share."""
    return sorted(p for p in (root / FOLDER).rglob("*.py") if p.name != "__init__.py")


def named(path: Path, root: Path) -> str:
    """A file's name among them, "fpfc/pairs"."""
    return path.relative_to(root / FOLDER).with_suffix("").as_posix()


def related(copy: Path) -> dict[str, tuple[set[str], list[str]]]:
    """For every file: the methods of its paper, or of those that use it, and the certificates they name."""
    papers, files = defaultdict(lambda: (set(), [], set())), [named(path, copy) for path in sources(copy)]
    for path, file in zip(sources(copy), files, strict=True):
        text = path.read_text()
        methods, certificates, uses = papers[_paper(file)]
        methods |= {c.lower() for c in re.findall(r"^@dataclass.*\nclass (\w+)(?!.*abstract)", text, re.M)}
        certificates += re.findall(r"(tests/[\w/]+\.py::\w+):", text)
        uses |= {f"_shared/{name}" for name in re.findall(r"polyfed\.algorithms\._shared\.(\w+)", text)}
    found = {}
    for file in files:
        users = {_paper(file)}
        while more := {p for p in papers if papers[p][2] & users} - users:
            users |= more
        methods = set().union(*(papers[p][0] for p in users if papers[p][1]))
        first = ["tests/certificates/test_admit.py"] if file.endswith("/newcomer") else []
        found[file] = (methods, first + [n for p in sorted(users) for n in papers[p][1]])
    return found


def _paper(file: str) -> str:
    """The paper of a file; what is shared stands for itself."""
    return file if file.startswith("_shared/") else file.split("/")[0]


def child(copy: Path, stage: int, methods: set[str], named: list[str], note: Path) -> int:
    """Run one stage of the tests on the copy, in a process of its own."""
    import pytest

    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / "src")
    sys.path[:0] = [str(copy / "src"), str(copy / "tests" / "conformance")]
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1), os.dup2(null.fileno(), 2)
    files = list(dict.fromkeys([n.split("::")[0] for n in named] + ["tests/certificates/test_traps.py"]))
    what = (named, files, ["tests/conformance"])[stage]
    skip = set(named) if stage == 1 else set()
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(copy), *dict.fromkeys(what)]
    return int(pytest.main(words, plugins=[Rows(methods, note, skip)]))


def run(copy: Path, methods: set[str], named: list[str], timeout: float) -> tuple[str, str, float]:
    """Which stage notices, by which test; "survived" if none does."""
    began = time.monotonic()
    for stage, label in enumerate(STAGES):
        note = copy / f"failed-{stage}"
        note.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            status = 70
            try:
                status = child(copy, stage, methods, named, note)
            finally:
                os._exit(status)
        until = time.monotonic() + timeout
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
            time.sleep(0.05)
        if ended[0] == 0:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "timed out", f"{label}, {timeout:.0f} s", time.monotonic() - began
        if os.waitstatus_to_exitcode(ended[1]) not in (0, 5):
            test = note.read_text() if note.exists() else "import"
            return label, test, time.monotonic() - began
    return "survived", "", time.monotonic() - began


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("files", nargs="*")
    ask.add_argument("--count", type=int, default=10)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--timeout", type=float, default=300.0)
    ask.add_argument("--jobs", type=int, default=1)
    ask.add_argument("--out", type=Path, default=Path("mutations.json"))
    given = ask.parse_args()
    os.environ.setdefault("POLYFED_DATA", str(ROOT.parent / "shared" / "data"))
    os.environ["OMP_NUM_THREADS"] = "1"
    for heavy in ("pandas", "pytest", "scipy.optimize", "scipy.cluster.hierarchy", "scipy.sparse.csgraph", "torch"):
        importlib.import_module(heavy)  # once, for all children
    files = given.files or [named(path, ROOT) for path in sources(ROOT)]
    jobs = [
        m for f in files for m in drawn(mutants(ROOT / FOLDER / f"{f}.py"), given.count, f"{given.seed} {f}")
    ]  # fmt: skip
    results = []

    def one(m: dict) -> None:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder)
            for part in ("src", "tests", "docs"):
                shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("images"))
            shutil.copy(ROOT / "pyproject.toml", copy)
            methods, named = related(copy)[m["file"]]
            path = copy / FOLDER / f"{m['file']}.py"
            path.write_text(changed(path.read_text(), m))
            caught, test, seconds = run(copy, methods, named, given.timeout)
        results.append({k: m[k] for k in ("file", "line", "in", "kind", "was", "is")} | {"caught": caught, "by": test})
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(results, indent=1))
        where = f"{m['file']}.py:{m['line']} {m['in']}"
        print(f"{caught:18} {seconds:5.0f} s  {where}: {m['was']}  ->  {m['is']}   {test}", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(one, jobs))
    print("\n| file | made | " + " | ".join(ENDS) + " |\n|---" + "|---" * (1 + len(ENDS)) + "|")
    for f in [*files, "all"]:
        mine = [r["caught"] for r in results if f in (r["file"], "all")]
        count = Counter(mine)
        print(f"| {f} | {len(mine)} | " + " | ".join(str(count[s]) for s in ENDS) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
