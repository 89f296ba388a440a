"""Tokenizer, chat template, detokenizer and stop strings against `transformers` and against plain decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from reprise_engine.errors import ModelError, ModelNotFound
from reprise_engine.request import FinishReason, RequestId, RequestOutput, SamplingParams
from reprise_engine.text import (
    ChatTemplate,
    ChatTemplateError,
    IncrementalDetokenizer,
    OutputText,
    StopStrings,
    Tokenizer,
    load_tokenizer,
)
from reprise_engine.text.chat_template import select_template

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """One token a byte, in byte order: token ids 0 to 255 are the bytes themselves; 256 and 257 are special."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """As Llama's: words with a metaspace, all else in byte tokens."""
    vocab = {"<unk>": 0, "▁hello": 1, "▁world": 2, "▁": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return backend


def tokenizer_of(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, chat_template=None)


def stream(tokenizer: Tokenizer, token_ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.finish()]


# --- detokenizer


def test_a_character_of_several_tokens_is_shown_whole() -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    pieces = stream(tokenizer, list("a🙂é".encode()))
    assert pieces == ["a", "", "", "", "🙂", "", "é", ""]


def test_an_incomplete_character_shows_only_at_the_end() -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    assert stream(tokenizer, list("ok🙂".encode()[:-1])) == ["o", "k", "", "", "", "\ufffd"]


def test_skipped_special_tokens_neither_show_nor_hide_what_follows() -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    assert stream(tokenizer, [97, 256, 256, 98, 257]) == ["a", "", "", "b", "", ""]
    detokenizer = IncrementalDetokenizer(tokenizer, (), skip_special_tokens=False)
    assert [detokenizer.push(token_id) for token_id in (97, 257)] == ["a", "</s>"]


def test_the_prompt_decides_about_a_leading_space() -> None:
    tokenizer = tokenizer_of(byte_fallback_backend())
    assert "".join(stream(tokenizer, [1, 2])) == "hello world"
    assert "".join(stream(tokenizer, [2, 1], prompt=(1,))) == " world hello"


def test_byte_fallback_characters_in_a_row() -> None:
    tokenizer = tokenizer_of(byte_fallback_backend())
    token_ids = [1, *(4 + byte for byte in "你好".encode()), 2]
    assert "".join(stream(tokenizer, token_ids)) == "hello你好 world" == tokenizer.decode(token_ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 257), max_size=60))
def test_the_stream_joins_to_the_decoded_whole(token_ids: list[int]) -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.text(max_size=20))
def test_valid_text_never_shows_a_replacement_character(prompt: str, text: str) -> None:
    tokenizer = tokenizer_of(byte_level_backend())
    pieces = stream(tokenizer, list(text.encode()), tuple(prompt.encode()))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


# --- stop strings


def test_a_possible_start_is_held_back_until_it_is_decided() -> None:
    stop = StopStrings(["\n\nHuman"])
    assert [stop.push(part) for part in ("Hi\n", "\nHu", "go.", "\n", "\nHuman: x")] == ["Hi", "", "\n\nHugo.", "", ""]
    assert stop.matched == "\n\nHuman"


def test_the_stop_string_that_is_complete_first_wins_and_may_be_included() -> None:
    stop = StopStrings(["END", "ND"], include=True)
    assert stop.push("one END two") == "one END"
    assert stop.matched == "END"
    assert stop.push("more") == ""


