"""The vault: which private state counts, whatever was written when the power failed."""

import os
from pathlib import Path

import pytest
import torch

from polyfed.base.errors import RunError
from polyfed_sites.vault import START, Vault


def state(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3,), value), "mask": torch.ones(2) > 0}


@pytest.mark.parametrize("write", ["save", "keep"])
def test_bytes_are_on_the_disk_before_their_name_is(tmp_path, monkeypatch, write):
    """Or the name would stand over zeros after a power cut: fsync has seen the bytes that get it, the folder last."""
    vault, done = Vault(tmp_path / "v", "run", "oslo"), []
    sync, rename = os.fsync, os.replace

    def fsync(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append(("flush", path if path.is_dir() else path.read_bytes()))
        sync(handle)

    def replace(source, target):
        done.append(("rename", Path(source).read_bytes()))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    if write == "save":
        vault.save((0, 0), state(1), START)
    else:
        vault.keep("model.json", b"{}")
    assert [what for what, _ in done] == ["flush", "rename", "flush"]
    assert done[0][1] == done[1][1]
    assert done[2][1] == tmp_path / "v"


@pytest.mark.parametrize(
    ("run", "site", "said"), [("other", "oslo", "run 'run', expected 'other'"), ("run", "bern", "site 'oslo'")]
)
def test_a_vault_of_another_run_or_site_is_refused(tmp_path, run, site, said):
    Vault(tmp_path / "v", "run", "oslo")
    with pytest.raises(RunError, match=said):
        Vault(tmp_path / "v", run, site)


@pytest.mark.parametrize(("error", "said"), [
    (KeyboardInterrupt("now"), "now"), (OSError(28, "No space left on device"), "the disk is full"),
])  # fmt: skip
def test_stopped_before_the_rename_the_version_before_is_whole(tmp_path, monkeypatch, error, said):
    """Where it is damaged it is refused, and not taken for numbers."""
    vault = Vault(tmp_path / "v", "run", "oslo")
    vault.save((1, 0), state(1), START)

    def stop(*_):
        raise error

    with monkeypatch.context() as stopped:
        stopped.setattr(os, "replace", stop)
        with pytest.raises((KeyboardInterrupt, RunError), match=said):
            vault.save((2, 0), state(2), (1, 0))
    again = Vault(tmp_path / "v", "run", "oslo")
    assert again.versions() == [(1, 0)]
    assert torch.equal(again.load((1, 0))["w"], state(1)["w"])
    (path,) = (tmp_path / "v").glob("0*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RunError, match="is damaged"):
        vault.load((1, 0))
