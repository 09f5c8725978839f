"""What polyfed uses of Flower, in one list: whoever moves to another version of it looks here first.

Much of it is Flower's own inside, so one minor version is pinned. It is untyped, as the extra [flower] may be missing,
and loaded by name, as each end needs only its part.
"""

import logging
import os
from importlib import import_module
from importlib.metadata import version
from typing import Any

from polyfed.base.errors import ConfigError

VERSION = "1.41"
NAMES = {
    # what both ends say: Flower's Fleet API
    "flwr.proto.fleet_pb2": (
        "ActivateNodeRequest DeactivateNodeRequest PullMessagesRequest PullMessagesResponse PushMessagesRequest "
        "PushMessagesResponse"
    ),
    "flwr.proto.heartbeat_pb2": "SendNodeHeartbeatRequest",
    "flwr.proto.message_pb2": (
        "Message Metadata ObjectTree PullObjectRequest PullObjectResponse PushObjectRequest PushObjectResponse"
    ),
    "flwr.proto.node_pb2": "Node",
    "flwr.app.message.arraychunk": "ArrayChunk",
    # a site: its calls, and their signatures
    "httpx": "HTTPError HTTPStatusError",
    "cryptography.hazmat.primitives.serialization": "load_ssh_public_key",
    "flwr.supernode.fleet_http_client": "FleetHttpClient",
    "flwr.supernode.node_auth_http_interceptor": "NodeAuthHttpInterceptor",
    "flwr.supercore.interceptors": "RuntimeVersionHttpInterceptor",
    # the server: the SuperLink's nodes, and what checks their signatures
    "flwr.supercore.error": "FlowerError",
    "flwr.supercore.object_store": "ObjectStoreFactory",
    "flwr.supercore.primitives.asymmetric": "public_key_to_bytes",
    "flwr.server.superlink.linkstate": "LinkStateFactory",
    "flwr.superlink.federation": "NoOpFederationManager",
    "flwr.superlink.routers.fleet.node_auth": "authenticate_node",
    "flwr.superlink.servicer.fleet.fleet_handlers": "activate_node deactivate_node send_node_heartbeat",
    "google.protobuf.message": "DecodeError",
    "starlette.exceptions": "HTTPException",
    "starlette.requests": "Request",
    "uvicorn": "Config Server",
}
_WHERE = {name: module for module, names in NAMES.items() for name in names.split()}
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

try:
    import_module("flwr")
    _found = version("flwr")
except ModuleNotFoundError:  # or PackageNotFoundError
    raise ConfigError("real sites need Flower, which is missing; pip install 'polyfed[flower]'") from None
if not _found.startswith(f"{VERSION}."):
    raise ConfigError(f"found Flower {_found}, expected {VERSION}; pip install 'polyfed[flower]'")


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(name)
    value = globals()[name] = getattr(import_module(_WHERE[name]), name)
    for of in ("flwr", "uvicorn", "httpx"):
        logging.getLogger(of).setLevel(logging.CRITICAL)  # what matters is said in polyfed's own words
    return value
