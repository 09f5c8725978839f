"""What polyfed uses of Flower, in one list: whoever moves to another version of it looks here first.

Much of it is Flower's own inside, so one minor version is pinned. It is untyped, as the extra [flower] may be missing,
and loaded by name, as each end needs only its part.
"""

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polyfed.base.errors import ConfigError

VERSION = "1.41"
NAMES = {
    "httpx": "HTTPError",
    "flwr.supercore.run": "RunNotRunningException",
    "flwr.supercore.inflatable.inflatable_utils": "ObjectPullError ObjectPushError ObjectUnavailableError pull_objects",
    "flwr.app": "Array ArrayRecord Message RecordDict",
    # what the server asks of its SuperLink
    "flwr.supercore.control": "ControlHttpClient",
    "flwr.proto.control_pb2": "ListNodesRequest RegisterNodeRequest StartRunRequest UnregisterNodeRequest",
    "flwr.cli.build": "build_fab_from_files",
    "flwr.supercore.fab": "Fab",
    "flwr.common.serde": "fab_to_proto run_from_proto",
    "flwr.superlink.grid": "HttpGrid",
    # the work that one of Flower's apps would do, at either end
    "flwr.supercore.runtime": "RuntimeHttpClient",
    "flwr.proto.runtime_pb2": "AcquireTaskRequest PullTaskInputRequest SendTaskHeartbeatRequest",
    "flwr.supercore.constant": "TaskType",
    "flwr.supercore.task_identity": "TaskIdentity",
    "flwr.common.constant": "SubStatus",
    "flwr.supercore.interceptors": (
        "RuntimeTokenHttpInterceptor RuntimeVersionHttpInterceptor SuperExecAuthHttpInterceptor"
    ),
    "flwr.supernode.runtime.run_clientapp": "pull_task_input push_message push_task_output",
    # keys, and a site's leave
    "cryptography.hazmat.primitives.serialization": "load_ssh_private_key load_ssh_public_key",
    "flwr.supercore.primitives.asymmetric": "public_key_to_bytes",
    "flwr.proto.fleet_pb2": "DeactivateNodeRequest",
    "flwr.supernode.fleet_http_client": "FleetHttpClient",
    "flwr.supernode.node_auth_http_interceptor": "NodeAuthHttpInterceptor",
}
_WHERE = {name: module for module, names in NAMES.items() for name in names.split()}

try:
    import_module("flwr")
    _found = version("flwr")
except (ModuleNotFoundError, PackageNotFoundError):
    raise ConfigError("real sites need Flower, which is missing; pip install 'polyfed[flower]'") from None
if not _found.startswith(f"{VERSION}."):
    raise ConfigError(f"found Flower {_found}, expected {VERSION}; pip install 'polyfed[flower]'")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(name)
    found = globals()[name] = getattr(import_module(_WHERE[name]), name)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what matters of it is said in polyfed's own words
    return found
