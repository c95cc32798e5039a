"""Engines: one port, one adapter each for llama.cpp in a child process and for any OpenAI-compatible server."""
