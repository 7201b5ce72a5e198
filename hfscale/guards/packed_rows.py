"""Packed rows: several documents in one row of tokens, told apart by ``position_ids`` that begin anew.

No document may change what is computed of another. Attention keeps them apart by masks made from the positions
(``packing``), whatever the family hands to the host's mask functions. Recurrences, convolutions and positions that a
model counts by itself pass from one document to the next: such models are refused before their first packed step.
Which ones do is found out once per class and config, by a tiny copy that is given documents in one row and one by one.
"""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .._host.transformers.attention import answer, set_implementation
from .._host.transformers.classes import stock_class
from .._host.transformers.computing import begins_anew, is_within_packing, packing, text_positions, uses_flash_attention
from ..errors import ConfigError
from ..families.clone import VOCABULARY, layers_of_every_kind
from ..planner.probe import tiny_model_of
from ..planner.remembered import Remembered, said_by
from ..runtime import Part, Runtime
from ..runtime.batches import BORDERS, with_borders
from ..runtime.local_weights import LocalWeights

_LENGTHS = (1, 6, 1, 4)
_TOLERANCE = 1e-4
"""Relative, in float32. What passes from one document to the next changes these logits by 1e-2 and more."""
_found: Remembered[str] = Remembered()


def check_packed_rows(model: Any, batches: Iterable[Mapping[str, Any]] = (), start: int = 0) -> None:
    """Refuse packed rows for a model that does not keep their documents apart.

    Args:
        model: a stock model, parallelized or not.
        batches: some of which hold packed rows.
        start: the position of a document's first token, where there are no batches yet.

    Raises:
        ConfigError: a tiny copy of it computes other logits for documents in one row than for each by itself.
    """
    kind, flash = stock_class(model), uses_flash_attention(model)

    def found(start: int) -> str:
        key = (kind, said_by(model.config), flash, start)
        return _found.answer(key, lambda: _difference(kind, model.config, flash, start))

    why = found(start)
    given = [each["position_ids"] for each in batches if isinstance(each.get("position_ids"), Tensor)] if why else []
    if given and (first := min(int(positions.min()) for positions in given)) > 0:  # as RoBERTa counts them
        why = found(first)
    if why:
        raise ConfigError(
            f"documents in one row (position_ids that begin anew within it) must not affect each other, but in "
            f"{kind.__name__} they do ({why}): give every document its own row (packing=False, padding_free=False, "
            "data.packing=false, a collator that pads)"
        )


def _difference(kind: Any, config: Any, flash: bool, start: int = 0) -> str:
    """Return what differs between documents in one row and one by one; nothing where they are computed alike."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        model = tiny_model_of(kind, config, torch.float32, layers=layers_of_every_kind(config))
        if model is None:
            return "no tiny copy of it could be made to prove the contrary"
        for parameter in model.parameters():  # first values are so small that layers hardly change anything
            parameter.add_(0.1 * torch.randn_like(parameter))
        if flash:
            set_implementation(model.config.get_text_config(), answer("documents_", "sdpa", _attend, _no_mask))
        ids = torch.randint(3, min(VOCABULARY, 60), (1, sum(_LENGTHS)))
        positions = torch.cat([torch.arange(length) + start for length in _LENGTHS])[None]
        try:
            parts = [_logits(model.eval(), {"input_ids": part}) for part in ids.split(_LENGTHS, dim=1)]
            batch = {"input_ids": ids, "position_ids": positions}
            with packing(True, batch):
                found = _logits(model, with_borders(batch, model) if flash else batch)
        except Exception as error:  # whatever stock code says of arguments that it does not take
            return f"{type(error).__name__}: {error}".split("\n")[0][:200]
    expected = torch.cat(parts, dim=1)
    if found.shape != expected.shape:
        return "its logits are not one row per token"
    relative = float((found - expected).abs().max() / expected.abs().max())
    return "" if relative <= _TOLERANCE else f"logits of a tiny copy change by {relative:.1g} of the largest"


def _logits(model: Any, batch: Mapping[str, Any]) -> Tensor:
    off = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    logits: Tensor = model(**batch, **off).logits
    return logits


def _attend(host: Any, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attend as a flash kernel does, which is told of documents by the lengths in ``cu_seq_lens_q`` alone."""
    starts = kwargs.pop(BORDERS[0], None)
    if starts is not None:
        documents = torch.bucketize(torch.arange(q.shape[2]), starts, right=True)
        mask = documents[:, None] == documents
        mask = (mask.tril() if getattr(module, "is_causal", True) else mask)[None, None]
    kwargs.pop("softcap", None)  # which sdpa does not take, and flash kernels do
    return host(module, q, k, v, mask, **kwargs)


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask, as the host does for flash kernels."""


class PackedRows(Part):
    """Documents of packed rows kept apart in plain loops too, or refused there."""

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Look at the positions of each pass that no step has looked at."""
        model = runtime.model
        names = list(inspect.signature(stock_class(model).forward).parameters)[1:]  # without self
        passes: list[ExitStack] = []

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            stack = ExitStack()
            passes.append(stack)
            if torch.compiler.is_compiling() or is_within_packing():
                return None
            batch = {**dict(zip(names, args, strict=False)), **kwargs}
            if not has_packed_rows(batch):
                return None
            check_packed_rows(model, [batch])
            stack.enter_context(packing(True, batch))
            return (args, {**kwargs, **with_borders(batch, model)}) if uses_flash_attention(model) else None

        def end(*_: Any) -> None:
            if passes:  # none, where a hook before `begin` has raised
                passes.pop().close()

        model.register_forward_pre_hook(begin, with_kwargs=True)
        model.register_forward_hook(end, always_call=True)


def has_packed_rows(batch: Mapping[str, Any]) -> bool:
    """Return whether positions begin anew within a row; waits for the device that they are on."""
    positions = batch.get("position_ids")
    positions = text_positions(positions) if isinstance(positions, Tensor) else None
    if positions is None or positions.shape[1] < 2:
        return False
    return bool(begins_anew(positions, batch.get("attention_mask")).any())
