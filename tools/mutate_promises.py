"""Mutations of what is promised beside the methods: privacy, policies, thresholds, folders. One thing is changed at a
time in a copy, and the tests that hold the promise must fail: `make mutate ONLY=promises`, or

    python tools/mutate_promises.py [WORD ...] [--timeout SECONDS]

WORD: part of a file's name (none: all). Every mutation stands here with its file; those of one file share its tests.
"""

import argparse
import importlib
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

import mutate

WARM = (
    "polyfed.cli",
    "polyfed.face",
    "polyfed.algorithms",
    "polyfed.sites.site",
    "polyfed.sites.server",
    "sklearn.metrics",
)
SECURE, GUARD = "tests/privacy/test_secure.py", "tests/privacy/test_guard.py"
NOISE, LEDGER = "tests/privacy/test_noise.py", "tests/privacy/test_privacy_ledger.py"
PROMISES: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {  # file of src -> its tests, (what was there, what is)
    "polyfed/privacy/secure.py": (SECURE, (
        ("if len(there) < max(context.threshold, self.least):", "if len(there) < self.least:"),
        ("if len(there) < max(context.threshold, self.least):", "if len(there) < context.threshold:"),
        ("if len(there) < max(context.threshold, self.least):", "if len(there) <= max(context.threshold, self.least):"),
        ("2 * len(self.cohort) // 3 + 1", "2 * len(self.cohort) // 3"),
        ("2 * len(self.cohort) // 3 + 1", "len(self.cohort) // 2 + 1"),
        ("2 * len(self.cohort) // 3 + 1", "(2 * len(self.cohort) + 2) // 3"),
        ("return max(self.least, 2 *", "return max(0, 2 *"),
        ("return max(self.least, 2 *", "return min(self.least or 99, 2 *"),
        ("parts = [self.run, self.what,", "parts = [self.what,"),
        ("parts = [self.run, self.what,", "parts = [self.run,"),
        ("str(self.least), str(self.limbs), *self.cohort]", "str(self.limbs), *self.cohort]"),
        ("str(self.least), str(self.limbs), *self.cohort]", "str(self.least), *self.cohort]"),
        ("str(self.least), str(self.limbs), *self.cohort]", "str(self.least), str(self.limbs)]"),
        ("h = sha256(self.digest)", "h = sha256()"),
        ("h.update(len(part.encode()).to_bytes(4, \"big\") + part.encode())", "h.update(part.encode())"),
        ("len(set(context.cohort)) < max(self.least, len(context.cohort))", "len(context.cohort) < self.least"),
        ("len(set(context.cohort)) < max(self.least, len(context.cohort))", "len(set(context.cohort)) < 3"),
        ("not set(there) <= set(context.cohort)", "False"),
        ("self.name not in there or", "False or"),
        ("if self.memory.setdefault(what, value) != value:", "if False:"),
        ("derive(self.secret, \"self\", context.key + sent)", "derive(self.secret, \"self\", context.key)"),
        ("derive(self.secret, \"self\", context.key + sent)", "derive(self.secret, \"self\", sent)"),
        ("derive(self.secret, \"self\", context.key + sent)", "derive(b\"\", \"self\", context.key + sent)"),
        ("derive(own, f\"share {k}\", context.key)", "derive(own, \"share\", context.key)"),
        ("derive(own, f\"share {k}\", context.key)", "derive(bytes(32), f\"share {k}\", b\"\")"),
        ("range(1, context.threshold)]", "range(1, 2)] * (context.threshold - 1)"),
        ("{j: derive(self._agreed[j], \"mask\", context.key)", "{j: derive(self._agreed[j], \"mask\", context.digest)"),
        ("{j: derive(self._agreed[j], \"mask\", context.key)", "{j: derive(bytes(32), \"mask\", context.key)"),
        ("[name for name in context.cohort if name not in there]))", "list(context.cohort)))"),
        ("[name for name in context.cohort if name not in there]))", "there))"),
        ("for dealer in there:\n            if dealer != self.name", "for dealer in context.cohort:\n            if dealer != self.name and dealer in sealed"),
        ("f\"seal {dealer} to {holder}\", context.key)", "\"seal\", context.key)"),
        ("f\"seal {dealer} to {holder}\", context.key)", "f\"seal {dealer} to {holder}\", b\"\")"),
        ("if self.memory.get(f\"asked {context.run} {context.what}\") != context.key:", "if False:"),
        ("f\"asked {context.run} {context.what}\", context.key, \"for", "f\"asked {context.key}\", context.key, \"for"),
        ("f\"{name} {sealed.get(name, b'').hex()}\"", "name"),
        ("if absent and (silent", "if False and (silent"),
        ("if commitment(name, gone, key) != self._answers[name].pairs.get(gone):", "if False:"),
        ("name not in self.context.cohort or name in self._answers", "name not in self.context.cohort"),
    )),
    "polyfed/privacy/guard.py": (GUARD, (
        ("kind, gaussian.sigma, digest])", "kind, gaussian.sigma])"),
        ("[self.run, round.t, round.phase, name, kind, gaussian", "[self.run, round.t, round.phase, name, gaussian"),
        ("[self.run, round.t, round.phase, name, kind, gaussian", "[self.run, round.t, round.phase, kind, gaussian"),
        ("[self.run, round.t, round.phase, name, kind, gaussian", "[self.run, round.t, name, kind, gaussian"),
        ("[self.run, round.t, round.phase, name, kind, gaussian", "[self.run, round.phase, name, kind, gaussian"),
        ("kind, gaussian.sigma, digest])", "kind, digest])"),
        ("self._noise(gaussian, self.site(i), total", "self._noise(gaussian, self.secret, total"),
        ("digest = b\"\".join(digest_of(received, m))", "digest = b\"\""),
        ("return keyed(self.secret, [\"site\", self.names[i]])", "return keyed(bytes(32), [\"site\", self.names[i]])"),
        ("t.t, t.phase, \"row\", self._calls[i], self._digests[k]]", "t.t, t.phase, \"row\", self._calls[i]]"),
        ("t.t, t.phase, \"row\", self._calls[i], self._digests[k]]", "t.t, t.phase, \"row\", self._digests[k]]"),
        ("t.t, t.phase, \"row\", self._calls[i], self._digests[k]]", "t.t, \"row\", self._calls[i], self._digests[k]]"),
        ("t.t, t.phase, \"row\", self._calls[i], self._digests[k]]", "t.phase, \"row\", self._calls[i], self._digests[k]]"),
        ("keyed(guard.site(i), [guard.run", "keyed(guard.secret, [guard.run"),
        ("shared.update(name.encode() + _bytes(t[:1]))", "shared.update(name.encode())"),
        ("shared.update(name.encode() + _bytes(t[:1]))", "shared.update(_bytes(t[:1]))"),
        ("h.update(name.encode() + _bytes(received[name][i]))", "h.update(name.encode())"),
        ("h.update(name.encode() + _bytes(received[name][i]))", "h.update(_bytes(received[name][i]))"),
        ("h.update(name.encode() + _bytes(received[name][i]))", "h.update(name.encode() + _bytes(received[name]))"),
        ("        if cohort < least:", "        if cohort <= least:"),
        ("        if cohort < least:", "        if False:"),
        ("p.absent + 1)", "p.absent)"),
        ("max(p.threshold if p.sums == \"secure\" else 1, p.absent + 1)", "max(p.threshold, p.absent + 1)"),
        ("max(p.threshold if p.sums == \"secure\" else 1, p.absent + 1)", "p.absent + 1"),
        ("max(p.threshold if p.sums == \"secure\" else 1, p.absent + 1)", "max(2, p.absent + 1)"),
        ("        self._enough(round, cohort)\n", ""),
        ("        self._book(ids, digests, round, sum(numbers.values()), cohort)\n", ""),
        ("spent + left * once > self.limit * (1 + 1e-6)", "spent + left * once > self.limit * 1.05"),
        ("spent + left * once > self.limit * (1 + 1e-6)", "spent > self.limit * (1 + 1e-6)"),
        ("spent + left * once > self.limit * (1 + 1e-6)", "spent + (left - 1) * once > self.limit * (1 + 1e-6)"),
        ("left = max(0, self.plan.rounds - done)", "left = self.plan.rounds"),
        ("self.limit = (self.plan.multiplier, self.plan.limit)", "self.limit = (0.95 * self.plan.multiplier, self.plan.limit)"),
        ("torch.where(long > clip,", "torch.where(long > 2 * clip,"),
        ("torch.where(long > clip,", "torch.where(long < 0,"),
        ("max(0.0, clip - math.sqrt(numbers))", "float(clip)"),
        ("max(0.0, clip - math.sqrt(numbers))", "max(0.0, clip - 1e5 * math.sqrt(numbers))"),
        ("over = lengths(words) > clip * (1 - 1e-12)", "over = lengths(words) > 2 * clip"),
        (".nan_to_num(0, 0, 0)", ""),
        (".square().sum(1) for t in of.values()]).sum(0).sqrt()", ".square().sum(1) for t in of.values()]).amax(0).sqrt()"),
        ("used[batch.places[k, :size] - self.guard.train.offsets[i]] += 1", "used[batch.places[k, :size] - self.guard.train.offsets[i]] = 1"),
        ("used[batch.places[k, :size] - self.guard.train.offsets[i]] += 1", "used[0] += 1"),
    )),
    "polyfed/privacy/ledger.py": (LEDGER, (
        ("most * (1 + 1e-9)", "most * 1.05"),
        ("most * (1 + 1e-9)", "most * 1.001"),
        ("most * (1 + 1e-9)", "most * (1 - 1e-3)"),
        ("total[key] = total.get(key, self.spent(*key)) + e.rho", "total[key] = self.spent(*key) + e.rho"),
        ("total[key] = total.get(key, self.spent(*key)) + e.rho", "total[key] = total.get(key, 0.0) + e.rho"),
        ("if total[key] > most", "if self.spent(*key) > most"),
        ("key = e.site, e.data", "key = e.site, e.site"),
        ("new = [e for e in entries if e[:4] not in self._known]", "new = [e for e in entries if e[:3] not in {k[:3] for k in self._known}]"),
        ("new = [e for e in entries if e[:4] not in self._known]", "new = [e for e in entries if (e[0], e[1], e[3]) not in {(k[0], k[1], k[3]) for k in self._known}]"),
        ("new = [e for e in entries if e[:4] not in self._known]", "new = list(entries)"),
        ("if e[:4] not in self._known:", "if e[1:4] not in {k[1:] for k in self._known}:"),
        ("if e[:4] not in self._known:", "if True:"),
        ("most = budget.rho if limit is None else limit", "most = budget.rho"),
        ("most = budget.rho if limit is None else limit", "most = max(budget.rho, limit or 0)"),
        ("self._rounds.setdefault((e.site, e.data, run), set())", "self._rounds.setdefault((e.site, e.data, e.context), set())"),
        (".add(exchange.partition(\".\")[0])", ".add(exchange)"),
        (".add(exchange.partition(\".\")[0])", ".add(exchange[:1])"),
        ("if size < self._read:", "if False:"),
        ("if not entry.rho >= 0:", "if False:"),
        ("os.ftruncate(file, self._read)", "pass"),
        ("0o600)", "0o644)"),
    )),
    "polyfed/privacy/noise.py": (NOISE, (
        ("TAIL = 13", "TAIL = 5"),
        ("TAIL = 13", "TAIL = 11"),
        ("TAIL = 13", "TAIL = 12"),
        ("FINE = 256", "FINE = 96"),
        ("for part in parts:\n        text", "for part in list(parts)[:-1]:\n        text"),
        ("h.update(len(text).to_bytes(8, \"big\") + text)", "h.update(text)"),
        ("h = blake2b(key=secret, digest", "h = blake2b(digest"),
        ("h = blake2b(key=secret, digest", "h = blake2b(key=secret[:31], digest"),
        ("shake_256(self._key + self._block", "shake_256(self._block"),
        ("shake_256(self._key + self._block", "shake_256(self._key[:31] + self._block"),
        ("self._low[found[i]] <= low", "self._low[found[i]] > low"),
        ("taken = drawn < limit", "taken = drawn < 2 * limit"),
        ("place.astype(np.float64) * (2.0 * start + place)", "place.astype(np.float64) * (2.0 * start)"),
        ("(2 * self.sigma**2)\n        limit", "(self.sigma**2)\n        limit"),
        ("taken &= self._accepted(", "self._accepted("),
        ("taken = ~(negative & (x == 0))", "taken = np.ones(n, dtype=bool)"),
        ("return np.where(negative, -x, x), taken", "return x, taken"),
        ("factor = int((-1 / Decimal(sigma) ** 2)", "factor = int((-1 / (2 * Decimal(sigma) ** 2))"),
        ("ratio = int((-1 / (2 * Decimal(sigma) ** 2))", "ratio = int((-1 / (Decimal(sigma) ** 2))"),
        ("rest & np.uint64(self.width - 1)", "rest & np.uint64(self.width // 2)"),
        ("return secrets.token_bytes(32)", "return secrets.token_bytes(16) + bytes(16)"),
        ("return secrets.token_bytes(32)", "return bytes(32)"),
    )),
}  # fmt: skip


