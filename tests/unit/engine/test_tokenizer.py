"""Encoding, decoding, chat templates; equality with transformers on the real default model."""

import json

import pytest
from tokenizers import decoders

from pico_vllm.engine.tokenizer import Tokenizer
from pico_vllm.errors import ConfigError, RequestError

CORPUS = [
    "",
    " ",
    "The capital of France is",
    "  leading and trailing spaces  ",
    "Digits 0123456789 and 3.14159, 1,000,000; year 2024-12-31",
    "don't I'll we've THEY'RE",
    "tabs\tand\r\nnew\n\n\nlines \n x",
    "naïve café Straße İstanbul ﬁ e\u0301 ﷺ",
    "日本語のテキスト、中文文本。한국어 ภาษาไทย עברית العربية हिन्दी",
    "😀 👩‍👩‍👧‍👦 🇫🇷 👍🏽 ☃️",
    "\u200b\u00a0\ufeff\u2028\ufffd\x00\x7f control",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": f'{x!r}'}  # comment\n",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|><|im_end|",
    "a" * 300 + " " * 50 + "1" * 40,
]
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
MULTI_TURN = [
    {"role": "system", "content": "You are terse. <b>&amp;</b>"},
    {"role": "user", "content": "Hi 😀"},
    {"role": "assistant", "content": "Hello.\n"},
    {"role": "user", "content": "  Spaces  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]


@pytest.fixture
def make_tokenizer(byte_level_backend):
    def make(chat_template=None):
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        return Tokenizer(byte_level_backend, special_tokens=special, chat_template=chat_template)

    return make


@pytest.fixture
def model_dir(tmp_path, byte_level_backend):
    byte_level_backend.enable_truncation(3)
    byte_level_backend.enable_padding(length=8)
    byte_level_backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(model_dir, **config):
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))


# ---- loading ----


def test_loading_reads_special_tokens_in_either_form_and_ignores_stored_truncation_and_padding(model_dir):
    write_config(
        model_dir, eos_token={"content": "<|im_end|>", "lstrip": False}, bos_token="<|im_start|>", pad_token=None
    )
    tokenizer = Tokenizer.from_directory(model_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert tokenizer.all_special_ids == [0, 1, 2]
    assert tokenizer.vocab_size == 300
    assert len(tokenizer.encode("a b c d")) == 7


def test_special_tokens_map_is_read_where_the_config_is_silent(model_dir):
    (model_dir / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|im_end|>"}')
    write_config(model_dir, eos_token="<|im_end|>")
    tokenizer = Tokenizer.from_directory(model_dir)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)


def test_a_directory_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_refused_by_name(model_dir, name):
    (model_dir / name).write_text("{ not json")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        Tokenizer.from_directory(model_dir)
    (model_dir / name).write_text("[1, 2]")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        Tokenizer.from_directory(model_dir)


# ---- text and ids ----


def test_a_batch_is_encoded_as_its_texts_are(make_tokenizer):
    tokenizer = make_tokenizer()
    assert tokenizer.encode_batch(CORPUS) == [tokenizer.encode(text) for text in CORPUS]
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00", 7, None, b"a"])
def test_what_is_no_unicode_text_is_the_requests_error(make_tokenizer, text):
    tokenizer = make_tokenizer()
    with pytest.raises(RequestError, match=r"surrogate pair|must be str"):
        tokenizer.encode(text)
    with pytest.raises(RequestError, match=r"surrogate pair|must be str"):
        tokenizer.encode_batch(["fine", text])
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"


def test_text_comes_back_and_special_tokens_are_skipped_on_request(make_tokenizer):
    tokenizer = make_tokenizer()
    for text in CORPUS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    ids = tokenizer.encode("a<|im_end|>b<tool call>c")
    assert tokenizer.decode(ids) == "ab<tool call>c"


def test_token_bytes_join_to_the_text_of_any_token_sequence(make_tokenizer):
    tokenizer = make_tokenizer()
    for text in CORPUS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    everything = range(tokenizer.vocab_size + 5)
    for token_id in everything:
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == alone
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_tokens_are_spelled_as_in_the_vocabulary(make_tokenizer):
    assert make_tokenizer().convert_ids_to_tokens([2, 299, 300]) == ["<|im_end|>", "<tool call>", None]


# ---- chat templates ----


def test_messages_make_a_prompt(make_tokenizer):
    tokenizer = make_tokenizer(
        "{% for m in messages %}\n  {% if m.role != 'x' %}\n{{ bos_token }}{{ m.role }}: {{ m.content }}\n"
        "  {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}assistant:{% endif %}"
        "{{ eos_token if not add_generation_prompt }}"
    )
    assert tokenizer.apply_chat_template(CHAT) == "<|im_start|>user: What is 2 + 2?\nassistant:"
    assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=False).endswith("2?\n<|im_end|>")


