"""Checkpoints become parameters: every key accounted for, rows fused in order, nothing read before all is checked."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from pico_vllm.config import ModelConfig
from pico_vllm.errors import WeightLoadError
from pico_vllm.kernels.backend import CPU
from pico_vllm.kernels.linear import LinearWeight, pack_linear_dense
from pico_vllm.models.qwen2 import Qwen2ForCausalLM
from pico_vllm.models.weights import (
    LinearSpec,
    ParameterPlace,
    SafetensorsCheckpoint,
    TensorSpec,
    dummy_parameters,
    load_parameters,
)

HIDDEN = 4
SPECS = [
    TensorSpec("embed_tokens", "model.embed_tokens.weight", (6, HIDDEN)),
    TensorSpec("layers.0.norm", "model.layers.0.norm.weight", (HIDDEN,)),
    LinearSpec("layers.0.qkv_proj", ("attn.q_proj", "attn.k_proj", "attn.v_proj"), (4, 2, 2), HIDDEN, bias=True),
    LinearSpec("layers.0.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"), (3, 3), HIDDEN),
    LinearSpec("lm_head", ("lm_head",), (6,), HIDDEN),
]
TIED_SPECS = [*SPECS[:-1], LinearSpec("lm_head", ("lm_head",), (6,), HIDDEN, tied_to="embed_tokens")]
FP32 = ParameterPlace(torch.float32, torch.device("cpu"), pack_linear_dense)


def rows(first, count):
    """[count, HIDDEN]: row r is [first + r, first + r + 0.25, ...], exact in bf16 for small numbers."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None] + torch.tensor([0.0, 0.25, 0.5, 0.75])


def make_tensors():
    return {
        "model.embed_tokens.weight": rows(0, 6),
        "model.layers.0.norm.weight": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "attn.q_proj.weight": rows(10, 4),
        "attn.k_proj.weight": rows(20, 2),
        "attn.v_proj.weight": rows(30, 2),
        "attn.q_proj.bias": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "attn.k_proj.bias": torch.tensor([5.0, 6.0]),
        "attn.v_proj.bias": torch.tensor([7.0, 8.0]),
        "mlp.gate_proj.weight": rows(40, 3),
        "mlp.up_proj.weight": rows(50, 3),
        "lm_head.weight": rows(60, 6),
    }


def save_sharded(directory, tensors, num_shards=3):
    """Shards hold every num_shards-th tensor: q, k and v lie in different files."""
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(directory, specs=SPECS, place=FP32, **options):
    with SafetensorsCheckpoint(directory) as checkpoint:
        return load_parameters(specs, checkpoint, place, **options)


def refusal(directory, specs=SPECS):
    with pytest.raises(WeightLoadError) as error:
        load(directory, specs)
    return str(error.value)


def assert_hand_made(parameters):
    assert list(parameters) == [spec.name for spec in SPECS]
    assert torch.equal(parameters["embed_tokens"], rows(0, 6))
    assert torch.equal(parameters["layers.0.norm"], torch.tensor([1.0, 2.0, 3.0, 4.0]))
    qkv, gate_up = parameters["layers.0.qkv_proj"], parameters["layers.0.gate_up_proj"]
    assert qkv.to_dense()[:, 0].tolist() == [10, 11, 12, 13, 20, 21, 30, 31]  # q | k | v
    assert torch.equal(qkv.to_dense(), torch.cat([rows(10, 4), rows(20, 2), rows(30, 2)]))
    assert qkv.bias.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert gate_up.to_dense()[:, 0].tolist() == [40, 41, 42, 50, 51, 52]  # gate | up
    assert torch.equal(gate_up.to_dense(), torch.cat([rows(40, 3), rows(50, 3)]))
    assert gate_up.bias is None
    assert torch.equal(parameters["lm_head"].to_dense(), rows(60, 6))
    assert (qkv.in_features, qkv.out_features) == (4, 8)


# ------------------------------------------------------------------------------------------------------- what is read
def test_rows_are_fused_in_order_from_a_single_file(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    assert_hand_made(load(tmp_path))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 11])
def test_rows_are_fused_in_order_from_shards(tmp_path, num_shards):
    save_sharded(tmp_path, make_tensors(), num_shards)
    assert_hand_made(load(tmp_path))


