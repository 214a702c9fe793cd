"""Who runs in the next step, and what becomes of its tokens. Plain Python, no torch."""

from pico_vllm.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
