"""What inference works on: a tiny clone of a model, on the CPU in float64, with a batch to run."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...._host.transformers.classes import from_config
from ...._host.transformers.experts import compute_eagerly
from ....errors import PlanError
from ....families.clone import tiny_clone
from ....families.precision import keep_float64
from ....planner.layers import find_layer_list

_LARGEST = 3_000_000  # parameters of a clone; one with more was not made small
_ROWS, _LENGTH, _PADDED = 3, 7, 2
_NOISE = 0.05  # norms start as ones and biases as zeros, which would hide errors in both


class Unproved(Exception):
    """A hypothesis does not hold on the clone, or the clone cannot be judged; says why."""


@dataclass
class Subject:
    """A tiny clone of a model and a ragged batch.

    Attributes:
        model: the clone, in evaluation mode.
        inputs: what its forward gets.
        layers: name of the layer list in the clone.
    """

    model: Any
    inputs: dict[str, Tensor]
    layers: str

    @property
    def layer_names(self) -> list[str]:
        """The layers, in order."""
        return [f"{self.layers}.{name}" for name, _ in self.model.get_submodule(self.layers).named_children()]

    @cached_property
    def reference(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Output of the untouched clone, and the gradient of every parameter that is not another's second name."""
        output = run(self.model, self.inputs)
        return output.detach(), gradients(self.model, output)


@contextmanager
def aside() -> Iterator[None]:
    """Within: random numbers come from a stream of their own, and torch computes with one thread.

    On tensors this small its threads only wait for each other: ten times as long on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def make_subject(model: Any, **changes: Any) -> Subject:
    """A clone of ``model`` with ``changes`` to its config.

    Raises:
        Unproved: it reads no tokens, cannot be made small, cannot be built, or has no list of layers.
    """
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        raise Unproved(f"it reads {reads}, and is tried on tokens alone")
    try:
        config = tiny_clone(model.config, **changes)
        config.use_cache = False
        compute_eagerly(config)  # the host's grouped matrix products take no float64
        with torch.device("meta"):
            size = sum(p.numel() for p in _build(type(model), config).parameters())
        if size > _LARGEST:
            raise Unproved(
                f"its clone still has {size:,} parameters: the config's sizes have names that "
                "hfscale.families.clone does not know"
            )
        with aside(), torch.device("cpu"):
            clone = _build(type(model), config).double().eval()
            with torch.no_grad():
                for parameter in clone.parameters():
                    parameter.add_(torch.randn_like(parameter) * _NOISE)
            inputs = _batch(clone)
            run(clone, inputs)
    except Unproved:
        raise
    except Exception as error:  # whatever foreign code says of a clone it cannot build or run
        raise Unproved(f"its clone does not run: {brief(error)}") from error
    try:
        return Subject(clone, inputs, find_layer_list(clone))
    except PlanError as error:
        raise Unproved(str(error)) from error


def brief(error: BaseException) -> str:
    """The kind of an error, and how its message begins."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def _build(kind: Any, config: Any) -> Any:
    return from_config(kind, config, dtype=torch.float32)


def _batch(model: Any) -> dict[str, Tensor]:
    known = inspect.signature(model.forward).parameters
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(3, vocabulary, (_ROWS, _LENGTH))
    inputs = {"input_ids": ids}
    if "attention_mask" in known:
        mask = torch.ones_like(ids)
        mask[1, -_PADDED:] = 0
        inputs["attention_mask"] = mask
    return inputs


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The first tensor that the model returns: its logits, or its last hidden states."""
    with torch.enable_grad(), torch.device("cpu"), keep_float64():
        output = model(**inputs)
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return first


def cotangent(output: Tensor) -> Tensor:
    """Fixed random weights of everything in ``output``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device="cpu")


def gradients(model: Any, output: Tensor) -> dict[str, Tensor | None]:
    """Gradients of a fixed random combination of everything in ``output``."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(output, list(named.values()), cotangent(output), allow_unused=True)
    return dict(zip(named, found, strict=True))


def refuse(model: Any, reason: str) -> PlanError:
    """Inference gave nothing: what the user is told."""
    return PlanError(
        f"a blueprint of {model.config.model_type!r} could not be inferred from {type(model).__name__}: {reason}"
    )
