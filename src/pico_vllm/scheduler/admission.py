"""What can ever run: the one check that decides it, for the scheduler and for a front end in another process.

Pure arithmetic on a request and three numbers, which the engine core hands out when it has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pico_vllm.errors import RequestError

if TYPE_CHECKING:
    from pico_vllm.request import Request


def checked_max_tokens(request: Request, *, max_model_len: int, num_blocks: int, block_size: int) -> int:
    """Output tokens a request may have: its ``max_tokens``, or what ``max_model_len`` leaves if that is less.

    Args:
        request: a new one.
        max_model_len: prompt + output tokens of a request at most.
        num_blocks, block_size: of the whole KV cache.

    Raises:
        RequestError: it cannot have even one, or it could not finish even if it had the cache to itself.
    """
    num_prompt_tokens = request.num_prompt_tokens
    if num_prompt_tokens >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and max_model_len={max_model_len} leaves no room for "
            f"an answer: shorten it to {max_model_len - 1} tokens or raise max_model_len"
        )
    max_tokens = min(request.max_tokens, max_model_len - num_prompt_tokens)
    num_slots = num_prompt_tokens + max_tokens - 1  # the KV of the last token is never stored
    capacity = num_blocks * block_size
    if num_slots > capacity:
        room = capacity + 1 - num_prompt_tokens
        remedy = f"lower max_tokens to {room}" if room > 0 else f"shorten the prompt to at most {capacity} tokens"
        raise RequestError(
            f"a prompt of {num_prompt_tokens} tokens with up to {max_tokens} output tokens needs "
            f"{-(-num_slots // block_size)} KV cache blocks of {block_size} tokens, and the whole cache has "
            f"{num_blocks}: {remedy}, or give the cache more memory"
        )
    return max_tokens
