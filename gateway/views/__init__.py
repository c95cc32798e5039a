"""The gateway's HTTP endpoints as raw ASGI applications: read, call one function, answer. No Django view on this path."""
