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

from .._host.transformers.classes import stock_class
from .._host.transformers.computing import begins_anew, is_within_packing, packing, text_positions, uses_flash_attention
from ..errors import ConfigError
from ..families.facts import ask
from ..runtime import Part, Runtime
from ..runtime.batches import with_borders
from ..runtime.local_weights import LocalWeights


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
        about = f"from {start}{' by flash attention' if flash else ''}"
        why: str = ask("documents", model, about, stock=kind, kind=kind, flash=flash, start=start)
        return why

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
