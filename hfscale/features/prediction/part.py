"""Run multi-token-prediction layers in training passes (DeepSeek-AI 2024, V3, section 2.2; depth ``k``).

::

    model --norm--> h0 [b, s, h] --------------------------------+--> head, loss
                     |                                           |
    ids + k --embedding--> [e | h(k-1)] --layer k of mtp--> hk --+    concatenated along rows: [(1 + depths) b, s, h]

MTP layer ``k`` receives the masks of a layer of the same kind in the model, and positions increased by ``k``. The stock
model runs its head once, on the rows of all depths. The loss (:class:`hfscale.parallel.tensor.loss.VocabParallelLoss`)
separates the rows by depth.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.hidden_states import other_arguments
from ..._compat.transformers.packed_rows import told_apart_by
from ..._compat.transformers.prediction import PREDICTION
from ...errors import ConfigError
from ...parallel.tensor.loss import LossTerm, VocabParallelLoss
from ...train.runtime import Batch, Part, Runtime
from ...train.runtime.batches import Microbatch
from ...train.runtime.shards import LocalWeights
from .plan import IDS, TARGETS, PredictionPlan

_LABELS = ("labels", "shift_labels")


class MultiTokenPrediction(Part):
    """Run the MTP layers, and add their loss to the model's loss."""

    is_logged = True
    _planned: PredictionPlan
    _loss: VocabParallelLoss
    _weight: float

    def __init__(self) -> None:
        self._ids: Tensor | None = None  # [b, depths, s], input ids of the current forward pass
        self._term: LossTerm | None = None  # loss term of the current forward pass
        # Layer of the model -> arguments of the layer's latest call.
        self._given: dict[str, dict[str, Any]] = {}
        # [1 + 2 depths], sums over the current step: the loss, then for each depth the right predictions and the labels
        self._step: Tensor | None = None
        self._latest: Tensor | None = None  # the same sums of the last step, over all ranks

    def install(self, runtime: Runtime, weights: LocalWeights | None) -> None:
        """Install hooks on the rank that has the MTP layers, after the model's loss is installed.

        Raises:
            ConfigError: the embedding has an adapter, or an MTP layer needs the masks of a layer that is not on
                the last stage.
        """
        planned = runtime.plan.feature(PredictionPlan)
        stages = runtime.plan.stages
        model = runtime.model
        assert planned is not None
        self._planned, self._weight = planned, float(runtime.options.mtp_loss_weight or 0)
        lookups = {f"{name}.weight" for name in (runtime.plan.lookup, PREDICTION.lookup)}
        if any(adapter.base in lookups for adapter in runtime.plan.adapters):
            raise ConfigError(
                "mtp_loss_weight cannot be used with adapters of the embedding, because the MTP layers share the "
                "embedding: leave out either mtp_loss_weight or the embedding's adapter"
            )
        away = [
            layer
            for layer in planned.like
            if stages is not None and not stages.stages[-1].is_local(layer)
        ]
        if away:
            raise ConfigError(
                f"mtp_loss_weight: the MTP layer {planned.layers[0]} needs the attention mask of {away[0]}, but this "
                "layer is not on the last pipeline stage, where the MTP layers are: use stage_layers with more "
                "layers on the last stage, or a smaller pp_size"
            )
        if not runtime.is_local(PREDICTION.name):
            return
        assert isinstance(runtime.loss, VocabParallelLoss)
        self._loss = runtime.loss
        for name in dict.fromkeys(planned.like):
            model.get_submodule(name).register_forward_pre_hook(
                partial(self._keep_arguments, name), with_kwargs=True
            )
        model.get_submodule(planned.text).register_forward_hook(
            partial(self._predict, model.get_submodule(PREDICTION.name))
        )
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def check_step(
        self, runtime: Runtime, batches: Sequence[Batch], user_loss: bool = False
    ) -> None:
        """Raise :class:`ConfigError` for batches without ``input_ids``, or with packed documents that are separated
        only by an attention mask.
        """
        for batch in batches:
            if batch.get("input_ids") is None or told_apart_by(batch) == "mask":
                raise ConfigError(
                    "mtp_loss_weight needs input_ids, and for packed rows position_ids that begin anew with every "
                    f"document, got a batch with {', '.join(batch)}: pass input_ids and position_ids, or load the "
                    "model without mtp_loss_weight"
                )

    @contextmanager
    def around_step(
        self, runtime: Runtime, microbatches: Sequence[Microbatch], train: bool
    ) -> Iterator[None]:
        """Sum the MTP loss, and for each depth the numbers of right predictions and of labels, over all forward passes
        and ranks of a training step.
        """
        sums = torch.zeros(
            1 + 2 * len(self._planned.layers), dtype=torch.float64, device=runtime.mesh.device
        )
        self._step = sums if train else None
        yield
        if self._step is not None:
            self._latest = runtime.sum_of_shares(self._step)
            self._step = None

    def metrics(self, runtime: Runtime) -> Mapping[str, float]:
        """Return the mean MTP loss over depths, and for each depth the fraction of labels that it predicts right;
        nothing before the first training step.
        """
        if self._latest is None:
            return {}
        loss, *counts = self._latest.tolist()
        depths = len(counts) // 2
        shares = [
            hits / max(1, labels)
            for hits, labels in zip(counts[:depths], counts[depths:], strict=True)
        ]
        names = ["mtp_acceptance", *(f"mtp_acceptance_{depth}" for depth in range(2, depths + 1))]
        return {"mtp_loss": loss, **dict(zip(names, shares, strict=True))}

    def _begin(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Take the MTP ids and targets out of the arguments, or compute them if they are missing (forward pre-hook of
        the model).
        """
        batch = {
            **dict(zip(signature(model.forward).parameters, args, strict=False)),
            **kwargs,
        }
        # The ids and targets are in the arguments if context parallelism has sharded them already.
        ahead = {name: kwargs.pop(name) for name in (IDS, TARGETS) if name in kwargs}
        known = batch.get("input_ids") is not None and any(
            batch.get(name) is not None for name in _LABELS
        )
        if known and torch.is_grad_enabled() and self._loss.trains(model):
            ahead = ahead or self._planned.fill(batch, self._loss.shift)
            self._ids = ahead[IDS]
            targets = ahead[TARGETS].transpose(0, 1).contiguous()
            hits = torch.zeros_like(targets, dtype=torch.bool)
            self._term = LossTerm(targets, self._weight, hits)
            self._loss.current.terms.append(self._term)
        return args, kwargs

    def _keep_arguments(
        self,
        name: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Record the arguments with which the model calls a layer (forward pre-hook of the layer)."""
        if self._ids is not None:
            self._given[name] = other_arguments(kwargs)

    def _predict(
        self,
        added: Any,
        text: Any,
        _: tuple[Any, ...],
        output: Any,
    ) -> Any:
        """Append the hidden states of each prediction depth to the model's, along rows (a forward hook)."""
        if self._ids is None:
            return output
        states = [output.last_hidden_state]
        for depth, layer in enumerate(added.layers):
            embedded = added.embed_tokens(self._ids[:, depth])
            given = dict(self._given[self._planned.like[depth]])
            if given.get("position_ids") is not None:
                given["position_ids"] = positions = given["position_ids"] + depth + 1
                if given.get("position_embeddings") is not None:
                    given["position_embeddings"] = text.rotary_emb(
                        embedded, position_ids=positions, **layer.rope
                    )
            states.append(
                layer(
                    torch.cat((embedded, states[-1]), -1),
                    **given,
                )
            )
        output.last_hidden_state = torch.cat(states)
        return output

    def _end(self, *_: Any) -> None:
        """Add a forward pass's loss, right predictions and labels to the step's sums (forward hook of the model)."""
        term = self._term
        self._term = None
        self._ids = None
        self._given.clear()
        if term is None:
            return
        self._loss.current.terms.remove(term)
        if term.loss is not None and self._step is not None:
            counts = (each.sum((1, 2)) for each in (term.hits, term.targets != -100))
            self._step += torch.cat((term.loss.double().view(1), *counts))
