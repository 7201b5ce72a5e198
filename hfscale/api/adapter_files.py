"""Merge a saved adapter into a checkpoint, or rewrite an adapter for engines: file to file, in one process.

Tensors without adapters are copied as stored. For weights with adapters, PEFT's own merge runs on the full weight and
factors, one module in memory at a time (:mod:`..features.adapters.merge_adapters`). Transformers converts these weights
from the checkpoint's format and back.

Engines expect separate factors for each expert. PEFT concatenates the factors of all experts of a stacked parameter:
``lora_A`` is ``[experts * rank, in]``, ``lora_B`` ``[out, rank * experts]``. If a family's checkpoints store the
projections of each expert separately, vLLM and SGLang expect the factors under the same names::

    experts.base_layer.lora_A  ->  experts.3.gate_proj.lora_A [rank, in]    experts.3.up_proj.lora_A [rank, in]
    experts.base_layer.lora_B  ->  experts.3.gate_proj.lora_B [out, rank]   experts.3.up_proj.lora_B [out, rank]

Values are copied unchanged. Families whose checkpoints store stacked experts (gpt-oss) need no rewriting: engines read
PEFT's own format.
"""

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .._compat.peft import LORA_A, LORA_B
from .._compat.transformers.classes import class_name, empty_model, stock_class
from .._compat.transformers.stored import AsStored, convert, loaded_targets
from ..checkpoint.copied import copy_tensors
from ..checkpoint.coverage import note_carried
from ..checkpoint.stored_forms.forms import as_plain, load_weights_as
from ..checkpoint.stored_forms.scheme import describe_form, form_in
from ..checkpoint.written_form import PlainForm, written_form
from ..distributed.files.replace import ADAPTER_CONFIG, finish_move
from ..distributed.files.sources import open_weights
from ..distributed.files.weight_files import open_tensors
from ..distributed.files.writer import INDEX, REPLACED, CheckpointWriter
from ..errors import CheckpointError, ConfigError
from ..features.adapters.attach import Adapters
from ..features.adapters.merge_adapters import WholeMerge
from ..features.adapters.storage import DECOMPOSING, WEIGHTS
from ..plan import AdapterParameter
from ..train.runtime.writing import atomic_directory
from .adapted_base import PREFIX, AdaptedBase
from .samples import answer_to, reads_tokens

_OF_TOKENIZERS = (
    "tokenizer",
    "special_tokens_map",
    "added_tokens",
    "vocab.",
    "merges.",
    "chat_template",
)


