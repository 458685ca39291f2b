"""One instrumented step of a setup: what flows, its gradients, the update, and the facts that are read off
them.

It imports ``setups`` and torch, and leaves the model as it was; every instrument imports it.
"""
