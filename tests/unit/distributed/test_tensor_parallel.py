"""Each layer, and then whole models, on several ranks against one; ranks are threads, and every sum is written here."""

import threading

import pytest
import torch

import tiny_models
from pico_vllm.config import ModelConfig
from pico_vllm.distributed.sharding import Shard
from pico_vllm.distributed.tensor_parallel import MultiRank, SingleRank
from pico_vllm.forward_batch import ForwardBatch
from pico_vllm.kernels.backend import CPU, REFERENCE
from pico_vllm.layers.embedding import LMHead, VocabEmbedding
from pico_vllm.layers.linear import GatedLinear, Linear, PartialLinear
from pico_vllm.layers.norm import RMSNorm
from pico_vllm.models import token_tiles
from pico_vllm.models.overlapped import OverlappedModel
from pico_vllm.models.registry import model_class
from pico_vllm.models.weights import LinearSpec, ParameterPlace, TensorSpec, dummy_parameters, load_parameters
from thread_ranks import on_each_rank

CPU_DEVICE = torch.device("cpu")
SIZES = (1, 2, 3, 4)
HIDDEN, NUM_TOKENS = 24, 5
HEAD_DIM = 4


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Tensors:
    """A checkpoint that is a dictionary."""

    def __init__(self, tensors):
        self._tensors = tensors
        self.read_elements = 0

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name, part=()):
        tensor = self._tensors[name][part]
        self.read_elements += tensor.numel()
        return tensor


def place(backend, shard=Shard(), dtype=torch.float32):  # noqa: B008 - frozen
    return ParameterPlace(dtype, CPU_DEVICE, backend.pack_linear, shard)


def on_ranks(size, specs, tensors, backend, run):
    """``run(parameters, group)`` on each rank, with the shards of these tensors."""

    def one(communicator):
        parameters = load_parameters(specs, Tensors(tensors), place(backend, communicator.shard))
        return run(parameters, MultiRank(backend, communicator=communicator, overlaps=False))

    return on_each_rank(size, one)


backends = pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=lambda backend: backend.name)
sizes = pytest.mark.parametrize("size", SIZES)