class _Merged:
    """Hold the dequantized tensors of a checkpoint, ``base``, and merge ``adapter`` into the weights it changes."""

    def __init__(self, base: Path, adapter: Path, trusted: bool) -> None:
        self.adapted = adapted = AdaptedBase(base, adapter, trusted)
        self.stored = as_plain(open_weights(base), adapted.form)
        if not self.stored:
            raise CheckpointError(
                f"{base} has no safetensors files and no pytorch_model.bin: give the directory of a checkpoint"
            )
        self.merge = WholeMerge(
            Adapters(None, adapted.whole, adapted.name, adapted.stock_plan), adapted.plan
        )
        self.owned = {p.name: p.first_name for p in adapted.plan.parameters}
        self.targets = loaded_targets(adapted.model, list(self.stored), adapted.stock_plan.by_name)
        load_weights_as(
            self.stored, self.targets, {n: t.dtype for n, t in adapted.model.state_dict().items()}
        )
        self.keys_of: dict[
            str, list[str]
        ] = {}  # owned name -> checkpoint keys that form the weight
        for key, target in self.targets.items():
            for name in (target.name, *target.others):
                self.keys_of.setdefault(self.owned.get(name, name), []).append(key)
        self._ready: dict[str, Tensor] = {}
        self.placed = adapted.placed()
        lost = [key for name, key in self.placed.items() if name not in self.keys_of]
        if lost:
            raise CheckpointError(
                f"{adapter} adapts {lost[0]}, but {base} stores no such weight: merge the adapter into the checkpoint "
                "that it was trained on"
            )
        self._refuse_rows(base)

    def _refuse_rows(self, base: Path) -> None:
        """Raise :class:`CheckpointError` if the adapter was trained with another vocabulary size than the checkpoint's,
        but does not contain all weights that have one row per token.
        """
        for key, shape in self.resized().items():
            if not self.changed(key) and not self._is_buffer(key):
                raise CheckpointError(
                    f"the adapter was trained with a vocabulary of {self.adapted.tokens} tokens, but has no {key}, "
                    f"which {base} stores with {self.stored[key].shape[0]} rows, and {shape[0]} rows are needed: save "
                    "the adapter with the embedding and the head (PEFT's save_embedding_layers=True)"
                )

    def resized(self) -> dict[str, tuple[int, ...]]:
        """Return the new shapes, by key, of the checkpoint's tensors that must be resized, because the adapter was
        trained with another vocabulary size.
        """
        if self.adapted.tokens is None:
            return {}
        contents = self.adapted.model.state_dict()
        shapes: dict[str, tuple[int, ...]] = {}
        for key, target in self.targets.items():
            if target.converter is None:
                shape = tuple(contents[target.name].shape)
                if shape != tuple(self.stored[key].shape):
                    shapes[key] = shape
        return shapes

    def _is_buffer(self, key: str) -> bool:
        return self.targets[key].name not in self.owned

    def layout(self) -> dict[str, Any]:
        """Return tensors with the shapes and dtypes of the result, by key."""
        tensors: dict[str, Any] = dict(self.stored)
        for key, shape in self.resized().items():
            tensors[key] = torch.empty(
                shape,
                dtype=self.stored[key].dtype,
                device="meta",
            )
        return tensors

    def changed(self, key: str) -> bool:
        """Return whether the adapter changes the tensor that is stored as ``key``."""
        target = self.targets[key]
        names = {self.owned.get(name, name) for name in (target.name, *target.others)}
        if self._is_buffer(key):
            return key in self.resized()
        return any(name in self.placed or self.merge.parts(name) != [name] for name in names)

    def stored_with(self, key: str) -> dict[str, Tensor]:
        """Return the merged tensor that is stored as ``key``, and the tensors that are converted with it, by key."""
        target = self.targets[key]
        if self._is_buffer(key):
            return {key: self._grown(key)}
        if target.converter is None:
            return {key: self._merged(target.name).to(self.stored[key].dtype).contiguous()}
        whole = {name: self._merged(name) for name in (target.name, *target.others)}
        as_stored = AsStored(
            self.adapted.model, {name: tensor.to("meta") for name, tensor in whole.items()}
        )
        return {
            key: made.to(self.stored[key].dtype).contiguous()
            for name, tensor in whole.items()
            for key, made in as_stored.made_of(name, tensor).items()
        }

    def _grown(self, key: str) -> Tensor:
        """Return a buffer with one entry per token (a logits bias), 0 for new tokens, like transformers' resizing."""
        stored = self.stored[key][...]
        grown = stored.new_zeros(self.resized()[key])
        kept = tuple(map(slice, map(min, stored.shape, grown.shape)))
        grown[kept] = stored[kept]
        return grown

    def _merged(self, name: str) -> Tensor:
        """Return a merged weight; the remaining weights of its module are merged at the same time and kept for later
        calls.
        """
        name = self.owned[name]
        if name not in self._ready:
            parts = {part: self._read(part) for part in self.merge.parts(name)}
            config = self.adapted.config
            decomposed = getattr(config, "init_lora_weights", True) in DECOMPOSING
            if decomposed and len(parts) > 1:
                parts |= self.merge.without_start(config, name, parts)
            self._ready = self.merge.merged(name, parts)
        return self._ready.pop(name)

    def _read(self, name: str) -> Tensor:
        """Return a factor, or a weight: from the adapter if the weight was trained, otherwise from the base."""
        trained = self.placed.get(name) or (
            self.adapted.keys[name] if name in self.merge.factors else None
        )
        if trained is not None:
            return self.adapted.trained[trained][...]
        tensors = {key: self.stored[key][...] for key in self.keys_of[name]}
        made = convert(tensors, self.targets, self.adapted.model, self.adapted.model.config)
        return next(tensor for each, tensor in made.items() if self.owned[each] == name)


def merge_adapter(
    base: Path,
    adapter: Path,
    out: Path,
    *,
    max_shard_size: str | int = "5GB",
    trust_remote_code: bool = False,
    quantization: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> int:
    """Merge an adapter into the checkpoint ``base``, write the result to ``out``, and return the number of changed
    tensors.

    ``quantization`` is that of :func:`hfscale.save_pretrained`. ``check`` is called with a temporary directory that
    contains the result, before the directory is renamed to ``out``; if ``check`` raises, nothing is written.
    """
    finish_move(base)
    merged = _Merged(base, adapter, trust_remote_code)
    note_carried(merged.adapted.model, base, ())
    again = written_form(quantization, merged.adapted.model)
    with atomic_directory(out, stale=REPLACED) as staging:
        changed = _write(merged, again, staging.path, max_shard_size)
        for path in base.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".bin", INDEX)):
                shutil.copyfile(path, staging.path / path.name)
        if merged.adapted.tokens is not None:
            merged.adapted.model.config.save_pretrained(staging.path)
            for path in adapter.iterdir():
                if path.name.startswith(
                    _OF_TOKENIZERS
                ):  # the base's tokenizer lacks the new tokens
                    shutil.copyfile(path, staging.path / path.name)
        if merged.adapted.form is not None:
            describe_form(staging.path, again.form)
        if check is not None:
            check(staging.path)
    return changed


