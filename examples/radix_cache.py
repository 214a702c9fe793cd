"""Radix cache: the tree as it grows. Prompts that share a beginning share its KV blocks, token by token.

Blocks are of 4 tokens here, and words stand for tokens. Each line of a picture is a node: its words, [first, last)
position, its blocks, how many running requests stand on it or below (locks).

    python examples/radix_cache.py
"""

from pico_vllm.kv_cache import KVCacheManager
from pico_vllm.kv_cache.radix_tree import ID_BYTES, Node
from pico_vllm.request import Request
from pico_vllm.sampling_params import SamplingParams

WORDS: list[str] = []


def ids(text: str) -> list[int]:
    """A token a word."""
    WORDS.extend(word for word in text.split() if word not in WORDS)
    return [WORDS.index(word) for word in text.split()]


def words(node: Node) -> str:
    """The words of a node."""
    packed = bytes(node.token_ids)
    return " ".join(WORDS[packed[at]] for at in range(0, len(packed), ID_BYTES))  # little-endian, fewer than 256 words


def show(manager: KVCacheManager, event: str) -> None:
    """Print the tree and who has the blocks."""
    manager.check_invariants()  # references = owners, locked nodes are not evictable, free + active + cached = all
    stats = manager.stats
    print(f"\n{event}")
    print(f"  {stats.num_free_blocks} free, {stats.num_active_blocks} active, {stats.num_cached_blocks} cached blocks")
    depths: dict[Node, int] = {}
    for node in manager.nodes():
        depth = depths[node] = depths.get(node.parent, 0) + 1 if node.parent is not None else 0
        where = f"[{node.start}, {node.end})"
        print(f"  {'  ' * (depth - 1)}{words(node)}  {where} blocks {node.block_ids} locks {node.lock_ref}")


def start(manager: KVCacheManager, name: str, text: str) -> Request:
    """Admit a request, as the scheduler does in a step, and insert what it computes."""
    request = Request(name, ids(text), SamplingParams(max_tokens=8))
    manager.begin_step()
    num_cached = manager.admit(request)
    manager.insert(request, request.num_tokens)
    copies = manager.take_block_copies()
    show(manager, f"{name} starts: {num_cached} of {request.num_tokens} tokens cached, copies {list(copies)}")
    print(f"  block table of {name}: {list(manager.block_table(name))}")
    return request


def end(manager: KVCacheManager, request: Request, answer: str) -> None:
    """The answer has come, and the request ends: what it has computed stays."""
    request.output_token_ids.extend(ids(answer))
    num_tokens = request.num_tokens - 1  # the KV of the last token is never stored
    assert manager.allocate_slots(request.request_id, num_tokens) is not None
    manager.free(request, num_tokens)
    show(manager, f"{request.request_id} ends with {answer!r}")


def main() -> None:
    """A split in mid-block, a copy-on-write, a conversation that goes on, an eviction."""
    manager = KVCacheManager(num_blocks=8, block_size=4, enable_prefix_caching=True)
    a = start(manager, "A", "you are a kind helper : what is two")
    b = start(manager, "B", "you are a kind helper . name a fish")
    end(manager, a, "the number")
    end(manager, b, "a cod .")
    c = start(manager, "C", "you are a kind helper . name a fish a cod . another one")
    end(manager, c, "ling .")
    start(manager, "D", "one two three four five six seven eight nine ten eleven twelve")


if __name__ == "__main__":
    main()
