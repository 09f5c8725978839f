"""Rows of a PostgreSQL server: values as Python's own, and one line for what does not answer.

A server of its own is started in a temporary folder, as another user where the tests run as root.
"""

import os
import shutil
import socket
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest
import torch

import polyfed as pf
from polyfed.base.columns import Columns
from polyfed.base.errors import ConfigError, DataError
from polyfed.data.repairs import plain

pytest.importorskip("psycopg", reason="psycopg is not installed")
PASSWORD = "Geheim/1@x%"
PLACES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
TOOLS = {name: shutil.which(name, path=os.pathsep.join([os.environ["PATH"], *map(str, PLACES)]))
         for name in ("initdb", "pg_ctl")}  # fmt: skip
ROWS = [
    (["east", "west"][k % 2], None if k % 9 == 0 else 20 + 7 * k % 60, 2**60 + k % 3, Decimal(137 * k % 101) / 8,
     None if k == 3 else k % 5 < 2, ["icu", "Ärzte"][k * k % 3 % 2], ["yes", "no"][k % 7 % 2])
    for k in range(60)
]  # fmt: skip
TABLE = """create table visits (hospital text, age int, code bigint, crp numeric(12, 4), smoker boolean,
 ward varchar(9), died char(3), seen date default '2024-05-01', at timestamp default '2024-05-01 10:30:00',
 tags int[] default '{1,2}',
 odd numeric default 'NaN')"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """URL of a database with visits, without its password, and the port."""
    if None in TOOLS.values():
        pytest.skip("no PostgreSQL server is installed (initdb, pg_ctl)")
    folder, as_user = tmp_path_factory.mktemp("pg"), []
    if os.geteuid() == 0:  # as whom no server starts
        import pwd

        if not {"postgres", "nobody"} & {p.pw_name for p in pwd.getpwall()} or not shutil.which("runuser"):
            pytest.skip("a PostgreSQL server does not start as root")
        user = "postgres" if "postgres" in {p.pw_name for p in pwd.getpwall()} else "nobody"
        as_user = ["runuser", "-u", user, "--"]
        folder = Path(subprocess.check_output([*as_user, "mktemp", "-d"], text=True, cwd="/").strip())
    (word := folder / "word").write_text(PASSWORD)
    word.chmod(0o644)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"

    def do(tool, *words):
        command = [*as_user, TOOLS[tool], "-D", data, *words]
        subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    do("initdb", "-U", "me", "-A", "scram-sha-256", "--pwfile", word, "-E", "UTF8", "-N")
    do("pg_ctl", "-o", f"-p {port} -k {folder} -c listen_addresses=127.0.0.1", "-l", folder / "log", "-w", "start")
    import psycopg

    with psycopg.connect(host="127.0.0.1", port=port, user="me", password=PASSWORD, dbname="postgres") as connection:
        connection.execute(TABLE)
        cells = "(hospital, age, code, crp, smoker, ward, died)"
        connection.cursor().executemany(f"insert into visits {cells} values (%s, %s, %s, %s, %s, %s, %s)", ROWS)
    yield f"postgresql+psycopg://me:$WORD@127.0.0.1:{port}/postgres", port
    do("pg_ctl", "-m", "immediate", "stop")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server, monkeypatch):
    monkeypatch.setenv("WORD", PASSWORD)
    return server[0]


def test_values_are_those_of_a_csv_file(url, tmp_path):
    names = "hospital, age, code, crp, smoker, ward, died"
    found = plain(url, Columns(query=f"select {names}, seen, at, odd from visits")).columns
    texts = [["" if v is None else str(v) for v in cells] for cells in zip(*ROWS, strict=True)]
    assert {k: found[k] for k in ("hospital", "age", "code", "smoker", "ward")} == dict(
        zip(("hospital", "age", "code", "smoker", "ward"), (*texts[:3], *texts[4:6]), strict=True)
    )
    assert [*map(float, found["crp"])] == [*map(float, texts[3])]
    assert [found[k][0] for k in ("died", "seen", "at", "odd")] == ["yes", "2024-05-01", "2024-05-01 10:30:00", ""]
    (tmp_path / "t.csv").write_text("\n".join([names, *(",".join(row) for row in zip(*texts, strict=True))]))
    how = {"by": "hospital", "target": "died", "drop": ["code"]}
    one = pf.data.load(tmp_path / "t.csv", **how).partition()
    query = f"select {names} from visits where ward like '%' and 'a:b' <> '%s' -- :x"
    two = pf.data.load(url, query=query, **how).partition()
    for part in ("train", "test"):
        assert torch.equal(getattr(one, part).x, getattr(two, part).x)
        assert torch.equal(getattr(one, part).y, getattr(two, part).y)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("select nothing from visits", 'cannot be answered .column "nothing" does not exist'),
        ("select * from visits where false", "the query finds no row"),
        ("update visits set age = 1", "the query finds no table"),
        ("selec", "syntax error"),
        ("select tags, died from visits", "line 2, column 'tags': found a list"),
        ("select age, age, died from visits", "two columns are called 'age'"),
    ],
)
def test_queries_without_an_answer_are_one_line(url, query, said):
    with pytest.raises(DataError, match=said) as e:
        pf.data.load(url, query=query, target="died")
    assert "\n" not in str(e.value)
    assert "me:***@" in str(e.value)


def test_a_password_stands_nowhere(cli, url, server, tmp_path, monkeypatch):
    words = ("--query", "select hospital, age, ward, died from visits", "--site", "hospital", "--target", "died")
    cli("run", "--data", url, *words, "--algorithm", "fedavg", "--rounds", "1", "--seeds", "1", "--out", "r").done()
    others = [url.replace("$WORD", "Plain77"), url.replace(":$WORD", "") + "?password=Plain77"]
    for other in others:
        refused = cli("run", "--data", other, *words, "--out", "r2")
        assert "found a password in" in refused.err
        assert "Plain77" not in refused.err + refused.out
        assert not Path("r2").exists()
    for value, said in (("Wrong77", "password authentication failed"), ("", "found no variable WORD")):
        monkeypatch.setenv("WORD", value)
        with pytest.raises((DataError, ConfigError), match=said) as e:
            pf.data.load(url, query="select 1")
        assert "Wrong77" not in str(e.value)
        assert "\n" not in str(e.value)
    monkeypatch.setenv("WORD", PASSWORD)
    with pytest.raises(DataError, match="cannot be answered") as e:
        pf.data.load(url.replace(str(server[1]), "1"), query="select 1")
    assert PASSWORD not in str(e.value)
    kept = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not [p for p in kept if PASSWORD.encode() in p.read_bytes() or b"Plain77" in p.read_bytes()]
