"""Operation tokens: what a node must be shown before it loads, unloads or flushes. Format, signing, verification; pure.

L0 is the exchange format of public model runners: one shared key, parameters unsigned. L1 binds the token to one node, to the
parameters of the request, to one approval and to an order. L2 carries what people signed and their proofs, so that whoever
holds every key of the issuer still cannot operate the node. What a node remembers between tokens is not kept here.

``approval`` stands alone: it judges statements, policies and proofs, here and for an auditor.
"""
