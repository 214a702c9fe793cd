"""Whatever the logits say, the output is inside its grammar; whatever a grammar says, only its own request suffers.

The core is real but for the device: ``RandomExecutor`` draws a token from random logits under the mask that it is
given, keyed by request and position as the engine's own sampler is, so that runs can be compared.
"""

import ast
import dataclasses
import json
import re
import threading
import zlib

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_gguf
import tiny_models
from engine_runs import greedy, make_llm
from pico_vllm import SamplingParams
from pico_vllm.config import EngineConfig
from pico_vllm.engine import engine_core
from pico_vllm.engine.structured_output import MAX_CACHED_GRAMMARS, StructuredOutputManager, read_tokenizer_json
from pico_vllm.engine.tokenizer import Tokenizer
from pico_vllm.errors import RequestError
from pico_vllm.models.source import GgufSource, find_model
from pico_vllm.outputs import EngineCoreOutput
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import StructuredOutputsParams
from pico_vllm.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from pico_vllm.worker.device_time import DeviceTime

BOS, EOS = 0, 1  # of the tiny models
DIGITS = StructuredOutputsParams(regex="[0-9]{3}")
LETTERS = StructuredOutputsParams(regex="[a-z]+")


# ---------------------------------------------------------------------------------------------------- the fake device
def allowed_bits(row):
    """[32 x words] bool, unpacked without any of our own code."""
    return np.unpackbits(row.view(np.uint8), bitorder="little").astype(bool)


class RandomExecutor:
    """Samples from random logits (+ ``favoured``), under the masks that it is handed."""

    def __init__(self, config, model_config, source, **_):
        self.num_blocks = config.cache.num_gpu_blocks_override
        self.max_num_batched_tokens = config.scheduler.max_num_batched_tokens or 2048
        self.measured_steps = None
        self.vocab_size = model_config.vocab_size
        self.device_time = DeviceTime()
        self.computes_beside_the_host = False
        self.favoured = np.zeros(self.vocab_size)
        self.seed = 0
        self.forced = {}  # request id -> ids to return whatever the mask says
        self.steps = []

    def check_request(self, params):
        pass

    def execute(self, plan, make_masks=None):
        pending = self.start(plan)
        self.sample(pending, None if make_masks is None else make_masks())
        return self.finish(pending)

    def start(self, plan):
        return [plan]

    def sample(self, pending, masks):
        (plan,) = pending
        rows = {} if masks is None else dict(zip(masks.request_ids, masks.bitmask, strict=True))
        assert set(rows) <= {r.request_id for r in plan.scheduled if r.samples}
        self.steps.append((plan, masks))
        pending += [(self.sample_one(r, rows.get(r.request_id)),) if r.samples else () for r in plan.scheduled]

    def finish(self, pending):
        return ModelRunnerOutput(tuple(pending[1:]))

    def sample_one(self, request, row):
        if self.forced.get(request.request_id):
            return self.forced[request.request_id].pop(0)
        position = request.num_computed_tokens + request.num_new_tokens
        rng = np.random.default_rng([self.seed, zlib.crc32(request.request_id.encode()), position])
        logits = 2 * rng.standard_normal(self.vocab_size) + rng.gumbel(size=self.vocab_size) + self.favoured
        if row is not None:
            allowed = allowed_bits(row)
            assert not allowed[self.vocab_size :].any(), "a bit beyond the logits"
            logits[~allowed[: self.vocab_size]] = -np.inf
        best = int(logits.argmax())
        return best if logits[best] > -np.inf else -1


