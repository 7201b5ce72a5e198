"""Hook modules inside a model with sharded sequences: its text model, rotary embeddings, and token mixers.

Mixers other than attention (convolutions, recurrences), and attention in a family's own code, which reads masks and
biases by itself, run on full sequences: each rank runs them on all tokens and keeps its own tokens of the output. The
result is exact, but the work is repeated on every rank. Weight gradients are partial, since on each rank only the
outputs of its own tokens have a gradient. Rotary embeddings whose frequencies depend on the length of the sequence
are called with all positions. A multimodal model's sequences are sharded at the input of its text model::

    ids [b, s] --embedding--> [b, s, h] --pictures put in--> [b, s, h] --cut--> [b, s/n, h] --layers, head--> own logits
    pictures --towers, whole, on every context rank--^        masks, positions [3, b, s] --cut--^

On each rank, a tower's gradient comes from the rank's own tokens. It is partial, like the gradient of every other
weight, and is summed over context ranks in the same reduction.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import tree_map
from ..._compat.transformers.caches import CACHE_LENGTHS
from ..._compat.transformers.classes import forward_arguments, takes_argument
from .attention_override import AttentionCall, current_batch, learn
from .cut_batch import CutBatch, MaskBlocks, cut_inputs
from .engine import OwnBlocks
from .methods import read

Gather = Callable[[Tensor, CutBatch], Tensor]
"""Type of a function that all-gathers a tensor along the sequence: this rank's tokens ``[b, s of this rank, ...]`` ->
all tokens ``[b, s, ...]``, in the order of the sequence. The function is collective and differentiable.
"""
_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the largest position (Peng et al. 2023; Ding et al. 2024)."""

_BIASES = ("alibi", "position_bias")
"""Names of arguments that hold an attention bias per key of the full sequence, ``[heads, 1, tokens]``.

These arguments have all tokens already, so they are not gathered over context ranks. Their dim of size 1 does not index
tokens, even if a rank has one token.
"""


class WholeSequences:
    """Run a token mixer (a module that mixes tokens) on full sequences: gather its inputs, and keep this rank's tokens
    of its output.

    ``current`` returns the batch of the running forward pass, or of the first forward pass of a layer that is
    recomputed.
    """

    def __init__(
        self, gather: Gather, current: Callable[[], CutBatch | None] = current_batch
    ) -> None:
        self._gather = gather
        self._current = current

    def install(self, module: nn.Module, reads_masks: bool = False) -> list[Any]:
        """Install hooks that run ``module`` on full sequences, and return the hooks' handles.

        ``reads_masks``: the module is attention in a family's own code, which gets transformers' mask of all tokens.
        """
        running: list[CutBatch | None] = []

        def before(
            _: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:
            batch = self._current()
            running.append(batch)
            if batch is None:
                return None
            whole = tuple(self._whole("", value, batch, reads_masks) for value in args)
            named = {
                name: self._whole(name, value, batch, reads_masks) for name, value in kwargs.items()
            }
            return whole, named

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            batch = running.pop()
            return output if batch is None else own_tokens(output, batch)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after),
        ]

    def _whole(self, name: str, value: Any, batch: CutBatch, reads_masks: bool) -> Any:
        if isinstance(value, MaskBlocks):
            return (
                value.dense
                if reads_masks
                else replace(value.of_groups(batch.split.size), attend=read_alone)
            )
        if isinstance(value, dict):
            return {
                key: self._whole(f"{name} {key}", each, batch, reads_masks)
                for key, each in value.items()
            }
        if "mask" in name and (value is None or (isinstance(value, Tensor) and value.ndim == 2)):
            return _padding(value, batch)
        if "position_ids" in name and isinstance(value, Tensor):
            return batch.whole_positions(value.device)
        if any(bias in name for bias in _BIASES):
            return value
        return _on_tokens(
            value,
            batch.split.length(batch.rank),
            lambda x: self._gather(x, batch),
        )


def own_tokens(output: Any, batch: CutBatch) -> Any:
    """Select this rank's tokens from a module's output for full sequences: tensors ``[b, s, ...]``."""
    return _on_tokens(
        output,
        batch.split.total,
        lambda x: x.index_select(1, batch.places(x.device)),
    )


