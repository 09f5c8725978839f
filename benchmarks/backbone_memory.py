"""Peak resident memory of `polyfed run` with a frozen backbone of N bytes: a BERT of random weights, three clients of
16 texts of 12 tokens, two rounds. Of each figure, the peak of the same run with a backbone of 1 MB is taken off.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

ADAPTERS = "probe", "lora:r=4,targets=query+value"
SIZES = {"small": (64, 2), "base": (768, 12), "large": (1280, 20)}  # width, layers
MADE = """
from transformers import BertConfig, BertModel
BertModel(BertConfig(hidden_size={h}, num_hidden_layers={n}, num_attention_heads={h} // 64, intermediate_size=4 * {h},
                     vocab_size=1000, max_position_embeddings=64)).save_pretrained({to!r})
"""  # in a process of its own: a child's peak is at least what its parent had when it was made


def backbone(to: Path, h: int, n: int) -> int:
    """Make one; its bytes."""
    subprocess.run([sys.executable, "-c", MADE.format(h=h, n=n, to=str(to))], check=True)
    return (to / "model.safetensors").stat().st_size


def peak(backbone: Path, adapter: str, threads: int) -> int:
    """Bytes of a run."""
    with TemporaryDirectory() as folder:
        at, rng = Path(folder), np.random.default_rng(0)
        (at / "data").mkdir()
        for name in ("bern", "oslo", "rome"):
            ids = rng.integers(1, 1000, (16, 12))
            np.savez(at / "data" / f"{name}.npz", x=np.stack([ids, np.ones_like(ids)], 1), y=ids[:, 0] % 2)
        (at / "study.toml").write_text(
            f'rounds = 2\n[data]\nname = "./data"\n[model]\nbackbone = "{backbone}"\nadapter = "{adapter}"\n'
            '[algorithm]\nname = "fedavg"\n'
        )
        program = str(Path(sys.executable).with_name("polyfed"))
        run = subprocess.Popen(
            [program, "run", "study.toml", "--workers", str(threads), "--out", "run", "--quiet"],
            cwd=at, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        _, status, used = os.wait4(run.pid, 0)
        assert not status, status
        return used.ru_maxrss * 1024


def main() -> None:
    with TemporaryDirectory() as folder:
        size = {name: backbone(Path(folder) / name, *shape) for name, shape in SIZES.items()}
        print("| N | adapter | threads | peak, of N |\n|--:|---|--:|--:|")
        for name in [*SIZES][1:]:
            for adapter in ADAPTERS:
                for threads in (1, 8):
                    whole, without = (peak(Path(folder) / which, adapter, threads) for which in (name, "small"))
                    print(
                        f"| {size[name] / 1e6:.0f} MB | {adapter} | {threads} | {(whole - without) / size[name]:.2f} |"
                    )


if __name__ == "__main__":
    main()
