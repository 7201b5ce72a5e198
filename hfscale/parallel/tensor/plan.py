"""Plan tensor parallelism: the attention and MLP blocks, the vocabulary (the head and the input embedding), and the
loss.
"""

import re
from typing import Any

from torch import nn

from ..._compat.transformers.classes import has_causal_loss, input_embedding, takes_argument
from ...models.facts import ask
from ...models.fields import partial_output
from ...models.module_kinds import SHIFTED, has_own_loss, looks_up_like_stock
from ...plan.drafting.draft import Draft
from ...plan.drafting.text_model import find_text_model
from ...plan.feature_plans import OwnLossPlan
from .blocks import plan_blocks

_PLACEHOLDER = re.compile(r"(image|video|audio)_token_(id|index)")


def plan_tensor(draft: Draft) -> None:
    """Plan the tensor-parallel blocks of a model: its attention and MLP modules, and which of their projections are
    column-parallel and row-parallel.

    The model's blueprint names these modules.
    """
    if draft.tp > 1 and (asked := partial_output(draft.config)):
        draft.problem(
            f"tp_size={draft.tp}: the config's {asked}: set this option to False, or use tp_size=1"
        )
    if draft.tp > 1 and draft.blueprint:
        draft.blocks = plan_blocks(draft, draft.blueprint, draft.decoders)


def plan_vocabulary(draft: Draft) -> None:
    """Plan the head and its loss; with several tensor ranks, shard head and input embedding along the vocabulary."""
    draft.head, draft.loss, draft.no_step = _find_head(draft)
    embedding = input_embedding(draft.model)
    name = next((name for name, module in draft.modules.items() if module is embedding), None)
    known = (
        name is not None and isinstance(embedding, nn.Embedding) and looks_up_like_stock(embedding)
    )
    # Token ids that stand for images or sounds may be outside of the embedding's range.
    numbers = [
        value for field, value in vars(draft.config).items() if _PLACEHOLDER.fullmatch(field)
    ]
    outside = known and any(
        isinstance(number, int) and number >= embedding.num_embeddings for number in numbers
    )
    draft.lookup = name if known and not outside else None
    if draft.tp > 1:
        draft.embedding = _cut_vocabulary(draft, draft.head, name, embedding)


def plan_own_loss(draft: Draft) -> None:
    """Plan how a step divides a loss that the model computes itself, if the loss is a mean over rows or over labels."""
    if (
        not draft.no_step
        or not takes_argument(draft.model, "labels")
        or not takes_argument(draft.model, "input_ids")
    ):
        return
    own_loss = ask("own loss", draft.model)
    if own_loss is not None:
        draft.features.append(OwnLossPlan(**own_loss))
        draft.no_step = ""


def _find_head(draft: Draft) -> tuple[str | None, str | None, str]:
    """Return the name of the head and the type of its loss, if hfscale can compute the loss from the head's output.

    Otherwise return ``None`` twice and the reason. With a head, the reason is ``""``.
    """
    kind = type(draft.model).__name__
    loss = getattr(draft.model, "loss_type", None) or "ForCausalLM"  # transformers' default
    head = getattr(draft.model, "get_output_embeddings", lambda: None)()
    proved = find_text_model(draft.model) is not None and has_causal_loss(draft.model)
    reason = ""
    if loss != SHIFTED and not proved:
        reason = f"{kind} has another loss than a causal language model's (loss_type {loss!r})"
    elif not isinstance(head, nn.Linear):
        found = "not there" if head is None else f"a {type(head).__name__}"
        reason = f"the head of {kind} is {found}"
    elif has_own_loss(draft.model, head):
        reason = f"{kind} takes a cross entropy of its own, in its forward pass"
    elif proved and (other := ask("loss", draft.model)) is not None:
        reason = f"{kind} has another loss than a causal language model's: {other}"
    if reason:
        return None, None, reason
    loss = SHIFTED if proved else loss
    return next(name for name, module in draft.modules.items() if module is head), loss, ""


def _cut_vocabulary(
    draft: Draft,
    head: str | None,
    name: str | None,
    embedding: Any,
) -> str | None:
    """Shard the head and the input embedding along the vocabulary; return the embedding's name."""
    if head is not None:
        module = draft.modules[head]
        draft.cut(f"{head}.weight", 0, module.weight.shape[0])
        for alias, parameter in draft.named() if module.bias is not None else ():
            if parameter is module.bias:  # some heads keep their bias under a second name
                draft.cut(alias, 0, module.bias.shape[0])
    if name is None or not isinstance(embedding, nn.Embedding):
        return None
    tied = head is not None and embedding.weight is draft.modules[head].weight
    if not looks_up_like_stock(embedding):
        # An embedding class that does more than a lookup is not sharded, which is impossible if it is tied to the head.
        if tied:  # the head is sharded, so the tied embedding would have to be sharded too
            draft.problem(
                f"tp_size={draft.tp}: {name} is a {type(embedding).__name__} tied to the head, which cannot be "
                "sharded along the vocabulary: use tp_size=1"
            )
            draft.cut(f"{name}.weight", 0, embedding.weight.shape[0])
        return None
    # Without a head to shard, an embedding that is tied to another parameter is not sharded.
    if head is None and sum(parameter is embedding.weight for _, parameter in draft.named()) > 1:
        return None
    if embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        draft.problem(
            f"tp_size={draft.tp}: {name} has max_norm, scale_grad_by_freq or sparse gradients, so it cannot be "
            "sharded along the vocabulary: use tp_size=1"
        )
    draft.cut(f"{name}.weight", 0, embedding.weight.shape[0])
    return name
