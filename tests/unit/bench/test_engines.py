"""Adapters: what a user writes, what isn't there, servers over HTTP, and how the peers are driven (by stand-ins)."""

import asyncio
import importlib.machinery
import json
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import tiny_models
from pico_vllm.bench.commands import _with_ranks
from pico_vllm.bench.engines.engine import EngineOptions, StreamingEngine
from pico_vllm.bench.engines.loading import EngineSpec, EngineUnavailableError, load_engine, parse_engine_spec
from pico_vllm.bench.workloads import Workload, WorkloadRequest
from pico_vllm.errors import ConfigError, RequestError


def burst(*max_tokens, concurrency=None):
    requests = tuple(WorkloadRequest((5, 6, 7), n) for n in max_tokens)
    return Workload(requests, concurrency or len(requests))


# ------------------------------------------------------------------------------------------------------------- specs
@pytest.mark.parametrize(
    "text, target, label, extra",
    [
        ("vllm", "vllm", "", {}),
        ("pico-vllm@b32", "pico-vllm", "b32", {}),
        ('pico-vllm@b32={"block_size": 32}', "pico-vllm", "b32", {"block_size": 32}),
        ('transformers={"cache": "static"}', "transformers", "", {"cache": "static"}),
        ("http://localhost:8000/v1", "http://localhost:8000/v1", "", {}),
        ('http://h:1@mine={"api_key": "k=@{}"}', "http://h:1", "mine", {"api_key": "k=@{}"}),
        ("my.module:Engine", "my.module:Engine", "", {}),
    ],
)
def test_engine_specs(text, target, label, extra):
    spec = parse_engine_spec(text)
    assert (spec.target, spec.label, spec.extra) == (target, label, extra)
    assert spec.name == (f"{target}@{label}" if label else target)


@pytest.mark.parametrize(
    "text, said",
    [("vlm", "unknown engine 'vlm'"), ("vllm={", "must be NAME"), ("vllm={x}", "no JSON"), ("", "must be NAME")],
)
def test_engine_specs_that_make_no_sense(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_engine_spec(text)


OPTIONS = EngineOptions("somewhere", "bfloat16", "cpu")


def test_an_engine_that_is_not_installed_says_so():
    with pytest.raises(EngineUnavailableError, match="vllm isn't installed"):
        load_engine(parse_engine_spec("vllm"), OPTIONS)


def test_an_engine_that_fails_to_start_says_why():
    with pytest.raises(EngineUnavailableError, match="somewhere"):
        load_engine(parse_engine_spec("pico-vllm"), OPTIONS)
    with pytest.raises(EngineUnavailableError, match="no_such_module"):
        load_engine(parse_engine_spec("no_such_module:Engine"), OPTIONS)
    with pytest.raises(EngineUnavailableError, match="no OpenAI-compatible server"):
        load_engine(parse_engine_spec("http://127.0.0.1:9"), OPTIONS)


def test_options_that_an_engine_has_not_are_refused(tmp_path):
    with pytest.raises(EngineUnavailableError, match="options of transformers are"):
        load_engine(EngineSpec("transformers", "", {"cach": "static"}), OPTIONS)
    with pytest.raises(EngineUnavailableError, match="no prefix cache"):
        load_engine(
            parse_engine_spec("transformers"), EngineOptions("x", "bfloat16", "cpu", enable_prefix_caching=True)
        )
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], tmp_path)
    with pytest.raises(EngineUnavailableError, match="block_siz"):
        load_engine(EngineSpec("pico-vllm", "", {"block_siz": 32}), EngineOptions(str(tmp_path), "float32", "cpu"))


# ---------------------------------------------------------------------------------------------------- this process
@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engines")
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], directory)
    return directory


