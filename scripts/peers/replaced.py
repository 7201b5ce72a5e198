"""Put hfscale's classes where a peer's tests look for stock ones, and note which of them a test reaches."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from transformers import LlamaConfig

import hfscale
from hfscale import ParallelConfig
from hfscale.models.clone import tiny_clone

LAYOUTS = {
    "one": ParallelConfig(),
    "tp2": ParallelConfig(tp_size=2),
    "dp_shard2": ParallelConfig(dp_shard_size=2),
    "dp_replicate2": ParallelConfig(dp_replicate_size=2),
}
TRL_TRAINERS = (
    "DPOTrainer",
    "DistillationTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
)


class Replacement:
    """What the tests of one suite meet: stock classes (``layout`` None), or hfscale's in a layout.

    Attributes:
        reached: the names of what has been called since a test began, of what is replaced or would be.
        beside: whether accelerators get a model of hfscale first, beside the scripts' own modules.
    """

    def __init__(self, layout: ParallelConfig | None) -> None:
        self.layout = layout
        self.reached = set[str]()
        self.beside = True

    def trl(self) -> None:
        """Replace TRL's trainers, whose stock bases stay."""
        import trl

        import hfscale.trl

        for name in TRL_TRAINERS:
            self._replace_trainer(trl, name, hfscale.trl)

    def transformers(self) -> None:
        """Replace both of transformers' trainers."""
        import transformers

        for name in ("Trainer", "Seq2SeqTrainer"):
            self._replace_trainer(transformers, name, hfscale)

    def peft(self) -> None:
        """Replace ``get_peft_model``; models of transformers are parallelized as it meets them."""
        import peft

        peft.get_peft_model = self._adapting(peft.get_peft_model)

    def accelerate(self) -> None:
        """Replace the accelerator; ours knows a model as it is made (``beside``), so that its own loaders run."""
        import accelerate

        stock = accelerate.Accelerator
        init = stock.__init__ if self.layout is None else self._with_a_model()
        kind = stock if self.layout is None else hfscale.Accelerator
        kind.__init__ = self._noting(init, "Accelerator")  # type: ignore[method-assign]
        for module in (accelerate, accelerate.accelerator):
            module.Accelerator = kind

    scripts = accelerate

    def _with_a_model(self) -> Callable[..., None]:
        """Return an initialization of ours that also prepares a tiny model in the layout."""
        init = hfscale.Accelerator.__init__
        layout = self.layout

        @wraps(init)
        def made(accelerator: hfscale.Accelerator, **kwargs: Any) -> None:
            init(accelerator, **kwargs)
            if not self.beside:
                return
            with torch.random.fork_rng():
                precision = accelerator.mixed_precision
                model = hfscale.from_config(
                    tiny_clone(LlamaConfig()), parallel=layout, mixed_precision=precision
                )
            accelerator.prepare(model)

        return made

    def _replace_trainer(self, module: Any, name: str, ours: Any) -> None:
        kind = getattr(module, name)
        given: dict[str, Any] = {}
        if self.layout is not None:
            kind = getattr(ours, name)
            given = {"parallel": self.layout}
        made = type(
            name,
            (kind,),
            {"__module__": kind.__module__, "__init__": self._noting(kind.__init__, name, **given)},
        )
        setattr(module, name, made)

    def _noting(self, call: Callable[..., Any], name: str = "", **given: Any) -> Callable[..., Any]:
        """Return ``call``, which notes that it was reached, with arguments that a caller does not give."""

        @wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.reached.add(name or call.__name__)
            return call(*args, **{**given, **kwargs})

        return noted

    def _adapting(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``stock``, or ours in its place, for models of transformers; for others it is stock, not reached."""

        @wraps(stock)
        def adapted(
            model: Any, peft_config: Any, adapter_name: str = "default", **kwargs: Any
        ) -> Any:
            from transformers import PreTrainedModel

            from hfscale.train.runtime import find_runtime

            if not isinstance(model, PreTrainedModel):
                return stock(model, peft_config, adapter_name, **kwargs)
            self.reached.add("get_peft_model")
            if self.layout is None:
                return stock(model, peft_config, adapter_name, **kwargs)
            if find_runtime(model) is None:
                model = hfscale.parallelize(model, self.layout)
            return hfscale.get_peft_model(model, peft_config, adapter_name, **kwargs)

        return adapted