class Core:
    """An EngineCore on a RandomExecutor, and what its requests have become."""

    def __init__(self, directory, **options):
        defaults = {"device": "cpu", "num_gpu_blocks_override": 2048, "max_num_seqs": 16}
        config = EngineConfig.from_options(model=str(directory), **(defaults | options))
        source = find_model(str(directory))
        self.model_config = source.model_config()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_core, "start_executor", RandomExecutor)
            self.core = engine_core.EngineCore(config, self.model_config, source)
        self.executor = self.core.executor
        self.manager = self.core.structured_output
        self.tokenizer = Tokenizer.from_directory(directory)
        self.token_ids, self.ends, self.stop_reasons = {}, {}, {}

    def favour(self, texts, amount=4.0):
        for text in texts:
            for token_id in self.tokenizer.encode(text, add_special_tokens=False):
                self.executor.favoured[token_id] = amount

    def add(self, request_id, structured, *, prompt=(10, 20, 30), max_tokens=150, **params):
        params = SamplingParams(structured_outputs=structured, max_tokens=max_tokens, **params)
        eos_token_ids = self.model_config.eos_token_ids
        self.core.add_request(Request(request_id, prompt, params, eos_token_ids=eos_token_ids))
        self.token_ids[request_id] = []

    def step(self):
        outputs = self.core.step()
        for output in outputs:
            assert output.request_id not in self.ends, "an output after the end"
            self.token_ids[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = str(output.finish_reason)
                self.stop_reasons[output.request_id] = output.stop_reason
        return outputs

    def run(self):
        while self.core.has_unfinished_requests():
            self.step()
        self.assert_idle()

    def assert_idle(self):
        cache = self.core.kv_cache_manager
        assert self.manager.num_matchers == 0
        assert cache.num_free_blocks == cache.num_blocks
        assert self.core.scheduler.num_running == self.core.scheduler.num_waiting == 0

    def text(self, request_id):
        ids = self.token_ids[request_id]
        return b"".join(self.tokenizer.token_bytes(i) for i in ids if i not in self.model_config.eos_token_ids).decode()

    def generate(self, structured, *, request_id="r", **params):
        """(text, finish reason) of one request alone."""
        self.ends.pop(request_id, None)
        self.add(request_id, structured, **params)
        self.run()
        return self.text(request_id), self.ends[request_id]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("structured")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    return directory


@pytest.fixture
def core(tiny_dir):
    return Core(tiny_dir)


@pytest.fixture(
    scope="module", params=["bytes", pytest.param("smollm2", marks=pytest.mark.model)], ids=["bytes", "smollm2"]
)
def any_core(request, tiny_dir):
    """One token a byte, or SmolLM2's 49,152 tokens; ends of strings and lists are likely, so that outputs end."""
    directory = tiny_dir if request.param == "bytes" else request.getfixturevalue("default_model_dir")
    core = Core(directory, max_model_len=256 if request.param == "bytes" else 1024)
    core.favour(['"', "}", "]", ",", ":"], 6.0 if request.param == "bytes" else 12.0)
    core.executor.favoured[list(core.model_config.eos_token_ids)] = 6.0
    return core


# ------------------------------------------------------------------------------------------- always inside the grammar
def closed(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "flat": closed(name={"type": "string", "maxLength": 12}, age={"type": "integer", "minimum": 0, "maximum": 150}),
    "nested": closed(a=closed(b=closed(c={"type": "boolean"}, d={"type": "null"})), e={"type": "integer"}),
    "enum": closed(unit={"enum": ["°C", "°F", 3, None, True, {"x": [1]}]}, kind={"const": 'a"b\\c\n'}),
    "array": {"type": "array", "items": {"enum": [1, 20, 300]}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "number": closed(x={"type": "number", "minimum": -1.5, "maximum": 2.25}, y={"type": "integer", "maximum": -3}),
    "any_of": {"anyOf": [{"type": "boolean"}, closed(z={"type": "null"}), {"type": "array", "maxItems": 0}]},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "additionalProperties": False,
    },
    "pattern": closed(id={"type": "string", "pattern": "^[A-F]{2}-\\d{3}$"}),
    "unicode key": closed(**{"größe 😀": {"type": "boolean"}, 'q"\\': {"type": "null"}}),
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                "required": ["left"],
                "additionalProperties": False,
            }
        },
    },
    "boolean schema": True,
}
NUM_SEEDS = 6


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_output_satisfies_its_schema(any_core, name):
    schema = SCHEMAS[name]
    structured = StructuredOutputsParams(json=json.dumps(schema))
    ids = [f"{name}-{i}" for i in range(NUM_SEEDS)]
    for request_id in ids:
        any_core.add(request_id, structured, max_tokens=250)
    any_core.run()
    complete = [request_id for request_id in ids if any_core.ends[request_id] == "stop"]
    assert len(complete) >= NUM_SEEDS - 2, "too few outputs that were not cut by max_tokens"
    assert {any_core.ends[request_id] for request_id in ids} <= {"stop", "length"}
    for request_id in complete:
        jsonschema.Draft202012Validator(schema).validate(json.loads(any_core.text(request_id)))


def test_any_string_of_json_decodes(any_core):
    """Escapes, control characters and half characters: nothing that json.loads refuses comes out of a free string."""
    favoured = any_core.executor.favoured.copy()
    any_core.favour(["\\", "é", "日"], favoured.max() - 1)
    for i in range(24):
        any_core.add(f"string-{i}", StructuredOutputsParams(json={"type": "string"}), max_tokens=250)
    any_core.run()
    any_core.executor.favoured = favoured
    texts = [any_core.text(f"string-{i}") for i in range(24) if any_core.ends[f"string-{i}"] == "stop"]
    assert len(texts) >= 20
    values = [json.loads(text) for text in texts]
    assert all(isinstance(value, str) for value in values)
    assert any(ord(c) > 127 for value in values for c in value), "no example was outside ASCII"


@pytest.mark.parametrize(
    "regex",
    [
        "[0-9]{3}-[a-z]{2}",
        "(yes|no|maybe)+!",
        "^\\+49 \\d{3}$",
        "é+[日本]{1,3}😀",
        "[^a]{3}",
        "a/b\\\\c\\.d\"e'",
        "(ab?c){2,4}",
        "\\s?x{5}",
    ],
)
def test_output_matches_its_regex_whole(any_core, regex):
    for i in range(NUM_SEEDS):
        any_core.add(f"{regex}-{i}", StructuredOutputsParams(regex=regex))
    any_core.run()
    for i in range(NUM_SEEDS):
        assert any_core.ends[f"{regex}-{i}"] == "stop"
        assert re.fullmatch(regex, any_core.text(f"{regex}-{i}"))


