"""What a user may name as a model: a directory, a GGUF file, a hub id; and the error for everything else."""

import dataclasses
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm.errors import ConfigError, WeightLoadError
from pico_vllm.models.gguf import convert_gguf
from pico_vllm.models.hub import is_hub_id
from pico_vllm.models.source import DirectorySource, GgufSource, find_model
from pico_vllm.models.weights import load_parameters
from pico_vllm.oracle.verify import verify
from tiny_gguf import HEAD_DIM, HEADS, KV_HEADS

PROMPTS = [[5, 6, 7], [100] * 20, list(range(3, 40))]


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "llama"
    directory.mkdir()
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


# ----------------------------------------------------------------------------------------------------------- GGUF
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_gives_the_tokens_of_its_conversion(make_gguf, tmp_path, arch, dtype):
    path = make_gguf(arch, bias=arch == "qwen2")
    directory = convert_gguf(path, tmp_path / "converted", dtype=dtype)
    outputs = [make_llm(model, dtype=dtype).generate(PROMPTS, greedy(8)) for model in (path, directory)]
    ids = [[output.outputs[0].token_ids for output in each] for each in outputs]
    assert ids[0] == ids[1]


def test_a_gguf_file_brings_its_tokenizer(make_gguf):
    llm = make_llm(make_gguf("llama"))
    (output,) = llm.generate("ab 12", greedy(4))
    assert output.prompt_token_ids == llm.engine.tokenizer.encode("ab 12")
    assert output.outputs[0].text == llm.engine.tokenizer.decode(output.outputs[0].token_ids)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_is_verified_against_transformers(make_gguf, arch):
    llm = make_llm(make_gguf(arch, bias=arch == "qwen2"))
    assert verify(llm.engine, prompt_lengths=(1, 17), num_new_tokens=4).passes


def test_gguf_tensors_go_straight_into_the_fused_parameters(make_gguf):
    source = GgufSource(make_gguf("llama"))
    llm = make_llm(source.path)
    fused = llm.engine.core.executor.runner.parameters["layers.1.qkv_proj"].to_dense()
    parts = [source.file.tensor(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    assert fused.shape == ((HEADS + 2 * KV_HEADS) * HEAD_DIM, 12)
    assert torch.equal(fused, torch.cat(parts))


def test_one_gguf_tensor_is_dequantised_at_a_time(make_gguf, monkeypatch):
    """Each read is used up before the next one."""
    source = GgufSource(make_gguf("llama"))
    llm = make_llm(source.path)
    runner = llm.engine.core.executor.runner
    reads = []
    original = source.file.tensor
    monkeypatch.setattr(source.file, "tensor", lambda name: reads.append(name) or original(name))
    from pico_vllm.models.qwen2 import Qwen2ForCausalLM
    from pico_vllm.models.weights import ParameterPlace

    specs = Qwen2ForCausalLM.parameter_specs(llm.engine.model_config)
    place = ParameterPlace(torch.float32, torch.device("cpu"), runner.backend.pack_linear)
    with source.open_checkpoint() as opened:
        load_parameters(specs, opened, place)
    assert sorted(reads) == sorted(source.file.tensor_shapes())


# ------------------------------------------------------------------------------------------------------------ hub
def test_a_hub_id_is_fetched_without_pickles_or_code_and_runs(checkpoint, monkeypatch):
    calls = []

    def snapshot_download(repo_id, *, revision, allow_patterns):
        calls.append((repo_id, revision, allow_patterns))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    llm = make_llm("Qwen/Qwen2.5-0.5B", revision="main")
    assert llm.generate(PROMPTS[:1], greedy(2))[0].finished
    assert calls == [("Qwen/Qwen2.5-0.5B", "main", ["*.json", "*.jinja", "*.safetensors"])]


def response(status):
    """What the hub's errors want to know of a response, whichever HTTP client it uses."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: errors.GatedRepoError("x", response=response(403)), ["gated", "hf auth login"]),
        (lambda: errors.RepositoryNotFoundError("x", response=response(404)), ["does not exist", "private"]),
        (lambda: errors.RevisionNotFoundError("x", response=response(404)), ["this revision"]),
        (lambda: errors.LocalEntryNotFoundError("x"), ["cannot be reached", "connect once"]),
        (lambda: errors.OfflineModeIsEnabled("x"), ["cannot be reached"]),
        (lambda: errors.HfHubHTTPError("500 from the hub\nmore", response=response(500)), ["500 from the hub"]),
        (lambda: ConnectionError("no route"), ["no route"]),
    ],
    ids=["gated", "missing", "no-revision", "not-cached", "offline", "http", "network"],
)
def test_each_failure_of_the_hub_is_one_readable_error(monkeypatch, error, words):
    def snapshot_download(*args, **kwargs):
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError) as caught:
        find_model("owner/name", "v1")
    message = str(caught.value)
    assert "'owner/name' at revision 'v1'" in message
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_an_unreachable_hub_is_a_config_error_in_offline_mode(monkeypatch, tmp_path):
    """The hub client's own offline mode, no fake: nothing leaves this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be reached"):
        find_model("owner/name-that-is-not-cached")


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Qwen/Qwen2.5-0.5B", True), ("a/b", True), ("a", False), ("a/b/c", False), ("./a", False), ("../a", False),
     ("/a/b", False), ("a/", False), ("", False)],
)  # fmt: skip
def test_only_owner_slash_name_is_a_hub_id(name, expected):
    assert is_hub_id(name) is expected


# ------------------------------------------------------------------------------------------------------ find_model
def test_a_directory_wins_over_a_hub_id_of_the_same_name(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent.parent)
    source = find_model(f"{checkpoint.parent.name}/{checkpoint.name}")
    assert isinstance(source, DirectorySource)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda tmp: "no-such-model", ["'no-such-model' does not exist", "hub id"]),
        (lambda tmp: str(tmp / "a" / "b"), ["does not exist"]),
        (lambda tmp: (tmp / "w.bin").write_text("x") and str(tmp / "w.bin"), ["is a file", ".gguf"]),
    ],
)
def test_what_is_no_model_is_refused(tmp_path, make, words):
    with pytest.raises(ConfigError) as error:
        find_model(make(tmp_path))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 5000, "a\0b"])
def test_what_cannot_be_a_path_is_refused(name):
    with pytest.raises(ConfigError, match="model="):
        find_model(name)


def test_a_broken_gguf_file_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(WeightLoadError, match=r"x\.gguf"):
        find_model(str(tmp_path / "x.gguf"))


def test_a_revision_is_refused_where_it_would_be_ignored(checkpoint):
    for model in (None, str(checkpoint), "not-a-hub-id"):
        with pytest.raises(ConfigError, match="revision='v1'"):
            find_model(model, "v1")


def test_a_gguf_config_is_a_model_config(make_gguf):
    config = GgufSource(make_gguf("llama")).model_config()
    assert (config.architecture, config.num_attention_heads, config.dtype) == ("LlamaForCausalLM", HEADS, "bfloat16")
    assert config.eos_token_ids == (2,)
    assert dataclasses.is_dataclass(config)
