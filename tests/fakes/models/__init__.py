"""Tiny models for tests, in every shape that an engine wants, made of the one GGUF file that is shipped."""