def _write(merged: _Merged, again: PlainForm, out: Path, max_shard_size: str | int) -> int:
    size = merged.adapted.stock_plan.parameter_count
    writer = CheckpointWriter(out, again.layout(merged.layout()), max_shard_size, size)
    changed = dict.fromkeys(key for key in merged.stored if merged.changed(key))
    for key, tensor in merged.stored.items():
        if key not in changed:
            copy_tensors(again.layout({key: tensor}), writer)
    waiting = dict(changed)
    while waiting:
        for key, plain in merged.stored_with(next(iter(waiting))).items():
            for name, made in again.made_of(key, plain).items():
                writer.add(name, made)
            del waiting[key]
    writer.finish()
    return len(changed)


def logit_difference(
    base: Path, adapter: Path, out: Path, trust_remote_code: bool = False
) -> float:
    """Return the difference between logits of base with adapter and of the merged model, over the largest logit.

    Raises:
        CheckpointError: the difference is larger than rounding explains, or some logits are not finite.
        ConfigError: the model reads no tokens.
    """
    trusted = trust_remote_code
    empty = empty_model(base, trusted)
    kind = stock_class(empty)
    if not reads_tokens(empty):
        raise ConfigError(
            f"comparing logits needs a model that takes input_ids, got {class_name(empty)}, which takes "
            f"{empty.main_input_name}: pass --no-check to skip the comparison, and inspect the merged model yourself"
        )
    tokens = AdaptedBase(base, adapter, trusted).tokens
    apart = _logits(kind, base, trusted, str(adapter), tokens)
    together = _logits(kind, out, trusted)
    by_token = (apart - together).abs().amax(-1).flatten() / apart.abs().max()
    usual = float(by_token.median())
    types = {tensor.dtype for tensor in open_tensors(sorted(out.glob("*.safetensors"))).values()}
    rounding = _EXACT if form_in(out) is None and types <= _WIDE else _ROUNDED
    if not usual <= rounding:
        raise CheckpointError(
            f"the merged model must have the logits of {base} with {adapter}, but the median difference is {usual:.1e} "
            f"of the largest logit, and rounding explains only {rounding:.0e}: nothing was written; report this with "
            "the adapter's config, or pass --no-check to write the result and inspect it"
        )
    return float(by_token.max())


# How much rounding may change the logits of a token, relative to the largest logit. In a mixture-of-experts model,
# rounding may route some tokens to other experts.
_EXACT = 1e-3
_ROUNDED = 0.3
_WIDE = {torch.float64, torch.float32}


@torch.no_grad()
def _logits(
    kind: Any,
    directory: Path,
    trusted: bool,
    adapter: str | None = None,
    tokens: int | None = None,
) -> Tensor:
    from peft import PeftModel

    from .build import from_pretrained

    options: dict[str, Any] = {
        "dtype": torch.float32,
        **({"trust_remote_code": True} if trusted else {}),
    }
    model: Any
    # Transformers computes with quantized weights only on some GPUs.
    if form_in(directory) is not None:
        options["resize_token_embeddings"] = tokens
        model = from_pretrained(directory, auto_class=kind, peft_config=adapter, **options)
    else:
        model = kind.from_pretrained(directory, **options)
        if tokens is not None:
            model.resize_token_embeddings(tokens, mean_resizing=False)
        model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    ids = torch.arange(32).view(2, 16) % int(model.config.get_text_config().vocab_size)
    return answer_to(model.eval(), ids)


