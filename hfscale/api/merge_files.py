"""Merge a saved adapter into a saved checkpoint, file to file: one process, one module in memory at a time.

Tensors without adapters are copied as stored. For others PEFT's own merge runs on the full weight and factors
(:mod:`..features.adapters.merge_adapters`).
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._compat.transformers.classes import empty_model, stock_class
from .._compat.transformers.conversions import Destination, loaded_targets
from .._compat.transformers.prediction import refuse_adapters_of_prediction
from ..checkpoint.stored_forms.scheme import form_in
from ..config.parallel import ParallelConfig
from ..distributed.files.reader import TensorOnDisk, open_tensors
from ..distributed.files.replace import finish_move
from ..distributed.files.writer import INDEX, REPLACED, CheckpointWriter
from ..errors import CheckpointError, ConfigError
from ..features.adapters.adapter_structure import adapter_parameters, quietly
from ..features.adapters.attach import Adapters
from ..features.adapters.merge_adapters import WholeMerge
from ..features.adapters.peft_config import read_config
from ..features.adapters.plan import plan_adapters
from ..features.adapters.storage import WEIGHTS, stored_names
from ..train.runtime.writing import atomic_directory
from .build_plan import build_plan

_NAME = "default"


class _Merged:
    """The base's stored tensors with the adapter merged, computed when indexed."""

    def __init__(self, base: Path, adapter: Path, trusted: bool) -> None:
        config, _ = read_config(str(adapter))
        self.stored = _tensors(base, sorted(base.glob("*.safetensors")))
        self.trained = _tensors(adapter, [adapter / WEIGHTS])
        refuse_adapters_of_prediction(self.trained, str(adapter))
        form = form_in(base)
        if form is not None:
            raise ConfigError(
                f"{base} stores its weights quantized ({form.method}), and a merged weight is not: load both with "
                "hfscale.from_pretrained(base, peft_config=adapter), and call hfscale.merge_and_unload"
            )
        plain, wrapped = empty_model(base, trusted), empty_model(base, trusted)
        plan = build_plan(plain, ParallelConfig())
        whole = quietly(wrapped, config, _NAME)
        planned = plan_adapters(plan, adapter_parameters(whole, plan))
        self.merge = WholeMerge(Adapters(None, whole, _NAME, plan), planned)
        self.merge.refuse_tied()
        self.keys = stored_names(whole, _NAME, planned, True)
        self.owned = {p.name: p.tied_to or p.name for p in planned.parameters}
        self.targets: dict[str, Destination] = loaded_targets(plain, list(self.stored), plan.by_name)
        self.key_of = {self.owned.get(t.name, t.name): key for key, t in self.targets.items() if not t.converter}
        for target in self.targets.values():
            if target.converter is not None and self.merge.parts(target.name) != [target.name]:
                raise ConfigError(
                    f"the adapter changes {target.name}, which the checkpoint stores in another form: load both with "
                    "hfscale.from_pretrained(base, peft_config=adapter), and call hfscale.merge_and_unload"
                )
        missing = [key for name, key in self.keys.items() if name in self.merge.factors and key not in self.trained]
        if missing:
            raise CheckpointError(f"{adapter} lacks {len(missing)} tensors of its config, {missing[0]} for one")

    def __getitem__(self, key: str) -> Tensor:
        target = self.targets[key]
        name = self.owned.get(target.name, target.name)
        parts = self.merge.parts(name)
        if parts == [name]:
            return self._read(name) if target.converter is None else self.stored[key][...]
        merged = self.merge.merged(name, {part: self._read(part) for part in parts})[name]
        return merged.to(self.stored[key].dtype).contiguous()

    def _read(self, name: str) -> Tensor:
        """Return a factor, or a weight from the adapter if it was trained, else from the base."""
        trained = self.keys.get(name)
        return self.trained[trained][...] if trained in self.trained else self.stored[self.key_of[name]][...]


def merge_adapter(
    base: Path, adapter: Path, out: Path, *, max_shard_size: str | int = "5GB", trust_remote_code: bool = False
) -> int:
    """Write ``base`` with ``adapter`` merged into it; return the number of changed tensors.

    Raises:
        CheckpointError: one of them cannot be read, or they do not fit each other.
        ConfigError: the adapter cannot be merged file to file.
    """
    finish_move(base)
    try:
        merged = _Merged(base, adapter, trust_remote_code)
    except (LookupError, OSError) as error:
        raise CheckpointError(f"no model can be built from the checkpoint {base}: {error}") from error
    contents = {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in merged.stored.items()}
    changed = 0
    with atomic_directory(out, stale=REPLACED) as staging:
        writer = CheckpointWriter(staging.path, contents, max_shard_size)
        for key in contents:
            writer.add(key, merged[key])
            changed += merged.merge.parts(merged.owned.get(merged.targets[key].name, "")) != [merged.targets[key].name]
        writer.finish()
        for path in base.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".bin", INDEX)):
                shutil.copyfile(path, staging.path / path.name)
    return changed


def logit_difference(base: Path, adapter: Path, out: Path, trust_remote_code: bool = False) -> float:
    """Return the largest difference of logits between base with adapter and the merged model, relative to the
    largest logit; both full models are loaded, one after the other.
    """
    from peft import PeftModel

    kind = stock_class(empty_model(base, trust_remote_code))
    ids = torch.arange(32).view(2, 16)

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            found: Tensor = model.eval()(input_ids=ids).logits
        return found.float()

    options = {"trust_remote_code": True} if trust_remote_code else {}
    apart = logits(PeftModel.from_pretrained(kind.from_pretrained(base, **options), str(adapter)))
    together = logits(kind.from_pretrained(out, **options))
    return float((apart - together).abs().max() / apart.abs().max())


def _tensors(source: Path, files: list[Path]) -> dict[str, TensorOnDisk]:
    if not files:
        raise CheckpointError(f"{source} has no safetensors files: give the directory of a checkpoint")
    return open_tensors(files)
