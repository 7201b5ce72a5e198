"""Cut a batch of full sequences into the tokens of one context rank.

Labels are shifted before the cut, since the label of a rank's last token may be on another rank. A multimodal model
gets all ids and pictures, computes the embeddings of all tokens, and is cut at the input of its text model
(:mod:`.inner_hooks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._compat.transformers.computing import begins_anew, text_positions
from ...errors import ConfigError
from ...plan.feature_plans import IDS, ROUTES, TARGETS
from ...plan.sequence_split import Split, tokens_of

# Along which dim the tokens of a whole sequence lie; by name, since other inputs may have as many entries by chance.
_TOKENS_ALONG = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "attention_mask": 1,
    "labels": 1,
    "shift_labels": 1,
    "position_ids": -1,
    "token_type_ids": 1,
    "mm_token_type_ids": 1,
    "visual_pos_masks": 1,
    "per_layer_inputs": 1,
    IDS: -1,
    TARGETS: -1,
    ROUTES: 1,
}
_AT_MARKED = {"deepstack_visual_embeds": "visual_pos_masks"}
"""Lists of tensors with a row for each token that a mask of whole sequences marks."""
CUT_INSIDE = ("visual_pos_masks", "per_layer_inputs", *_AT_MARKED)
"""Of what models of text are given besides embeddings where there are pictures, what can be cut."""
CUT_FIRST = ("labels", "shift_labels", IDS, TARGETS, ROUTES)
_NO_TOKENS = ("use_cache", "return_dict", "output_hidden_states", "num_items_in_batch", "output_attentions")


@dataclass(frozen=True)
class CutBatch:
    """Describe the full sequences of which one context rank computes a part."""

    split: Split
    rank: int
    # ``[b, s]`` of the whole sequences, False where a token is padding; ``None``: none is
    padding: Tensor | None = None
    # ``[..., s]`` of the whole sequences, where the batch gives them: ``[1 or b, s]``, or with three or four rows in
    # front for time, height and width, and the text before them
    position_ids: Tensor | None = None
    # ``[b, s]``: which example of a packed row each token is in; ``None`` where rows hold one each
    documents: Tensor | None = None

    @property
    def places(self) -> Tensor:
        """The positions of this rank's tokens in the sequence."""
        return self.split.places(self.rank)

    def to(self, device: torch.device) -> "CutBatch":
        """Return the batch with its tensors on ``device``."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name in ("padding", "position_ids", "documents")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved) if moved else self

    def whole_positions(self, device: torch.device) -> Tensor:
        """Return the positions of all tokens, ``[..., s]``, counted as transformers does where none are given."""
        if self.position_ids is not None:
            return self.position_ids
        return torch.arange(self.split.total, device=device)[None]


def cut_batch(
    batch: Mapping[str, Any], size: int, rank: int, shift: int, takes_positions: bool, inside: bool = False
) -> tuple[CutBatch, dict[str, Any]]:
    """Return what context rank ``rank`` of ``size`` should know of the whole batch, and the arguments of its own
    tokens, with ``labels`` shifted.

    Args:
        shift: how far behind its token a label is that it predicts: 1 for causal language models.
        inside: whether only what the text model is not given is cut here, and the rest where the text begins.
    """
    samples, total = tokens_of(batch)
    if total < size:
        raise ConfigError(
            f"sequences of {total} tokens are cut over cp_size={size} ranks, and some would have none: use longer "
            "sequences, or a smaller cp_size"
        )
    split = Split(total, size)
    padding, positions = _padding(batch.get("attention_mask")), batch.get("position_ids")
    of_text = None if positions is None else text_positions(positions)
    documents = None if of_text is None else _documents(of_text.expand(samples, -1), batch.get("attention_mask"))
    whole = dict(batch)
    if padding is None:
        whole.pop("attention_mask", None)
    if whole.get("labels") is not None and shift:
        whole["labels"] = F.pad(whole["labels"], (0, shift), value=-100)[..., shift:]
    known = CutBatch(split, rank, padding, positions, documents)
    if inside:
        return known, {**whole, **cut_inputs(known, {name: whole[name] for name in CUT_FIRST if name in whole})}
    if takes_positions and positions is None:
        whole["position_ids"] = torch.arange(total)[None]
    return known, cut_inputs(known, whole)


def cut_inputs(batch: CutBatch, given: Mapping[str, Any]) -> dict[str, Any]:
    """Cut keyword arguments for full sequences to this rank's tokens; arguments without a token dim stay."""
    total, places = batch.split.total, batch.places
    found = dict[str, Any]()
    for name, value in given.items():
        if name in _AT_MARKED and value is not None:
            found[name] = _marked(value, given[_AT_MARKED[name]], places)
        else:
            found[name] = _part(name, value, total, places)
    return found


def _padding(mask: Any) -> Tensor | None:
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ConfigError(
            f"an attention_mask of {mask.ndim} dims cannot be cut along the sequence: pass one of [samples, tokens], "
            "or position_ids that begin anew with every packed example"
        )
    return None if bool(mask.all()) else mask.bool()


def _documents(positions: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return which document of its row each token is in; ``None`` where every row is one."""
    begins = begins_anew(positions, mask)
    return F.pad(begins.cumsum(-1), (1, 0)) if bool(begins.any()) else None


def _marked(rows: list[Tensor], marks: Tensor, places: Tensor) -> list[Tensor]:
    """Return the rows of this rank's tokens from tensors ``[marked tokens, ...]``, given the mask ``marks [b, s]``."""
    own = torch.zeros_like(marks)
    own[:, places.to(marks.device)] = True
    kept = own[marks.bool()].bool()
    return [each[kept.to(each.device)] for each in rows]


def _part(name: str, value: Any, total: int, places: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or name in _NO_TOKENS:
        return value
    dim = _TOKENS_ALONG.get(name)
    if dim is None or value.shape[dim] != total:
        raise ConfigError(
            f"{name} of shape {tuple(value.shape)} cannot be cut along sequences of {total} tokens: leave it out, or "
            "use cp_size=1"
        )
    return value.index_select(dim, places.to(value.device))
