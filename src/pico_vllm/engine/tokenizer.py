"""Text to token ids and back, and messages to a prompt.

Owns a ``tokenizers.Tokenizer`` (the Rust library; never transformers) and the model's chat template, which runs in a
sandboxed jinja environment because it comes with the checkpoint. Knows nothing of requests; safe to share between
threads. Called by the front end; the engine core sees token ids only.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pico_vllm.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import jinja2
    import tokenizers
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_FALLBACK_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer and chat template.

    Args:
        backend: the tokenizer itself; its truncation and padding are switched off.
        special_tokens: bos_token, eos_token, pad_token and so on, as in ``tokenizer_config.json``. They are variables
            of the chat template.
        chat_template: jinja source, or one source a name ("default", "tool_use"); None for a base model.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        from tokenizers import decoders

        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = _named_templates(chat_template)
        self._compiled_templates: dict[str, jinja2.Template] = {}
        self._special_ids = sorted(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        """Whether every token stands for fixed bytes, and text is those bytes joined and read as UTF-8."""
        self._byte_tables = {
            skip_special: _ByteTable(backend.id_to_token, self._special_ids if skip_special else ())
            for skip_special in (False, True)
        }

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a HF model directory.

        Raises:
            ConfigError: there is no ``tokenizer.json``, or one of the files cannot be read.
        """
        directory = Path(path)
        tokenizer_json = directory / "tokenizer.json"
        if not tokenizer_json.is_file():
            raise ConfigError(
                f"{directory}: no tokenizer.json (the only supported tokenizer format; transformers' "
                f"AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
            )
        config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
        template_file = directory / "chat_template.jinja"
        if template_file.is_file():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        return cls.from_json(tokenizer_json.read_bytes(), config, source=str(tokenizer_json))

    @classmethod
    def from_json(cls, tokenizer_json: str | bytes, config: Mapping[str, Any], *, source: str) -> Tokenizer:
        """Build a tokenizer from the contents of ``tokenizer.json`` and ``tokenizer_config.json`` (parsed).

        Args:
            source: where they come from, for errors.

        Raises:
            ConfigError: ``tokenizer_json`` is not one.
        """
        import tokenizers

        try:
            data = tokenizer_json if isinstance(tokenizer_json, bytes) else tokenizer_json.encode()
            backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"{source}: not a tokenizer.json that this tokenizers library can read ({error})"
            ) from error
        special_tokens = {
            name: token["content"] if isinstance(token, Mapping) else str(token)
            for name in _SPECIAL_TOKEN_NAMES
            if (token := config.get(name)) is not None
        }
        template = config.get("chat_template")
        if isinstance(template, list):  # the old form of several: [{"name": ..., "template": ...}]
            template = {entry["name"]: entry["template"] for entry in template}
        return cls(backend, special_tokens=special_tokens, chat_template=template)

    # ---- ids -------------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if the model has one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text or a turn; ``generation_config.json`` may name more."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, if the model has one. The engine never pads."""
        return self._special_id("pad_token")

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the tokens that ``skip_special_tokens`` leaves out, ascending."""
        return list(self._special_ids)

    # ---- text to ids -----------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: any Unicode text. Special tokens written out in it become those tokens, as in transformers.
            add_special_tokens: put bos (or what the model wants) around it. Not for text from a chat template.

        Raises:
            RequestError: the text is no ``str``, or holds half a surrogate pair.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return ``encode`` of each text; the library's threads share the work.

        Raises:
            RequestError: as ``encode``.
        """
        for text in texts:
            _check_text(text)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt that a conversation makes; encode it with ``add_special_tokens=False``.

        Args:
            messages: dicts with "role", mostly "content", and whatever else the template reads. A key whose value is
                None counts as absent.
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: more variables for the template, such as Qwen3's ``enable_thinking``.

        Raises:
            RequestError: the model has no chat template, there is no message, or the template refuses them.

        Source: transformers' ``apply_chat_template``; equal output is tested.
        """
        import jinja2

        template = self._template("tool_use" if tools and "tool_use" in self._chat_templates else "default")
        variables = self._special_tokens | dict(chat_template_kwargs or {})
        try:
            return template.render(
                **variables,
                messages=_plain_messages(messages),
                tools=None if tools is None else _plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    # ---- ids to text -----------------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD; ids without a token give nothing."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str | None]:
        """Return each id's entry in the vocabulary as it is spelled there (None for an id without one)."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for: maybe half a character, b"" for an id without a token.

        For a tokenizer that is not byte-level this is the token decoded on its own, which may lack a leading space.
        """
        if self.is_byte_level:
            return self._byte_tables[False][token_id]
        token = self._backend.id_to_token(token_id)
        if token is not None and (match := _BYTE_FALLBACK_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self.decode([token_id], skip_special_tokens=False).encode()

    def is_byte_fallback(self, token_id: int) -> bool:
        """Whether a token of a SentencePiece-like tokenizer stands for one byte of a character: ``<0xE2>``."""
        token = self._backend.id_to_token(token_id)
        return token is not None and _BYTE_FALLBACK_TOKEN.fullmatch(token) is not None

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """Return the table id → bytes of a byte-level tokenizer; it fills itself as ids are looked up.

        Looking up any id works (no token: b""); ids in ``all_special_ids`` give b"" if special tokens are skipped.
        """
        assert self.is_byte_level, "tokens of this tokenizer have no fixed bytes"
        return self._byte_tables[skip_special_tokens]

    # ---- private ---------------------------------------------------------------------------------------------------

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled_templates:
            if name not in self._chat_templates:
                raise RequestError("this model has no chat template; send a plain prompt instead of messages")
            self._compiled_templates[name] = _compile(self._chat_templates[name])
        return self._compiled_templates[name]


class _ByteTable(dict[int, bytes]):
    """id → bytes of a byte-level vocabulary, worked out at the first look-up of each id."""

    def __init__(self, id_to_token: Callable[[int], str | None], skipped_ids: Iterable[int]) -> None:
        super().__init__(dict.fromkeys(skipped_ids, b""))
        self._id_to_token = id_to_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        value = b"" if token is None else _bytes_of_token(token)
        self[token_id] = value
        return value


def _byte_alphabet() -> str:
    """The 256 characters in which a byte-level vocabulary spells the bytes 0-255.

    Source: GPT-2's ``bytes_to_unicode``: printable Latin-1 stands for itself, the rest for U+0100 onwards in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_OF_CHARACTER = codecs.charmap_build(_byte_alphabet())


