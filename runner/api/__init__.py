"""The node's own HTTP port: the model-runner API, inference, and the admin endpoints of llm-pool."""
