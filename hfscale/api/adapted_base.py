"""Read a checkpoint and its adapter from disk: build the model on the meta device, and assign each key a weight."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .._compat.peft import COPIES, COPY
from .._compat.transformers.classes import empty_model, input_embedding
from ..checkpoint.stored_forms.scheme import split_stored_form
from ..config.parallel import ParallelConfig
from ..distributed.files.reader import TensorOnDisk
from ..distributed.files.sources import find_source
from ..distributed.files.weight_files import open_tensors
from ..errors import CheckpointError, ConfigError
from ..features.adapters.adapter_structure import adapter_parameters, quietly
from ..features.adapters.plan import plan_adapters
from ..features.adapters.shared_values import read_fixed
from ..features.adapters.storage import (
    read_config,
    refuse_unfit_files,
    stored_keys,
    stored_names,
    weights_file,
)
from ..features.added_layers import refuse_adapters
from .build_plan import build_plan

PREFIX = "base_model.model."
_FACTOR = ".lora_"  # in the keys of LoRA's factors


class AdaptedBase:
    """Hold the model of a checkpoint and its saved adapter on the meta device; ``trusted`` allows the checkpoint's own
    code to run. If the adapter was trained with another vocabulary size than the checkpoint's, the model is resized to
    it (:attr:`tokens`).
    """

    name = "default"

    def __init__(self, base: Path, adapter: Path, trusted: bool) -> None:
        _refuse_source(base)
        config, _ = read_config(str(adapter))
        refuse_unfit_files(config, adapter)
        self.config = config
        self.directory = adapter
        self.trained: dict[str, TensorOnDisk] = open_tensors([weights_file(adapter)])
        refuse_adapters(self.trained, str(adapter))
        try:
            self.model, wrapped = empty_model(base, trusted), empty_model(base, trusted)
        except (LookupError, OSError) as error:
            raise CheckpointError(
                f"no model can be built from the checkpoint {base}: {error}: correct its config.json, or download the "
                "checkpoint again"
            ) from error
        self.tokens = _other_tokens(self.model, self.trained)
        for model in (self.model, wrapped) if self.tokens is not None else ():
            model.resize_token_embeddings(self.tokens, mean_resizing=False)
        self.model.config, self.form = split_stored_form(self.model.config)
        self.stock_plan = build_plan(self.model, ParallelConfig())
        # PEFT's model around a second model of the same class.
        self.whole: Any = quietly(wrapped, config, self.name)
        self.adapters = adapter_parameters(self.whole, self.stock_plan)
        self.plan = plan_adapters(self.stock_plan, self.adapters)
        self._fixed = read_fixed(self.whole, self.name, self.trained, str(adapter))
        # parameter name -> key in the adapter's file, for the adapter's own and other trained parameters
        self.keys = stored_names(self.whole, self.name, self.plan, True)
        self._every_key = stored_keys(self.whole, self.name, self.plan, True)

    def placed(self) -> dict[str, str]:
        """Return the adapter file's keys of trained weights of the model itself (biases, embeddings), by the weights'
        names in the model; a tied weight is listed once, under its first name.

        Raises:
            CheckpointError: the file lacks a tensor that its config requires, or has a tensor that matches no weight,
                has another shape than its weight, or differs from a second tensor of a tied weight.
        """
        factors = {adapter.name for adapter in self.adapters}
        plan = self.plan
        # PEFT writes the token rows of a tied weight once, under the name of the weight that owns them.
        own = {adapter.name for adapter in self.adapters if adapter.tied_to is None}
        self._refuse_missing(key for name, key in self.keys.items() if name in own)
        self._refuse_strange()
        found: dict[str, str] = {}
        for name, key in self.keys.items():
            if key not in self.trained:
                continue
            planned = plan.by_name[name]
            shape = tuple(self.trained[key].shape)
            if shape != planned.shape:
                raise CheckpointError(
                    f"{self.directory}: {key} has the shape {shape}, but the checkpoint's {name} has the shape "
                    f"{planned.shape}: merge the adapter into the checkpoint that it was trained on"
                )
            if name in factors:
                continue
            other = found.setdefault(planned.first_name, key)
            if not self._equal(key, other):
                raise CheckpointError(
                    f"{self.directory}: the tensors {other} and {key} of the adapter differ, but the checkpoint ties "
                    "them to one weight: set tie_word_embeddings=false in the checkpoint's config.json, and store a "
                    "copy of the weight under both names"
                )
        return found

    def refuse_beside_factors(self) -> None:
        """Raise :class:`ConfigError` for an adapter that inference engines cannot serve: any method other than plain
        LoRA, or an adapter that contains weights of the model itself, such as trained copies and resized embeddings.
        """
        method = getattr(self.config.peft_type, "value", self.config.peft_type)
        dora = bool(getattr(self.config, "use_dora", False))
        if method != "LORA" or dora:
            raise ConfigError(
                f"{self.directory} must be a plain LoRA adapter to be served by an inference engine, got "
                f"{'DoRA' if dora else method}: merge the adapter into its base instead (hfscale merge)"
            )
        factors = {
            self.keys[each.name]
            for each in self.adapters
            if each.name in self.keys and each.kept_in not in COPIES
        }
        other = next((key for key in self.trained if key not in factors), None)
        if other is not None:
            tokens = "" if self.tokens is None else f", and a vocabulary of {self.tokens} tokens"
            raise ConfigError(
                f"{self.directory} must contain only low-rank factors to be served by an inference engine, got "
                f"{other}, a weight of the model itself{tokens}: merge the adapter into its base instead (hfscale "
                "merge)"
            )

    def _refuse_missing(self, needed: Iterable[str]) -> None:
        missing = [key for key in needed if key not in self.trained]
        if missing:
            raise CheckpointError(
                f"{self.directory} lacks {len(missing)} tensors that its adapter_config.json requires, for example "
                f"{missing[0]}: save or download the adapter again"
            )

    def _refuse_strange(self) -> None:
        """Raise :class:`CheckpointError` for keys that belong to no known weight. A second key with equal values is
        accepted, because PEFT writes a trained embedding under two keys.
        """
        known = set(self.keys.values()) | self._fixed
        strange = [key for key in self.trained if key not in known]
        for key in strange:
            again = self.keys.get(self._every_key.get(key, ""), key.replace(f".{COPY}.", "."))
            if again == key or again not in known or not self._equal(key, again):
                raise CheckpointError(
                    f"{self.directory} contains {key}, which belongs to no weight of the checkpoint according to the "
                    "adapter's config: merge the adapter with the library that wrote it, or into the checkpoint that "
                    "it was trained on"
                )

    def _equal(self, key: str, other: str) -> bool:
        if key == other:
            return True
        first, second = (self.trained.get(each) for each in (key, other))
        if first is None or second is None or first.shape != second.shape:
            return False
        return torch.equal(first[...], second[...])


def _refuse_source(base: Path) -> None:
    """Raise :class:`CheckpointError` if the directory ``base`` has another library's weights and no ``config.json``:
    only a Hugging Face directory can be the base of an adapter.
    """
    source = find_source(base)
    if source is not None and not (base / "config.json").exists():
        raise CheckpointError(
            f"{base} must be a Hugging Face checkpoint with a config.json, but holds only {source.form}: convert it "
            f"first (hfscale convert {base} OUT)"
        )


def _other_tokens(model: Any, trained: Mapping[str, TensorOnDisk]) -> int | None:
    """Return the number of rows of the embedding in an adapter's file if it differs from the number of rows of the
    embedding of ``model``. Return ``None`` if both are equal, or if the adapter contains no embedding.
    """
    embedding = input_embedding(model)
    if embedding is None:
        return None
    ends = [module for module in (embedding, model.get_output_embeddings()) if module is not None]
    paths = tuple(
        f"{PREFIX}{path}."
        for path, module in model.named_modules()
        if any(module is end for end in ends)
    )
    rows = {
        tensor.shape[0]
        for key, tensor in trained.items()
        if key.startswith(paths) and key.endswith(".weight") and _FACTOR not in key
    }
    return rows.pop() if len(rows) == 1 and rows != {len(embedding.weight)} else None