CHOICES = ("a", "ab", "abc", 'quo"te\\', "line\nbreak\t", "é日😀", "x.y*z|(w)[v]{2}", "/slash/", " space ", "^$", "'")


def test_output_is_one_of_its_choices_and_every_choice_can_come(any_core):
    for i in range(80):
        any_core.add(f"choice-{i}", StructuredOutputsParams(choice=CHOICES))
    any_core.run()
    assert {any_core.ends[f"choice-{i}"] for i in range(80)} == {"stop"}
    assert {any_core.text(f"choice-{i}") for i in range(80)} <= set(CHOICES)
    for choice in CHOICES:  # each alone is reachable, whatever characters it has
        any_core.add(choice, StructuredOutputsParams(choice=(choice,)))
    any_core.run()
    assert [any_core.text(choice) for choice in CHOICES] == list(CHOICES)


def test_grammar_output_parses(any_core):
    arithmetic = """
        start: term (OP term){0,3}
        term: NUMBER | "(" start ")"
        OP: "+" | "-" | "*"
        NUMBER: /[1-9][0-9]{0,2}/
    """
    any_core.favour([")"], 5.0)
    for i in range(2 * NUM_SEEDS):
        any_core.add(f"sum-{i}", StructuredOutputsParams(grammar=arithmetic), max_tokens=250)
    any_core.run()
    complete = [f"sum-{i}" for i in range(2 * NUM_SEEDS) if any_core.ends[f"sum-{i}"] == "stop"]
    assert len(complete) >= NUM_SEEDS
    for request_id in complete:
        text = any_core.text(request_id)
        assert set(text) <= set("0123456789+-*()")
        ast.parse(text, mode="eval")


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -20, "maximum": 7},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["x", 1, None]},
        {"const": [1, "é"]},
    ]
)
KEYS = st.text(st.characters(exclude_categories=("Cs",), max_codepoint=0x2FFF), max_size=4)


def containers(inner):
    objects = st.dictionaries(KEYS, inner, max_size=3).map(lambda properties: closed(**properties))
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
    )
    any_of = st.lists(inner, min_size=1, max_size=3).map(lambda schemas: {"anyOf": schemas})
    return objects | arrays | any_of


@given(schema=st.recursive(SCALARS, containers, max_leaves=6), seed=st.integers(0, 2**31))
@settings(max_examples=60)
def test_any_small_schema_holds_for_any_logits(tiny_dir, schema, seed):
    core = _shared_core(tiny_dir)
    core.executor.seed = seed
    text, end = core.generate(StructuredOutputsParams(json=schema), max_tokens=240)
    if end == "stop":
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    else:
        assert end == "length"
        assert len(core.token_ids["r"]) == 240


_CORES = {}


def _shared_core(directory):
    """One core for all examples: hypothesis and function fixtures do not mix."""
    if directory not in _CORES:
        _CORES[directory] = Core(directory)
        _CORES[directory].favour(['"', "}", "]", ":"], 6.0)
    return _CORES[directory]


# ------------------------------------------------------------------------------------------------------- its own error
@pytest.mark.parametrize(
    ("structured", "words"),
    [
        ({"json": "{"}, ["structured_outputs.json", "'{'", "line 1"]),
        ({"json": "null"}, ["structured_outputs.json", "object or a boolean", "NoneType"]),
        ({"json": "[1]"}, ["structured_outputs.json", "list"]),
        ({"json": '{"type": "strin"}'}, ["structured_outputs.json", "Invalid type", "strin"]),
        ({"json": '{"type": 3}'}, ["structured_outputs.json", "type must be"]),
        ({"json": '{"type": "array", "uniqueItems": true}'}, ["structured_outputs.json", "uniqueItems"]),
        ({"json": '{"$ref": "http://example.com/x"}'}, ["structured_outputs.json", "http://example.com/x"]),
        ({"json": '{"type": "string", "pattern": "("}'}, ["structured_outputs.json", "unclosed group"]),
        ({"json": "[" * 100_000}, ["structured_outputs.json"]),
        ({"json": '{"a":' * 500 + "1" + "}" * 500}, ["structured_outputs.json", "recursion"]),
        ({"json": "false"}, ["structured_outputs.json", "Unsatisfiable", "false"]),
        ({"json": '{"enum": []}'}, ["structured_outputs.json", "Unsatisfiable"]),
        ({"json": '{"type": "integer", "minimum": 5, "maximum": 3}'}, ["Unsatisfiable", "minimum (5)", "maximum (3)"]),
        ({"regex": "(ab"}, ["structured_outputs.regex='(ab'", "unclosed group"]),
        ({"regex": "(?=a)b"}, ["structured_outputs.regex", "look-ahead"]),
        ({"regex": r"(a)\1"}, ["structured_outputs.regex", "backreferences"]),
        ({"regex": r"[^\s\S]"}, ["structured_outputs.regex", "no text", "vocabulary"]),
        ({"regex": "\ud800"}, ["structured_outputs.regex", "surrogates"]),
        ({"choice": ("\ud800",)}, ["structured_outputs.choice"]),
        ({"grammar": 'start: "a" missing'}, ["structured_outputs.grammar", "missing"]),
        ({"grammar": 'root: "a"'}, ["structured_outputs.grammar", "start"]),
        ({"grammar": ""}, ["structured_outputs.grammar", "mpty"]),
        ({"grammar": 'start: start "a"'}, ["structured_outputs.grammar", "no text"]),
        ({"grammar": f'start: "a" {"missing " * 300}'}, ["structured_outputs.grammar", "missing"]),
    ],
)
def test_a_grammar_that_cannot_be_compiled_is_one_clear_error(core, structured, words):
    core.add("other", DIGITS)
    core.step()
    with pytest.raises(RequestError) as caught:
        core.add("bad", StructuredOutputsParams(**structured))
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 700 and "<state>" not in str(caught.value)
    core.run()
    assert re.fullmatch("[0-9]{3}", core.text("other"))


