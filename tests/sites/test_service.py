"""The systemd unit, the container file and the operators' guide: their commands are commands of polyfed."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from polyfed.cli import command_line

ROOT = Path(__file__).parents[2]
UNIT, IMAGE = (ROOT / "examples" / "network" / name for name in ("polyfed-client.service", "Containerfile"))
GUIDE = ROOT / "docs" / "sites.md"


def commands() -> list[str]:
    (started,) = re.findall(r"^ExecStart=/opt/polyfed/bin/polyfed (.*)$", UNIT.read_text(), flags=re.M)
    inside = re.findall(r"^# +once .* polyfed \\\n# +(.*)$", IMAGE.read_text(), flags=re.M)
    assert len(inside) == 2
    typed = re.findall(r"^(?:/opt/polyfed/bin/)?polyfed (.*)$", GUIDE.read_text(), flags=re.M)
    assert len(typed) == 9
    return [started, *inside, *typed]


@pytest.mark.parametrize("line", commands(), ids=lambda line: line.split()[0])
def test_its_command_is_one_of_polyfeds(line):
    """Names and values of options are read as they would be before the command begins."""
    command, words = command_line(), shlex.split(line, comments=True)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


def test_every_path_in_a_container_is_a_volume():
    for run in re.findall(r"once (-.*)\n#( +.*)", IMAGE.read_text()):
        mounted = re.findall(r"-v \S+?:(/[^: ]+)", run[0])
        used = re.findall(r"(?<= )/\S+", run[1])
        assert used
        for path in used:
            assert any(path == m or path.startswith(f"{m}/") for m in mounted), path


def test_what_the_image_copies_is_all_that_the_package_is_built_from():
    copied = {
        name for names in re.findall(r"^COPY (?!--)(.*) \S+$", IMAGE.read_text(), flags=re.M) for name in names.split()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed | set(project["tool"]["setuptools"]["packages"]["find"]["where"]) <= copied
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_has_nothing_to_say_about_the_unit(tmp_path):
    mine = tmp_path / UNIT.name
    mine.write_text(UNIT.read_text().replace("/opt/polyfed/bin/polyfed", shutil.which("true")))
    done = subprocess.run(["systemd-analyze", "verify", mine], capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr == ""