def test_what_was_held_comes_at_the_end() -> None:
    stop = StopStrings(["###"])
    assert stop.push("a##") == "a"
    assert stop.finish() == "##"
    assert stop.matched is None


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.data(),
)
def test_stop_strings_do_not_depend_on_how_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    watch = StopStrings(stops)
    shown, rest = "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += watch.push(rest[:size])
        rest = rest[size:]
    shown += watch.finish()
    if ends:
        end, _, stop = min(ends)
        assert (watch.matched, shown) == (stop, text[: end - len(stop)])
    else:
        assert (watch.matched, shown) == (None, text)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 10),
)
def test_a_stop_string_may_begin_below_min_tokens_and_ends_behind_them(
    text: str, stops: list[str], min_tokens: int
) -> None:
    """One token a character. As in vLLM, what has ended by then is text."""
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(min_tokens + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    sampling = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)
    watch = OutputText(tokenizer_of(byte_level_backend()), prompt_token_ids=(), sampling=sampling)
    shown, matched = "", None
    for number, token in enumerate(text.encode(), 1):
        delta = watch.push(output(token, finish=FinishReason.LENGTH if number == len(text) else None))
        shown += delta.text
        if delta.finish_reason is not None:
            matched = delta.stop_reason
            break
    if ends:
        end, _, stop = min(ends)
        assert (matched, shown) == (stop, text[: end - len(stop)])
    else:
        assert (matched, shown) == (None, text)


# --- one request's output


def output(*token_ids: int, finish: FinishReason | None = None, stop_token: int | None = None) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId("r"), new_token_ids=token_ids, finish_reason=finish, stop_token_id=stop_token
    )


def test_the_end_of_sequence_token_is_counted_but_not_shown() -> None:
    text = OutputText(tokenizer_of(byte_level_backend()), prompt_token_ids=(), sampling=SamplingParams())
    assert text.push(output(104)).text == "h"
    last = text.push(output(105, 257, finish=FinishReason.STOP, stop_token=257))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == (
        "i",
        (105, 257),
        FinishReason.STOP,
        None,
    )


def test_a_stop_token_of_the_request_is_named_and_shown_on_demand() -> None:
    sampling = SamplingParams(stop_token_ids=(33,), include_stop_str_in_output=True)
    text = OutputText(tokenizer_of(byte_level_backend()), prompt_token_ids=(), sampling=sampling)
    last = text.push(output(33, finish=FinishReason.STOP, stop_token=33))
    assert (last.text, last.stop_reason) == ("!", 33)


def test_a_stop_string_ends_the_text_and_drops_later_tokens() -> None:
    text = OutputText(tokenizer_of(byte_level_backend()), prompt_token_ids=(), sampling=SamplingParams(stop=("bc",)))
    last = text.push(output(*b"abcd"))
    assert (last.text, last.token_ids, last.finish_reason, last.stop_reason) == (
        "a",
        (97, 98, 99),
        FinishReason.STOP,
        "bc",
    )


def test_stop_strings_wait_for_min_tokens() -> None:
    sampling = SamplingParams(stop=("b",), min_tokens=2)
    text = OutputText(tokenizer_of(byte_level_backend()), prompt_token_ids=(), sampling=sampling)
    assert [text.push(output(token_id)).text for token_id in b"ab"] == ["a", "b"]
    assert text.push(output(98)).finish_reason is FinishReason.STOP


def test_held_text_is_shown_when_the_length_ends_the_sequence() -> None:
    text = OutputText(tokenizer_of(byte_level_backend()), prompt_token_ids=(), sampling=SamplingParams(stop=("!!",)))
    assert text.push(output(33)).text == ""
    last = text.push(output(195, finish=FinishReason.LENGTH))
    assert (last.text, last.finish_reason) == ("!\ufffd", FinishReason.LENGTH)


# --- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": CHATML,
        "added_tokens_decoder": {"258": {"content": "<|im_start|>", "special": True}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_gives_tokenizer_template_and_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("hi") == (256, 104, 105)
    assert tokenizer.encode("hi", add_special_tokens=False) == (104, 105)
    assert tokenizer.encode("<|im_start|>", add_special_tokens=False) == (258,)
    assert tokenizer.eos_token_id == 257
    assert tokenizer.vocab_size == 259
    assert tokenizer.token_bytes(195) == b"\xc3"
    prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_file_beside_the_tokenizer_and_one_by_argument(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ bos_token }}from the file")
    assert load_tokenizer(folder).render_chat([]) == "<s>from the file"
    assert load_tokenizer(folder, chat_template="{{ messages|length }}").render_chat([]) == "0"
    (tmp_path / "own.jinja").write_text("own")
    assert load_tokenizer(folder, chat_template=str(tmp_path / "own.jinja")).render_chat([]) == "own"
    with pytest.raises(ModelError, match="--chat-template '/no/such' cannot be read"):
        load_tokenizer(folder, chat_template="/no/such")