def test_a_refused_request_leaves_nothing_and_the_error_comes_again(core):
    core.add("other", LETTERS, max_tokens=30)
    alone = core.generate(DIGITS, request_id="good")[0]
    core.ends.clear()
    core.add("good", DIGITS)
    depths = set()
    for _ in range(3):
        with pytest.raises(RequestError, match="unclosed group") as caught:
            core.add("bad", StructuredOutputsParams(regex="(ab"))
        depths.add(len(caught.traceback))
    assert len(depths) == 1, "the cached error gathers tracebacks"
    assert core.manager.num_matchers == 1
    core.run()
    assert core.text("good") == alone
    core.ends.clear()
    core.add("bad", DIGITS)  # the id is free
    core.run()
    assert re.fullmatch("[0-9]{3}", core.text("bad"))


def test_a_request_that_the_scheduler_refuses_leaves_no_matcher_and_does_not_touch_its_namesake(core):
    core.add("r", LETTERS, max_tokens=40)
    core.step()
    with pytest.raises(RequestError, match="in use"):
        core.add("r", DIGITS)
    with pytest.raises(RequestError, match="max_model_len"):
        core.add("long", DIGITS, prompt=[5] * 300)
    assert core.manager.num_matchers == 1
    core.run()
    assert re.fullmatch("[a-z]+", core.text("r"))


def tokenizer_text(tokens):
    """A tokenizer.json of one-byte tokens."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(["<bos>", "<eos>", *tokens])}, [])
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer.to_str()


def with_vocabulary(core, tokens, vocab_size=tiny_models.VOCAB_SIZE):
    """Replace the manager by one that knows these tokens only."""
    text = tokenizer_text(tokens)
    core.manager = StructuredOutputManager(lambda: text, vocab_size=vocab_size, eos_token_ids=[EOS])
    core.core.structured_output = core.manager
    return core


def test_a_dead_end_that_shows_later_ends_its_request_with_an_error(core, caplog):
    """After "a" only "b" may follow, and no token holds a "b"."""
    core = with_vocabulary(core, ["a", "c"])
    core.add("dead", StructuredOutputsParams(regex="ab"))
    core.add("alive", StructuredOutputsParams(regex="a{5}"))
    core.run()
    assert core.ends == {"dead": "error", "alive": "stop"}
    assert core.token_ids["dead"] == [2]
    assert core.token_ids["alive"] == [2] * 5
    assert "request dead ends with an error" in caplog.text


def test_what_no_token_can_begin_is_refused_at_once(core):
    core = with_vocabulary(core, ["a", "c"])
    with pytest.raises(RequestError, match="no text of this model's vocabulary"):
        core.add("r", StructuredOutputsParams(choice=("b", "bb")))
    assert core.generate(StructuredOutputsParams(choice=("bb", "ca")))[1] == "stop"


@pytest.mark.parametrize("after", [0, 2])
def test_a_token_that_the_grammar_forbids_ends_the_request_and_is_not_given_out(core, after, caplog):
    """As when a logits processor sets a masked logit to a number."""
    good = core.tokenizer.encode("12", add_special_tokens=False)[:after]
    bad = core.tokenizer.encode("x", add_special_tokens=False)
    core.executor.forced["r"] = [*good, *bad]
    core.add("r", DIGITS)
    core.add("other", DIGITS)
    core.run()
    assert core.ends == {"r": "error", "other": "stop"}
    assert core.token_ids["r"] == good
    assert f"forbids token {bad[0]}" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", ["tokenizer.json", "Model missing"]), (None, ["tokenizer.json", "No such file"])],
)
def test_without_a_usable_tokenizer_json_only_structured_requests_are_refused(core, tmp_path, text, words):
    def read():
        return text if text is not None else (tmp_path / "tokenizer.json").read_text()

    core.manager = StructuredOutputManager(read, vocab_size=300, eos_token_ids=[EOS])
    core.core.structured_output = core.manager
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            core.add("r", DIGITS)
        assert all(word in str(caught.value) for word in words)
    core.add("plain", None, max_tokens=4, ignore_eos=True)
    core.run()
    assert len(core.token_ids["plain"]) == 4


def test_a_vocabulary_larger_than_the_logits_is_refused(core):
    core = with_vocabulary(core, [chr(ord("a") + i) for i in range(26)], vocab_size=20)
    with pytest.raises(RequestError, match="28"):
        core.add("r", LETTERS)


# ------------------------------------------------------------------------------------------------------------- the mask
def mask_of(core, request_id="r"):
    """The request's mask in the last step, as a set of allowed ids."""
    _, masks = core.executor.steps[-1]
    return set(np.flatnonzero(allowed_bits(masks.bitmask[masks.request_ids.index(request_id)])).tolist())


