"""Conversations and completions: which tokens have labels, and what is refused."""

import re
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from hfscale.recipes.chat import TEMPLATES, encode_chat, encode_completion, set_chat_template
from hfscale.recipes.rows import IGNORED, Example
from hfscale.recipes.schema import DataRecipe, RecipeError

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "One."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Two, of course."},
]
TURN = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
WITHOUT_MARKERS = "{% for message in messages %}" + TURN + "{% endfor %}" + PROMPT
# Only the last message keeps its dots: what the messages up to a turn render to is not how all of them begin.
REWRITES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] }}"
    "{% if loop.last %}...{% endif %}{% endfor %}"
)
MARKS_CONTENT_ALONE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>{{ '\n' }}{% endfor %}"
)


@pytest.fixture
def chatml(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return tokenizer


def labelled(tokenizer: Any, example: Example) -> list[str]:
    """The text of each run of labels."""
    assert all(
        label in (IGNORED, token)
        for token, label in zip(example.input_ids, example.labels, strict=True)
    )
    runs: list[list[int]] = [[]]
    for label in example.labels:
        runs[-1].append(label) if label != IGNORED else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_the_plain_template_ends_turns_with_the_end_of_text(tokenizer):
    tokenizer.chat_template = TEMPLATES["plain"]
    example = encode_chat(tokenizer, CONVERSATION, "completions", "x")
    assert labelled(tokenizer, example) == ["One.<|endoftext|>", "Two, of course.<|endoftext|>"]
    text = tokenizer.decode(example.input_ids)
    assert text.startswith(
        "### System:\nBe short.\n\n### User:\nOne?\n\n### Assistant:\nOne.<|endoftext|>\n\n###"
    )
    prompt = tokenizer.apply_chat_template(CONVERSATION[:2], add_generation_prompt=True)[
        "input_ids"
    ]
    assert example.input_ids[: len(prompt)] == prompt  # generation continues what was trained on
    assert set(example.labels[: len(prompt)]) == {IGNORED}


@pytest.mark.parametrize("template", [TEMPLATES["chatml"], MARKS_CONTENT_ALONE])
def test_markers_and_the_token_that_ends_a_turn(chatml, template):
    chatml.chat_template = template
    example = encode_chat(chatml, CONVERSATION, "completions", "x")
    assert labelled(chatml, example) == ["One.<|im_end|>", "Two, of course.<|im_end|>"]


def test_prefixes_find_the_same_turns(chatml):
    chatml.chat_template = WITHOUT_MARKERS
    example = encode_chat(chatml, CONVERSATION, "completions", "x")
    assert labelled(chatml, example) == ["One.<|im_end|>\n", "Two, of course.<|im_end|>\n"]
    chatml.chat_template = TEMPLATES["chatml"]
    assert encode_chat(chatml, CONVERSATION, "completions", "x").input_ids == example.input_ids


def test_everything_or_nothing_has_labels(chatml):
    chatml.chat_template = TEMPLATES["chatml"]
    example = encode_chat(chatml, CONVERSATION, "all", "x")
    assert example.labels == example.input_ids
    assert set(encode_chat(chatml, CONVERSATION[:2], "completions", "x").labels) == {IGNORED}


def test_a_template_that_rewrites_earlier_turns_is_refused(chatml):
    chatml.chat_template = REWRITES
    with pytest.raises(
        RecipeError, match=r"row:7: the assistant's turn \(message 2\).*data.train_on=all"
    ):
        encode_chat(chatml, CONVERSATION, "completions", "row:7")
    assert encode_chat(chatml, CONVERSATION, "all", "row:7").input_ids


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (6, r"2 turns of the assistant.* mark 1"),
        (4, r"1 turns of the assistant.* or a span goes beyond its turn"),
    ],
)
def test_spaces_at_the_ends_of_markers(chatml, messages, said):
    """Tokenizers may leave them out of a token's offsets. Before transformers 5.24 all that follows is marked then."""
    chatml.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    chatml.chat_template = MARKS_CONTENT_ALONE.replace(
        "{% endgeneration %}", "{{ ' ' }}{% endgeneration %}"
    )
    refusal = ""
    example = None
    try:
        example = encode_chat(chatml, CONVERSATION[:messages], "completions", "x")
    except RecipeError as error:
        refusal = str(error)
    if example is None:
        assert re.search(said, refusal)
    else:
        turns = ["One. <|im_end|>", "Two, of course. <|im_end|>"]
        assert labelled(chatml, example) == turns[: messages // 2 - 1]


@pytest.mark.parametrize(
    "messages", [None, [], "hello", [{"from": "human", "value": "hello"}], [{"role": "user"}]]
)
def test_what_is_no_conversation_is_refused(chatml, messages):
    chatml.chat_template = TEMPLATES["chatml"]
    with pytest.raises(RecipeError, match=r"x is no conversation.*data.messages_column"):
        encode_chat(chatml, messages, "completions", "x")


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "hello"}]])
def test_what_the_template_does_not_render_is_refused(chatml, content):
    chatml.chat_template = TEMPLATES["chatml"]
    with pytest.raises(RecipeError, match="the chat template does not render x"):
        encode_chat(chatml, [{"role": "user", "content": content}], "completions", "x")


def test_where_the_template_comes_from(tokenizer, tmp_path):
    chat = DataRecipe(format="chat")
    with pytest.raises(RecipeError, match=r"has none.*Jinja template, or one of chatml, plain"):
        set_chat_template(tokenizer, chat)
    with pytest.raises(
        RecipeError, match="'chatlm' is neither the path of an existing file nor a template"
    ):
        set_chat_template(tokenizer, DataRecipe(format="chat", chat_template="chatlm"))
    path = tmp_path / "template.jinja"
    path.write_text(WITHOUT_MARKERS)
    set_chat_template(tokenizer, DataRecipe(format="chat", chat_template=str(path)))
    set_chat_template(tokenizer, chat)  # as its own now
    assert tokenizer.chat_template == WITHOUT_MARKERS
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == WITHOUT_MARKERS


def test_a_completion_alone_has_labels(tokenizer):
    example = encode_completion(tokenizer, "One?", " Two.", "completions", "x")
    assert labelled(tokenizer, example) == [" Two.<|endoftext|>"]
    assert tokenizer.decode(example.input_ids) == "One? Two.<|endoftext|>"
    assert encode_completion(tokenizer, "One?", " Two.", "all", "x").labels == example.input_ids
    with pytest.raises(RecipeError, match="begin completions with the space"):
        encode_completion(tokenizer, "One? ", "Two", "completions", "x")
    with pytest.raises(RecipeError, match="a completion that is not a string"):
        encode_completion(tokenizer, "One?", None, "completions", "x")
