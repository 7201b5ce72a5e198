"""The loss over a cut vocabulary, installed as the stock model's ``loss_function``.

Data flow: the head's output stays cut (``[b, s, V/t]``); :class:`VocabParallelLoss` shifts the *labels* (never the
logits, which would copy them) and reduces to a scalar. Where a caller wants logits - no labels given, or evaluation -
they are gathered whole. In a training step with labels nobody gets to see logits: ``output.logits`` is ``None``, since
their memory is reused for their gradient.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..mesh import Mesh
from ..ops import gather_last_dim, vocab_cross_entropy
from ..plan import LOSSES, Plan
from ..runtime import Runtime
from .edges import install_head_edge


class VocabParallelLoss:
    """Token cross entropy, mean over valid labels like the host's, or over a number set from outside."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        weight = plan.by_name[f"{plan.head}.weight"]
        self.shift = LOSSES[plan.loss or ""]
        self.group = mesh.group("tp")
        cut = weight.cut_over("tp")
        size = mesh.layout.size("tp")
        self.lengths = [cut.local_length(weight.shape[0], r) if cut else weight.shape[0] for r in range(size)]
        self.start = sum(self.lengths[: mesh.ranks["tp"]])
        self.count: Tensor | None = None
        self._cut_logits: Tensor | None = None
        self._with_labels = False
        self._called = False

    def targets(self, labels: Tensor) -> Tensor:
        """``[b, s]`` labels -> ``[b, s]``: what each position predicts; the last ones predict nothing."""
        if not self.shift:
            return labels
        return nn.functional.pad(labels, (0, self.shift), value=-100)[..., self.shift :]

    def count_valid(self, batch: dict[str, Any]) -> int:
        """Number of positions of one microbatch that contribute to the loss."""
        targets = batch.get("shift_labels")
        if targets is None:
            targets = self.targets(batch["labels"])
        return int((targets != -100).sum())

    @contextmanager
    def normalized_by(self, count: Tensor) -> Iterator[None]:
        """Within: losses are sums divided by ``count`` (a scalar), instead of means over their own labels."""
        self.count = count
        try:
            yield
        finally:
            self.count = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """The signature of the host's losses; ``logits`` are ``[b, s, V/t]`` here."""
        self._called = True
        targets = (self.targets(labels) if shift_labels is None else shift_labels).to(logits.device).reshape(-1)
        total = vocab_cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets,
            start=self.start,
            ignore_index=ignore_index,
            # Only the head's very own output is known to have no other reader (a soft cap keeps its input, say).
            overwrite=logits is self._cut_logits and torch.is_grad_enabled(),
            group=self.group,
        )
        count = self.count if self.count is not None else num_items_in_batch
        return total / ((targets != ignore_index).sum() if count is None else count)

    def before_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: will its loss be computed?"""
        self._with_labels, self._called = kwargs.get("labels") is not None, False

    def after_head(self, _: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor:
        """Forward hook of the head: keep logits cut for the loss, gather them for everyone else."""
        if not self._with_labels:
            return gather_last_dim(logits, self.lengths, self.group)
        self._cut_logits = logits
        return logits

    def after_model(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the model: what its caller sees as logits."""
        if not self._with_labels:
            return output
        self._with_labels, self._cut_logits = False, None
        if not self._called:
            raise ConfigError(
                f"{type(model).__name__} computes its loss itself instead of calling model.loss_function, so it cannot "
                "run on a cut vocabulary: call it without labels, and compute the loss from its logits"
            )
        visible = not (model.training and torch.is_grad_enabled())
        if isinstance(output, tuple):  # (loss, logits, ...)
            logits = gather_last_dim(output[1], self.lengths, self.group) if visible else None
            return (output[0], logits, *output[2:])
        output.logits = gather_last_dim(output.logits, self.lengths, self.group) if visible else None
        return output


def install_loss(runtime: Runtime) -> None:
    """Put :class:`VocabParallelLoss` into the model, where the plan names a head it can run on."""
    plan, model = runtime.plan, runtime.model
    if plan.head is None:
        return
    loss, head = VocabParallelLoss(plan, runtime.mesh), model.get_submodule(plan.head)
    group = runtime.mesh.group("tp")
    if group is not None:
        install_head_edge(head, group)
    head.register_forward_hook(loss.after_head)
    model.register_forward_pre_hook(loss.before_model, with_kwargs=True)
    model.register_forward_hook(loss.after_model)
    model.loss_function = loss
    runtime.loss = loss
