"""Encode records of a data set (conversations, prompts with completions, preference pairs, texts with classes) as
tokens and labels.
"""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from .corpus import Document
from .rows import IGNORED, Example
from .schema import DataRecipe, RecipeError
from .templates import DIRECTORY

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in sorted(DIRECTORY.glob("*.jinja"))
}
"""Built-in chat templates by name. ``chatml`` is for tokenizers that have the special tokens ``<|im_start|>`` and
``<|im_end|>``; ``plain`` marks turns by headings of ordinary text, for all other tokenizers. Both templates mark the
assistant's text, including the end of each turn, for the labels.
"""

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def set_chat_template(reader: Any, data: DataRecipe) -> None:
    """Set the chat template that the recipe names (``data.chat_template``, if given) on a tokenizer, or on the
    processor of a vision-language model; raise :class:`RecipeError` if it then has no default template.

    The template is saved together with the tokenizer.
    """
    built_in = {} if hasattr(reader, "tokenizer") else TEMPLATES
    use = ", or one of ".join(
        ["the path of a Jinja template", *([", ".join(built_in)] if built_in else [])]
    )
    if data.chat_template in built_in:
        reader.chat_template = built_in[data.chat_template]
    elif data.chat_template is not None:
        path = Path(data.chat_template)
        if not path.is_file():
            raise RecipeError(
                f"data.chat_template={data.chat_template!r} is neither the path of an existing file nor a template "
                f"that is built in for this base: give {use}"
            )
        reader.chat_template = path.read_text(encoding="utf-8")
    given = reader.chat_template
    if not given or (isinstance(given, dict) and "default" not in given):
        raise RecipeError(
            "conversations are rendered through the base's chat template, but this base has none to use by default: "
            "give "
            f"data.chat_template {use}"
        )


def encode_chat(tokenizer: Any, messages: Any, train_on: str, where: str) -> Example:
    """Return the tokens of a conversation and their labels. Only the assistant's turns have labels; with
    ``train_on="all"``, all tokens have labels.

    ``where`` names the conversation in errors.
    """
    # The content of an assistant message that calls a tool may have any type: templates differ.
    if not (isinstance(messages, list) and messages) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    ):
        raise RecipeError(
            f"{where} is no conversation: messages must be a list of records with role and content, got "
            f"{str(messages)[:200]!r}; change data.messages_column, or the data"
        )
    try:
        ids = render(tokenizer, messages)["input_ids"]
        if train_on == "all":
            return Example(ids, list(ids))
        if _MARKER.search(tokenizer.get_chat_template()):
            return _by_markers(tokenizer, messages, where)

        def first(number: int, answer: bool) -> list[int]:
            return list(
                render(tokenizer, messages[:number], add_generation_prompt=answer)["input_ids"]
            )

        return Example(ids, by_prefixes(ids, messages, first))
    except (
        TemplateError,
        TypeError,
        ValueError,
    ) as error:  # TypeError: a message's content is no text
        raise RecipeError(
            f"the chat template does not render {where}: {error}; correct the data, or give another data.chat_template"
        ) from error


def encode_completion(
    tokenizer: Any, prompt: Any, completion: Any, train_on: str, where: str
) -> Example:
    """Return the tokens of a prompt, its completion and an end-of-text token, with labels for the completion and the
    end-of-text token only; with ``train_on="all"``, all tokens have labels. ``where`` names the example in errors.
    """
    if not isinstance(prompt, str) or not isinstance(completion, str):
        raise RecipeError(
            f"{where} has a prompt or a completion that is not a string: correct the data, or change "
            "data.prompt_column and data.completion_column"
        )
    before = tokenizer(prompt, verbose=False)["input_ids"]
    ids = tokenizer(prompt + completion, verbose=False)["input_ids"]
    if train_on == "completions" and ids[: len(before)] != before:
        raise RecipeError(
            f"{where}: the last token of the prompt changes when the completion follows it, so the model would see "
            "other prompts in training than in generation: begin completions with the space that prompts end with, "
            "or use data.train_on=all"
        )
    ids = [*ids, tokenizer.eos_token_id]
    return Example(
        ids, list(ids) if train_on == "all" else [IGNORED] * len(before) + ids[len(before) :]
    )


