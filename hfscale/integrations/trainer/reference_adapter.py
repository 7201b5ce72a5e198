"""Emulate the adapter ``ref`` of TRL's trainers: while ``ref`` is active, the trained adapter's parameters hold the
values of a copy.

TRL adds the adapter ``ref`` to a given PEFT model, copies the trained adapter's parameters into ``ref`` by name, and
switches to ``ref`` for a reference's forward pass, without gradients. A sharded model has one adapter, so here the copy
is a list of tensors, one for each of this rank's adapter parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..._compat.replaced import attribute_replaced
from ...train.runtime import local_tensor, runtime_of
from .fused_head import FusedHead

# part of parameters' names
_TRAINED = ".default."
_REFERENCE = ".ref."
_NAME = "ref"


class ReferenceAdapter:
    """Hold the copy of the trained adapter of ``peft_model`` that serves as the adapter ``ref``. ``heads`` are the
    trainer's fused heads. While they replay recorded outputs, no model runs, and switching to ``ref`` does nothing.
    """

    def __init__(self, peft_model: Any, heads: Sequence[FusedHead]) -> None:
        self._model = peft_model
        self._heads = heads
        self._copies: dict[str, Tensor] = {}
        self._trained: dict[
            str, Tensor
        ] = {}  # the trained values, while parameters hold the copy's values
        self._set_adapter: Callable[..., Any] = peft_model.set_adapter

    @contextmanager
    def may_be_added(self) -> Iterator[None]:
        """Let TRL add the adapter ``ref``, and read its parameters, inside the ``with`` block."""
        find = self._model.get_parameter

        def get_parameter(name: str) -> Any:
            return (
                self._copies[name.replace(_REFERENCE, _TRAINED)]
                if _REFERENCE in name
                else find(name)
            )

        with (
            attribute_replaced(self._model, "add_adapter", self._add),
            attribute_replaced(self._model, "get_parameter", get_parameter),
        ):
            yield

    def _add(
        self,
        name: str,
        config: Any,
        *_: Any,
        **__: Any,
    ) -> None:
        with runtime_of(self._model).data.as_shards():
            self._copies = self._values()
        self._model.peft_config[name] = config
        self._model.set_adapter = self._switch

    def _parameters(self) -> list[tuple[str, Any]]:
        return [
            (name, parameter)
            for name, parameter in self._model.named_parameters()
            if _TRAINED in name
        ]

    def _values(self) -> dict[str, Tensor]:
        return {name: parameter.data.clone() for name, parameter in self._parameters()}

    def _switch(self, name: Any, *args: Any, **kwargs: Any) -> None:
        """Switch to the adapter ``name``: write the copied or the trained values into the parameters if necessary."""
        if name == _NAME:
            recalls = any(
                head.conversation is not None and head.conversation.scores is not None
                for head in self._heads
            )
            if not (
                self._trained or recalls
            ):  # otherwise, recorded outputs replace the reference's forward pass
                with runtime_of(self._model).data.as_shards():
                    self._trained = self._values()
                    self._put(self._copies)
        elif self._trained:
            with runtime_of(self._model).data.as_shards():
                self._put(self._trained)
            self._trained = {}
        else:
            self._set_adapter(name, *args, **kwargs)

    def _put(self, values: dict[str, Tensor]) -> None:
        """Write ``values`` into the parameters of the adapter without autograd. Trained values are written back before
        a backward pass reads them.
        """
        for name, parameter in self._parameters():
            local_tensor(parameter.data).copy_(local_tensor(values[name]))
