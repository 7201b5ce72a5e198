"""Conversations and prompts with completions, as tokens and labels."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from .packing import Example
from .rows import IGNORED
from .schema import DataRecipe, RecipeError

# Both mark what the assistant writes, the end of its turn included.
TEMPLATES = {
    # For tokenizers that have these two as special tokens.
    "chatml": """\
{{- bos_token | default('', true) -}}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
    # For all others: headings of ordinary text, and the end-of-text token, at which generation stops.
    "plain": """\
{{- bos_token | default('', true) -}}
{%- for message in messages -%}
    {{- '### ' + message['role'] | capitalize + ':\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- message['content'] -}}
    {%- endif -%}
    {{- '\\n\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Assistant:\\n' -}}{%- endif -%}
""",
}

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_INSTEAD = "give data.chat_template a template with {% generation %} markers, or use data.train_on=all"


def set_chat_template(tokenizer: Any, data: DataRecipe) -> None:
    """Give ``tokenizer`` the template that the recipe asks for; it is saved with it.

    Raises:
        RecipeError: there is no such template, or none is asked for and the tokenizer has none.
    """
    built_in = ", ".join(TEMPLATES)
    if data.chat_template in TEMPLATES:
        tokenizer.chat_template = TEMPLATES[data.chat_template]
    elif data.chat_template is not None:
        path = Path(data.chat_template)
        if not path.is_file():
            raise RecipeError(
                f"data.chat_template={data.chat_template!r} is neither a file here nor built in: give the path of a "
                f"Jinja template, or one of {built_in}"
            )
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    try:
        tokenizer.get_chat_template()
    except ValueError as error:
        raise RecipeError(
            "data.format=chat renders messages through the tokenizer's chat template, and that of the base model has "
            f"none to use by default: give data.chat_template the path of a Jinja template, or one of {built_in}"
        ) from error


def set_processor_template(processor: Any, data: DataRecipe) -> None:
    """The same for a processor, whose templates take pictures.

    Raises:
        RecipeError: there is no such template, or none at all.
    """
    if data.chat_template is not None:
        path = Path(data.chat_template)
        if not path.is_file():
            raise RecipeError(
                f"data.chat_template={data.chat_template!r} is no file here, and none that is built in takes pictures: "
                "give the path of a Jinja template"
            )
        processor.chat_template = path.read_text(encoding="utf-8")
    if not processor.chat_template:
        raise RecipeError(
            "conversations are rendered through the chat template of the base's processor, and it has none: give "
            "data.chat_template the path of a Jinja template"
        )


def encode_chat(tokenizer: Any, messages: Any, train_on: str, where: str) -> Example:
    """One conversation; the assistant's turns have labels, or all of it.

    Args:
        train_on: ``completions`` or ``all``.
        where: what to call the record in an error.

    Raises:
        RecipeError: this is no conversation, the template refuses it, or its turns cannot be told apart in it.
    """
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise RecipeError(
            f"{where} is no conversation: messages must be a list of records with role and content, and this is "
            f"{str(messages)[:200]!r}; change data.messages_column, or the data"
        )
    try:
        if train_on == "all":
            ids = render(tokenizer, messages)["input_ids"]
            return Example(ids, list(ids))
        if _MARKER.search(tokenizer.get_chat_template()):
            return _by_markers(tokenizer, messages, where)
        return _by_prefixes(tokenizer, messages, where)
    except (TemplateError, TypeError) as error:  # the second where content is not the text that a template takes
        raise RecipeError(
            f"the chat template does not render {where}: {error}; correct the data, or give another data.chat_template"
        ) from error


def encode_completion(tokenizer: Any, prompt: Any, completion: Any, train_on: str, where: str) -> Example:
    """A prompt and its completion, which alone has labels or does not, with an end-of-text token behind it."""
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RecipeError(
            f"{where} has a prompt or a completion that is no text: correct the data, or change data.prompt_column and "
            "data.completion_column"
        )
    before = tokenizer(prompt, verbose=False)["input_ids"]
    ids = tokenizer(prompt + completion, verbose=False)["input_ids"]
    if train_on == "completions" and ids[: len(before)] != before:
        raise RecipeError(
            f"{where}: the prompt's last token changes when the completion is put behind it, so a model that is given "
            "the prompt would never see what it was trained on: begin completions with the space that prompts end "
            "with, or use data.train_on=all"
        )
    ids = [*ids, tokenizer.eos_token_id]
    return Example(ids, list(ids) if train_on == "all" else [IGNORED] * len(before) + ids[len(before) :])


def _by_markers(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> Example:
    encoded = render(tokenizer, messages, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    turns = sum(message["role"] == "assistant" for message in messages)
    spans = sum(marked for marked, _ in groupby(mask))
    if spans < turns or (mask[-1] and messages[-1]["role"] != "assistant"):
        # Where a span begins or ends with a space that is in no token's offsets, the host marks nothing behind it, or
        # everything: also what the user says next.
        raise RecipeError(
            f"{where} has {turns} turns of the assistant, and the template's {{% generation %}} markers show {spans} "
            "in its tokens, or do not end: strip spaces from the messages, begin and end the markers at other text, "
            "or use data.train_on=all"
        )
    special = set(tokenizer.all_special_ids)
    start = 0
    for marked, tokens in groupby(list(mask)):
        end = start + len(list(tokens))
        # The token that ends a turn, where the markers leave it out: without it the model would not learn to stop.
        if marked and end < len(ids) and ids[end] in special and not special.intersection(ids[start:end]):
            mask[end] = 1
        start = end
    return Example(ids, [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)])


def _by_prefixes(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> Example:
    """What a turn of the assistant adds to the rendering of the messages before it, its heading left out."""
    ids = render(tokenizer, messages)["input_ids"]
    labels = [IGNORED] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:  # nothing asks for what a conversation begins with
            continue
        before = render(tokenizer, messages[:index], add_generation_prompt=True)["input_ids"]
        until = render(tokenizer, messages[: index + 1])["input_ids"]
        for shorter, longer in ((before, until), (until, ids)):
            if longer[: len(shorter)] != shorter:
                raise RecipeError(
                    f"{where}: where the assistant's turn (message {index}) begins or ends cannot be found, since the "
                    "chat template renders the messages up to there to other tokens than those that the whole "
                    f"conversation begins with: {_INSTEAD}"
                )
        labels[len(before) : len(until)] = ids[len(before) : len(until)]
    return Example(ids, labels)


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """What the chat template makes of a conversation, as tokens."""
    return tokenizer.apply_chat_template(messages, tokenizer_kwargs={"verbose": False}, **options)


def _is_message(message: Any) -> bool:
    # What an assistant's call of a tool has for content depends on the template.
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