@pytest.mark.parametrize("name", ["pico-vllm", "transformers"])
def test_engines_of_this_process_give_what_they_are_asked_for(model_dir, name):
    engine = load_engine(parse_engine_spec(name), EngineOptions(str(model_dir), "float32", "cpu"))
    first, second = engine.serve(burst(5, 3, concurrency=1))
    assert first.counts == [1] * 5 and second.counts == [1] * 3
    assert first.token_ids[:3] == second.token_ids  # the same prompt, greedy
    assert first.submit_s < first.times_s[0] < first.times_s[-1] <= second.submit_s
    assert engine.why_not(burst(300, concurrency=1)) is not None
    assert engine.info.start_s > 0
    engine.close()


def test_both_engines_give_the_same_tokens(model_dir):
    options = EngineOptions(str(model_dir), "float32", "cpu")
    a, b = (
        load_engine(parse_engine_spec(name), options).serve(burst(20, concurrency=1))
        for name in ("pico-vllm", "transformers")
    )
    assert a[0].token_ids == b[0].token_ids


def test_transformers_takes_no_defaults_from_the_checkpoint(tmp_path):
    tiny_models.save_tiny_model(tiny_models.MODELS["qwen2-gqa6-d64-tied"], tmp_path)
    options = EngineOptions(str(tmp_path), "float32", "cpu")
    (before,) = load_engine(parse_engine_spec("transformers"), options).serve(burst(30))
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 3.0, "eos_token_id": 1}')
    (after,) = load_engine(parse_engine_spec("transformers"), options).serve(burst(30))
    assert after.token_ids == before.token_ids


def test_transformers_runs_one_request_at_a_time_and_samples(model_dir):
    engine = load_engine(parse_engine_spec("transformers"), EngineOptions(str(model_dir), "float32", "cpu"))
    assert "one request at a time" in engine.why_not(burst(3, 3))
    (trace,) = engine.serve(Workload((WorkloadRequest((5, 6), 4, temperature=0.8),), 1))
    assert trace.num_tokens == 4


def test_our_engine_goes_on_after_a_run_that_failed(model_dir):
    engine = load_engine(parse_engine_spec("pico-vllm"), EngineOptions(str(model_dir), "float32", "cpu"))
    beyond = WorkloadRequest((5, 99_999), 5)  # refused when it is sent: the first request runs by then
    with pytest.raises(RequestError, match="99999 is outside the vocabulary"):
        engine.serve(Workload((*burst(20).requests, beyond), 2))
    assert not engine.engine.has_unfinished_requests()
    assert [trace.num_tokens for trace in engine.serve(burst(4, 3))] == [4, 3]


def test_our_engine_tells_the_hosts_share(model_dir):
    engine = load_engine(parse_engine_spec("pico-vllm"), EngineOptions(str(model_dir), "float32", "cpu"))
    engine.serve(burst(5, 5))
    assert 0 < engine.host_share() < 1
    assert engine.run_offline(burst(2, 2))[1] == 4


# ------------------------------------------------------------------------------------------------------- streaming
class Streams(StreamingEngine):
    """Tokens at known times of its own reading of the same clock."""

    def __init__(self):
        self.truth = []

    async def stream(self, prompt_token_ids, max_tokens, temperature):
        times = [time.perf_counter()]
        self.truth.append(times)
        for i in range(max_tokens):
            await asyncio.sleep(0.02 if i == 0 else 0.004)
            times.append(time.perf_counter())
            yield 1, [i]


def assert_seen_after_it_was_sent(traces, truth):
    """On one clock: no request comes before it is sent, and no token is seen before it was.

    In order of time, since nobody knows which request of two is which: if each is late, so is the k-th of all.
    """
    sent = sorted(trace.submit_s for trace in traces), sorted(time_s for times in truth for time_s in times[1:])
    seen = sorted(times[0] for times in truth), sorted(time_s for trace in traces for time_s in trace.times_s)
    for causes, effects in zip(sent, seen, strict=True):
        assert len(causes) == len(effects)
        assert all(cause <= effect for cause, effect in zip(causes, effects, strict=True))


