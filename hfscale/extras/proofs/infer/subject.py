"""Build the model from which a blueprint is derived: a tiny clone, on the CPU in float64, with a batch to run."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...._compat.transformers.experts import compute_eagerly
from ....errors import PlanError
from ....models.clone import tiny_clone
from ....models.precision import keep_float64
from ....plan.drafting.layers import find_layer_list
from ..probe import on_cpu, perturb, size_of

_LARGEST = 3_000_000  # maximum of a clone's parameters; more means that it is not small
_ROWS = 3
_LENGTH = 7
_PADDED = 2


class Unproved(Exception):
    """Raised if a hypothesis does not hold on the clone, or the clone cannot be tested; the message contains the
    reason.
    """


class Unplanned(Unproved):
    """Raised if the clone itself cannot be planned, for example because its sizes are not divisible by the number of
    ranks.
    """


@dataclass
class Subject:
    """Hold a tiny clone of a model, and a batch for it whose rows have padding."""

    model: Any  # the clone, in evaluation mode
    inputs: dict[str, Tensor]  # arguments of its forward pass
    layers: str  # name of the layer list in the clone

    @property
    def layer_names(self) -> list[str]:
        """The names of the layers, in order."""
        return [
            f"{self.layers}.{name}"
            for name, _ in self.model.get_submodule(self.layers).named_children()
        ]

    @cached_property
    def reference(self) -> tuple[Tensor, dict[str, Tensor | None]]:
        """The output of the unchanged clone, and the gradients of its parameters; a tied parameter occurs once."""
        return run_backward(self.model, self.inputs, dict(self.model.named_parameters()))


@contextmanager
def aside() -> Iterator[None]:
    """Set a fixed seed and use a single torch thread in the ``with`` block; the caller's RNG state is restored after
    it. More threads would slow small tensors down.
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
    """Build a clone of ``model``, with ``changes`` to its tiny config, and a batch for it; raise :class:`Unproved` if
    that fails.
    """
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids" and "input_ids" not in inspect.signature(model.forward).parameters:
        raise Unproved(f"the model reads {reads}, but the inference tries input_ids alone")
    try:
        config = tiny_clone(model.config, **changes)
    except Exception as error:  # of any type: transformers checks sizes
        raise Unproved(f"the config of the model cannot be made small: {brief(error)}") from error
    try:
        config.use_cache = False
        compute_eagerly(config)  # transformers' grouped products lack float64
        size = size_of(type(model), config)
        if size > _LARGEST:
            raise Unproved(
                f"a tiny copy of the model still has {size:,} parameters: the config's sizes have names that "
                "hfscale.models.clone does not know: write a blueprint for this family"
            )
        with aside(), torch.device("cpu"):
            clone = on_cpu(type(model), config, torch.float32).double().eval()
            # Train all parameters, as `from_pretrained` does even with those that stock code freezes.
            clone.requires_grad_(True)
            perturb(clone, 0.05)
            inputs = _batch(clone)
            run(clone, inputs)
        return Subject(clone, inputs, find_layer_list(clone))
    except Unproved:
        raise
    except PlanError as error:
        raise Unproved(str(error)) from error
    except Exception as error:  # of any type: errors of stock code
        raise Unproved(f"a tiny copy of the model does not run: {brief(error)}") from error


def brief(error: BaseException) -> str:
    """Return an error's class and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def _batch(model: Any) -> dict[str, Tensor]:
    ids = torch.randint(3, model.get_input_embeddings().num_embeddings, (_ROWS, _LENGTH))
    if "attention_mask" not in inspect.signature(model.forward).parameters:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, -_PADDED:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return the model's first result: its logits, or its last hidden states."""
    with torch.enable_grad(), torch.device("cpu"), keep_float64():
        output = model(**inputs)
    return output if isinstance(output, Tensor) else output[0]


def run_backward(
    model: Any, inputs: dict[str, Tensor], parameters: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return :func:`run`'s output, and the gradients of a fixed random combination of all its entries. Parameters that
    the class itself freezes have ``None``.
    """
    output = run(model, inputs)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(output.shape, generator=generator, dtype=output.dtype, device="cpu")
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    leaves = [parameters[name] for name in trained]
    gradients = torch.autograd.grad(output, leaves, weights, allow_unused=True)
    return output.detach(), {
        **dict.fromkeys(parameters),
        **dict(zip(trained, gradients, strict=True)),
    }
