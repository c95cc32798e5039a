"""vLLM as an engine: its own API server in a child process, spoken to over a Unix socket that only we can reach."""

from runner.engines.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]