def test_parameters_outlive_the_checkpoint_they_were_read_from(tmp_path):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    parameters = load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * (tmp_path / "model.safetensors").stat().st_size)
    assert_hand_made(parameters)


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_converted_to_the_dtype_asked_for(tmp_path, saved, wanted):
    tensors = {name: (tensor / 3).to(saved) for name, tensor in make_tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = load(tmp_path, place=ParameterPlace(wanted, torch.device("cpu"), pack_linear_dense))
    assert torch.equal(parameters["embed_tokens"], tensors["model.embed_tokens.weight"].to(wanted))
    qkv = parameters["layers.0.qkv_proj"]
    assert qkv.to_dense().dtype == qkv.bias.dtype == wanted
    assert torch.equal(qkv.to_dense()[4:6], tensors["attn.k_proj.weight"].to(wanted))
    assert torch.equal(qkv.bias[6:8], tensors["attn.v_proj.bias"].to(wanted))


def test_each_matrix_is_packed_by_the_backend_once_and_whole(tmp_path):
    packed = []

    def pack(weight, bias):
        packed.append((tuple(weight.shape), None if bias is None else tuple(bias.shape)))
        return CPU.pack_linear(weight, bias)

    save_file(make_tensors(), tmp_path / "model.safetensors")
    parameters = load(tmp_path, place=ParameterPlace(torch.float32, torch.device("cpu"), pack))
    assert packed == [((8, 4), (8,)), ((6, 4), None), ((6, 4), None)]
    assert_hand_made(parameters)


@pytest.mark.parametrize("shipped", [True, False])
def test_a_tied_lm_head_is_the_embedding_whether_the_checkpoint_ships_one_or_not(tmp_path, shipped):
    tensors = make_tensors()
    if not shipped:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    parameters = load(tmp_path, TIED_SPECS)
    assert torch.equal(parameters["lm_head"].to_dense(), rows(0, 6))
    assert parameters["lm_head"].dense.data_ptr() == parameters["embed_tokens"].data_ptr(), "it exists twice"


def test_inverse_frequencies_of_old_exporters_are_ignored(tmp_path):
    tensors = make_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_hand_made(load(tmp_path))


# ------------------------------------------------------------------------------------------------- keys and shapes
@pytest.mark.parametrize("name", make_tensors())
@pytest.mark.parametrize("sharded", [False, True])
def test_a_missing_tensor_is_refused_by_name(tmp_path, name, sharded):
    tensors = make_tensors()
    del tensors[name]
    if sharded:
        save_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    assert f"lacks {name!r}" in refusal(tmp_path)


def test_several_missing_tensors_are_counted(tmp_path):
    tensors = make_tensors()
    del tensors["attn.k_proj.weight"], tensors["mlp.up_proj.weight"], tensors["attn.v_proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lacks 'attn.k_proj.weight' and 2 more" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.layers.1.norm.weight", "mlp.gate_proj.bias", "attn.q_proj.weight_scale", "inv_freq", "lm_head.bias"]
)
def test_an_unexpected_tensor_is_refused_by_name(tmp_path, name):
    save_file(make_tensors() | {name: torch.ones(3)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert f"holds {name!r}" in message and "does not have" in message


@pytest.mark.parametrize("name", make_tensors())
def test_a_mis_shaped_tensor_is_refused_with_both_shapes(tmp_path, name):
    tensors = make_tensors()
    right = list(tensors[name].shape)
    wrong = [right[0] + 1, *right[1:]]
    tensors[name] = torch.zeros(wrong)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert message.startswith(f"{name} has shape {wrong}") and str(right) in message


@pytest.mark.parametrize("shape", [(HIDDEN, 1), (1, HIDDEN), ()])
def test_a_tensor_that_would_broadcast_into_place_is_refused(tmp_path, shape):
    save_file(make_tensors() | {"model.layers.0.norm.weight": torch.ones(shape)}, tmp_path / "model.safetensors")
    assert "model.layers.0.norm.weight has shape" in refusal(tmp_path)


def test_a_tensor_saved_in_a_quantised_dtype_is_refused_by_name(tmp_path):
    tensors = make_tensors()
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightLoadError, match=rf"{name} is saved as torch.int8"):
        load(tmp_path)


def test_a_tensor_in_a_shard_that_the_index_does_not_name_is_unexpected(tmp_path):
    tensors = make_tensors()
    save_file(tensors | {"stray.weight": torch.zeros(2)}, tmp_path / "part.safetensors")
    write_index(tmp_path, dict.fromkeys(tensors, "part.safetensors"))
    with pytest.raises(WeightLoadError, match=r"stray\.weight"):
        load(tmp_path)


class WatchedCheckpoint:
    """Shapes of a whole model, one of them wrong, and a note of everything that is read."""

    def __init__(self, tensors):
        self._tensors = tensors
        self.read_names = []

    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name, part=()):
        self.read_names.append(name)
        return self._tensors[name][part]


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mis-shaped"])
def test_nothing_is_read_before_everything_is_checked(fault):
    tensors = make_tensors()
    if fault == "missing":
        del tensors["lm_head.weight"]
    elif fault == "unexpected":
        tensors["z"] = torch.ones(1)
    else:
        tensors["lm_head.weight"] = torch.ones(5, HIDDEN)
    checkpoint = WatchedCheckpoint(tensors)
    with pytest.raises(WeightLoadError):
        load_parameters(SPECS, checkpoint, FP32)
    assert checkpoint.read_names == []


def test_every_tensor_is_read_once():
    checkpoint = WatchedCheckpoint(make_tensors())
    load_parameters(SPECS, checkpoint, FP32)
    assert sorted(checkpoint.read_names) == sorted(make_tensors())


# ------------------------------------------------------------------------------------------------------- the files
def test_an_index_that_names_a_missing_file_is_refused(tmp_path):
    weight_map = save_sharded(tmp_path, make_tensors())
    gone = weight_map["attn.k_proj.weight"]
    (tmp_path / gone).unlink()
    message = refusal(tmp_path)
    assert repr(gone) in message and "does not exist" in message


@pytest.mark.parametrize("outside", ["../elsewhere.safetensors", "sub/model.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path, outside):
    model = tmp_path / "model"
    model.mkdir()
    path = model / outside
    path.parent.mkdir(exist_ok=True)
    save_file(make_tensors(), path)
    for name in (outside, str(path.resolve())):
        write_index(model, dict.fromkeys(make_tensors(), name))
        message = refusal(model)
        assert repr(name) in message and "not in the model directory" in message


def test_a_shard_without_a_tensor_that_the_index_promises_is_refused(tmp_path):
    weight_map = save_sharded(tmp_path, make_tensors())
    first, second = sorted(set(weight_map.values()))[:2]
    moved = next(name for name, file_name in weight_map.items() if file_name == first)
    write_index(tmp_path, weight_map | {moved: second})
    message = refusal(tmp_path)
    assert f"{second} lacks {moved!r}" in message and "index.json" in message


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '{"weight_map": null}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}', "\udcff"],
)
def test_a_broken_index_is_refused_by_path(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    message = refusal(tmp_path)
    assert str(tmp_path / "model.safetensors.index.json") in message and "not a safetensors index" in message


@pytest.mark.parametrize("num_bytes", [0, 4, 60, -1])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_file_is_refused_by_directory(tmp_path, num_bytes, sharded):
    if sharded:
        path = tmp_path / save_sharded(tmp_path, make_tensors())["attn.k_proj.weight"]
    else:
        path = tmp_path / "model.safetensors"
        save_file(make_tensors(), path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "cannot read" in message


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", struct.pack("<Q", 2**62) + b"{}"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "cannot read" in refusal(tmp_path)


def test_a_directory_with_pickles_only_says_that_only_safetensors_are_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    message = refusal(tmp_path)
    assert "found pytorch_model.bin" in message and "only safetensors are loaded" in message


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path):
    message = refusal(tmp_path)
    assert "found no weights at all" in message
    assert "model.safetensors" in message and "model.safetensors.index.json" in message


# ---------------------------------------------------------------------------------------------------- dummy weights
DUMMY_CONFIG = ModelConfig("Qwen2ForCausalLM", 64, 32, 48, 3, 4, 2, 8, 128, qkv_bias=True, tie_word_embeddings=False)
DUMMY_SPECS = Qwen2ForCausalLM.parameter_specs(DUMMY_CONFIG)


def tensors_of(parameters):
    """Every matrix, bias and vector by a name of its own."""
    found = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, LinearWeight):
            found[name] = parameter.to_dense()
            if parameter.bias is not None:
                found[f"{name}.bias"] = parameter.bias
        else:
            found[name] = parameter
    return found


def dummy(seed=0, specs=DUMMY_SPECS, place=FP32):
    return tensors_of(dummy_parameters(specs, place, seed=seed))


def test_dummy_weights_repeat_with_their_seed_and_differ_without():
    first, again, other = dummy(5), dummy(5), dummy(6)
    assert first.keys() == again.keys() == other.keys()
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first[name], other[name]), name


