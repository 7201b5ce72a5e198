"""Make all that ``make demo-vision`` starts from, without a network: pictures with words about them, and a small model.

    python scripts/make_pictures.py runs/demo-vision-data

Pictures are drawn: one or two coloured shapes, side by side. ``captions.jsonl`` has conversations that ask for a
description, ``questions.jsonl`` such that ask about colours, shapes and numbers; each picture is in one of them only.
``start`` is a LLaVA of stock classes with random weights, a tokenizer trained on these words, and its processor.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from hfscale.recipes.dataset import train_tokenizer

SIZE = 32
PATCH = 8
COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 205, 40),
    "black": (20, 20, 20),
}
SHAPES = ("circle", "square", "triangle")
TEMPLATE = """\
{%- for message in messages -%}
    {{- message['role'] + ':\\n' -}}
    {%- for part in message['content'] -%}
        {%- if part['type'] == 'image' -%}{{- '<image>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
    {%- endfor -%}
    {{- eos_token if message['role'] == 'assistant' else '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:\\n' -}}{%- endif -%}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--captions", type=int, default=2000)
    parser.add_argument("--questions", type=int, default=1200)
    arguments = parser.parse_args()
    make(arguments.directory, arguments.captions, arguments.questions)


def make(directory: Path, captions: int, questions: int) -> None:
    """All of it, the same in every run."""
    draw = random.Random(0)
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    texts = []
    for name, count, ask in (("captions", captions, caption), ("questions", questions, question)):
        with (directory / f"{name}.jsonl").open("w") as stream:
            for index in range(count):
                things = [
                    (draw.choice(list(COLOURS)), draw.choice(SHAPES))
                    for _ in range(draw.choice((1, 2)))
                ]
                path = Path("pictures") / f"{name}-{index:04d}.png"
                picture(things, draw).save(directory / path)
                asked, answer = ask(things, draw)
                texts.append(f"user:\n{asked}\nassistant:\n{answer}")
                stream.write(
                    json.dumps({"messages": conversation(asked, answer), "images": [str(path)]})
                    + "\n"
                )
    make_start(directory / "start", texts)


def picture(things: list[tuple[str, str]], draw: random.Random) -> Image.Image:
    """The things side by side, each a little out of the middle of its place."""
    image = Image.new("RGB", (SIZE, SIZE), (245, 245, 245))
    pen = ImageDraw.Draw(image)
    for place, (colour, shape) in enumerate(things):
        x = SIZE * (2 * place + 1) // (2 * len(things)) + draw.randint(-1, 1)
        y = SIZE // 2 + draw.randint(-6, 6)
        r = draw.randint(5, 7)
        if shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=COLOURS[colour])
        else:
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=COLOURS[colour])
    return image


def caption(things: list[tuple[str, str]], _: random.Random) -> tuple[str, str]:
    """A request for a description, and the description."""
    return "Describe the picture.", f"{number(things)}: " + " and ".join(
        f"a {colour} {shape}" for colour, shape in things
    )


def question(things: list[tuple[str, str]], draw: random.Random) -> tuple[str, str]:
    """A question with one right answer, and that."""
    colour, shape = draw.choice(things)
    asked = [("How many shapes are there?", number(things))]
    if sum(shape == other for _, other in things) == 1:
        asked.append((f"What colour is the {shape}?", f"the {shape} is {colour}"))
    if sum(colour == other for other, _ in things) == 1:
        asked.append((f"Which shape is {colour}?", f"a {colour} {shape}"))
    return draw.choice(asked)


def number(things: list[tuple[str, str]]) -> str:
    return ("one shape", "two shapes")[len(things) - 1]


def conversation(asked: str, answer: str) -> list[dict[str, Any]]:
    """A turn of the user with the picture, and one of the assistant."""
    said = [{"type": "image", "text": None}, {"type": "text", "text": asked}]
    return [
        {"role": "user", "content": said},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def make_start(directory: Path, texts: list[str]) -> None:
    """A small LLaVA with random weights, and its processor."""
    tokenizer = train_tokenizer(texts, 380)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.eos_token
    image = tokenizer.convert_tokens_to_ids("<image>")
    sides = {"height": SIZE, "width": SIZE}
    processor = LlavaProcessor(
        image_processor=image_processor(size=sides, crop_size=sides, do_resize=False),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=256,
            image_size=SIZE,
            patch_size=PATCH,
            projection_dim=64,
            **layers,
        ),
        text_config=LlamaConfig(
            vocab_size=384,
            hidden_size=128,
            intermediate_size=384,
            num_key_value_heads=4,
            **layers,
            **ends,
        ),
        image_token_index=image,
        image_seq_length=(SIZE // PATCH) ** 2,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)


def image_processor(**sizes: Any) -> Any:
    """LLaVA's over pillow; in older releases there is that over torchvision."""
    kind = getattr(transformers, "LlavaImageProcessorPil", None) or transformers.LlavaImageProcessor
    return kind(**sizes)


if __name__ == "__main__":
    main()
