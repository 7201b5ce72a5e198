"""How a rank of a draw looks at its model between two steps: evaluation, generation, outputs, scores."""

from typing import Any

import torch
from torch import Tensor

import hfscale
from hfscale.testing.differences import difference

from .children import Note
from .draw import Draw
from .fuzz_batches import Batch, Call, as_given
from .measures import EXACT, Yardstick
from .reference import GREEDY, Record, prompt, unlabelled


def look(
    draw: Draw, model: Any, call: Call, record: Record, yardstick: Yardstick, note: Note
) -> None:
    """Compare what is drawn with what one process saw there."""
    own = call[hfscale.batch_rank(model)]
    given: Any = as_given(draw, own)
    exact = yardstick.exact and yardstick.follows()
    model.eval()
    if "eval" in draw.between and draw.loop == "train_step":
        note("eval")
        loss = float(hfscale.eval_step(model, given, label_smoothing=draw.label_smoothing))
        if record.evaluation is not None and exact:
            yardstick.scalar("evaluation", 1, loss, record.evaluation, None)
    if "generate" in draw.between and record.tokens is not None:
        note("generate")
        tokens = model.generate(**prompt(call), **GREEDY)
        if exact:
            yardstick.worst.note(
                "tokens", float(not torch.equal(tokens, record.tokens)), 0.5, f"{tokens.tolist()}"
            )
    _look_at_tokens(draw, model, own, record, yardstick, note)
    model.train()


def _look_at_tokens(
    draw: Draw, model: Any, own: list[Batch], record: Record, yardstick: Yardstick, note: Note
) -> None:
    """At what the model makes of this rank's batch: logits, and scores of its first microbatch."""
    given: Any = as_given(draw, own)
    wanted = record.logits[hfscale.batch_rank(model)] if record.logits else None
    compares = wanted is not None and yardstick.exact and yardstick.follows()
    if "outputs" in draw.between:
        note("outputs")
        _, outputs = hfscale.eval_step(model, given, return_outputs=True)
        logits: Tensor = (outputs if isinstance(given, dict) else outputs[0]).logits
        if compares and wanted is not None:
            seen = _seen(own[0])
            yardstick.worst.note("outputs", difference(logits[seen], wanted[seen]), EXACT, "logits")
    if "scores" in draw.between and ("pp_size" not in draw.layout or isinstance(given, dict)):
        note("scores")
        with torch.no_grad():
            scores = hfscale.token_scores(model, unlabelled(own[0])).log_probs
        if compares and wanted is not None:
            at = _scored(draw, own[0])
            expected = _log_probs(wanted, own[0])
            yardstick.worst.note(
                "scores", difference(scores[at], expected[at]), EXACT, "log-probabilities"
            )


def _seen(batch: Batch) -> Tensor:
    """Positions that are no padding."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    return mask != 0


def _scored(draw: Draw, batch: Batch) -> Tensor:
    """Positions that predict what a reference knows.

    Padding predicts the first token behind it from whatever its mask leaves. Of rows with one document that is what
    stock code computes; of packed rows it is not defined: their documents are computed apart, each with its own mask.
    """
    return _seen(batch) if draw.packed else torch.ones_like(_seen(batch))


def _log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """Of each next token that is no padding, at the position before it; 0 elsewhere."""
    found = torch.zeros(batch["input_ids"].shape, dtype=logits.dtype)
    of_next = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    found[:, :-1] = of_next.where(_seen(batch)[:, 1:], 0.0)
    return found
