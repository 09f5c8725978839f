"""The commands that this package adds to polyfed; what they do is in `cli`."""

from pathlib import Path
from typing import Literal

from polyfed.cli.options import Command, Shared, argument, option

MADE = ("pooled", "labels", "signature", "prototypes", "mass", "moments", "mean")  # made of samples and not by training
GROUPS = {"keys": "Make, list and revoke the keys of a federation's sites."}
KEYS = option("Folder with the federation's keys; keep it safe.", Path("keys"), "DIR")


class Server(
    Shared, takes=("out", "force", "quiet"),
    idle={"quorum": "without --wait", "resume": "without --out", "force": "without --out | with --resume"},
    module="cli.server",
):  # fmt: skip
    """Train over real sites: the same experiment, with the hospitals' data where they are.

    Waits for the sites (polyfed client), trains, and writes a run as polyfed run does. No sample and no private state
    of a site is ever here; each site keeps its own model.

    Several experiments are several runs at one port, each in a folder of its own in --out; sites take part in them
    with --stay. A folder is a queue: each experiment in it is a run, also one that is put there later, and the server
    stays until it is stopped.

    [dim]polyfed server experiment.toml --sites 4 --out runs/heart
    polyfed server heart.toml lung.toml --sites heart=bern,oslo --sites lung=3[/dim]
    """

    experiment: list[Path] = argument("Experiment files (TOML), or a folder of them.", ..., "FILE.toml|DIR")
    sites: list[str] | None = option(
        "Who takes part: these sites, or the first N that connect; RUN= before it: in this run alone; repeatable. "
        "Default: all with a key.",
        None,
        "[RUN=]N|A,B",
    )
    at_once: int | None = option("Runs that go at once; others wait for their turn. Default: 4.", None, "N", min=1)
    keys: Path = option("Folder made by polyfed keys.", Path("keys"), "DIR")
    host: str = option("Address of this machine; unix:PATH: a proxy here ends TLS.", "0.0.0.0", "HOST|unix:PATH")
    certificate: Path | None = option("PEM for TLS and its key. Default: that of polyfed keys.", None, "FILE")
    clients: Path | None = option("Nobody connects without a certificate of these authorities.", None, "FILE")
    port: int | None = option("Port to listen at. Default: that of the keys' address.", None, "PORT", min=1, max=65535)
    wait: float | None = option(
        "Seconds to wait for all sites of a round before --quorum will do. Default: for ever.", None, "S", min=0
    )
    quorum: int | None = option(
        "After --wait, go on when N sites of a round have answered. Default: all.", None, "N", min=1
    )
    most_share: float = option(
        "Refuse to begin where one site has more than this share of all training rows, by which most methods weight "
        "sites.",
        1.0,
        "S",
        min=0,
        max=1,
    )
    resume: bool = option("Continue the run in --out.", False)


class Client(Shared, takes=("quiet",), idle={"yes": "with --dry-run", "stay": "with --dry-run"}, module="cli.client"):
    """Take part in a federation: train on this site's data, which stay here.

    Shows what will leave the site and asks before anything does. It may be stopped at any time, and goes on where it
    was when it is started again.

    [dim]polyfed client --key cleveland.key --data cleveland.csv --vault vault[/dim]
    """

    key: Path = option("The site's key: a file from polyfed keys add.", ..., "FILE")
    passphrase: Path | None = option(
        "File with the key's passphrase. Default: ask for it, if it has one.", None, "FILE"
    )
    data: Path = option("The site's own file, CSV or npz, or its folder of images, LABEL/IMAGE.", ..., "FILE")
    vault: Path = option(
        "Folder for what the site keeps, its private state and its model: one for each run.", ..., "DIR"
    )
    backbone: Path | None = option(
        "Pretrained weights of the experiment's model here: a folder of transformers, or a file.", None, "PATH"
    )
    stay: bool = option(
        "Take part in every run that the server has, until stopped; each has a folder of its own in --vault.", False
    )
    server: str | None = option("Where the server is, if not where the key says.", None, "[https://]HOST[:PORT][/PATH]")
    proxy: str | None = option("Proxy on the way there. Default: HTTPS_PROXY's.", None, "http://[NAME:WORD@]HOST:PORT")
    certificate: Path | None = option("PEM of this site and its key, if the server wants another one.", None, "FILE")
    allow: list[str] | None = option(
        f"Let leave the site what is made of samples and not by training: {', '.join(MADE)}.", None, "A,B,..."
    )
    metrics: Literal["none", "aggregate", "own"] = option(
        "What the server writes down of how good models are here: nothing, a mean over sites, or all.", "own"
    )
    dry_run: bool = option("Ask the server what it wants, show what would leave the site, and stop.", False)
    policy: Path | None = option(
        "What this site answers at most. Default: policy.toml beside the key, or else careful settings of ours.",
        None,
        "FILE",
    )
    yes: str | None = option(
        "Agree to these terms, by the digests that --dry-run shows, and to no others; policy: to whatever the policy "
        "allows.",
        None,
        "DIGEST,...|policy",
    )


class Status(Command, module="cli.events"):
    """Show whether a server or site runs, who is connected, and its last events."""

    folder: Path = argument("A server's run, or a site's vault.")
    lines: int = option("How many of the last events to show.", 10, "N", "--lines", "-n", min=1)


class AuditLog(Command, module="cli.audit_log"):
    """Compare the audit logs of a server and a site: who was asked what, and what each answer was, by its digest.

    Exit status 0: both ends have the same; 1: the first line that is missing, changed, doubled or only at one end.

    [dim]polyfed audit-log runs/heart vault[/dim]
    """

    a: Path = argument("A server's run, a site's vault, or the audit.jsonl of either.", ..., "A")
    b: Path = argument("The other end's.", ..., "B")


class KeysInit(Command, group="keys", module="cli.keys"):
    """Make a certificate authority and the server's certificate; again, to renew the latter or to change the address.

    [dim]polyfed keys init fed.example.org:8000[/dim]
    """

    address: str = argument("Where the sites reach the server.", ..., "[https://]HOST[:PORT][/PATH]")
    also: list[str] | None = option("Another name of the host; repeatable.", None, "NAME")
    keys: Path = KEYS


class KeysAdd(Command, group="keys", module="cli.keys"):
    """Make the file with which a site joins: its key, the server's address and the authority's certificate.

    Send it to the site over a channel that both trust, and delete it here: who has it is the site.
    """

    site: str = argument("Name of the site.")
    out: Path = option("Folder for the site's file.", Path(), "DIR")
    rotate: bool = option("Make a second key for a site that has one; both are accepted for a month.", False)
    passphrase: bool = option("Ask for a passphrase, which the site then has to give.", False)
    keys: Path = KEYS


class KeysList(Command, group="keys", module="cli.keys"):
    """Show the sites, whether their keys are accepted and until when, and what ends soon."""

    keys: Path = KEYS


class KeysRevoke(Command, group="keys", module="cli.keys"):
    """Refuse a site's keys from now on, also in a run that is under way. They stay in the register, as evidence."""

    site: str = argument("Name of the site.")
    key: str | None = option("One key alone, as polyfed keys list has it.", None, "KEY")
    why: str | None = option("Reason, which is written down.", None, "TEXT")
    keys: Path = KEYS
