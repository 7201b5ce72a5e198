"""A Llama cut into stages by hand for torch.distributed.pipelining, as its tutorials do it: nothing of hfscale.

The stock ``LlamaModel`` keeps a slice of its layers; the embedding stays on the first stage, the norm and the head on
the last. One schedule class runs the stages; losses are divided by the number of labels of the whole step.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from transformers.loss.loss_utils import ForCausalLMLoss

from hfscale.distributed.ops.head_cross_entropy import LinearRows, head_cross_entropy
from hfscale.distributed.ops.vocab_cross_entropy import VocabularySlice

CLASSES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
}


class Part(nn.Module):
    """Some consecutive layers of a causal language model, with what comes before the first and behind the last."""

    def __init__(self, whole: Any, start: int, stop: int, stock_loss: bool) -> None:
        super().__init__()
        count = len(whole.model.layers)
        self.start = start
        self.first = start == 0
        self.last = stop == count
        self.model = copy.copy(whole.model)
        self.model._modules = dict(whole.model._modules)
        self.model.layers = whole.model.layers[start:stop]
        if not self.first:
            self.model.embed_tokens = None
        if not self.last:
            self.model.norm = nn.Identity()
        self.lm_head = whole.lm_head if self.last else None
        self.gives_logits = self.last and stock_loss

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or hidden states -> hidden states or, on the last stage with the stock loss, logits."""
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        hidden: Tensor = self.model(**given, use_cache=False).last_hidden_state
        if self.gives_logits:
            assert self.lm_head is not None
            return self.lm_head(hidden)
        return hidden


class HandCut:
    """The stages of this rank and the schedule that runs them.

    Attributes:
        stages: the modules, in the order of the model.
    """

    def __init__(
        self,
        whole: Any,
        schedule: str,
        cut: Sequence[int],
        ranks: Sequence[int],
        microbatches: int,
        stock_loss: bool,
    ) -> None:
        rank = dist.get_rank()
        self._first = ranks[0]
        self._last = ranks[-1]
        own = [index for index, home in enumerate(ranks) if home == rank]
        self.stages = [Part(whole, sum(cut[:i]), sum(cut[: i + 1]), stock_loss) for i in own]
        device = torch.device("cpu")
        made = [
            PipelineStage(part, i, len(cut), device)
            for i, part in zip(own, self.stages, strict=True)
        ]
        self._count = 1
        loss: Any = self._stock_loss if stock_loss else self._same_loss
        kind: Any = get_schedule_class(CLASSES[schedule])
        given = made[0] if schedule in ("1f1b", "gpipe") else made
        self._schedule = kind(given, microbatches, loss_fn=loss, scale_grads=False)

    def train_step(self, ids: Tensor) -> Tensor:
        """Token mean of the step, with gradients left in ``.grad``."""
        rank = dist.get_rank()
        losses: list[Tensor] = []
        self._count = (ids.shape[1] - 1) * len(ids)
        arguments = (ids,) if rank == self._first else ()
        keywords = {"target": ids, "losses": losses} if rank == self._last else {}
        self._schedule.step(*arguments, **keywords, return_outputs=False)
        total = torch.stack(losses).detach().sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        return total

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages, and return it."""
        parameters = [p for _, p in self.named_parameters()]
        total = (
            torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]) ** 2
        )
        dist.all_reduce(total)
        norm = total**0.5
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters by their names in the whole model."""
        for part in self.stages:
            for name, parameter in part.named_parameters():
                if name.startswith("model.layers."):
                    _, _, index, rest = name.split(".", 3)
                    name = f"model.layers.{int(index) + part.start}.{rest}"
                yield name, parameter

    def _stock_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ForCausalLMLoss(
            logits, labels, logits.shape[-1], num_items_in_batch=torch.tensor(self._count)
        )

    def _same_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss of hfscale, which never has all logits at once."""
        head: Any = self.stages[-1].lm_head
        targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        whole = VocabularySlice(0, head.out_features, head.out_features)
        rows = LinearRows(head.weight, head.bias, None, True, hidden.requires_grad)
        return head_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            targets,
            rows,
            vocabulary=whole,
            divisor=self._count,
        )