def adapter_for_engine(
    base: Path, adapter: Path, out: Path, *, trust_remote_code: bool = False
) -> int:
    """Write the LoRA adapter of the checkpoint ``base`` for an engine, and return the number of written tensors; raise
    for adapters that engines cannot apply.
    """
    adapted = AdaptedBase(base, adapter, trust_remote_code)
    init = getattr(adapted.config, "init_lora_weights", True)
    if init in DECOMPOSING:
        raise ConfigError(
            f"an inference engine adds {adapter} to the base weights as stored, but PEFT changed the base weights "
            f"before training (init_lora_weights={init!r}): merge the adapter into its base instead (hfscale merge)"
        )
    by_rows = next((each for each in adapted.adapters if each.tokens), None)
    if by_rows is not None:
        raise ConfigError(
            f"{adapter} must contain only low-rank factors to be served by an inference engine, got trained rows of "
            f"{len(by_rows.tokens)} tokens of {by_rows.base}: merge the adapter into its base instead (hfscale merge)"
        )
    adapted.refuse_beside_factors()
    stored = {key: tensor[...] for key, tensor in adapted.trained.items()}
    contents = {name: p.detach() for name, p in adapted.model.named_parameters()}
    as_stored = AsStored(adapted.model, contents)
    settings = json.loads((adapter / ADAPTER_CONFIG).read_text())
    factors: dict[str, dict[str, AdapterParameter]] = {}
    for each in adapted.adapters:
        if each.experts and contents[each.base].ndim == 3:  # excludes a router's matrix
            factors.setdefault(each.base, {})[each.kept_in] = each
    for parameter, pair in factors.items():
        pieces = _pieces(as_stored, parameter, contents[parameter])
        if list(pieces) != [parameter]:
            a, b = (stored.pop(adapted.keys[pair[kind].name]) for kind in (LORA_A, LORA_B))
            stored |= _per_expert(a, b, pair[LORA_A].experts, pieces)
            rank = len(a) // pair[LORA_A].experts
            _record_rank(settings, rank, pieces)
            module = parameter.rpartition(".")[0]
            for (
                other,
                weight,
            ) in (
                contents.items()
            ):  # engines need adapters on all projections of an expert, or on none
                if other.rpartition(".")[0] == module and weight.ndim == 3 and other not in factors:
                    beside = _pieces(as_stored, other, weight)
                    experts, rows, columns = weight.shape
                    zeros = torch.zeros(experts * rank, columns), torch.zeros(rows, rank * experts)
                    stored |= _per_expert(*zeros, experts, beside)
                    _record_rank(settings, rank, beside)
    with atomic_directory(out, stale=(WEIGHTS, "adapter_model.bin")) as staging:
        save_file(stored, staging.path / WEIGHTS, metadata={"format": "pt"})
        (staging.path / ADAPTER_CONFIG).write_text(
            json.dumps(settings, indent=2, sort_keys=True) + "\n"
        )
    return len(stored)


def _pieces(
    as_stored: AsStored,
    parameter: str,
    like: Tensor,
) -> dict[str, tuple[int, Tensor]]:
    """Return, for each projection that the checkpoint stores of the stacked experts ``like [experts, out, in]``: the
    index of its expert, and the indices of its rows along ``out``. The projections are listed by their module names.
    """
    rows = torch.arange(like.shape[0] * like.shape[1]).view(*like.shape[:2], 1).expand(like.shape)
    pieces: dict[str, tuple[int, Tensor]] = {}
    for key, piece in as_stored.made_of(parameter, rows).items():
        if piece.shape == like.shape:
            return {parameter: (0, rows)}
        if piece.dim() != 2 or not torch.equal(piece, piece[:, :1].expand_as(piece)):
            break
        pieces[key.removesuffix(".weight")] = (
            int(piece[0, 0]) // like.shape[1],
            piece[:, 0] % like.shape[1],
        )
    else:
        if pieces:
            return pieces
    raise ConfigError(
        f"the adapter of {parameter} cannot be rewritten for an inference engine, because the checkpoint stores its "
        "experts neither as one tensor per expert nor as one stack: merge the adapter into the weights instead "
        "(hfscale merge)"
    )


def _per_expert(
    a: Tensor, b: Tensor, experts: int, pieces: dict[str, tuple[int, Tensor]]
) -> dict[str, Tensor]:
    """Split the factors ``a`` and ``b`` of stacked experts into the factors of each expert's projections. Return these
    by their keys in an adapter's file; ``pieces`` maps a projection to its expert and its rows.
    """
    by_expert = b.view(len(b), -1, experts)
    factors = dict[str, Tensor]()
    for module, (expert, rows) in pieces.items():
        factors[f"{PREFIX}{module}.{LORA_A}.weight"] = a.view(experts, -1, a.shape[1])[
            expert
        ].clone()
        factors[f"{PREFIX}{module}.{LORA_B}.weight"] = by_expert[rows, :, expert].contiguous()
    return factors


def _record_rank(
    settings: dict[str, Any],
    rank: int,
    modules: Collection[str],
) -> None:
    """Record in an adapter's config that the experts' projections ``modules`` have factors of LoRA rank ``rank``."""
    projections = {name.rpartition(".")[2] for name in modules}
    if any("expert" in pattern for pattern in settings.get("alpha_pattern") or {}):
        raise ConfigError(
            "alpha_pattern in the adapter's config must not name experts, because inference engines use one scale for "
            "all experts: train with one lora_alpha"
        )
    known = settings.get("target_modules") or []
    settings["target_modules"] = sorted(
        {*([known] if isinstance(known, str) else known), *projections}
    )
    settings["target_parameters"] = None
    if rank != settings["r"]:
        ranks = {rf"experts\.\d+\.{name}": rank for name in projections}
        settings["rank_pattern"] = {**(settings.get("rank_pattern") or {}), **ranks}
