"""Select the tokens of one context rank from a batch of full sequences, and evaluate the attention mask in blocks.

Labels are shifted before the batch is sharded, since the label of a rank's last token may be on another rank. A
multimodal model receives all ids and pictures and computes the embeddings of all tokens; the sequences are sharded at
the input of its text model (:mod:`.inner_hooks`).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._compat.transformers.computing import and_masks, causal_mask_function, leave_out_padding
from ..._compat.transformers.packed_rows import (
    documents_of,
    keep_documents_apart,
    starts_of,
    text_positions,
)
from ...errors import ConfigError
from ...plan.batch_fields import BatchField
from ...plan.feature_plans import ROUTES
from ...plan.sequence_split import Interval, Split, tokens_of
from .sequence_plan import AT_MARKED

# The dim of each argument that indexes tokens. It is looked up by the argument's name and not by size, since a dim of
# another input may have as many entries as the sequence has tokens by chance.
_TOKENS_ALONG = {
    **dict.fromkeys(
        ("input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids"), 1
    ),
    **dict.fromkeys(("labels", "shift_labels", "visual_pos_masks", "per_layer_inputs", ROUTES), 1),
    "position_ids": -1,
}
_CUT_FIRST = ("labels", "shift_labels", ROUTES)
_NO_TOKENS = (
    "use_cache",
    "return_dict",
    "output_hidden_states",
    "num_items_in_batch",
    "output_attentions",
)
# The kinds of a block of the mask. A block holds the queries of one interval of tokens and the keys of another.
SKIPPED = "skipped"
FULL = "full"
CAUSAL = "causal"
MASKED = "masked"
_ROWS = 1024  # rows of a block of the mask that are evaluated at once


@dataclass(frozen=True)
class CutBatch:
    """Describe a batch of full sequences, and which of their tokens one context rank computes."""

    split: Split
    rank: int
    # ``[b, s]`` of the full sequences, False where a token is padding; ``None``: no token is padding
    padding: Tensor | None = None
    # The batch's positions of the full sequences: ``[1 or b, s]``, or ``[3, b, s]`` (time, height, width), or
    # ``[4, b, s]`` (text, time, height, width); ``None``: the batch has no positions
    position_ids: Tensor | None = None
    # ``[b, s]``: which example of a packed row each token is in; ``None``: every row is one example
    documents: Tensor | None = None
    # the positions at which the documents begin: a list per row, or one list if all rows are equal
    starts: tuple[tuple[int, ...], ...] | None = None
    # the arguments that features add to a forward pass, by name
    added: Mapping[str, BatchField] = field(default_factory=dict)

    @property
    def cut_first(self) -> tuple[str, ...]:
        """The arguments that are sharded before the model runs. A multimodal model's other arguments are sharded later,
        at the input of its text model.
        """
        return (*_CUT_FIRST, *self.added)

    def places(self, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's tokens in the sequence."""
        return self.split.places(self.rank, device)

    def to(self, device: torch.device) -> "CutBatch":
        """Return the batch with its tensors on ``device``."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name in ("padding", "position_ids", "documents")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved) if moved else self

    def whole_positions(self, device: torch.device) -> Tensor:
        """Return the positions of all tokens, ``[..., s]``: ``position_ids``, or 0, 1, 2, ... without them."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.split.total, device=device)[None]