def ids_of(core, text):
    return set(core.tokenizer.encode(text, add_special_tokens=False))


def test_the_mask_allows_exactly_what_may_follow(core):
    core.add("r", StructuredOutputsParams(regex="[ab]c?"))
    core.step()
    assert mask_of(core) == ids_of(core, "ab")
    core.step()
    assert mask_of(core) == ids_of(core, "c") | {EOS}


def test_ids_without_a_token_are_never_allowed_and_the_last_word_is_not_overrun(core):
    """258 tokens, 300 logits, 10 words of 32 bits; a free string allows nearly all tokens and no special one."""
    core.add("r", StructuredOutputsParams(regex="(?s:.)+"))
    core.step()
    _, masks = core.executor.steps[-1]
    assert masks.bitmask.dtype == np.int32 and masks.bitmask.shape == (1, 10)
    allowed = mask_of(core)
    assert len(allowed) > 150
    assert max(allowed) < 258 and BOS not in allowed
    core.core.abort("r")


def test_rows_are_those_that_sample_under_a_grammar(core):
    """Plain requests, and the chunks of a prompt before its last, have no row."""
    core.add("plain", None, max_tokens=3, ignore_eos=True)
    core.add("x", DIGITS)
    core.add("y", LETTERS, max_tokens=3)
    core.step()
    assert core.executor.steps[-1][1].request_ids == ("x", "y")
    core.run()
    core.add("plain2", None, max_tokens=1)
    core.run()
    assert core.executor.steps[-1][1] is None


def test_a_chunk_that_samples_nothing_has_no_row(tiny_dir):
    core = Core(tiny_dir, max_num_batched_tokens=16)
    core.add("r", DIGITS, prompt=[7] * 40)
    for expected in (None, None, ("r",)):
        core.step()
        masks = core.executor.steps[-1][1]
        assert (masks and masks.request_ids) == expected
    core.run()
    assert re.fullmatch("[0-9]{3}", core.text("r"))


def test_structured_requests_leave_plain_ones_in_their_batch_alone(core):
    for i in range(4):
        core.add(f"plain-{i}", None, max_tokens=12)
    core.run()
    alone = dict(core.token_ids)
    core.ends.clear()
    for i in range(4):
        core.add(f"plain-{i}", None, max_tokens=12)
        core.add(f"digits-{i}", DIGITS)
        core.add(f"letters-{i}", LETTERS, max_tokens=9)
    core.run()
    assert {key: core.token_ids[key] for key in alone} == alone
    for i in range(4):
        assert re.fullmatch("[0-9]{3}", core.text(f"digits-{i}"))
        assert re.fullmatch("[a-z]{1,9}", core.text(f"letters-{i}"))


# ------------------------------------------------------------------------------------------------------------- the end
def test_a_complete_grammar_ends_the_request_without_eos(core):
    _, end = core.generate(DIGITS)
    assert end == "stop" and core.stop_reasons["r"] is None
    assert len(core.token_ids["r"]) == 3 and EOS not in core.token_ids["r"]


def test_max_tokens_may_cut_a_text_short_of_its_grammar(core):
    assert core.generate(DIGITS, max_tokens=2)[1] == "length"
    assert re.fullmatch("[0-9]{2}", core.text("r"))


def test_a_grammar_complete_with_the_last_token_is_a_stop(core):
    assert core.generate(DIGITS, max_tokens=3)[1] == "stop"


def test_eos_ends_a_text_that_could_go_on(core):
    core.executor.favoured[EOS] = 50
    text, end = core.generate(LETTERS)
    assert (len(text), end) == (1, "stop")
    assert core.token_ids["r"][-1] == EOS


