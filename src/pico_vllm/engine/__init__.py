"""The engine: the core (token ids in, token ids out) and the front end (text in, text out)."""
