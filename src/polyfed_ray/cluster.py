"""Ray's cluster: one that there is, or one of this machine alone."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from polyfed.base.errors import ConfigError

try:
    ray: Any = import_module("ray")  # which comes without types
except ModuleNotFoundError:
    raise ConfigError("engine: ray is not installed; pip install 'polyfed[ray]'") from None

PATIENCE = 120.0  # seconds that actors of this machine may take to start
GROWS = 900.0  # seconds that a cluster may take to have room for all
JOINED: list[str | None] = []  # the address by which this process has joined a cluster; None: one of its own


def needs(device: str) -> dict[str, int]:
    """Ray's resources for an actor: one processor, and a graphics card where it trains on one."""
    return {"CPU": 1} | ({"GPU": 1} if device.startswith("cuda") else {})


def _alone(workers: int) -> None:
    """Start Ray on this machine, where nobody else can reach it: it asks nobody for a password."""
    constants: Any = import_module("ray._private.ray_constants")
    clusters, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False  # else it listens to all interfaces
    try:
        ray.init(
            num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error",
            _node_ip_address="127.0.0.1",
        )  # fmt: skip
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def connect(workers: int, address: str | None, needed: Mapping[str, int], idle: Sequence[Any]) -> float:
    """Join a cluster, or start one here. Returns the seconds that actors may take to start."""
    if not ray.is_initialized():
        try:
            if address is None:
                _alone(workers)
            else:
                ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RuntimeError) as e:
            raise ConfigError(f"engine: no Ray cluster at {address} ({str(e).splitlines()[0]})") from None
        JOINED.append(address)
    elif JOINED and address not in (None, JOINED[-1]):
        raise ConfigError(f"engine: found {address}, and this process has joined {JOINED[-1] or 'Ray on this machine'}")
    if address is not None:
        return GROWS
    for kind, each in needed.items():  # actors of this machine would wait for ever
        have = int(ray.available_resources().get(kind, 0)) // each + len(idle)
        if have < workers:
            resource = {"CPU": "processors", "GPU": "graphics cards"}[kind]
            raise ConfigError(f"workers: found {workers}, expected at most {have}, the cluster's free {resource}")
    return PATIENCE