def cut_batch(
    batch: Mapping[str, Any],
    size: int,
    rank: int,
    shift: int,
    counted: Tensor | None,
    inside: bool = False,
    whole_mask: bool = False,
    added: Mapping[str, BatchField] | None = None,
) -> tuple[CutBatch, dict[str, Any]]:
    """Return a description of the batch of full sequences for context rank ``rank`` of ``size``, and the batch with
    only this rank's tokens.

    Args:
        batch: the batch of full sequences.
        size: number of context ranks.
        rank: this context rank.
        shift: by how many tokens ``labels`` are shifted (1 for causal language models).
        counted: the positions that the model would give the tokens of the full sequences; used if the batch has no
            ``position_ids``, since the model would count this rank's tokens from 0.
        inside: whether the model has a text model inside, at whose input its inputs are sharded later
            (:func:`.inner_hooks.cut_inside`). Then only the other arguments, such as labels, are sharded here.
        whole_mask: give the model the ``attention_mask`` of all tokens. The model makes biases of it (ALiBi, Press et
            al. 2022) for attention that runs on full sequences.
        added: the arguments that features add to the batch, by name.

    Raises:
        ConfigError: a sequence has fewer tokens than there are ranks, or an argument cannot be sharded.
    """
    samples, total = tokens_of(batch)
    if total < size:
        raise ConfigError(
            f"sequences of {total} tokens are cut over cp_size={size} ranks, so some ranks would have no tokens: use "
            "longer sequences, or a smaller cp_size"
        )
    split = Split(total, size)
    padding = _padding(batch.get("attention_mask"))
    positions = batch.get("position_ids")
    of_text = None if positions is None else text_positions(positions)
    documents = starts = None  # every row is one document
    if of_text is not None:
        documents = documents_of(of_text.expand(samples, -1), batch.get("attention_mask"))
        # If the batch is on the device, the host waits for it here, once.
        starts = starts_of(documents)
        if not any(starts):
            documents = starts = None
    whole = dict(batch)
    if padding is None:
        whole.pop("attention_mask", None)
    if whole.get("labels") is not None and shift:
        whole["labels"] = F.pad(whole["labels"], (0, shift), value=-100)[..., shift:]
    known = CutBatch(split, rank, padding, positions, documents, starts, added or {})
    if inside:
        return known, {
            **whole,
            **cut_inputs(known, {name: whole[name] for name in known.cut_first if name in whole}),
        }
    if counted is not None and positions is None:
        whole["position_ids"] = counted
    part = cut_inputs(known, whole)
    if whole_mask:
        mask = batch.get("attention_mask")
        device = next(value.device for value in part.values() if isinstance(value, Tensor))
        part["attention_mask"] = (
            torch.ones(samples, total, dtype=torch.long, device=device) if mask is None else mask
        )
    return known, part


