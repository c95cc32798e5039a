"""The models of the node: what is known, what is loaded in how many replicas, what memory they hold, and their life."""
