"""The scripted engine: an OpenAI-compatible server that does what the prompt tells it to, faults included.

It stands for a model wherever a requirement hangs on what the engine says (tool calls, thoughts, refusals, errors, cuts):
``python -m conformance.engine --port 0`` prints its address. ``conformance.engine.script`` lists what it obeys.
"""