def cut_inputs(batch: CutBatch, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with only this rank's tokens of the full sequences; arguments without a token dim are
    unchanged.
    """
    marks = {name: given[mask] for name, mask in AT_MARKED.items() if given.get(name) is not None}
    return {
        name: _marked(value, marks[name], batch) if name in marks else _part(name, value, batch)
        for name, value in given.items()
    }


def _padding(mask: Any) -> Tensor | None:
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ConfigError(
            f"an attention_mask of {mask.ndim} dims cannot be cut along the sequence: pass an attention_mask of shape "
            "[samples, tokens], or position_ids that begin anew with every packed example"
        )
    return None if bool(mask.all()) else mask.bool()


def _marked(rows: list[Tensor], marks: Tensor, batch: CutBatch) -> list[Tensor]:
    """Select this rank's tokens from tensors that have one row for each token that the mask ``marks [b, s]`` marks, in
    order.
    """
    own = torch.zeros_like(marks)
    own[:, batch.places(marks.device)] = True
    kept = own[marks.bool()].bool()
    return [row[kept.to(row.device)] for row in rows]


def _part(name: str, value: Any, batch: CutBatch) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or name in _NO_TOKENS:
        return value
    dim = batch.added[name].token_dim if name in batch.added else _TOKENS_ALONG.get(name)
    total = batch.split.total
    if dim is None or value.shape[dim] != total:
        raise ConfigError(
            f"{name} of shape {tuple(value.shape)} cannot be cut along sequences of {total} tokens: leave {name} out, "
            "or use cp_size=1"
        )
    return value.index_select(dim, batch.places(value.device))


@dataclass
class MaskBlocks:
    """Evaluate the attention mask of one forward pass block by block; a block has the queries of one interval of tokens
    and the keys of another.

    A block is skipped (no query reads a key), full (every query reads every key), causal, or masked in another way.
    Only for a block of the last kind is a mask tensor made.
    """

    batch: CutBatch
    # transformers' mask function of full-sequence positions: (sample, head, query, key) -> whether query attends to key
    function: Callable[..., Tensor]
    samples: int
    device: torch.device
    # Computes the attention of calls with this mask: ``(module, q, k, v, mask, call)``.
    attend: Callable[..., Any]
    # makes transformers' dense mask of all tokens from the mask function, for attention in a family's own code
    host: Callable[[Callable[..., Tensor]], Any]
    # ``[b, s]``: True for queries that may read no key, and therefore read all keys with equal weight; ``None``: such
    # queries read nothing
    idle: Tensor | None = None
    # where documents begin, if the mask is exactly causal within each document; otherwise ``None``
    starts: tuple[tuple[int, ...], ...] | None = None
    _kinds: dict[tuple[Interval, Interval], str] = field(default_factory=dict)
    _others: dict[int, "MaskBlocks"] = field(default_factory=dict)

    def of_examples(self) -> "MaskBlocks":
        """Return this mask restricted to single examples: no query reads padding, or a key of another document in a
        packed row.
        """
        function = self.function
        batch = self.batch
        starts = (
            batch.starts if function is causal_mask_function and batch.padding is None else None
        )
        if batch.documents is not None:
            positions = text_positions(batch.whole_positions(self.device))
            assert positions is not None  # the documents were derived from the positions
            function = keep_documents_apart(
                function, positions.expand(self.samples, -1), batch.documents
            )
        if batch.padding is not None:
            function = and_masks(function, leave_out_padding(batch.padding))
        return replace(self, function=function, starts=starts, _kinds={})

    @cached_property
    def members(self) -> tuple[list[Tensor], Tensor]:
        """For each rank of this rank's group, the indices of its tokens among the group's tokens, and the permutation
        that sorts the concatenated tokens of all these ranks by position.
        """
        places = self.batch.split.members(self.batch.rank, self.device)
        return places, torch.cat(places).argsort()

    @cached_property
    def dense(self) -> Any:
        """The mask of all tokens as transformers makes it for the model's attention implementation, for example as a
        4-D tensor.
        """
        return self.host(self.function)

    def to(self, dtype: torch.dtype) -> "MaskBlocks":
        """Return a copy of this mask whose mask of all tokens, :attr:`dense`, is converted to ``dtype``."""
        return replace(
            self, host=lambda f: None if (made := self.host(f)) is None else made.to(dtype)
        )

    def filled(self) -> "MaskBlocks":
        """Return this mask changed so that queries that may read no key (left padding) read all keys with equal weight.

        These queries are marked in ``idle``.
        """
        every = (0, self.batch.split.total)
        reads = [self.block(rows, every).any(-1).squeeze(1) for rows in _chunks(every)]
        idle = ~torch.cat(reads, -1)
        return replace(self, idle=idle, _kinds={}, _others={}) if bool(idle.any()) else self

    @cached_property
    def without_idle(self) -> "MaskBlocks":
        """This mask, but queries that may read no key (left padding) read nothing. The mask itself may let them read
        all keys with equal weight.
        """
        return self if self.idle is None else replace(self, idle=None, _kinds={}, _others={})

    def of_groups(self, size: int) -> "MaskBlocks":
        """Return this mask for head exchange (Ulysses) in groups of ``size`` ranks, where every rank computes all
        tokens of its group.
        """
        if size not in self._others:
            split = Split(self.batch.split.total, self.batch.split.size // size, size)
            batch = replace(self.batch, split=split, rank=self.batch.rank // size)
            self._others[size] = replace(self, batch=batch, _others={})
        return self._others[size]

    def kind(self, rows: Interval, columns: Interval) -> str:
        """Return how queries in ``rows`` read keys in ``columns``: skipped, full, causal or masked."""
        if rows[0] == rows[1] or columns[0] == columns[1]:
            return SKIPPED
        if (rows, columns) not in self._kinds:
            starts = ((),) if self.function is causal_mask_function else self.starts
            if starts is None:
                pieces = self.batch.split.pieces
                ranks = range(self.batch.split.size)
                every = [
                    (own, other)
                    for own in pieces(self.batch.rank)
                    for r in ranks
                    for other in pieces(r)
                ]
                self._find_mask_kinds([*dict.fromkeys([(rows, columns), *every])])
            else:
                self._kinds[rows, columns] = _causal_kind(rows, columns, starts)
        return self._kinds[rows, columns]

    def _find_mask_kinds(self, pairs: Sequence[tuple[Interval, Interval]]) -> None:
        """Find, for each pair of a query interval and a key interval, whether its block of the mask is skipped, full,
        causal or masked otherwise.

        All pairs together take a single device synchronization.
        """
        flags = dict[tuple[Interval, Interval], Tensor]()
        for rows, columns in pairs:
            for chunk in _chunks(rows) if columns[0] < columns[1] else ():
                block = self.block(chunk, columns)
                # If windows and documents are at least as long as the interval, the block is exactly causal.
                below = torch.ones_like(block[0, 0]).tril(chunk[0] - columns[0])
                here = torch.stack(
                    [
                        block.any(),
                        ~block.all(),
                        (block != below).any(),
                    ]
                )
                flags[rows, columns] = flags.get((rows, columns), here) | here
        for pair, (some, hidden, other) in zip(
            flags, torch.stack([*flags.values()]).tolist(), strict=True
        ):
            causal = pair[0] == pair[1] and not other
            self._kinds[pair] = (
                FULL if not hidden else CAUSAL if causal else MASKED if some else SKIPPED
            )

    def of_own(self, own: slice) -> Tensor:
        """Return ``[b, 1, rows, s]``, True where a query attends to a key. The rows are this rank's queries in the
        slice ``own``, and the columns are all keys. Rows of queries that may read no key are False.
        """
        return self._attends(
            self.batch.places(self.device)[own],
            torch.arange(self.batch.split.total, device=self.device),
        )

    def block(self, rows: Interval, columns: Interval) -> Tensor:
        """Return the mask of one block, ``[b, 1, rows, columns]``: True where a query in ``rows`` attends to a key in
        ``columns``.
        """
        attends = self._attends(
            *(torch.arange(*span, device=self.device) for span in (rows, columns))
        )
        if self.idle is not None:
            attends = attends | self.idle[:, None, slice(*rows), None]
        return attends

    def _attends(self, rows: Tensor, columns: Tensor) -> Tensor:
        sample = torch.arange(self.samples, device=self.device)
        head = torch.zeros_like(rows[:1])
        axes = (sample, head, rows, columns)
        attends = self.function(
            *(axis.view([-1 if dim == i else 1 for i in range(4)]) for dim, axis in enumerate(axes))
        )
        return attends.expand(self.samples, 1, len(rows), len(columns))

    def bias(self, rows: Interval, columns: Interval, dtype: torch.dtype) -> Tensor:
        """Return the mask of a block as a bias to add to scores: 0 or minus infinity."""
        attends = self.block(rows, columns)
        return torch.zeros((), dtype=dtype, device=attends.device).masked_fill(
            ~attends, float("-inf")
        )


def _chunks(rows: Interval) -> list[Interval]:
    """Divide an interval of rows of the mask into those that are evaluated at once."""
    return [(start, min(start + _ROWS, rows[1])) for start in range(*rows, _ROWS)]


def _causal_kind(rows: Interval, columns: Interval, starts: Sequence[Sequence[int]]) -> str:
    """Return whether a block of a mask is skipped, full, causal or masked otherwise, by arithmetic on positions.

    The mask is causal within documents, which begin at the positions ``starts``. The block has the queries of interval
    ``rows`` and the keys of interval ``columns``.
    """
    if rows != columns and columns[0] < rows[1] and rows[0] < columns[1]:
        return MASKED
    if rows[0] < columns[0]:
        return SKIPPED
    if not any(
        bisect_right(start, columns[0]) < bisect_right(start, rows[1] - 1) for start in starts
    ):
        return CAUSAL if rows == columns else FULL
    apart = all(
        bisect_right(start, columns[1] - 1) < bisect_right(start, rows[0]) for start in starts
    )
    return SKIPPED if apart else MASKED
