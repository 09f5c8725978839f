"""Which tests certify which method, read from their marks `@certifies(Scaffold, by="the centralised optimum")`, which
their rows may have too.

    python tools/certificates.py        write src/polyfed/certificates.json anew

That file goes into the wheel, where the tests do not: `polyfed algorithms NAME` and the pages of the methods show it.
"""

import ast
import json
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src/polyfed/certificates.json"


def marked(root: Path) -> dict[str, list[tuple[str, str]]]:
    """{a method's class: [(test, what it compares with)]}, from the files of a repository."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for test in ast.parse(path.read_text()).body:
            decorators = test.decorator_list if isinstance(test, ast.FunctionDef) else ()
            for mark in (node for decorator in decorators for node in ast.walk(decorator)):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "certifies":
                    (by,) = (ast.literal_eval(k.value) for k in mark.keywords)
                    for method in mark.args:
                        name = ast.unparse(method).rpartition(".")[2]
                        found[name].append((f"{path.relative_to(root).as_posix()}::{test.name}", by))
    return found


def text() -> str:
    """What `FILE` should hold: {a method's name: ["test: what it compares with"]}."""
    import polyfed as pf  # not for tools/mutate.py, which only reads marks

    lines = {getattr(pf, cls).name: [f"{test}: {by}" for test, by in tests] for cls, tests in marked(ROOT).items()}
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(lines.items())) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text())