def test_ignored_eos_is_not_even_allowed_while_the_text_can_go_on(core):
    core.executor.favoured[EOS] = 50
    text, end = core.generate(LETTERS, ignore_eos=True, max_tokens=20)
    assert end == "length" and re.fullmatch("[a-z]{20}", text)
    core.add("mask", LETTERS, ignore_eos=True, max_tokens=2)
    core.step()
    core.step()
    assert mask_of(core, "mask") == ids_of(core, "abcdefghijklmnopqrstuvwxyz")


def test_a_complete_grammar_ends_a_request_that_ignores_eos(core):
    assert core.generate(DIGITS, ignore_eos=True, max_tokens=50)[1] == "stop"
    assert len(core.token_ids["r"]) == 3


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_of_the_empty_text_ends_at_once(core, ignore_eos):
    assert core.generate(StructuredOutputsParams(regex=""), ignore_eos=ignore_eos) == ("", "stop")
    assert core.token_ids["r"] == [EOS]


def test_a_stop_token_of_the_request_is_allowed_where_eos_is_and_only_there(core):
    """BOS stands for a chat model's end of turn that is not among the model's EOS ids."""
    core.executor.favoured[BOS] = 50
    text, end = core.generate(StructuredOutputsParams(regex="ab+"), stop_token_ids=[BOS])
    assert (text, end) == ("ab<bos>", "stop")
    assert core.stop_reasons["r"] == BOS
    core.add("mask", StructuredOutputsParams(regex="ab+"), stop_token_ids=[BOS], ignore_eos=True)
    for allowed in (ids_of(core, "a"), ids_of(core, "b"), ids_of(core, "b") | {BOS}):
        core.step()
        assert mask_of(core, "mask") == allowed
    assert core.ends["mask"] == "stop"


def test_a_stop_token_beyond_the_vocabulary_never_comes(core):
    assert core.generate(LETTERS, stop_token_ids=[4000], max_tokens=5)[1] in ("length", "stop")


def test_update_names_the_requests_that_the_grammar_has_ended_and_no_other(core):
    """Digits "123": complete with the third token, whether or not the scheduler has ended the request itself."""
    tokens = core.tokenizer.encode("123", add_special_tokens=False)
    params = SamplingParams(structured_outputs=DIGITS)
    for request_id in ("grammar", "length", "eos", "goes on"):
        request = Request(request_id, [5], params, eos_token_ids=[EOS])
        core.manager.start(request, core.manager.compile(request))
    outputs = [
        EngineCoreOutput("grammar", tuple(tokens)),
        EngineCoreOutput("length", tuple(tokens[:2]), FinishReason.LENGTH),
        EngineCoreOutput("plain", (7,)),
        EngineCoreOutput("eos", (EOS,), FinishReason.STOP),
        EngineCoreOutput("goes on", tuple(tokens[:1])),
    ]
    updated, ended = core.manager.update(outputs)
    assert ended == ["grammar"]
    assert updated == [dataclasses.replace(outputs[0], finish_reason=FinishReason.STOP), *outputs[1:]]
    assert core.manager.num_matchers == 1


def test_several_eos_ids_are_all_allowed(core, tiny_dir):
    text = (tiny_dir / "tokenizer.json").read_text()
    manager = StructuredOutputManager(lambda: text, vocab_size=300, eos_token_ids=[EOS, BOS, 4000])
    request = Request(
        "r", [5], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a?")), eos_token_ids=[EOS, BOS]
    )
    manager.start(request, manager.compile(request))
    plan = SchedulerOutput((ScheduledRequest("r", (5,), 0, 1, (0,), True),), 0, 1)
    masks = manager.masks(plan)
    assert set(np.flatnonzero(allowed_bits(masks.bitmask[0])).tolist()) == ids_of(core, "a") | {EOS, BOS}


# ------------------------------------------------------------------------------------------------- preemption, abort, n
def test_preemption_changes_no_token(tiny_dir):
    def run(num_blocks):
        core = Core(tiny_dir, num_gpu_blocks_override=num_blocks, block_size=4)
        core.favour(['"', "}"], 2.0)
        for i in range(6):
            core.add(f"s{i}", StructuredOutputsParams(json=SCHEMAS["flat"]), max_tokens=60)
            core.add(f"l{i}", LETTERS, max_tokens=30)
        core.run()
        return core

    roomy, tight = run(1024), run(24)
    assert roomy.core.scheduler.num_preemptions == 0
    assert tight.core.scheduler.num_preemptions > 5
    assert tight.token_ids == roomy.token_ids
    assert tight.ends == roomy.ends
    assert sum(end == "stop" for end in roomy.ends.values()) >= 6
    for i in range(6):
        if tight.ends[f"s{i}"] == "stop":
            jsonschema.validate(json.loads(tight.text(f"s{i}")), SCHEMAS["flat"])


