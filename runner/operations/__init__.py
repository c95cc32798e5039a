"""Lifecycle operations: the gate that checks who may have them done, and the tasks that do them."""
