"""Tensor parallelism: how the ranks of one model combine what each has computed."""
