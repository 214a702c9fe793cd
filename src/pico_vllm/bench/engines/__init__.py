"""Adapters: one file an engine, all driven by the same dispatcher and the same clock."""
