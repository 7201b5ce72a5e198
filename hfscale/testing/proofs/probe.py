"""Run a model on two tokens, mostly without memory, to see what its modules do in which order."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._host.torch import TorchDispatchMode
from ..._host.torch_device import fork_random_state
from ..._host.transformers.classes import takes_argument
from ...families.expert_modules import takes_routes
from ...families.fields import text_config
from ...planner.around import PROBED


def end_texts(ids: Tensor, config: Any) -> None:
    """Let texts for an encoder-decoder end with the token for that, by which it classifies them."""
    end = getattr(text_config(config), "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):
        ids[:, -1] = end


def names_no_size(*texts: str) -> bool:
    """Return whether some words hold for models of other sizes: there is no number in them."""
    return not any(letter.isdigit() for text in texts for letter in text)


class Reached(Exception):
    """There is nothing more to see."""


class Probe(TorchDispatchMode):
    """A run of a model with hooks on its modules.

    Attributes:
        failure: why the model could not be run, if so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failure = ""
        self._handles: list[Any] = []

    def _before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, hook: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_hook(hook))

    def _run(self, model: Any, **inputs: Any) -> None:
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def skipped_experts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within: experts pass their tokens on. What they do depends on values, and on kernels that not every type of
    number has; it stays inside a layer in any case.
    """
    skipped = [module for module in modules if takes_routes(module) and "forward" not in module.__dict__]
    for module in skipped:
        module.forward = lambda hidden_states, *args, **kwargs: torch.zeros_like(hidden_states)
    try:
        yield
    finally:
        for module in skipped:
            del module.forward
