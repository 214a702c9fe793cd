"""The transformers oracle: does the engine compute, sub-layer by sub-layer, what the paper's model computes?

``verify`` runs both on the same token ids and compares after every sub-layer. Used by ``pico-vllm verify``, by the
tests, and by every benchmark before it measures. The only part of the package that imports transformers' models.
"""
