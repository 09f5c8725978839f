"""FedAvg's round by PFLlib's own code, where its folder is given: its clients' training, sending and averaging.

Its samples are read from memory and not from files, and only the round's clients are made and sent to, which PFLlib
itself does for all of them: both are in its favour. It leaves out a client's last batch where that is not full.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from torch import nn

from polyfed.compute.split import Split


class PFLlib:
    """The clients of one round. folder: a checkout of PFLlib, whose server needs h5py; its classes as of 004a405."""

    def __init__(
        self, folder: Path, model: nn.Module, train: Split, clients: Sequence[int], lr: float, epochs: int, batch: int
    ):
        sys.path.insert(0, str(folder / "system"))
        base, own, server = (
            importlib.import_module(f"flcore.{name}")
            for name in ("clients.clientbase", "clients.clientavg", "servers.serverbase")
        )
        parts = [train.select([k]) for k in clients]
        samples = [list(zip(part.x.float(), part.y, strict=True)) for part in parts]
        vars(base)["read_client_data"] = lambda dataset, k, *_, **__: samples[k]
        arguments = SimpleNamespace(
            model=model, algorithm="FedAvg", dataset="", device="cpu", save_folder_name="", num_classes=10, few_shot=0,
            batch_size=batch, local_learning_rate=lr, local_epochs=epochs, learning_rate_decay=False,
            learning_rate_decay_gamma=1.0,
        )  # fmt: skip
        self.clients = [
            own.clientAVG(arguments, k, len(own_samples), 0, train_slow=False, send_slow=False)
            for k, own_samples in enumerate(samples)
        ]
        self.start, self.server = model, server.Server.__new__(server.Server)
        vars(self.server).update(
            clients=self.clients, selected_clients=self.clients, client_drop_rate=0.0, time_threthold=float("inf"),
            current_num_join_clients=len(self.clients),
        )  # fmt: skip

    def round(self) -> None:
        """Send the model, train the clients one after another, average."""
        self.server.global_model = self.start
        self.server.send_models()
        for client in self.clients:
            client.train()
        self.server.receive_models()
        self.server.aggregate_parameters()
