"""What a forge runs and shows: workflows call what the Makefile has, on the Pythons that pyproject.toml names."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
ROOT = Path(__file__).parent.parent
FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
OURS = "checkout|setup-python|upload-artifact|download-artifact"
ACTION = re.compile(rf"actions/({OURS})@v\d+|pypa/gh-action-pypi-publish@release/v\d+")  # and how far they are pinned
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = {
    target
    for line in re.findall(r"^([\w /.-]+):(?![=]).*$", (ROOT / "Makefile").read_text(), re.M)
    for target in line.split()
}


def jobs(path: Path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text())["jobs"]


def steps(path: Path) -> list[dict]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def called(path: Path) -> set[str]:
    """The make targets of a workflow, those of a matrix too."""
    matrix = [t for job in jobs(path).values() for t in job.get("strategy", {}).get("matrix", {}).get("target", [])]
    words = [w for step in steps(path) for w in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))]
    return {*matrix, *words}


def pythons(path: Path) -> set[str]:
    found = set()
    for job in jobs(path).values():
        matrix = job.get("strategy", {}).get("matrix", {})
        found |= {*matrix.get("python", []), *(row["python"] for row in matrix.get("include", []) if "python" in row)}
        found |= {w for s in job["steps"] if "matrix" not in (w := s.get("with", {}).get("python-version", "matrix"))}
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_parses_and_ends_in_time_with_few_rights(path):
    read = yaml.safe_load(path.read_text())
    assert {"name", True, "permissions", "jobs"} <= read.keys()  # YAML reads `on` as true
    assert read["permissions"] == {"contents": "read"}
    for name, job in read["jobs"].items():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys(), name
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= read["jobs"].keys(), name
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert not [action for action in used if not ACTION.fullmatch(action)]


def test_every_make_target_that_workflows_call_is_in_the_makefile():
    targets = set().union(*map(called, WORKFLOWS))
    assert {"test", "suite", "test-long", "test-oldest", "test-newest", "coverage", "docs"} <= targets
    assert targets <= TARGETS


def test_the_classifiers_name_the_pythons_that_are_run():
    named = {c.rsplit(" ", 1)[1] for c in PROJECT["project"]["classifiers"] if re.search(r"Python :: \d\.\d+$", c)}
    assert pythons(FORGE / "workflows" / "test.yml") == named
    assert PROJECT["project"]["requires-python"] == f">={min(named, key=lambda v: int(v[2:]))}"
    assert {f"3.{w[3:]}" for w in re.findall(r"cp3\d+", PROJECT["tool"]["cibuildwheel"]["build"])} == named


def test_what_may_publish_runs_no_code_of_ours():
    release = jobs(FORGE / "workflows" / "release.yml")
    mighty = {name: job for name, job in release.items() if "permissions" in job}
    assert mighty.keys() == {"publish"}
    assert mighty["publish"]["permissions"] == {"id-token": "write"}
    assert mighty["publish"]["environment"] == "pypi"
    assert not any("run" in step or "checkout" in step["uses"] for step in mighty["publish"]["steps"])
    assert set(mighty["publish"]["needs"]) == release.keys() - {"publish"}
    assert not re.search(r"secrets\.|password|token:(?! write)", (FORGE / "workflows" / "release.yml").read_text())


def script(name: str) -> str:
    return next(s["run"] for s in steps(FORGE / "workflows" / "release.yml") if s.get("name") == name)


@pytest.mark.parametrize(("tag", "right"), [("v{}", True), ("{}", False), ("v{}.1", False), ("v0.0", False)])
def test_a_tag_is_released_only_where_it_is_the_version(tag, right, tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    version = PROJECT["project"]["version"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_REF_NAME": tag.format(version)}
    command = ["bash", "-e", "-c", script("the tag is the version")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True)
    assert (done.returncode == 0) is right
    assert right or f"v{version}" in done.stderr.decode()


def test_the_oldest_packages_are_the_lower_bounds():
    subprocess.run(["make", "-s", "-B", "build/constraints-oldest.txt"], cwd=ROOT, check=True)
    written = (ROOT / "build" / "constraints-oldest.txt").read_text().split()
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [*PROJECT["project"]["dependencies"], *extras["sites"], *extras["tables"]]
    assert written == [d.replace(">=", "==") for d in declared]
