"""The playground: a page on which an operator asks a model by any surface of the gateway, watches the answer and takes code.

The page posts to the control plane, which asks the gateway as any client would and streams its answer through.
"""