@backends
@pytest.mark.parametrize(
    ("size", "num_kv_heads"), [(1, 2), (2, 1), (2, 2), (2, 4), (3, 1), (3, 12), (4, 1), (4, 2), (4, 4), (4, 12)]
)
def test_qkv_gives_each_rank_its_heads(backend, size, num_kv_heads):
    rows = (12 * HEAD_DIM, num_kv_heads * HEAD_DIM, num_kv_heads * HEAD_DIM)
    units = (12, num_kv_heads, num_kv_heads)
    spec = LinearSpec("qkv", ("q", "k", "v"), rows, HIDDEN, True, num_units=units)
    tensors = {
        f"{name}.weight": numbers(n, HIDDEN, seed=i) for i, (name, n) in enumerate(zip("qkv", rows, strict=True))
    }
    tensors |= {f"{name}.bias": numbers(n, seed=9 + i) for i, (name, n) in enumerate(zip("qkv", rows, strict=True))}
    x = numbers(NUM_TOKENS, HIDDEN, seed=3)
    whole = [x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in "qkv"]
    results = on_ranks(size, [spec], tensors, backend, lambda p, group: Linear(p["qkv"], backend)(x))
    for rank, result in enumerate(results):
        expected = []
        for heads, y in zip(units, whole, strict=True):
            num_own = max(1, heads // size)
            first = rank * num_own if heads >= size else rank * heads // size
            expected.append(y[:, first * HEAD_DIM : (first + num_own) * HEAD_DIM])
        torch.testing.assert_close(result, torch.cat(expected, dim=1))


@backends
@sizes
def test_gate_and_up_are_each_split(backend, size):
    spec = LinearSpec("gate_up", ("g", "u"), (36, 36), HIDDEN, True, num_units=(36, 36))
    tensors = {"g.weight": numbers(36, HIDDEN), "u.weight": numbers(36, HIDDEN, seed=1)}
    tensors |= {"g.bias": numbers(36, seed=2), "u.bias": numbers(36, seed=3)}
    x = numbers(NUM_TOKENS, HIDDEN, seed=4)
    gate, up = (x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"] for name in "gu")
    whole = torch.nn.functional.silu(gate) * up
    results = on_ranks(size, [spec], tensors, backend, lambda p, group: GatedLinear(p["gate_up"], backend)(x))
    torch.testing.assert_close(torch.cat(results, dim=1), whole)


@backends
@sizes
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_row_parallel_results_are_reduced_with_the_bias_once(backend, size, num_splits):
    """And then added to the residual and normalised, the same bits on every rank."""
    specs = [
        LinearSpec("down", ("d",), (HIDDEN,), 36, True, splits_inputs=True),
        TensorSpec("norm", "norm.weight", (HIDDEN,)),
    ]
    tensors = {"d.weight": numbers(HIDDEN, 36), "d.bias": numbers(HIDDEN, seed=1), "norm.weight": numbers(HIDDEN)}
    x, residual = numbers(NUM_TOKENS, 36, seed=2), numbers(NUM_TOKENS, HIDDEN, seed=3)

    def run(parameters, group):
        own = x.chunk(size, dim=1)[group.shard.rank].contiguous()
        partial = PartialLinear(parameters["down"], backend)(own)
        if num_splits:  # as a kernel leaves them
            shares = torch.rand(num_splits, 1, 1)
            partial = partial[None] * shares / shares.sum()
        return RMSNorm(parameters["norm"], 1e-5, backend, group).add(partial, residual.clone())

    results = on_ranks(size, specs, tensors, backend, run)
    expected = residual + x @ tensors["d.weight"].T + tensors["d.bias"]
    for normalised, summed in results:
        torch.testing.assert_close(summed, expected)
        torch.testing.assert_close(normalised, REFERENCE.rms_norm(expected, tensors["norm.weight"], 1e-5))
        assert torch.equal(summed, results[0][1]) and torch.equal(normalised, results[0][0])


@backends
@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_is_exact_on_every_rank(backend, size, dtype):
    spec = TensorSpec("embed", "e", (48, HIDDEN), num_units=48)
    table = numbers(48, HIDDEN).to(dtype)
    ids = torch.tensor([0, 47, 11, 12, 15, 16, 23, 24, 31, 32, 35, 36], dtype=torch.int32)

    def run(communicator):
        parameters = load_parameters([spec], Tensors({"e": table}), place(backend, communicator.shard, dtype))
        assert len(parameters["embed"]) == 48 // size
        return VocabEmbedding(parameters["embed"], MultiRank(backend, communicator=communicator, overlaps=False))(ids)

    for result in on_each_rank(size, run):
        assert torch.equal(result, table[ids.long()])


@backends
@sizes
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, NUM_TOKENS])
def test_every_rank_has_all_logits(backend, size, tied, num_rows):
    specs = [
        TensorSpec("embed", "e", (48, HIDDEN), num_units=48),
        LinearSpec("lm_head", ("h",), (48,), HIDDEN, tied_to="embed" if tied else None, num_units=(48,)),
    ]
    tensors = {"e": numbers(48, HIDDEN)} | ({} if tied else {"h.weight": numbers(48, HIDDEN, seed=1)})
    hidden = numbers(num_rows, HIDDEN, seed=2)

    def run(parameters, group):
        head, out = LMHead(parameters["lm_head"], group), torch.full((num_rows, 48 // size), float("nan"))
        assert head.own(hidden, out).data_ptr() == out.data_ptr()
        assert torch.equal(head.whole(out), head(hidden))
        return head(hidden)

    results = on_ranks(size, specs, tensors, backend, run)
    for result in results:
        torch.testing.assert_close(result, hidden @ (tensors["e"] if tied else tensors["h.weight"]).T)
        assert torch.equal(result, results[0])


def test_a_rank_reads_its_shards_and_nothing_else():
    spec = [
        TensorSpec("embed", "e", (48, HIDDEN), num_units=48),
        TensorSpec("norm", "n", (HIDDEN,)),
        LinearSpec("qkv", ("q", "k"), (48, 8), HIDDEN, True, num_units=(12, 2)),
        LinearSpec("down", ("d",), (HIDDEN,), 36, True, splits_inputs=True),
    ]
    tensors = {"e": numbers(48, HIDDEN), "n": numbers(HIDDEN)}
    tensors |= {
        "q.weight": numbers(48, HIDDEN),
        "q.bias": numbers(48),
        "k.weight": numbers(8, HIDDEN),
        "k.bias": numbers(8),
    }
    tensors |= {"d.weight": numbers(HIDDEN, 36), "d.bias": numbers(HIDDEN)}
    for rank in range(4):
        checkpoint = Tensors(tensors)
        parameters = load_parameters(spec, checkpoint, place(CPU, Shard(rank, 4)))
        # 12 of 48 rows, and one of 2 heads of 4 rows each; 9 of 36 columns.
        expected = 12 * HIDDEN + HIDDEN + (12 + 4) * (HIDDEN + 1) + HIDDEN * 9 + HIDDEN
        assert checkpoint.read_elements == expected
        assert (parameters["down"].bias is not None) == (rank == 0)


@pytest.mark.parametrize("size", [2, 3])
def test_dummy_shards_are_those_of_the_whole_dummy_model(size):
    spec = [
        TensorSpec("embed", "e", (48, HIDDEN), num_units=48),
        LinearSpec("qkv", ("q", "k"), (48, 24), HIDDEN, True, num_units=(12, 6)),
        LinearSpec("down", ("d",), (HIDDEN,), 36, True, splits_inputs=True),
        TensorSpec("norm", "norm.weight", (HIDDEN,)),
    ]
    whole = dummy_parameters(spec, place(REFERENCE), seed=5)
    shards = [dummy_parameters(spec, place(REFERENCE, Shard(rank, size)), seed=5) for rank in range(size)]
    assert torch.equal(torch.cat([shard["embed"] for shard in shards]), whole["embed"])
    assert torch.equal(torch.cat([shard["down"].dense for shard in shards], dim=1), whole["down"].dense)
    assert torch.equal(shards[0]["down"].bias, whole["down"].bias) and shards[1]["down"].bias is None
    assert all(torch.equal(shard["norm"], whole["norm"]) for shard in shards)
    for first, end in ((0, 48), (48, 72)):
        num_own = (end - first) // size
        own = slice(0, num_own) if first == 0 else slice(48 // size, 48 // size + num_own)
        assert torch.equal(torch.cat([shard["qkv"].dense[own] for shard in shards]), whole["qkv"].dense[first:end])
        assert torch.equal(torch.cat([shard["qkv"].bias[own] for shard in shards]), whole["qkv"].bias[first:end])


# -------------------------------------------------------------------------------------------------- whole models
BLOCK_SIZE, NUM_BLOCKS = 8, 6


def make_batch(lens):
    """Whole prompts, one after the other."""
    starts = torch.tensor([0, *lens]).cumsum(0)
    tables = torch.arange(NUM_BLOCKS, dtype=torch.int32).view(len(lens), -1)
    positions = torch.cat([torch.arange(n) for n in lens])
    sequence = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    slots = tables[sequence, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardBatch(
        input_ids=(torch.arange(sum(lens), dtype=torch.int32) * 37) % tiny_models.VOCAB_SIZE,
        positions=positions.to(torch.int32),
        slot_mapping=slots.to(torch.int32),
        block_tables=tables,
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        logits_indices=None,
        num_decode_reqs=0,
        max_query_len=max(lens),
        max_seq_len=max(lens),
    )


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_a_model_on_several_ranks_computes_what_it_does_on_one(name):
    tiny = tiny_models.MODELS[name]
    config = ModelConfig.from_hf_config(tiny_models.hf_config(tiny).to_dict() | {"architectures": [tiny.model_class]})
    specs = model_class(config.architecture).parameter_specs(config)
    batch = make_batch([17, 5])
    init_lock = threading.Lock()

    def run(group):
        of_rank = group.shard.model_config(config)
        with init_lock:
            parameters = dummy_parameters(specs, place(CPU, group.shard))
            model = model_class(config.architecture)(of_rank, parameters, max_model_len=64, backend=CPU, group=group)
        shape = (NUM_BLOCKS, 2, of_rank.num_key_value_heads, BLOCK_SIZE, of_rank.head_dim)
        caches = [torch.full(shape, float("nan")) for _ in model.layers]
        return model(batch, caches)

    with torch.inference_mode():
        expected = run(SingleRank(CPU))
    num_compared = 0
    for size in (2, 3, 4):
        try:
            Shard(0, size).model_config(config)
        except ValueError:
            continue
        results = on_each_rank(
            size, lambda communicator: run(MultiRank(CPU, communicator=communicator, overlaps=False))
        )
        for result in results:
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
            assert torch.equal(result, results[0])
        num_compared += 1
    assert num_compared or name == "qwen2-gqa3-d128-untied"  # three heads, and 160 features


@pytest.mark.parametrize(("lens", "boundary"), [([17, 5], 12), ([1, 23], 12), ([9], 8), ([7], None)])
@pytest.mark.parametrize("name", ["llama-biases-llama3-rope", "qwen3-gqa2-d128-untied"])
def test_a_model_in_tiles_computes_what_it_does_whole(monkeypatch, name, lens, boundary):
    """Sums under way overlap, and what is summed late is what is added; too few tokens have one tile."""
    monkeypatch.setattr(token_tiles, "MIN_TOKENS", 8)
    monkeypatch.setattr(token_tiles, "TILE_TOKENS", 4)
    token_tiles.choose_cut.cache_clear()
    tiny = tiny_models.MODELS[name]
    config = ModelConfig.from_hf_config(tiny_models.hf_config(tiny).to_dict() | {"architectures": [tiny.model_class]})
    specs = model_class(config.architecture).parameter_specs(config)
    init_lock = threading.Lock()
    batch = make_batch(lens)

    def run(communicator):
        outputs = []
        for overlaps in (False, True):
            group = MultiRank(CPU, communicator=communicator, overlaps=overlaps)
            of_rank = group.shard.model_config(config)
            with init_lock:
                parameters = dummy_parameters(specs, place(CPU, group.shard))
                model = model_class(config.architecture)(
                    of_rank, parameters, max_model_len=64, backend=CPU, group=group
                )
            shape = (NUM_BLOCKS, 2, of_rank.num_key_value_heads, BLOCK_SIZE, of_rank.head_dim)
            caches = [torch.full(shape, float("nan")) for _ in model.layers]
            chosen = OverlappedModel(model, num_sms=None) if overlaps else model
            outputs.append(chosen(batch, caches))
        return outputs, communicator.most_under_way, chosen.tiles(sum(lens))

    for (plain, overlapped), most_under_way, tiles in on_each_rank(2, run):
        torch.testing.assert_close(overlapped, plain, rtol=0, atol=1e-5)
        assert most_under_way == (0 if boundary is None else 2)
        assert [tile.stop for tile in tiles] == ([] if boundary is None else [boundary]) + [sum(lens)]
    token_tiles.choose_cut.cache_clear()


def test_passes_that_are_replayed_are_cut_where_launched_ones_are_not():
    """The same model, layers and all, on a device of 132 SMs; its products are too short to launch them twice."""
    tiny = tiny_models.MODELS["llama-biases-llama3-rope"]
    config = ModelConfig.from_hf_config(tiny_models.hf_config(tiny).to_dict() | {"architectures": [tiny.model_class]})
    parameters = dummy_parameters(model_class(config.architecture).parameter_specs(config), place(CPU))
    model = model_class(config.architecture)(
        config, parameters, max_model_len=64, backend=CPU, group=SingleRank(CPU)
    )  # fmt: skip
    launched = OverlappedModel(model, num_sms=132)
    replayed = launched.replayed()
    assert replayed.model is model and launched.replayed().lm_head is launched.lm_head
    shallow, _ = replayed.outermost_layers([torch.zeros(1)] * len(model.layers))
    for num_tokens in (8192, 16384):
        assert len(launched.tiles(num_tokens)) == 1
        assert len(replayed.tiles(num_tokens)) == len(shallow.tiles(num_tokens)) == 2


def test_a_step_of_many_tokens_begins_with_a_sum_that_is_no_copy():
    """It tells that what was copied before has been added up everywhere."""

    class Symmetric:
        def __init__(self):
            self.sums = []

        def begins_with(self, num_tokens):
            return num_tokens <= 4

        def all_reduce(self, partial):
            self.sums.append(len(partial))
            return partial

    def run(communicator):
        communicator.symmetric = symmetric = Symmetric()
        group = MultiRank(CPU, communicator=communicator, overlaps=False)
        weight = torch.ones(10 // communicator.shard.size, HIDDEN)
        for num_tokens in (4, 5):
            group.embed(torch.zeros(num_tokens, dtype=torch.int32), weight)
        return symmetric.sums, communicator.num_calls

    assert on_each_rank(2, run) == [([4], 1), ([4], 1)]


@backends
@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_chooses_the_best_token_of_all(backend, size, dtype):
    """Ties on one rank and on two, the best one on each rank once, and one that is better by the least there is."""
    whole = numbers(8, 12 * size, seed=3).to(dtype)
    whole[0], whole[1, 5], whole[1, -1] = 2.0, 9.0, 9.0
    for rank in range(size):
        whole[2 + rank, 12 * rank + 7] = 50.0
    whole[6, 0], whole[6, -1] = 40.0, 40.0 * (1 + torch.finfo(dtype).eps)
    rows = torch.tensor([3, 0, 9, 1, 2, 8, 5, 4])
    kept = torch.full((10,), -1, dtype=torch.int32)
    expected = backend.greedy(whole, kept, rows)

    def run(communicator):
        group = MultiRank(backend, communicator=communicator, overlaps=False)
        own = whole[:, 12 * communicator.shard.rank :][:, :12].contiguous()
        of_rank = torch.full((10,), -1, dtype=torch.int32)
        return group.greedy(own, of_rank, rows), of_rank, group.greedy(own[:0], of_rank, rows[:0])

    for chosen, of_rank, of_none in on_each_rank(size, run):
        assert chosen.tolist() == expected.tolist() and of_rank.tolist() == kept.tolist() and len(of_none) == 0


def test_one_rank_is_the_backend_itself():
    """Nothing stands between a layer and its op."""
    group = SingleRank(CPU)
    assert group.embed is CPU.embedding
    assert group.reduce_add_rms_norm is CPU.add_rms_norm
    assert group.own_logits is CPU.linear and group.greedy is CPU.greedy
    own = torch.ones(2, 8)
    assert group.all_logits(own) is own
    assert group.largest(-3.0) == -3.0
    assert not group.overlaps
    group.reserve(10, 8, torch.float32)
    args = torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-6
    pending = group.start_reduce_add_rms_norm(*(args[0].clone(), args[1].clone(), *args[2:]))
    for ours, expected in zip(pending(), CPU.add_rms_norm(*args), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("value", [0.0, -7.0, 1e-9, float(2**53 - 1)])
def test_the_largest_number_counts_on_every_rank(value):
    results = on_each_rank(
        3, lambda c: MultiRank(CPU, communicator=c, overlaps=False).largest(value - c.shard.rank * abs(value))
    )
    assert results == [value] * 3
