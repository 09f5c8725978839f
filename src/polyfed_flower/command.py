"""polyfed flower: an app for Flower, and a SuperNode's site."""

import dataclasses
import json
import re
from pathlib import Path

from polyfed.base.errors import ConfigError
from polyfed.base.text import nfc
from polyfed.cli.folders import write_new
from polyfed.cli.screen import say, stderr
from polyfed.data.readers import client_files, picture_folders
from polyfed.runs.config import resolve
from polyfed_flower.commands import FlowerNew, FlowerSite
from polyfed_flower.node import Node
from polyfed_flower.process import answers, listen
from polyfed_sites.consent import at_terminal
from polyfed_sites.keys import private

SERVER = '''"""The server's part: polyfed's own loop, whose messages Flower carries."""

from pathlib import Path

from polyfed_flower.server import server

app = server(Path(__file__).with_name("experiment.toml"))
'''
CLIENT = '''"""A node's part: its site's answers."""

from polyfed_flower.client import client


def data(context):
    """This node's rows: a path, a data frame, or arrays {"x": ..., "y": ...}; None: the file that its settings name."""
    return None


app = client(data)
'''
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {name}
version = "1.0.0"
description = "An experiment of polyfed"
dependencies = []  # polyfed is installed by whoever runs a SuperLink or SuperNode, of one version everywhere

[tool.flwr.app]
publisher = "polyfed"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"

[tool.flwr.app.config]
sites = {sites}  # who takes part, "bern,oslo", or how many; "": whoever is there with the first one
out = {out}  # at the server: a folder in it for each run
resume = ""  # name of such a folder, to go on there
wait = 0.0  # seconds before `quorum` sites will do; 0: for ever
quorum = 0  # 0: all
data = {data}  # in Flower's simulation: a file for each site; a SuperNode has its own in --node-config
"""


def flower_new(o: FlowerNew) -> None:
    e, folder = resolve(o.experiment), o.folder.absolute()
    if not e.single:
        raise ConfigError(
            f"{o.experiment}: found {len(e.methods)} methods and {len(e.seeds)} seeds, expected one of each"
        )
    place = (o.experiment.parent / Path(e.data.name).expanduser()).resolve()
    sites = len(picture_folders(place) or client_files(place)) if place.is_dir() else 0
    says = {
        "name": re.sub("[^a-z0-9-]", "-", folder.name.lower()), "sites": str(sites or ""), "out": str(folder / "runs"),
        "data": str(place) if sites else "",
    }  # fmt: skip
    project = PROJECT.format(**{key: json.dumps(value) for key, value in says.items()})
    texts = {"pyproject.toml": project, "server_app.py": SERVER, "client_app.py": CLIENT}
    texts["experiment.toml"] = o.experiment.read_text(encoding="utf-8")
    write_new({o.folder / file: text for file, text in texts.items()})
    simulated = f" --federation-config 'num-supernodes={sites}'" if sites else ""
    say(f"\nnext: flwr run {o.folder} --stream{simulated}")


@private()
def flower_site(o: FlowerSite) -> None:
    files = {key: str(path.absolute()) for key, path in (("policy", o.policy), ("backbone", o.backbone)) if path}
    place, allow = str(o.data.absolute()), ",".join(o.allow or ())
    node = Node(
        o.name or nfc(o.data.stem), place, str(o.vault.absolute()), yes=o.yes or "", allow=allow, metrics=o.metrics
    )
    there = answers(node._replace(**files).checked(), lambda line: say(line, stderr))
    if not o.yes:
        there.consent = dataclasses.replace(there.consent, ask=at_terminal, agreed=frozenset())
    there.say(f"{node.name}: listens at {o.socket}")
    listen(o.socket, there)