def test_named_templates() -> None:
    assert select_template([{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]) == "b"
    assert select_template({"default": "b", "rag": "c"}) == "b"
    assert select_template(None) is None


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="'/no/such/model' does not exist"):
        load_tokenizer("/no/such/model")
    with pytest.raises(
        ModelNotFound, match=r"'nobody/nothing' is neither a path .* nor a model in the local hub cache"
    ):
        load_tokenizer("nobody/nothing")
    with pytest.raises(ModelNotFound, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a tokenizer that can be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_tokenizer_json_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As facebook/opt-125m ships it: GPT-2's vocabulary and merges, and no tokenizer.json.
    model = tmp_path / "model"
    model.mkdir()
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    vocab = {token: index for index, token in enumerate(["<pad>", "</s>", *letters, "he", "ll", "hell"])}
    (model / "vocab.json").write_text(json.dumps(vocab))
    (model / "merges.txt").write_text("#version: 0.2\nh e\nl l\nhe ll\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "</s>", "unk_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    monkeypatch.setenv("REPRISE_CACHE_DIR", str(tmp_path / "cache"))
    tokenizer = load_tokenizer(model)
    token_ids = tokenizer.encode("hello", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in token_ids] == ["hell", "o"]
    kept = list((tmp_path / "cache" / "tokenizers").iterdir())
    assert len(kept) == 1
    changed = kept[0].stat().st_mtime_ns
    assert load_tokenizer(model).encode("hello") == tokenizer.encode("hello")
    assert kept[0].stat().st_mtime_ns == changed


# --- chat templates, against transformers

CONVERSATIONS: list[list[dict[str, object]]] = [
    [{"role": "user", "content": "Hi <b>&"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Grüße 🙂"}],
    [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning": "two and two", "name": None},
        {"role": "user", "content": "Sure?"},
    ],
]
TEMPLATES = [
    CHATML,
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}\n  {{ m | tojson }}\n{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ bos_token }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    "{{ messages | tojson(indent=2) }}{{ messages[0].content.split(' ')[0].strip() }}",
    "{% for m in messages %}{{ m.reasoning_content if m.reasoning_content is string else '-' }}{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=["one", "system", "reasoning"])
def test_rendering_equals_transformers(template: str, conversation: list[dict[str, object]]) -> None:
    import transformers

    untyped: Any = transformers
    reference = untyped.PreTrainedTokenizerFast(
        tokenizer_object=byte_level_backend(), bos_token="<s>", eos_token="</s>"
    )
    reference.chat_template = template
    expected = reference.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    ours = ChatTemplate(template, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(conversation, variables={"enable_thinking": False}) == expected


def test_the_last_message_can_be_continued() -> None:
    template = ChatTemplate(CHATML)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "The answer is "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nThe answer is "
    with pytest.raises(ChatTemplateError, match="needs a last message"):
        template.render([{"role": "user", "content": ""}], continue_final_message=True)


def test_a_template_refuses_in_its_own_words_and_cannot_leave_the_sandbox() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])
    with pytest.raises(ChatTemplateError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([])
    with pytest.raises(ChatTemplateError, match="failed on the conversation: TypeError"):
        ChatTemplate("{{ messages + 1 }}").render([])
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_the_window_stays_short_where_tokens_have_no_text() -> None:
    """ignore_eos with a model that repeats its end token: every token would decode all before it again."""

    class Special:
        longest = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            self.longest = max(self.longest, len(token_ids))
            return "".join(chr(token) for token in token_ids if token != 0 or not skip_special_tokens)

    decoder = Special()
    detokenizer = IncrementalDetokenizer(decoder, [ord("p")])
    shown = "".join(detokenizer.push(token) for token in [ord("a"), *[0] * 1000, ord("b"), *[0] * 70, ord("c")])
    assert shown + detokenizer.finish() == "abc"
    assert decoder.longest < 140
