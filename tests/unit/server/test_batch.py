"""Batch files: every line answered once, wrong ones as their own answer, a cut-off run goes on where it stopped."""

import json

import pytest

import tiny_models
from engine_runs import make_llm
from pico_vllm.errors import ConfigError
from pico_vllm.server.batch import open_output, read_batch, run_batch


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    tiny_models.save_tiny_model(tiny_models.MODELS["llama-gqa3-d64-tied"], directory)
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    return make_llm(directory)


def request(custom_id, prompt="hello", url="/v1/completions", **body):
    content = {"prompt": prompt} if url == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "tiny", "max_tokens": 4, "temperature": 0, **content, **body},
    }


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(llm, input_path, output_path, **options):
    lines = read_batch(input_path)
    output, done = open_output(output_path)
    with output:
        todo = [line for line in lines if line.custom_id not in done]
        run_batch(llm.engine, todo, output, model="tiny", **options)
    return [json.loads(line) for line in output_path.read_text().split("\n") if line]


def test_every_line_gets_one_answer_of_its_endpoints_form(llm, tmp_path):
    records = [
        request(f"r{i}", f"text {i}", url) for i, url in enumerate(["/v1/completions", "/v1/chat/completions"] * 3)
    ]
    answers = run(llm, write(tmp_path / "in", records), tmp_path / "out")
    assert sorted(answer["custom_id"] for answer in answers) == [f"r{i}" for i in range(6)]
    assert all(answer["response"]["status_code"] == 200 and answer["error"] is None for answer in answers)
    by_id = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    assert by_id["r0"]["object"] == "text_completion"
    assert by_id["r1"]["object"] == "chat.completion"
    assert by_id["r1"]["choices"][0]["message"]["role"] == "assistant"
    usage = {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert by_id["r0"]["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_salts_keep_requests_apart(llm, tmp_path):
    llm = make_llm(llm.engine.config.model, enable_prefix_caching=True)
    urls = ["/v1/completions", "/v1/chat/completions"]
    for number, (salt, hits) in enumerate([("a", False), ("b", False), ("a", True)]):
        before = llm.engine.cache_stats.num_hit_tokens
        records = [request(f"r{i}", "a text of its own", url, cache_salt=salt) for i, url in enumerate(urls)]
        run(llm, write(tmp_path / "in", records), tmp_path / f"out{number}")
        assert (llm.engine.cache_stats.num_hit_tokens - before > 20) == hits


def test_an_answer_is_what_the_engine_gives_alone(llm, tmp_path):
    from pico_vllm import SamplingParams

    answers = run(llm, write(tmp_path / "in", [request("a", "abc", n=2, seed=5, temperature=1.0)]), tmp_path / "out")
    params = SamplingParams(max_tokens=4, n=2, seed=5, temperature=1.0)
    (expected,) = llm.generate("abc", params)
    assert [c["text"] for c in answers[0]["response"]["body"]["choices"]] == [c.text for c in expected.outputs]


def test_a_wrong_request_is_its_own_answer_and_disturbs_no_one(llm, tmp_path):
    records = [
        request("ok", "abc"),
        request("range", temperature=-1),
        request("unknown", frobnicate=1),
        request("stream", stream=True),
        request("url", url="/v1/completions") | {"url": "/v1/other"},
        request("method") | {"method": "GET"},
        request("empty", ""),
        request("long", "x" * 1000),
        request("body") | {"body": 5},
    ]
    answers = {a["custom_id"]: a["response"] for a in run(llm, write(tmp_path / "in", records), tmp_path / "out")}
    assert set(answers) == {record["custom_id"] for record in records}
    assert answers.pop("ok")["status_code"] == 200
    words = {"range": "temperature=-1", "unknown": "frobnicate", "stream": "stream=True", "url": "/v1/other",
             "method": "GET", "empty": "empty", "long": "1000", "body": "JSON object"}  # fmt: skip
    for name, answer in answers.items():
        assert answer["status_code"] == 400
        assert words[name] in answer["body"]["error"]["message"]


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_run_cut_in_the_middle_of_a_write_goes_on_without_losing_or_doubling_a_line(llm, tmp_path, cut):
    path = write(tmp_path / "in", [request(f"r{i}", f"text {i}") for i in range(6)])
    whole = run(llm, path, tmp_path / "out")
    lines = (tmp_path / "out").read_bytes().splitlines(keepends=True)
    (tmp_path / "out").write_bytes(b"".join(lines[:3]) + lines[3][:cut])
    again = run(llm, path, tmp_path / "out")
    assert [a["custom_id"] for a in again[:3]] == [a["custom_id"] for a in whole[:3]]
    assert sorted(a["custom_id"] for a in again) == [f"r{i}" for i in range(6)]
    texts = [{a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in each} for each in (whole, again)]
    assert texts[0] == texts[1]


def test_a_stopped_run_keeps_what_is_finished_and_leaves_the_engine_idle(llm, tmp_path):
    path = write(tmp_path / "in", [request("short", max_tokens=1), request("long", max_tokens=60)])
    steps = iter(range(100))
    answers = run(llm, path, tmp_path / "out", should_stop=lambda: next(steps) == 3)
    assert [answer["custom_id"] for answer in answers] == ["short"]
    assert not llm.engine.has_unfinished_requests()
    assert sorted(a["custom_id"] for a in run(llm, path, tmp_path / "out")) == ["long", "short"]


def test_progress_is_called_once_an_answer_wrong_ones_included(llm, tmp_path):
    calls = []
    path = write(tmp_path / "in", [request("a"), request("b", temperature=-1)])
    run(llm, path, tmp_path / "out", progress=lambda: calls.append(1))
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"custom_id": "a"}\n{', [":2", "no JSON"]),
        ('{"url": "x"}', [":1", "custom_id"]),
        ("[1]", [":1", "custom_id"]),
        ('{"custom_id": "a"}\n\n{"custom_id": "a"}', [":3", "line 1"]),
    ],
)
def test_a_file_that_is_no_batch_is_refused_by_line_before_anything_runs(tmp_path, text, words):
    (tmp_path / "in").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_batch(tmp_path / "in")
    assert all(word in str(error.value) for word in words), error.value


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path):
    path = tmp_path / "in"
    path.write_text(json.dumps(request("a", "one\u2028two\x85three"), ensure_ascii=False) + "\n", encoding="utf-8")
    assert [line.body["prompt"] for line in read_batch(path)] == ["one\u2028two\x85three"]


def test_another_file_is_not_overwritten(tmp_path):
    (tmp_path / "out").write_text("my diary\n")
    with pytest.raises(ConfigError, match=r"out:1 is not an answer"):
        open_output(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "my diary\n"


def test_missing_files_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_batch(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_output(tmp_path / "no" / "out")
