"""The program on a GPU node: dials the gateway, runs or fronts an engine, relays requests. Never imports Django."""

from wire import RELEASE

AGENT_VERSION = RELEASE