def test_the_template_file_wins_over_the_config(model_dir):
    write_config(model_dir, chat_template="config")
    assert Tokenizer.from_directory(model_dir).apply_chat_template(CHAT) == "config"
    (model_dir / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(model_dir).apply_chat_template(CHAT) == "file"


def test_of_several_templates_tools_take_the_one_for_tools(model_dir):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    write_config(model_dir, chat_template=templates)
    tokenizer = Tokenizer.from_directory(model_dir)
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=TOOLS) == json.dumps(TOOLS, ensure_ascii=False)


def test_a_value_of_none_counts_as_absent_and_other_variables_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer("{{ messages[0].content is defined }} {{ enable_thinking }}")
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]}
    rendered = tokenizer.apply_chat_template([message], chat_template_kwargs={"enable_thinking": False})
    assert rendered == "False False"


def test_what_published_templates_use_is_there(make_tokenizer):
    tokenizer = make_tokenizer(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}{{ tools | tojson(indent=1) }}"
    )
    assert tokenizer.apply_chat_template(CHAT + CHAT, tools=["<&>"]) == 'What is 2 + 2?20[\n "<&>"\n]'


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", CHAT, "chat template refuses"),
        ("{{ messages[0]['nothing']['below'] }}", CHAT, "chat template refuses"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, "unsafe|not safely"),
        ("x", [], "at least one"),
        ("x", "hello", "must be a list"),
        ("x", [{"content": "no role"}], 'message 0 must be a dict with a "role"'),
        ("x", ["hello"], "message 0"),
        ("x", [{"role": "user", "content": object()}], "not object"),
        (None, CHAT, "no chat template"),
    ],
)
def test_messages_that_make_no_prompt_are_the_requests_error(make_tokenizer, template, messages, message):
    with pytest.raises(RequestError, match=message):
        make_tokenizer(template).apply_chat_template(messages)


def test_a_template_that_is_no_jinja_is_the_models_error(make_tokenizer):
    with pytest.raises(ConfigError, match="line 2"):
        make_tokenizer("a\n{% if %}").apply_chat_template(CHAT)


def test_a_tokenizer_that_is_not_byte_level_says_so(byte_level_backend):
    byte_level_backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(byte_level_backend)
    assert not tokenizer.is_byte_level
    with pytest.raises(AssertionError):
        tokenizer.byte_table(True)
    assert tokenizer.token_bytes(299) == b"<tool call>"


# ---- the real one ----


@pytest.fixture(scope="module")
def ours_and_theirs(default_model_dir):
    from transformers import AutoTokenizer

    return Tokenizer.from_directory(default_model_dir), AutoTokenizer.from_pretrained(default_model_dir)


@pytest.mark.model
def test_the_default_models_ids_and_texts_equal_transformers(ours_and_theirs):
    ours, theirs = ours_and_theirs
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, 2)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)
    assert ours.vocab_size == len(theirs) == 49152
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids) == set(range(17))
    for text in CORPUS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    assert ours.encode_batch(CORPUS) == theirs(CORPUS).input_ids


@pytest.mark.model
@pytest.mark.parametrize("messages", [CHAT, MULTI_TURN, MULTI_TURN[1:3]])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_default_models_chat_prompts_equal_transformers(ours_and_theirs, messages, add_generation_prompt, tools):
    ours, theirs = ours_and_theirs
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.apply_chat_template(messages, **options) == expected
    assert "<|im_start|>" in expected


@pytest.mark.model
def test_published_template_constructs_render_as_in_transformers(ours_and_theirs):
    """The constructs of Qwen2.5's, Qwen3's and Llama 3's templates, in one."""
    ours, theirs = ours_and_theirs
    template = """{%- set ns = namespace(last=0) %}
    {%- for message in messages %}
        {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
        {%- if message.content is string and message.content.startswith('  ') %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content.strip() | trim + '<|im_end|>' + '\\n' }}
        {%- else %}
            {{- bos_token ~ message['content'].split('\\n')[0] ~ eos_token }}
        {%- endif %}
    {%- endfor %}
    {%- if tools %}
        {%- for tool in tools %}
            {{- "\\n" }}{{ tool | tojson }} {{ tool | tojson(indent=4) }}
        {%- endfor %}
    {%- endif %}
{{ ns.last }} {{ date_string if date_string is defined else 'none' }} {% if add_generation_prompt %}A{% endif %}
"""
    expected = theirs.apply_chat_template(MULTI_TURN, chat_template=template, tools=TOOLS, tokenize=False)
    other = Tokenizer(
        ours._backend, special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, chat_template=template
    )
    assert other.apply_chat_template(MULTI_TURN, tools=TOOLS, add_generation_prompt=False) == expected
