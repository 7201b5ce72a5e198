"""What wrong calls are made of: batches that no causal language model can be trained on, and one call per value."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hfscale import ParallelConfig

from .tiny_models import tiny

IDS = torch.randint(3, 67, (4, 8), generator=torch.Generator().manual_seed(1))


def batch(**changes: Any) -> dict[str, Any]:
    """A right batch, changed."""
    return {"input_ids": IDS, "labels": IDS, **changes}


@dataclass
class Made:
    """What calls are about: a model in a layout, and where a checkpoint is."""

    layout: ParallelConfig
    model: Any
    path: str
    folder: Path

    @property
    def config(self) -> Any:
        """A config that nobody has changed."""
        return tiny("llama")

    def stock(self) -> Any:
        """A model that nobody has parallelized."""
        return AutoModelForCausalLM.from_config(self.config)

    def seeded(self) -> Any:
        """The same with other weights on each rank."""
        torch.manual_seed(dist.get_rank())
        return self.stock()


Call = Callable[[Made], Any]


def with_values(
    name: str, call: Callable[..., Any], values: Iterable[Any], leave_out: Iterable[Any] = ()
) -> dict[str, Call]:
    """One call for each value of an argument."""
    left = [repr(value) for value in leave_out]
    return {
        f"{name}={value!r}": partial(_call, call, value)
        for value in values
        if repr(value) not in left
    }


def _call(call: Callable[..., Any], value: Any, made: Made) -> Any:
    return call(made, value)


def with_options(name: str, call: Callable[..., Any], /, **options: list[Any]) -> dict[str, Call]:
    """One call for each value of each keyword argument."""
    return {
        f"{name}: {option}={value!r}": partial(_call, call, {option: value})
        for option, values in options.items()
        for value in values
    }


BATCHES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a number": lambda: 3,
    "a string": lambda: "text",
    "a tensor": lambda: IDS,
    "a set": lambda: {"input_ids"},
    "a list of strings": lambda: ["a", "b"],
    "an empty list": lambda: [],
    "an empty mapping": lambda: {},
    "a list with None": lambda: [batch(), None],
    "a tuple of tensors": lambda: (IDS, IDS),
    "no labels": lambda: {"input_ids": IDS},
    "labels None": lambda: batch(labels=None),
    "no ids": lambda: {"labels": IDS},
    "ids None": lambda: batch(input_ids=None),
    "float ids": lambda: batch(input_ids=IDS.float()),
    "half ids": lambda: batch(input_ids=IDS.half()),
    "uint8 ids": lambda: batch(input_ids=IDS.to(torch.uint8)),
    "int16 ids": lambda: batch(input_ids=IDS.to(torch.int16)),
    "bool ids": lambda: batch(input_ids=IDS > 5),
    "complex ids": lambda: batch(input_ids=IDS.to(torch.complex64)),
    "float labels": lambda: batch(labels=IDS.float()),
    "bool labels": lambda: batch(labels=IDS > 5),
    "uint8 labels": lambda: batch(labels=IDS.to(torch.uint8)),
    "complex labels": lambda: batch(labels=IDS.to(torch.complex64)),
    "labels of three dims": lambda: batch(labels=IDS[..., None]),
    "labels of one dim": lambda: batch(labels=IDS.flatten()),
    "labels of fewer rows": lambda: batch(labels=IDS[:2]),
    "labels of fewer tokens": lambda: batch(labels=IDS[:, :5]),
    "labels of one row": lambda: batch(labels=IDS[:1]),
    "labels scalar": lambda: batch(labels=torch.tensor(3)),
    "labels a number": lambda: batch(labels=3),
    "labels a list": lambda: batch(labels=IDS.tolist()),
    "labels a string": lambda: batch(labels="text"),
    "labels sparse": lambda: batch(labels=IDS.to_sparse()),
    "labels on meta": lambda: batch(labels=IDS.to("meta")),
    "labels out of range": lambda: batch(labels=IDS + 1000),
    "labels negative": lambda: batch(labels=IDS * 0 - 5),
    "ids of three dims": lambda: batch(input_ids=IDS[..., None], labels=IDS[..., None]),
    "ids of one dim": lambda: batch(input_ids=IDS[0], labels=IDS[0]),
    "ids scalar": lambda: batch(input_ids=torch.tensor(3), labels=torch.tensor(3)),
    "ids a list": lambda: batch(input_ids=IDS.tolist()),
    "ids a string": lambda: batch(input_ids="text"),
    "ids a number": lambda: batch(input_ids=3),
    "ids a list of strings": lambda: batch(input_ids=["a", "b"]),
    "ids a tuple": lambda: batch(input_ids=tuple(map(tuple, IDS.tolist()))),
    "ids sparse": lambda: batch(input_ids=IDS.to_sparse()),
    "ids on meta": lambda: batch(input_ids=IDS.to("meta")),
    "batch on meta": lambda: batch(input_ids=IDS.to("meta"), labels=IDS.to("meta")),
    "ids out of range": lambda: batch(input_ids=IDS + 1000),
    "ids negative": lambda: batch(input_ids=IDS - 1000),
    "zero tokens": lambda: batch(input_ids=IDS[:, :0], labels=IDS[:, :0]),
    "mask of fewer rows": lambda: batch(attention_mask=torch.ones(2, 8, dtype=torch.long)),
    "mask of fewer tokens": lambda: batch(attention_mask=torch.ones(4, 5, dtype=torch.long)),
    "mask of more tokens": lambda: batch(attention_mask=torch.ones(4, 11, dtype=torch.long)),
    "mask of one dim": lambda: batch(attention_mask=torch.ones(8, dtype=torch.long)),
    "mask of three dims": lambda: batch(attention_mask=torch.ones(4, 8, 8, dtype=torch.long)),
    "mask a list": lambda: batch(attention_mask=[[1] * 8] * 4),
    "mask a string": lambda: batch(attention_mask="ones"),
    "mask complex": lambda: batch(attention_mask=torch.ones(4, 8, dtype=torch.complex64)),
    "mask on meta": lambda: batch(attention_mask=torch.ones(4, 8, device="meta")),
    "mask sparse": lambda: batch(attention_mask=torch.ones(4, 8).to_sparse()),
    "positions of fewer rows": lambda: batch(position_ids=torch.arange(8).expand(2, 8)),
    "positions of fewer tokens": lambda: batch(position_ids=torch.arange(5).expand(4, 5)),
    "positions float": lambda: batch(position_ids=torch.arange(8.0).expand(4, 8)),
    "positions a string": lambda: batch(position_ids="restart"),
    "positions of one dim": lambda: batch(position_ids=torch.arange(8)),
    "embeds beside ids": lambda: batch(inputs_embeds=torch.zeros(4, 8, 32)),
    "embeds of other width": lambda: {"inputs_embeds": torch.zeros(4, 8, 31), "labels": IDS},
    "embeds of integers": lambda: {
        "inputs_embeds": torch.zeros(4, 8, 32, dtype=torch.long),
        "labels": IDS,
    },
    "embeds of two dims": lambda: {"inputs_embeds": torch.zeros(4, 32), "labels": IDS},
    "misspelt key": lambda: batch(atention_mask=torch.ones(4, 8)),
    "a number for a key": lambda: {**batch(), 3: IDS},
    "shift_labels of other shape": lambda: batch(shift_labels=IDS[:, :5]),
    "shift_labels float": lambda: batch(shift_labels=IDS.float()),
    "return_dict a string": lambda: batch(return_dict="no"),
    "logits_to_keep": lambda: batch(logits_to_keep=1),
    "past_key_values a string": lambda: batch(past_key_values="cache"),
    "use_cache a string": lambda: batch(use_cache="yes"),
}