def jobs(words: list[str]) -> list[tuple[str, str, str, str]]:
    """(file, tests, what was there, what is) of every mutation whose file has one of the words in its name."""
    wanted = [(file, *of) for file, of in PROMISES.items() if not words or any(word in file for word in words)]
    return [(file, tests, was, put) for file, tests, changes in wanted for was, put in changes]


def judged(copy: Path, file: str, tests: str, was: str, put: str, timeout: float) -> str:
    """The first test that fails with the mutation, "" if none does."""
    path = copy / "src" / file
    whole = path.read_text()
    assert whole.count(was) == 1, f"{file}: {was!r} stands there {whole.count(was)} times"
    path.write_text(whole.replace(was, put))
    try:
        return failing(copy, tests, timeout, file)
    finally:
        path.write_text(whole)


def failing(copy: Path, tests: str, timeout: float, file: str = "") -> str:
    """The first test that fails in a fork of this process, which imports a file and its users anew."""
    plugin = mutate.Rows(set(), copy / "notes", set(), Counter())
    plugin.wanted = lambda item: True
    plugin.pytest_configure = lambda config: forget(file.removesuffix(".py").replace("/", ".")) if file else None
    return mutate.fails(copy, tests.split(), plugin, timeout)[0]


def forget(name: str) -> None:
    """Take a module, and all that import it, out of what is loaded."""
    loaded = {n: m for n, m in sys.modules.items() if n.startswith("polyfed") and getattr(m, "__file__", None)}
    uses = {n: imports(Path(str(m.__file__)).read_text()) for n, m in loaded.items() if n != "polyfed"}
    gone, more = {name}, {name}
    while more:
        more = {n for n, of in uses.items() if n not in gone and of & gone}
        gone |= more
    registry = sys.modules["polyfed.core.algorithm"].REGISTRY
    for key in [key for key, cls in registry.items() if cls.__module__ in gone]:
        del registry[key]
    for n in gone & loaded.keys():
        del sys.modules[n]
    for module in [m for n, m in loaded.items() if n not in gone and hasattr(m, "__path__")]:
        for key, value in list(vars(module).items()):
            of = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(of, str) and of in gone:
                delattr(module, key)


