"""The program on a GPU node: dials the gateway, runs or fronts an engine, relays requests. Never imports Django."""

AGENT_VERSION = "0.1.0"