def _bytes_of_token(token: str) -> bytes:
    """What the ByteLevel decoder makes of a token: bytes if it is spelled in the byte alphabet, else its UTF-8."""
    try:
        return codecs.charmap_encode(token, "strict", _BYTE_OF_CHARACTER)[0]
    except UnicodeEncodeError:
        return token.encode()


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a text must be str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: half a surrogate pair (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _named_templates(chat_template: str | Mapping[str, str] | None) -> dict[str, str]:
    if chat_template is None:
        return {}
    return {"default": chat_template} if isinstance(chat_template, str) else dict(chat_template)


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not messages:
        raise RequestError('messages must be a list of at least one {"role": ..., "content": ...}')
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'message {index} must be a dict with a "role", not {message!r}')
        plain.append({key: _plain(value) for key, value in message.items() if value is not None})
    return plain


def _plain(value: Any) -> Any:
    """Rebuild a value out of JSON types, so that a template gets no methods to call."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise RequestError(f"a message may hold text, numbers, lists and dicts, not {type(value).__name__}")


def _compile(source: str) -> jinja2.Template:
    """Compile a chat template in the environment that HF templates are written for, sandboxed.

    Source: transformers' ``_compile_jinja_template``.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class GenerationBlock(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's words for training; rendering takes no notice of it."""

        tags: set[str] = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja's own filter escapes HTML, which no model was trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is not valid jinja (line {error.lineno}: {error})") from error