def test_an_abort_in_any_state_drops_the_matcher_and_frees_the_id(core):
    core.add("waiting", DIGITS)
    assert core.manager.num_matchers == 1
    assert core.core.abort("waiting")
    assert core.manager.num_matchers == 0
    core.add("running", LETTERS)
    core.step()
    assert core.core.abort("running") and not core.core.abort("running")
    core.assert_idle()
    core.add("running", DIGITS)  # from its beginning, with the new grammar
    core.token_ids["running"] = []
    core.run()
    assert re.fullmatch("[0-9]{3}", core.text("running"))


def counted_compilations(monkeypatch):
    """A list that grows with what is compiled."""
    compiled = []
    plain_compile = StructuredOutputManager._compile

    def compile_and_count(self, params):
        compiled.append(params)
        return plain_compile(self, params)

    monkeypatch.setattr(StructuredOutputManager, "_compile", compile_and_count)
    return compiled


def test_requests_of_one_grammar_share_its_compilation_and_nothing_else(core, monkeypatch):
    compiled = counted_compilations(monkeypatch)
    schema = closed(a={"type": "integer", "maximum": 99999}, b={"enum": ["x", "y"]})
    for i in range(8):
        core.add(f"r{i}", StructuredOutputsParams(json=schema if i % 2 else json.dumps(schema)))
        core.step()  # so each stands somewhere else
    core.run()
    assert len(compiled) == 1
    assert {core.ends[f"r{i}"] for i in range(8)} == {"stop"}
    assert len({core.text(f"r{i}") for i in range(8)}) > 1
    for i in range(8):
        jsonschema.validate(json.loads(core.text(f"r{i}")), schema)


def test_the_cache_of_grammars_is_bounded_and_keeps_the_recently_used(core, monkeypatch):
    compiled = counted_compilations(monkeypatch)
    first = StructuredOutputsParams(choice=("first",))
    core.generate(first)
    for i in range(2 * MAX_CACHED_GRAMMARS):
        core.generate(StructuredOutputsParams(choice=(f"c{i}",)))
        assert core.generate(first) == ("first", "stop")
    assert core.manager.num_cached_grammars == MAX_CACHED_GRAMMARS
    assert compiled.count(first) == 1
    core.generate(StructuredOutputsParams(choice=("c0",)))
    assert compiled.count(StructuredOutputsParams(choice=("c0",))) == 2


# -------------------------------------------------------------------------------------------------------- compile time
VALUES = [{"enum": [f"v{i}{x}" for x in range(10)]} for i in range(40)]
LARGE_SCHEMA = closed(
    **{f"k{i}": closed(**{f"p{i}.{j}": values for j, values in enumerate(VALUES)}) for i in range(120)}
)


def test_other_requests_stream_while_a_large_grammar_is_compiled(core, monkeypatch):
    """The caller adds the request when the future is done; until then the loop goes on (llguidance drops the GIL)."""
    large = StructuredOutputsParams(json=LARGE_SCHEMA)
    core.manager.warm_up().result()
    core.add("plain", None, max_tokens=200, ignore_eos=True)
    future = core.manager.prepare(large)
    assert core.manager.prepare(large) is future
    steps_meanwhile = 0
    while not future.done():
        core.step()
        steps_meanwhile += 1
    assert steps_meanwhile >= 3
    monkeypatch.setattr(core.manager, "_compile", lambda params: pytest.fail("compiled again"))
    core.add("large", large, max_tokens=20)
    core.run()
    assert core.ends["large"] == "length"
    assert re.match(r"\{\s*", core.text("large"))


def test_a_failed_preparation_holds_the_error_that_adding_raises(core):
    bad = StructuredOutputsParams(regex="(ab")
    error = core.manager.prepare(bad).exception(timeout=30)
    assert isinstance(error, RequestError)
    with pytest.raises(RequestError, match=re.escape(str(error))):
        core.add("r", bad)


def test_many_threads_may_prepare_at_once(core):
    params = [StructuredOutputsParams(choice=(f"t{i % 5}",)) for i in range(40)]
    futures = [None] * len(params)

    def prepare(i):
        futures[i] = core.manager.prepare(params[i])

    threads = [threading.Thread(target=prepare, args=(i,)) for i in range(len(params))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(future) for future in futures}) == 5
    assert all(future.result(timeout=30) is not None for future in futures)


def test_plain_requests_never_read_the_vocabulary(core):
    core.manager._read_tokenizer_json = lambda: pytest.fail("read")
    core.add("plain", None, max_tokens=3)
    core.run()


# ---------------------------------------------------------------------------------------------- which tokenizer is read
def test_the_tokenizer_json_is_that_of_the_front_end(tiny_dir, tmp_path):
    source = find_model(str(tiny_dir))
    own = (tiny_dir / "tokenizer.json").read_text()
    assert read_tokenizer_json(EngineConfig.from_options(model=str(tiny_dir)), source) == own
    (tmp_path / "tokenizer.json").write_text('{"other": 1}')
    other = EngineConfig.from_options(model=str(tiny_dir), tokenizer=str(tmp_path))
    assert read_tokenizer_json(other, source) == '{"other": 1}'


