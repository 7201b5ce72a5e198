"""TRL's trainers: replace functions that they call by name, because these assume full weights, or one batch per
process.

Read and run with TRL 1.16. Nothing in this file imports TRL: a script that uses one of its trainers has imported it.
"""

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import chain, islice
from types import ModuleType
from typing import Any

import torch

from ..config.environment import started_processes
from .lasting import replace_for_good
from .replaced import attribute_replaced

_RECORDS = ("_metrics", "_total_train_tokens", "_logs", "_step")
"""Attributes in which a trainer records metrics of its losses."""


_GENERATED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "num_items_in_batch",
    "tool_mask",
    "num_images",
    "num_tiles",
)
"""Entries of a generated batch that are no arguments of a model."""

_ASKED = "_hfscale_asked_generation_batch_size"  # an attribute of configs

_Mixin: Any = object  # so that type checkers accept the attributes of a trainer


class DataHooks(_Mixin):
    """Override the methods by which TRL's trainers prepare their data sets and compute log-probabilities of
    completions.

    A subclass has ``arguments_of_data(arguments)``, which returns the config by which rows are prepared;
    ``check_cached(dataset)``, called before the first rank stores a reference model's log-probabilities with the rows;
    and ``scored(log_probs)``, called with the trained model's log-probabilities of the completions' tokens.
    """

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *rest: Any) -> Any:
        return super()._prepare_dataset(
            dataset, processing_class, self.arguments_of_data(args), *rest
        )

    def _precompute_ref_logps(self, dataset: Any, *rest: Any) -> Any:
        self.check_cached(dataset)
        return super()._precompute_ref_logps(dataset, *rest)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if model is self.model:
            self.scored(scores[0])
        return scores


def record(trainer: Any, name: str, value: float) -> None:
    """Record a number; the trainer logs the mean of the numbers recorded since its last log."""
    trainer._metrics["train" if trainer.model.training else "eval"][name].append(value)


class EngineHooks(_Mixin):
    """Override private methods of TRL's ``VLLMGeneration``, which generates with a vLLM engine and sends new weights to
    it.

    A subclass has ``check()``, called before the engine starts, and ``weights()``, which yields the full tensors to
    send by their names in a checkpoint. For engines that serve adapters (of LoRA rank ``adapter_rank``) instead, it has
    ``adapter()``, which returns an adapter's directory. ``weights`` and ``adapter`` are called on every rank.
    """

    accelerator: Any
    adapter_rank = 0
    _syncs = 0

    def _init_vllm(self) -> None:
        self.check()
        if self.mode == "colocate":  # one engine per process, even if processes share a batch
            self.accelerator = self.accelerator.state
        serves = (
            {"enable_lora": True, "max_lora_rank": self.adapter_rank} if self.adapter_rank else {}
        )
        with replaced(
            type(self),
            {"LLM": lambda stock, **given: stock(**given, **serves)},
        ):
            super()._init_vllm()

    def _iter_named_params(self) -> Any:
        """Return an iterator over the weights, with the first weight made already, since TRL announces weights to a
        server when this method returns.
        """
        weights = self.weights()
        return chain(list(islice(weights, 1)), weights)

    def sync_weights(self) -> None:
        """Send the weights. For a colocated engine, TRL's own method would write into the engine's parameters; here the
        engine's ``reload_weights`` is called, because the engine may convert weights when it loads them.
        """
        if self.mode == "server":
            super().sync_weights()
            return
        if self.enable_sleep_mode:
            importlib.import_module("trl.generation.vllm_generation").empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        if self.adapter_rank:
            self._syncs += 1  # a new number: an engine reads the adapter of a number only once
            request = importlib.import_module("vllm.lora.request").LoRARequest(
                "trained", self._syncs, self.adapter()
            )
            self.llm.generate = partial(type(self.llm).generate, self.llm, lora_request=request)
        else:
            weights = self.weights()
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            for _ in weights:  # every rank takes part in gathering all weights
                pass
        self.llm.reset_prefix_cache()


def has_engine(kind: type) -> bool:
    """Return whether a trainer generates with ``VLLMGeneration``, whose methods :class:`EngineHooks` overrides."""
    engines = (getattr(module, "VLLMGeneration", None) for module in _modules(kind))
    return any(hasattr(engine, "_iter_named_params") for engine in engines)


def remember_generation_sizes(kind: type) -> None:
    """Let the configs of a trainer that generates keep the ``generation_batch_size`` that they are given.

    While a config is created, TRL divides this size by the number of processes, and refuses sizes that do not divide.
    But the number of processes that share a batch is known only when the trainer is created. Each class of configs is
    changed once, until the process ends.
    """
    for module in _modules(kind):
        for config in filter(_plans_generations, vars(module).values()):
            replace_for_good(config, "__post_init__", _remembering)


def _plans_generations(found: Any) -> bool:
    fields = getattr(found, "__dataclass_fields__", {})
    return (
        isinstance(found, type)
        and "generation_batch_size" in fields
        and "__post_init__" in vars(found)
    )