def test_dummy_layers_differ_and_share_no_storage():
    tensors = dummy()
    assert torch.equal(torch.tensor(tensors["layers.0.qkv_proj"].shape), torch.tensor([64, 32]))
    for name in [name.removeprefix("layers.0.") for name in tensors if name.startswith("layers.0.")]:
        zero, one, two = (tensors[f"layers.{i}.{name}"] for i in range(3))
        assert not torch.equal(zero, one) and not torch.equal(one, two), name
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == len(tensors)


def test_dummy_norms_are_near_one_and_everything_else_near_zero():
    for name, tensor in dummy().items():
        is_norm = name.endswith("norm")
        assert abs(tensor.mean().item() - is_norm) < (0.1 if is_norm else 0.01), name
        spread = tensor.std().item()
        assert 0.05 < spread < 0.15 if is_norm else 0.012 < spread < 0.028, name


def test_dummy_weights_have_the_dtype_asked_for_and_are_tied_where_the_model_is():
    specs = Qwen2ForCausalLM.parameter_specs(
        ModelConfig("LlamaForCausalLM", 64, 32, 48, 1, 4, 2, 8, 128, tie_word_embeddings=True)
    )
    place = ParameterPlace(torch.bfloat16, torch.device("cpu"), pack_linear_dense)
    tensors = dummy(specs=specs, place=place)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["lm_head"].data_ptr() == tensors["embed_tokens"].data_ptr()


# -------------------------------------------------------------------------------------------------------- progress
@pytest.mark.parametrize("source", ["checkpoint", "dummy"])
def test_progress_never_goes_back_and_ends_at_the_total(tmp_path, source):
    calls = []
    if source == "dummy":
        dummy_parameters(SPECS, FP32, progress=lambda *call: calls.append(call))
    else:
        save_file(make_tensors(), tmp_path / "model.safetensors")
        load(tmp_path, progress=lambda *call: calls.append(call))
    assert calls == [(done, 5) for done in range(6)]