def _on_tokens(value: Any, tokens: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to each tensor ``[b, tokens, ...]`` or ``[1, 1, tokens, ...]`` (positions) in ``value``, a
    tensor or nested lists and tuples.
    """

    def changed(x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim > 3 and x.shape[:3] == (1, 1, tokens):
            return change(x[0])[None]
        return change(x) if isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == tokens else x

    return tree_map(changed, value) if isinstance(value, (Tensor, tuple, list)) else value


def _padding(value: Tensor | None, batch: CutBatch) -> Tensor | None:
    """Return the padding mask of all tokens, in the dtype of the given mask ``value`` (boolean if ``value`` is
    ``None``).

    If the batch has no padding, return ones for a given mask, and ``None`` for ``None``.
    """
    if batch.padding is None:
        return None if value is None else value.new_ones(len(value), batch.split.total)
    return batch.padding.to(batch.padding.dtype if value is None else value.dtype)


def read_alone(
    _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall
) -> Tensor:
    """Compute attention on this rank only, which has the queries, keys and values of full sequences."""
    return read(q, k, v, mask, call, OwnBlocks())


def counting_tables(model: nn.Module) -> list[nn.Module]:
    """Return the position embeddings that count positions from the first token of their input.

    Return an empty list if ``model`` takes ``position_ids``, which it passes to its position embeddings.
    """
    if takes_argument(model, "position_ids"):  # which the model passes to the position embeddings
        return []
    tables = list[nn.Module]()
    for table in model.modules():
        if isinstance(table, nn.Embedding):
            told = forward_arguments(type(table).forward)[0]
            if "position_ids" in told and CACHE_LENGTHS & told:
                tables.append(table)
    return tables


def ask_for_all_positions(model: nn.Module) -> list[Any]:
    """Make rotary and position embeddings use positions in the full sequence, not among this rank's tokens; return the
    handles of the hooks.
    """
    tables = counting_tables(model)
    handles: list[Any] = [
        table.register_forward_pre_hook(_by_places, with_kwargs=True) for table in tables
    ]
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(
            kind in _BY_LENGTH for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
        ):
            handles.append(module.register_forward_pre_hook(_all_positions, with_kwargs=True))
            handles.append(module.register_forward_hook(_own_positions))
    return handles


def _by_places(
    table: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    batch = current_batch()
    return (
        None
        if batch is None
        else (
            args[:1],
            {
                **kwargs,
                "position_ids": batch.places(table.weight.device),
            },
        )
    )


def _all_positions(
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    batch = current_batch()
    if batch is None:
        return None
    given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    whole = batch.whole_positions(given.device).expand(*given.shape[:-1], -1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": whole}
    return (args[0], whole, *args[2:]), kwargs


def _own_positions(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    batch = current_batch()
    return (
        output
        if batch is None
        else tuple(table[..., batch.places(table.device), :] for table in output)
    )


def cut_inside(text: nn.Module, learned: Callable[[CutBatch], None] = learn) -> Any:
    """Install a hook on ``text``, the text model of a multimodal model, that selects this rank's tokens from its
    inputs.

    The multimodal model calls ``text`` with full sequences. ``learned`` is called in each pass with the batch,
    including the positions that the multimodal model has computed. Returned is the hook's handle.
    """
    names = list(inspect.signature(text.forward).parameters)

    def before(
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        batch = current_batch()
        if batch is None:
            return None
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if "position_ids" in names and given.get("position_ids") is None:
            tokens = (given.get(name) for name in ("inputs_embeds", "input_ids"))
            device = next((token.device for token in tokens if isinstance(token, Tensor)), None)
            given["position_ids"] = torch.arange(batch.split.total, device=device)[None]
        learned(replace(batch, position_ids=given.get("position_ids")))
        # These arguments are sharded already.
        passed_on = {name: given.pop(name) for name in batch.cut_first if name in given}
        return (), {**cut_inputs(batch, given), **passed_on}

    return text.register_forward_pre_hook(before, with_kwargs=True)
