"""The hot operations: one file an op with its contract, its reference and its implementations; ``backend`` binds them.

Imports torch and nothing of ours. Triton kernels are in ``<op>_triton.py`` beside their op's contract and references,
and only ``triton_backend`` imports those: a process that runs on another backend never loads triton.
"""
