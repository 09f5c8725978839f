"""Flower's Grid without Flower: nodes whose ClientApps answer in this process, when their replies are looked for."""

from importlib import import_module

from flwr.app import Context, RecordDict

from polyfed_flower import server

try:  # newer versions make messages inside a task alone
    identity = import_module("flwr.supercore.task_identity").TaskIdentity
    identity.task_id, identity.run_id, identity.node_id = 1, 7, 1
except ModuleNotFoundError:
    pass


def context(k, node_config, run_config):
    return Context(run_id=7, node_id=k, node_config=node_config, state=RecordDict(), run_config=run_config)


class Nodes:
    """nodes: by id, (a ClientApp, its node_config)     gone: those that are away     before: called with a message"""

    def __init__(self, nodes, run_config, before=lambda k, message: None):
        self.nodes, self.run_config, self.before = dict(nodes), run_config, before
        self.gone, self.asked, self.heard, self.n = set(), {}, [], 0

    def get_node_ids(self):
        return [k for k in self.nodes if k not in self.gone]

    def push_messages(self, messages):
        for message in messages:
            self.n += 1
            message.metadata.__dict__["_message_id"] = key = f"message-{self.n}"
            self.asked[key] = message
            yield key

    def pull_messages(self, ids):
        for key in [key for key in ids if key in self.asked]:
            message = self.asked[key]
            k = message.metadata.dst_node_id
            self.before(k, message)
            if k in self.get_node_ids():
                del self.asked[key]
                app, config = self.nodes[k]
                reply = app(message, context(k, config, self.run_config))
                self.heard.append((k, message, reply))
                yield reply

    def run(self, file, lines=None, **config):
        """The server's result. lines: what it says"""
        self.run_config |= config
        about = context(0, {}, self.run_config)
        found = server.run(self, about, file, (lines if lines is not None else []).append)
        return found, about.state