def test_a_gguf_files_vocabulary_serves_too(tmp_path):
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write_gguf(path, "llama", tiny_gguf.tokenizer_metadata(), tiny_gguf.random_tensors("llama"))
    source = GgufSource(path)
    text = read_tokenizer_json(EngineConfig.from_options(model=str(path)), source)
    manager = StructuredOutputManager(lambda: text, vocab_size=tiny_gguf.VOCAB, eos_token_ids=[2])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]b?"))
    matcher = manager.compile(Request("r", [5], params, eos_token_ids=[2]))
    vocab = tiny_gguf.byte_level_vocab()
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = {vocab[i] for i in np.flatnonzero(np.unpackbits(mask, bitorder="little"))}
    assert allowed == {"a", "b", "ab"}


# ---------------------------------------------------------------------------------------------------- the whole engine
@pytest.fixture(scope="module")
def llm(tiny_dir):
    return make_llm(tiny_dir)


def bias_of(llm, text, amount):
    return {i: amount for i in llm.engine.tokenizer.encode(text)}


def test_the_whole_engine_keeps_to_the_schema_with_bias_penalties_and_temperature(llm):
    schema = closed(name={"type": "string", "maxLength": 6}, n={"type": "integer", "minimum": 1, "maximum": 99})
    params = SamplingParams(
        temperature=1.3,
        top_p=0.95,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        logit_bias=bias_of(llm, '"}x', 6.0),
        max_tokens=150,
        n=4,
        seed=7,
        logprobs=1,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    (output,) = llm.generate("hello", params)
    assert len({completion.text for completion in output.outputs}) > 1
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), schema)
        assert len(completion.logprobs) == len(completion.token_ids)
    assert llm.engine.core.structured_output.num_matchers == 0


def test_greedy_decoding_keeps_to_the_grammar_in_a_mixed_batch(llm):
    structured = greedy(12, structured_outputs=DIGITS, ignore_eos=False)
    prompts = [[10, 20, 30], [11, 21], [12]]
    alone = [llm.generate(prompt, greedy(12))[0].outputs[0].token_ids for prompt in prompts]
    outputs = llm.generate([*prompts, [9, 9]], [greedy(12)] * 3 + [structured])
    assert [o.outputs[0].token_ids for o in outputs[:3]] == alone
    assert re.fullmatch("[0-9]{3}", outputs[3].outputs[0].text)


@pytest.mark.parametrize(
    ("overrides", "text", "reason"),
    [
        ({"structured_outputs": StructuredOutputsParams(choice=("abcdef",)), "stop": ["cd"]}, "ab", "stop"),
        ({"structured_outputs": StructuredOutputsParams(choice=("abc",)), "min_tokens": 9}, "abc", "stop"),
        ({"structured_outputs": StructuredOutputsParams(choice=("abc",)), "max_tokens": 2}, "ab", "length"),
        ({"structured_outputs": StructuredOutputsParams(choice=("abc",)), "bad_words": ["b"]}, "a", "error"),
        ({"structured_outputs": StructuredOutputsParams(choice=("abc",)), "allowed_token_ids": [50]}, "", "error"),
    ],
    ids=["stop string", "min_tokens", "max_tokens", "bad_words", "allowed_token_ids"],
)
def test_what_else_ends_a_structured_request(llm, overrides, text, reason):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 30} | overrides))
    (output,) = llm.generate([[10, 20, 30]], params)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, reason)
    assert llm.engine.core.structured_output.num_matchers == 0
    assert not llm.engine.has_unfinished_requests()


def test_min_tokens_holds_off_eos_while_the_grammar_can_go_on(llm):
    params = SamplingParams(
        temperature=0.0, max_tokens=30, min_tokens=7, logit_bias={EOS: 100.0}, structured_outputs=LETTERS
    )
    (output,) = llm.generate([[10, 20, 30]], params)
    assert re.fullmatch("[a-z]{7}", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"


def test_a_bad_schema_is_an_error_of_generate_and_the_engine_goes_on(llm):
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(")))
    assert not llm.engine.has_unfinished_requests()
    (output,) = llm.generate("x", SamplingParams(structured_outputs=DIGITS))
    assert re.fullmatch("[0-9]{3}", output.outputs[0].text)


def test_an_engine_without_tokenizer_refuses_structured_outputs(tiny_dir):
    llm = make_llm(tiny_dir, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate([[5]], SamplingParams(detokenize=False, structured_outputs=DIGITS))


@pytest.mark.model
def test_the_default_model_fills_in_a_schema(default_model_dir):
    llm = make_llm(default_model_dir)
    schema = closed(city={"type": "string", "maxLength": 30}, is_capital={"type": "boolean"})
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=StructuredOutputsParams(json=schema))
    prompt = 'Describe Paris as JSON with the keys "city" and "is_capital".\n'
    (output,) = llm.generate(prompt, params)
    value = json.loads(output.outputs[0].text)
    jsonschema.validate(value, schema)
    assert output.outputs[0].finish_reason == "stop"
