"""Run a model on two tokens, mostly without memory, to record which modules run in which order."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..._compat.torch import TorchDispatchMode, tree_leaves
from ..._compat.torch_device import fork_random_state
from ..._compat.transformers.classes import takes_argument
from ...models.fields import text_config
from ...models.module_kinds import takes_routes
from ...plan.drafting.boundary_modules import PROBED
from .clones import tiny_model


def end_texts(ids: Tensor, config: Any) -> None:
    """Make texts for an encoder-decoder end with its end-of-text token, at which it classifies them."""
    end = getattr(text_config(config), "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):
        ids[:, -1] = end


def names_no_size(*texts: str) -> bool:
    """Return whether a reason contains no number, so that it also holds for other model sizes."""
    return not any(letter.isdigit() for text in texts for letter in text)


class Reached(Exception):
    """Signal that the probe has seen enough."""


class Probe(TorchDispatchMode):
    """Run ``model`` with hooks on its modules; ``failure`` says why it could not be run, if so."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.failure = model, ""
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
            # Without values, the host's masks want a cache; with them, classes without attention want none.
            inputs.setdefault("use_cache", False)
        modes = [(module, module.training) for module in model.modules()]
        inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}), **inputs}
        try:
            model.eval()  # some models leave out layers at random while they train
            with torch.no_grad(), fork_random_state(device), self:
                model(**inputs)
        except Reached:
            pass
        except Exception as error:  # whatever stock code says of a run without memory
            self.failure = f"{type(error).__name__}: {error}".split("\n")[0][:100]
        finally:
            for module, training in modes:
                module.training = training
            while self._handles:
                self._handles.pop().remove()

    def _operated(self, given: list[Tensor], result: Any) -> None:
        """Inspect the tensors of an operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operated([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)], result)
        return result


ProbeT = TypeVar("ProbeT", bound=Probe)


def probed(probe: Callable[..., ProbeT], model: Any, *about: Any) -> ProbeT:
    """Probe the model itself, mostly without memory, or, where its code looks at values, a tiny clone of it."""
    found = probe(model, *about)
    clone = tiny_model(model) if found.failure else None
    return found if clone is None else probe(clone, *about)


@contextmanager
def skipped_experts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Skip the experts inside the with block: their routes depend on values, their kernels support few dtypes, and no
    layer boundary is inside them.
    """
    skipped = [module for module in modules if takes_routes(module) and "forward" not in module.__dict__]
    for module in skipped:
        module.forward = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module in skipped:
            del module.forward