def _remembering(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(stock)
    def remembering(config: Any) -> None:
        asked = config.generation_batch_size if config.steps_per_generation is None else None
        processes = started_processes()
        setattr(config, _ASKED, asked)
        if asked is None or processes == 1:
            stock(config)
            return
        config.generation_batch_size = None
        # This number is divisible by all numbers by which TRL divides it.
        config.steps_per_generation = asked * config.num_generations
        stock(config)
        config.generation_batch_size = asked
        config.steps_per_generation = max(
            asked // (config.per_device_train_batch_size * processes), 1
        )

    return remembering


def asked_generation_size(config: Any) -> int | None:
    """Return the ``generation_batch_size`` that a config was given, if any; the trainer has to divide it.

    Raises:
        LookupError: the given size of this config was not recorded.
    """
    asked: int | None = vars(config).get(_ASKED)
    if asked is None and _ASKED not in vars(config):
        raise LookupError(type(config).__name__)
    return asked


def distils(kind: type) -> bool:
    """Return whether a trainer's loss is a divergence from a teacher, for which TRL reads full heads."""
    return any(
        "Distillation" in base.__name__
        for base in kind.__mro__
        if base.__module__.startswith("trl.")
    )


def default_config(kind: type, model: Any, **given: Any) -> Any:
    """Return the config that a TRL trainer creates if it gets none; ``None`` if ``kind`` is no trainer of TRL."""
    for base in kind.__mro__:
        made_by = getattr(
            sys.modules.get(base.__module__), f"{base.__name__.removesuffix('Trainer')}Config", None
        )
        if base.__module__.startswith("trl.") and made_by is not None:
            model_id = importlib.import_module("trl.trainer.utils").get_config_model_id
            name = model if isinstance(model, str) else model_id(model.config)
            return made_by(
                f"{name.split('/')[-1]}-{base.__name__.removesuffix('Trainer')}", **given
            )
    return None


def count_microbatch(trainer: Any) -> None:
    """Count a microbatch like the ``training_step`` of trainers that generate; the count tells when to generate."""
    if hasattr(trainer, "_step"):
        trainer._step += 1


class DistillationHooks(_Mixin):
    """Compute the loss of TRL's DistillationTrainer without full hidden states and heads, which TRL's own method reads.
    A subclass has ``distilled(batch, divisor)``, which returns the loss of labelled tokens, the sum of the student's
    entropies, and the number of labelled tokens.
    """

    @property
    def _forward_redirection(self) -> Any:
        return lambda wrapper, model, method, *args, **kwargs: method(*args, **kwargs)

    @_forward_redirection.setter
    def _forward_redirection(self, _: Any) -> None:
        """Ignore the object that TRL assigns to this attribute, by which TRL would compute the loss inside the forward
        pass of a wrapped model.
        """

    def _compute_loss(self, student: Any, inputs: Any, num_items_in_batch: Any) -> Any:
        batch = {name: value for name, value in inputs.items() if name not in _GENERATED}
        ids, mask = (
            [inputs[f"{part}_{kind}"] for part in ("prompt", "completion")]
            for kind in ("ids", "mask")
        )
        trained = mask[1] * inputs.get("tool_mask", 1)
        labels = torch.cat(
            (
                torch.full_like(ids[0], -100),
                ids[1].masked_fill(trained == 0, -100),
            ),
            1,
        )
        batch |= {
            "input_ids": torch.cat(ids, 1),
            "attention_mask": torch.cat(mask, 1),
            "labels": labels,
        }
        return self.distilled(batch, num_items_in_batch)


def is_trl(kind: type) -> bool:
    """Return whether a trainer class is TRL's, or derived from one."""
    return bool(_modules(kind))


def _modules(kind: type) -> list[ModuleType]:
    names = dict.fromkeys(
        base.__module__ for base in kind.__mro__ if base.__module__.startswith("trl.")
    )
    return [sys.modules[name] for name in names]


@contextmanager
def replaced(kind: type, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions in the modules of a trainer and its bases inside the ``with`` block; each replacement gets the
    original function as its first argument.
    """
    with ExitStack() as stack:
        for module in _modules(kind):
            for name, function in functions.items():
                stock = getattr(module, name, None)
                if stock is not None:
                    stack.enter_context(attribute_replaced(module, name, partial(function, stock)))
        yield


def fused_output(**fields: Any) -> Any:
    """Return TRL's ``FusedCausalLMOutput`` with these ``fields``: the output of a model whose head also computes the
    loss.
    """
    return importlib.import_module("trl.trainer.utils").FusedCausalLMOutput(**fields)


@contextmanager
def unrecorded(trainer: Any) -> Iterator[None]:
    """Restore the trainer's recorded metrics after the ``with`` block."""
    kept = {name: copy.deepcopy(vars(trainer)[name]) for name in _RECORDS if name in vars(trainer)}
    try:
        yield
    finally:
        vars(trainer).update(kept)


def loss_is_scaled(trainer: Any, num_items_in_batch: Any) -> bool:
    """Return whether ``compute_loss`` divides by the number of items in the step, not by that in the microbatch."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    by_items = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return bool(by_items or trainer.compute_loss_func is not None)
