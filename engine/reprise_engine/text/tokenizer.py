"""A model's tokenizer, from tokenizer.json and tokenizer_config.json, without torch and without transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from reprise_engine.errors import ModelError
from reprise_engine.request import TokenId
from reprise_engine.text.byte_level import BYTE_LEVEL
from reprise_engine.text.chat_template import ChatMessage, ChatTemplate, ChatTemplateError, select_template
from reprise_engine.text.convert import converted_folder
from reprise_engine.text.files import model_folder, read_json, resolve_model
from reprise_engine.text.token_bounds import TokenBounds, token_bounds

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_LONG_TOKEN = 8
"""Characters: few texts have tokens that are longer than this in the mean."""


class Tokenizer:
    """Thread-safe. A text is encoded without the interpreter's lock, so that others go on meanwhile."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        # Truncation and padding stored in the file are a trainer's settings: a prompt is never cut silently.
        backend.no_truncation()
        backend.no_padding()
        self._added = backend.get_added_tokens_decoder()
        self._bounds: TokenBounds | None = None
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included; the model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_id(self) -> TokenId | None:
        token = self.special_tokens.get("eos_token")
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]:
        """`add_special_tokens` adds what the tokenizer's post-processor says, usually the BOS token."""
        # The call for one text holds the lock throughout, and computes offsets that nobody wants.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def at_least(self, text: str, limit: int) -> int:
        """Tokens that `text` has, or fewer, found without encoding more than about `limit` tokens of it.

        A figure of `limit` or more is a proof that it has as many; a smaller one is none of anything.
        """
        ahead = limit * _LONG_TOKEN
        if len(text) <= ahead:
            return 0
        if self._bounds is None:  # by whoever comes first; two at once find the same
            self._bounds = token_bounds(self._backend)
        found = self._bounds.at_least(text)
        if found >= limit:
            return found
        front = self._bounds.front(text, ahead)
        return found if front is None else max(found, len(self.encode(front, add_special_tokens=False)))

    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: TokenId) -> str:
        """The text of one token by itself, special ones included; U+FFFD where it is no whole character."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: TokenId) -> bytes:
        """The bytes of one token where the vocabulary tells them (byte-level and byte-fallback), else its text's."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        text = self.token_text(token_id)
        if "\ufffd" in text:
            try:
                return bytes(BYTE_LEVEL[character] for character in token)
            except KeyError:
                pass
        return text.encode()

    def token_id(self, text: str) -> TokenId | None:
        """The token that `text` is by itself, None where it is spelled."""
        return self._backend.token_to_id(text)

    def is_special(self, text: str) -> bool:
        """Whether `text` is one special token, which `skip_special_tokens` hides."""
        return any(token.special and token.content == text for token in self._added.values())

    def serialized(self) -> str:
        """What tokenizer.json holds, with the tokens of tokenizer_config.json."""
        return self._backend.to_str()

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text; encode it with add_special_tokens=False, since a template writes them itself.

        Raises ChatTemplateError, also where the model has no template.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                "the model has no chat template; use completions instead, or give one with --chat-template."
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )


def load_tokenizer(
    model: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    chat_template: str | None = None,
) -> Tokenizer:
    """The tokenizer of a model folder, a .gguf file or a name in the local hub cache; `tokenizer` names another one.

    What has no tokenizer.json is converted once, by transformers in a process of its own, and kept.
    `chat_template` is a file or the template itself and takes the place of the model's.
    Raises ModelNotFound, ModelError.
    """
    path = resolve_model(str(tokenizer if tokenizer is not None else model), revision=revision)
    folder = model_folder(path)
    if not (folder / "tokenizer.json").is_file():
        folder = converted_folder(path)
    file = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises a bare Exception
        raise ModelError(f"{file} is not a tokenizer that can be read: {error}") from error
    config = read_json(folder / "tokenizer_config.json") or {}
    _add_tokens(backend, config)
    special_tokens = _special_tokens(config, read_json(folder / "special_tokens_map.json") or {})
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=_load_chat_template(folder, config, special_tokens, chat_template),
    )


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json lists; transformers adds them too."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, Mapping):
        return
    missing = [
        tokenizers.AddedToken(
            entry["content"],
            single_word=bool(entry.get("single_word", False)),
            lstrip=bool(entry.get("lstrip", False)),
            rstrip=bool(entry.get("rstrip", False)),
            normalized=bool(entry.get("normalized", not entry.get("special", False))),
            special=bool(entry.get("special", False)),
        )
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))
        if isinstance(entry, Mapping) and backend.token_to_id(str(entry.get("content"))) is None
    ]
    if missing:
        backend.add_tokens(missing)


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_TOKENS:
            value = source.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def _load_chat_template(
    folder: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str], override: str | None
) -> ChatTemplate | None:
    source: str | None
    if override is not None:
        source = _read_template_argument(override)
    elif (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    else:
        source = select_template(config.get("chat_template"))
        if source is None:
            source = select_template((read_json(folder / "chat_template.json") or {}).get("chat_template"))
    if source is None:
        return None
    try:
        return ChatTemplate(source, special_tokens=special_tokens)
    except ChatTemplateError as error:
        raise ModelError(str(error)) from error


def _read_template_argument(value: str) -> str:
    """A file's content, or the value itself when it is a template (it then holds `{`)."""
    if "{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--chat-template {value!r} cannot be read: {error}") from error
