"""The hot operations: one file an op with its contract, its reference and its implementations; ``backend`` binds them.

Imports torch and nothing of ours.
"""
