"""The audit log: both ends' are the same, and whatever is done to one of them is found and named."""

import json
import shutil

import pytest
from direct import Raw

from polyfed.base.errors import ConfigError, RunError
from polyfed_sites.audit import SERVER, Audit, audited, compare, heading, mark, read


@pytest.fixture
def ends(tmp_path):
    """The folders of a server and a site after four questions, and a way to ask one more."""
    server, site = Audit(tmp_path / "run", SERVER), Audit(tmp_path / "vault", "bern")
    answer = audited(lambda data: b"answer to " + data, site, lambda: "1234")

    def ask(n: int, taken: bool = True, server: Audit = server) -> None:
        data = Raw({"kind": "train", "t": n}).pack()
        server.add("asked", site="bern", run="r", asked=mark(data), what=heading(data))
        reply = answer("r", data)
        if taken:
            server.add("answered", site="bern", run="r", asked=mark(data), answer=mark(reply), bytes=len(reply))

    for n in range(4):
        ask(n)
    return tmp_path / "run", tmp_path / "vault", ask


def test_what_both_ends_have_written_is_the_same_and_holds_no_data(ends):
    server, site, _ = ends
    assert compare(read(server), read(site)).startswith("4 answers of bern, ")
    assert compare(read(site / "audit.jsonl"), read(server)) == compare(read(server), read(site))
    lines = [json.loads(line) for line in (site / "audit.jsonl").read_text().splitlines()]
    assert [s["did"] for s in lines] == ["started", "agreed", *["answered"] * 4]
    assert lines[1]["terms"] == "1234"
    assert lines[2]["what"] == "train t 0"
    assert "answer to" not in (site / "audit.jsonl").read_text()
    assert {path.stat().st_mode & 0o777 for path in (server / "audit.jsonl", site / "audit.jsonl")} == {0o600}


def changed(lines: list[str]) -> list[str]:
    return [line.replace('"bytes": ', '"bytes": 1') if k == 4 else line for k, line in enumerate(lines)]


SPOILED = {
    "changed": (changed, "line 5: has changed"),
    "missing": (lambda lines: lines[:3] + lines[4:], "line 4: line 4 is missing"),
    "doubled": (lambda lines: lines[:4] + lines[3:], "line 5: line 4 is there twice"),
    "cut off": (lambda lines: [*lines[:-1], lines[-1][:40]], "found no line of an audit log"),
    "short": (lambda lines: lines[:-2], "has no such answer; a line or the end of it is missing"),
    "empty": (lambda lines: [], "found no line"),
}


@pytest.mark.parametrize("end", ["run", "vault"])
@pytest.mark.parametrize("what", SPOILED)
def test_the_first_difference_is_named(ends, tmp_path, cli, end, what):
    spoil, said = SPOILED[what]
    path = tmp_path / end / "audit.jsonl"
    lines = spoil(path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n" * bool(lines))
    cli("audit-log", ends[0], ends[1]).line(1, said)


def test_a_log_that_was_written_anew_with_another_answer_is_found_by_the_other_ends(ends, tmp_path):
    shutil.rmtree(tmp_path / "vault")
    again = Audit(tmp_path / "vault", "bern")
    answer = audited(lambda data: b"another answer", again, lambda: "")
    for n in range(4):
        answer("r", Raw({"kind": "train", "t": n}).pack())
    with pytest.raises(RunError, match=r"audit\.jsonl, line 2: bern's answer to train t 0: found .* at the server"):
        compare(read(ends[0]), read(ends[1]))


def test_an_answer_that_a_stopped_server_did_not_take_is_counted_and_no_difference(ends, tmp_path):
    server, site, ask = ends
    ask(4, taken=False)
    with pytest.raises(RunError, match=r"train t 4: .* has no such answer"):
        compare(read(server), read(site))
    ask(5, server=Audit(server, SERVER))
    assert compare(read(server), read(site)).endswith("; 1 of them did not reach a server that was stopped")
    with pytest.raises(ConfigError, match="expected a server's and a site's"):
        compare(read(server), read(server))
    with pytest.raises(ConfigError, match="no audit log"):
        read(tmp_path)


def test_a_line_that_a_kill_has_cut_off_is_written_anew(ends, tmp_path):
    path = ends[1] / "audit.jsonl"
    path.write_bytes(path.read_bytes() + b'{"n": 7, "did": "ans')
    Audit(ends[1], "bern").add("agreed", run="r", terms="5")
    assert [s["did"] for s in read(ends[1]).lines][-2:] == ["started", "agreed"]


@pytest.mark.parametrize("data", [b"", b"\xff" * 30, Raw({"kind": "x" * 500}).pack(), b"\x02" + bytes(7) + b"[]"])
def test_whatever_is_said_has_a_heading(data):
    assert 0 < len(heading(data)) <= 200
