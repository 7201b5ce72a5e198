"""Build tiny clones; run a model on two tokens, mostly on the meta device, to record the order of its modules."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._compat.torch import TorchDispatchMode, tree_leaves
from ..._compat.torch_device import fork_random_state
from ..._compat.transformers.classes import from_config, takes_argument
from ..._compat.transformers.recurrences import CONVOLUTION, SCANS
from ...models.clone import tiny_clone
from ...models.fields import text_config
from ...models.module_kinds import takes_routes
from ...plan.drafting.boundary_modules import PROBED
from ...testing.differences import difference

_LARGEST = 30_000_000  # maximum of a clone's parameters, which take a second or two to draw


def tiny_model(model: Any) -> Any | None:
    """Return a tiny clone with real float32 weights, a dtype that every kernel supports; ``None`` if it cannot be
    built.
    """
    return tiny_model_of(type(model), model.config, torch.float32)


def tiny_model_of(
    kind: Any,
    config: Any,
    dtype: torch.dtype,
    **changes: Any,
) -> Any | None:
    """Return a tiny clone with ``changes`` to its config (see :func:`hfscale.models.clone.tiny_clone`); ``None`` if it
    cannot be built or has too many parameters.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            small = tiny_clone(config, **changes)
            return None if size_of(kind, small) > _LARGEST else on_cpu(kind, small, dtype)
        except Exception:  # of any type: stock code cannot build it
            return None


def size_of(kind: Any, config: Any) -> int:
    """Return the number of parameters of a model of class ``kind``."""
    with torch.device("meta"):
        return sum(
            parameter.numel()
            for parameter in from_config(kind, config, dtype=torch.float32).parameters()
        )


def on_cpu(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model of class ``kind`` on the CPU, whatever the default device is."""
    with torch.device("cpu"):
        return from_config(kind, config, dtype=dtype)


@torch.no_grad()
def perturb(model: nn.Module, scale: float) -> None:
    """Add noise to all weights, because norms start as ones, biases as zeros, and small initial values hide
    differences.
    """
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * scale)


def without_cache(model: Any) -> dict[str, bool]:
    """Return the arguments that make the model keep no key/value cache."""
    return {"use_cache": False} if takes_argument(model, "use_cache") else {}


def apart(found: Tensor, wanted: Tensor, floor: float = 1e-30) -> float:
    """Return the largest difference between two tensors, relative to the largest entry of ``wanted``, or to ``floor``
    if that is larger; infinite if their shapes differ.
    """
    return difference(found, wanted, floor=floor) if found.shape == wanted.shape else float("inf")


def end_texts(ids: Tensor, config: Any) -> None:
    """Let texts for an encoder-decoder end with its end-of-text token, at which it classifies texts."""
    end = getattr(text_config(config), "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):
        ids[:, -1] = end


def names_no_size(*texts: str) -> bool:
    """Return whether a reason contains no digit, so that it also holds for models of other sizes."""
    return not any(letter.isdigit() for text in texts for letter in text)


class Reached(Exception):
    """Signal, from a hook, that the probe has recorded enough, so that the forward pass can end."""


class Probe(TorchDispatchMode):
    """Run ``model`` with hooks on its modules; ``failure`` is the reason why it could not run, or empty."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.failure = ""
        self._handles: list[Any] = []

    def _before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _run(self, **inputs: Any) -> None:
        model: Any = self.model
        device = next(model.parameters()).device
        ids = torch.full(PROBED, 3, dtype=torch.long, device=device)
        end_texts(ids, model.config)
        if device.type != "meta" and takes_argument(model, "use_cache"):
            # On the meta device, transformers' masks need a cache; on other devices, classes without attention must get
            # no cache.
            inputs.setdefault("use_cache", False)
        modes = [(module, module.training) for module in model.modules()]
        inputs = {
            "input_ids": ids,
            **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}),
            **inputs,
        }
        try:
            model.eval()  # some models leave out layers at random while they train
            with torch.no_grad(), fork_random_state(device), self:
                model(**inputs)
        except Reached:
            pass
        except Exception as error:  # of any type: stock code may need values
            self.failure = f"{type(error).__name__}: {error}".split("\n")[0][:100]
        finally:
            for module, training in modes:
                module.training = training
            while self._handles:
                self._handles.pop().remove()

    def _operated(self, given: list[Tensor], result: Any) -> None:
        """Inspect the input tensors and the result of one torch operation; called for every operation of the pass."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operated(
            [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], result
        )
        return result


ProbeT = TypeVar("ProbeT", bound=Probe)


def probed(probe: Callable[..., ProbeT], model: Any, *about: Any) -> ProbeT:
    """Run the ``probe`` on the model itself, mostly on the meta device; if that fails, because the model's code reads
    values of tensors, run it on a tiny clone.
    """
    result = probe(model, *about)
    clone = tiny_model(model) if result.failure else None
    return result if clone is None else probe(clone, *about)


@contextmanager
def skipped_experts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make experts return zeros inside the ``with`` block, because the routing depends on values, and expert kernels
    support few dtypes. No layer ends in an expert.
    """
    skipped = [
        module for module in modules if takes_routes(module) and "forward" not in module.__dict__
    ]
    for module in skipped:
        module.forward = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module in skipped:
            del module.forward


class TokenByToken:
    """Replace convolutions and scans of mixers by functions of each single token's inputs, so that no token depends on
    another one.
    """

    def replacement(self, name: str, function: Any) -> Any:
        """Return a function of single tokens, to be called by a mixer in place of its convolution or scan ``function``
        of this ``name``.
        """
        if name == CONVOLUTION:
            return lambda x, weight, *_, **__: torch.tanh(x) * weight.sum(-1)[:, None]
        scan = SCANS[name]

        def scanned(*args: Any, **kwargs: Any) -> Any:
            given = {
                **dict(zip(inspect.signature(function).parameters, args, strict=False)),
                **kwargs,
            }
            y = given[scan.output]
            for argument, dim in scan.tokens.items():
                if (x := given.get(argument)) is not None:
                    token = x.transpose(1, dim).flatten(2).mean(-1) if x.ndim > 2 else x
                    y = y * (
                        1
                        + token.view(
                            len(token),
                            *(-1 if d == dim else 1 for d in range(1, y.ndim)),
                        )
                    )
            return (y, None) if scan.pairs else y

        return scanned