def imports(source: str) -> set[str]:
    """What a file may import of ours, by its text."""
    found = re.findall(r"from (polyfed[\w.]*) import (\([^)]*\)|[^\n]*)|import (polyfed[\w.]+)", source)
    names = {f"{base}.{n}" for base, of, _ in found for n in re.findall(r"\w+", of)}
    return names | {base or module for base, _, module in found}


def main() -> int:
    """Print one line per mutation; 1 if any survived."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("words", nargs="*")
    ask.add_argument("--timeout", type=float, default=300.0)
    given = ask.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True  # two mutants of one second and one length would share it
    for heavy in mutate.HEAVY:
        importlib.import_module(heavy)
    survived, todo = 0, jobs(given.words)
    with mutate.copied() as copy:
        sys.path.insert(0, str(copy / "src"))
        for module in [n for n in sys.modules if n.startswith("polyfed")]:
            del sys.modules[module]
        for ours in WARM:
            importlib.import_module(ours)
        for tests in dict.fromkeys(job[1] for job in todo):
            if failed := failing(copy, tests, 600):
                print(f"{failed} fails without a mutation: nothing can be said", file=sys.stderr)
                return 1
        for file, tests, was, put in todo:
            began = time.monotonic()
            by = judged(copy, file, tests, was, put, given.timeout)
            survived += not by
            took = f"{time.monotonic() - began:5.1f} s"
            print(f"{'caught' if by else 'SURVIVED':9} {took}  {file}: {was}  ->  {put}   {by}", flush=True)
    print(f"{len(todo)} mutations, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
