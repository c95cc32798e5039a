"""Black-box tests of the running system: the real entry points as processes, driven over HTTP and WebSocket."""
