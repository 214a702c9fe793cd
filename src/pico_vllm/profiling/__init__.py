"""Where a step's time goes: a trace of an engine at work, the numbers in it, two of them side by side."""