def test_streams_are_timed_on_the_clock_of_what_the_engine_did():
    engine = Streams()
    traces = engine.serve(burst(*[20] * 8, concurrency=2))
    for trace in traces:
        assert trace.counts == [1] * 20 and trace.token_ids == list(range(20))
    assert_seen_after_it_was_sent(traces, engine.truth)


def test_streams_of_an_open_loop_start_at_their_arrivals():
    requests = tuple(WorkloadRequest((1,), 2, arrival_s=a) for a in (0.0, 0.03, 0.2))
    traces = Streams().serve(Workload(requests, None))
    assert all(t.submit_s >= t.arrival_s for t in traces)
    assert [round(t.arrival_s - traces[0].arrival_s, 3) for t in traces] == [0.0, 0.03, 0.2]


# ------------------------------------------------------------------------------------------------------------- HTTP
class Server:
    """An OpenAI-compatible server that streams tokens with known gaps. ``style``: what its chunks hold."""

    def __init__(self, style):
        self.bodies, self.truth, self.style = [], [], style
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                answer = json.dumps({"data": [{"id": "served"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def do_POST(self):
                outer.answer(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler):
        start = time.perf_counter()
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        self.bodies.append(body)
        if self.style == "refuses":
            handler.send_response(400)
            handler.send_header("Content-Length", "9")
            handler.end_headers()
            handler.wfile.write(b"too large")
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        times = [start]
        for i in range(body["max_tokens"]):
            time.sleep(0.02 if i == 0 else 0.004)
            choice = {"index": 0, "text": "ab"[i % 2]}
            if self.style == "ids":
                choice["token_ids"] = [10 + i]
            times.append(time.perf_counter())
            self.send(handler, {"choices": [choice]})
        self.truth.append(times)
        self.send(handler, {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        handler.wfile.write(b"data: [DONE]\n\n")
        handler.close_connection = True

    @staticmethod
    def send(handler, chunk):
        handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        handler.wfile.flush()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(request):
    server = Server(request.param)
    yield server
    server.close()


@pytest.mark.parametrize("server", ["ids"], indirect=True)
def test_a_server_is_asked_for_ids_and_measured_on_our_clock(server, model_dir):
    spec = parse_engine_spec(f'{server.url}/v1={{"top_k": 5}}')
    engine = load_engine(spec, EngineOptions(str(model_dir), "float32", "cpu"))
    traces = engine.serve(burst(*[15] * 6, concurrency=2))
    assert [t.token_ids for t in traces] == [list(range(10, 25))] * 6
    assert [t.counts for t in traces] == [[1] * 15] * 6
    body = server.bodies[0]
    assert body["prompt"] == [5, 6, 7] and body["ignore_eos"] and body["stream"] and body["top_k"] == 5
    assert body["model"] == "served" and body["max_tokens"] == 15 and body["return_token_ids"]
    assert_seen_after_it_was_sent(traces, server.truth)
    assert engine.info.mode == "server"


@pytest.mark.parametrize("server", ["ids"], indirect=True)
def test_what_only_the_start_of_a_server_decides_is_not_asked_of_it(server):
    def load(text, **more):
        return load_engine(parse_engine_spec(text), EngineOptions("m", "float32", "cpu", **more))

    with pytest.raises(EngineUnavailableError, match="enable_prefix_caching=True can't be asked of a running server"):
        load(server.url, enable_prefix_caching=True)
    with pytest.raises(EngineUnavailableError, match="max_num_seqs=3 can't be asked of a running server"):
        load(server.url, max_num_seqs=3)
    assert load(server.url).info.settings["prefix_caching"] is None
    cached = load(f'{server.url}={{"prefix_caching": true}}', enable_prefix_caching=True)
    assert cached.info.settings["prefix_caching"] is True
    assert cached.info.settings["url"] == f"{server.url}/v1"  # two servers are two engines in a table
    cached.serve(burst(2))
    assert "prefix_caching" not in server.bodies[0]


@pytest.mark.parametrize("server", ["text"], indirect=True)
def test_ids_of_a_server_that_tells_none_come_from_its_text(server, model_dir):
    engine = load_engine(parse_engine_spec(server.url), EngineOptions(str(model_dir), "float32", "cpu"))
    (trace,) = engine.serve(burst(4))
    from pico_vllm.engine.tokenizer import Tokenizer

    assert trace.counts == [1] * 4
    assert trace.token_ids == Tokenizer.from_directory(model_dir).encode("abab", add_special_tokens=False)


@pytest.mark.parametrize("server", ["refuses"], indirect=True)
def test_what_a_server_says_is_passed_on(server, model_dir):
    engine = load_engine(parse_engine_spec(server.url), EngineOptions(str(model_dir), "float32", "cpu"))
    with pytest.raises(ConfigError, match="answers 400: too large"):
        engine.serve(burst(4))


# ------------------------------------------------------------------------------------------------ stand-ins of peers
def stand_in(monkeypatch, name, **attributes):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class FakeVllm:
    """The parts of vllm.LLM that the adapter touches; every step gives each live request a token."""

    fails_at_step = 0

    def __init__(self, **arguments):
        FakeVllm.arguments = arguments
        self.llm_engine = self
        self.live = {}
        self.late = []
        names = types.SimpleNamespace
        self.vllm_config = names(
            model_config=names(max_model_len=64),
            scheduler_config=names(
                max_num_seqs=8, max_num_batched_tokens=99, async_scheduling=True, enable_chunked_prefill=True
            ),
            compilation_config=names(mode=3, cudagraph_mode="FULL", max_cudagraph_capture_size=8),
            cache_config=names(
                block_size=16,
                enable_prefix_caching=arguments["enable_prefix_caching"],
            ),
        )
        self.engine_core = names(engine_core=names(batch_queue=[1]), shutdown=lambda: None)

    def add_request(self, request_id, prompt, params):
        assert request_id not in self.live
        self.live[request_id] = [prompt["prompt_token_ids"], params["max_tokens"]]
        assert params["ignore_eos"] and not params["detokenize"]

    def abort_request(self, request_ids):
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def step(self):
        self.engine_core.engine_core.batch_queue = []
        FakeVllm.fails_at_step -= 1
        if FakeVllm.fails_at_step == 0:
            raise RuntimeError("out of luck")
        names = types.SimpleNamespace
        outputs = [names(request_id=i, outputs=[names(token_ids=[99])], finished=True) for i in self.late]
        self.late = []
        for request_id, state in list(self.live.items()):
            state[1] -= 1
            tokens = [types.SimpleNamespace(token_ids=[state[1]])]
            outputs.append(types.SimpleNamespace(request_id=request_id, outputs=tokens, finished=state[1] == 0))
            if state[1] == 0:
                del self.live[request_id]
        return outputs

    def generate(self, prompts, params, use_tqdm):
        params = params if isinstance(params, list) else [params] * len(prompts)
        names = types.SimpleNamespace
        return [
            names(
                outputs=[
                    names(
                        token_ids=list(range(p["max_tokens"])),
                        logprobs=[{i: names(logprob=-0.5)} for i in range(p["max_tokens"])],
                    )
                ]
            )
            for p in params
        ]


def test_vllm_is_driven_step_by_step(monkeypatch):
    kinds = types.SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    stand_in(monkeypatch, "vllm", LLM=FakeVllm, SamplingParams=dict, __version__="0.24.0")
    stand_in(monkeypatch, "vllm.sampling_params", RequestOutputKind=kinds)
    options = EngineOptions("m", "bfloat16", "cuda", memory_share=0.4, max_num_seqs=8)
    engine = load_engine(parse_engine_spec('vllm={"enforce_eager": true, "enable_prefix_caching": true}'), options)
    assert FakeVllm.arguments["model"] == "m" and FakeVllm.arguments["gpu_memory_utilization"] == 0.4
    assert FakeVllm.arguments["enforce_eager"] is True and FakeVllm.arguments["skip_tokenizer_init"] is True
    assert (engine.info.engine, engine.info.version, engine.info.mode) == ("vllm", "0.24.0", "in-process")
    assert engine.info.settings["prefix_caching"] is True  # what it has, whoever asked for it
    for _ in range(2):  # ids are unique over the engine's life
        traces = engine.serve(burst(3, 2, 2, concurrency=2))
        assert [t.token_ids for t in traces] == [[2, 1, 0], [1, 0], [1, 0]]
    assert engine.run_offline(burst(3, 2))[1] == 5
    scored = engine.score([[1, 2]], 3)
    assert scored[0].token_ids == [0, 1, 2] and scored[0].logprobs[1] == {1: -0.5}
    assert engine.why_not(burst(62)) is not None and engine.why_not(burst(61)) is None
    engine.close()


def test_vllm_drops_the_requests_of_a_run_that_failed(monkeypatch):
    kinds = types.SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    stand_in(monkeypatch, "vllm", LLM=FakeVllm, SamplingParams=dict, __version__="0.24.0")
    stand_in(monkeypatch, "vllm.sampling_params", RequestOutputKind=kinds)
    engine = load_engine(parse_engine_spec("vllm"), EngineOptions("m", "bfloat16", "cuda"))
    FakeVllm.fails_at_step = 2
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.serve(burst(9, 9))
    assert engine._engine.live == {}
    engine._engine.late = ["0-1"]  # an output of the run that failed, from a step that ran ahead
    assert [t.token_ids for t in engine.serve(burst(2, 2))] == [[1, 0], [1, 0]]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_peers_need_a_gpu(monkeypatch, name):
    stand_in(monkeypatch, name)
    with pytest.raises(EngineUnavailableError, match="GPU only"):
        load_engine(parse_engine_spec(name), OPTIONS)


class FakeSglang:
    """The parts of sglang.Engine that the adapter touches; ``cumulative`` outputs as it sends them by default."""

    def __init__(self, **arguments):
        FakeSglang.arguments = arguments
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = types.SimpleNamespace(server_args=types.SimpleNamespace(**arguments))

    async def async_generate(self, input_ids, sampling_params, stream):
        async def outputs():
            ids = []
            for i in range(sampling_params["max_new_tokens"]):
                await asyncio.sleep(0)
                ids.append(i)
                if i % 3 != 1:  # two tokens may come together
                    yield {"output_ids": list(ids), "meta_info": {"completion_tokens": i + 1}}

        return outputs()

    def generate(self, input_ids, sampling_params):
        return [{"meta_info": {"completion_tokens": p["max_new_tokens"]}} for p in sampling_params]

    def shutdown(self):
        self.loop.close()


def test_sglang_is_driven_on_its_own_loop(monkeypatch):
    stand_in(monkeypatch, "sglang", Engine=FakeSglang, __version__="0.5.15")
    engine = load_engine(parse_engine_spec("sglang"), EngineOptions("m", "bfloat16", "cuda"))
    assert FakeSglang.arguments["disable_radix_cache"] is True
    assert engine.info.settings["prefix_caching"] is False
    traces = engine.serve(burst(6, 4, concurrency=1))
    assert [t.token_ids for t in traces] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]]
    assert traces[0].counts == [1, 2, 1, 2]
    assert engine.run_offline(burst(3, 2))[1] == 5
    engine.close()


def test_ranks_are_for_our_own_engine_and_its_spec_has_the_last_word():
    specs = [parse_engine_spec(text) for text in ("pico-vllm", 'pico-vllm@one={"tensor_parallel_size": 1}', "vllm")]
    assert _with_ranks(specs, None) == specs
    assert [spec.extra for spec in _with_ranks(specs, 2)] == [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 1},
        {},
    ]
    with pytest.raises(ConfigError, match="--tp=2 is for pico-vllm"):
        _with_ranks(specs[2:], 2)