def _by_markers(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    where: str,
) -> Example:
    encoded = render(tokenizer, messages, return_assistant_tokens_mask=True)
    ids = encoded["input_ids"]
    mask = encoded["assistant_masks"]
    turns = sum(message["role"] == "assistant" for message in messages)
    spans = sum(marked for marked, _ in groupby(mask))
    if spans < turns or (mask[-1] and messages[-1]["role"] != "assistant"):
        # If a span begins or ends with a space that is in no token's offsets, transformers marks either nothing after
        # the space or everything, including the user's next message.
        raise RecipeError(
            f"{where} has {turns} turns of the assistant, but the template's {{% generation %}} markers mark {spans} "
            "spans of its tokens, or a span goes beyond its turn: strip spaces from the messages, begin and end the "
            "markers at text other than spaces, or use data.train_on=all"
        )
    special = set(tokenizer.all_special_ids)
    start = 0
    for marked, tokens in groupby(list(mask)):
        end = start + len(list(tokens))
        # If the markers leave out the token that ends a turn, mark it here: without its label the model would not learn
        # to stop. Spaces before that token may be in no token's offsets; transformers leaves such spaces unmarked too.
        last = end
        while last < len(ids) and not tokenizer.decode([ids[last]]).strip():
            last += 1
        ends_here = last < len(ids) and ids[last] in special
        if marked and ends_here and not special.intersection(ids[start:end]):
            mask[end : last + 1] = [1] * (last + 1 - end)
        start = end
    return Example(
        ids, [token if counts else IGNORED for token, counts in zip(ids, mask, strict=True)]
    )


def by_prefixes(
    ids: list[int],
    messages: Any,
    rendered: Callable[
        [
            int,
            bool,
        ],
        list[int],
    ],
) -> list[int]:
    """Return labels for the tokens ``ids`` of a conversation, of which only the assistant's turns have labels; an
    assistant message at the very beginning has none.

    Each turn is located by rendering the conversation up to its beginning and up to its end. ``rendered(n, answer)``
    returns the tokens of the first ``n`` messages; if ``answer`` is true, they are followed by the generation prompt.
    """
    labels = [IGNORED] * len(ids)
    for index, message in enumerate(messages):
        # An assistant message at the very beginning answers nothing, so it gets no labels.
        if message["role"] != "assistant" or index == 0:
            continue
        before = rendered(index, True)
        until = rendered(index + 1, False)
        if until[: len(before)] != before or ids[: len(until)] != until:
            raise ValueError(
                f"the assistant's turn (message {index}) cannot be located, since the chat template renders the first "
                "messages to other tokens when it renders them alone than within the whole conversation: give "
                "data.chat_template a template with {% generation %} markers, or use data.train_on=all"
            )
        labels[len(before) : len(until)] = ids[len(before) : len(until)]
    return labels


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    **options: Any,
) -> Any:
    """Return the tokens of a conversation rendered by the chat template."""
    return tokenizer.apply_chat_template(messages, tokenizer_kwargs={"verbose": False}, **options)


class Pair(NamedTuple):
    """Hold a preference pair: the tokens of the preferred and of the rejected text."""

    chosen: list[int]
    rejected: list[int]


def encode_pairs(
    data: DataRecipe, tokenizer: Any, documents: Sequence[Document]
) -> tuple[list[Pair], int]:
    """Encode preference pairs, each text truncated to ``data.sequence_length`` tokens.

    Return the encoded pairs, and the number of dropped pairs: those whose two texts are equal after truncation, or of
    which a text is empty.
    """
    pairs = []
    for document in documents:
        columns = document.columns
        prompt = columns.get(data.prompt_column)
        ids = [
            _encode(tokenizer, prompt, columns[name], document.name)[: data.sequence_length]
            for name in (data.chosen_column, data.rejected_column)
        ]
        pairs.append(Pair(*ids))
    kept = [
        pair for pair in pairs if pair.chosen != pair.rejected and pair.chosen and pair.rejected
    ]
    return kept, len(pairs) - len(kept)


def _encode(tokenizer: Any, prompt: Any, answer: Any, where: str) -> list[int]:
    whole = answer if prompt is None else prompt + answer if type(prompt) is type(answer) else None
    if isinstance(whole, str):
        return list(tokenizer(whole, verbose=False)["input_ids"])
    if not isinstance(whole, list):
        raise RecipeError(
            f"{where} must have two texts or two conversations, and a prompt of the same kind, if it has one: correct "
            "the data, or change data.chosen_column, data.rejected_column and data.prompt_column"
        )
    try:
        return list(render(tokenizer, whole)["input_ids"])
    except (TemplateError, TypeError, ValueError) as error:
        raise RecipeError(
            f"the chat template does not render {where}: {error}; correct the data, or give another data.chat_template"
        ) from error


def encode_classes(
    data: DataRecipe, tokenizer: Any, documents: Sequence[Document]
) -> dict[str, list[Any]]:
    """Encode texts, each truncated to ``data.sequence_length`` tokens, and the numbers of their classes."""
    columns: dict[str, list[Any]] = {"input_ids": [], "label": []}
    for document in documents:
        ids = tokenizer(document.columns[data.text_column], verbose=False)["input_ids"]
        columns["input_ids"].append(ids[: data.sequence_length])
        columns["label"].append(
            _number(document.columns[data.label_column], data.classes, document.name)
        )
    return columns


def _number(label: Any, classes: Sequence[str], where: str) -> int:
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    if isinstance(label, int) and 0 <= label < len(classes):
        return int(label)
    raise RecipeError(
        f"the class of {where} is {label!r}, but data.classes has {', '.join(classes)} (numbers 0 to "
        f"{len(classes) - 1}): correct data.classes, data.label_column or the data"
    )
