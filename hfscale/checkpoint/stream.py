"""Yield full weights one by one, named as in a Hugging Face checkpoint, for example to an inference engine during a
run.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._compat.transformers.fp8 import Fp8Encoder
from .._compat.transformers.saving import AsStored
from ..errors import ConfigError, check_switch
from ..features.adapters import Adapters
from ..features.adapters.merge_adapters import WholeMerge
from ..features.adapters.storage import adapter_tensors
from ..parallel.data import reshard
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.full_tensors import SavedTensor, full_tensors, tensors_to_save
from ..train.runtime.parameter_names import stock_name
from .carried import carried_tensors
from .stored_forms.encoding import QuantizedAgain, quantized_again

_NONE = torch.empty(0)  # on ranks that get nothing


def stream_weights(
    model: nn.Module,
    *,
    ranks: Sequence[int] | Literal["all"] = (0,),
    merge_adapters: bool = False,
    adapters_only: bool = False,
    quantization_config: Any = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, full tensor)``, on the CPU, in the order and under the names of a Hugging Face checkpoint.

    Call it on every rank and exhaust it: every rank sends its shards. Ranks that are not chosen get nothing. No rank
    holds more than one full tensor, and its conversion to the checkpoint's format (one tensor per expert, say). A
    tensor is valid until the next one is requested, and must not be changed. Tensors that the stock class does not load
    (``mtp.*``) come last, as the checkpoint has them.

    Args:
        ranks: the global ranks that get the tensors, or ``"all"``.
        merge_adapters: yield weights with their adapters added, as stock PEFT would merge them; the model is unchanged.
            Otherwise adapters follow the weights, under the keys of PEFT's files.
        adapters_only: yield the adapter alone: the tensors that PEFT's ``adapter_model.safetensors`` has, by its keys.
            The weights may be held in 4 or 8 bits.
        quantization_config: a ``transformers.FineGrainedFP8Config``: weights that transformers would quantize on
            loading are yielded in the same 8-bit floating point, bit by bit, each followed by the scales of its blocks
            (``KEY_scale_inv``). ``"as_stored"``: weights that the checkpoint stores quantized are yielded in its form,
            as :func:`hfscale.save_pretrained` writes them.

    Raises:
        ConfigError: a rank does not exist, the weights are held in 4 or 8 bits, adapters cannot be merged, a weight is
            not made of whole blocks, ``"as_stored"`` is given for a checkpoint that is not quantized, or
            ``adapters_only`` for a model without adapters, or with another of these choices.
    """
    runtime = runtime_of(model)
    reshard(runtime.model)
    check_switch("merge_adapters", merge_adapters)
    check_switch("adapters_only", adapters_only)
    chosen, adapters = _chosen(ranks, runtime.mesh.layout.total_size), runtime.part(Adapters)
    if adapters_only:
        if adapters is None or merge_adapters or quantization_config is not None:
            raise ConfigError(
                "adapters_only=True must be asked of a model with adapters, without merge_adapters= and "
                "quantization_config=, which are about its weights: leave it, or them, out"
            )
        return _adapter(runtime, adapters, chosen)
    if runtime.plan.quantized is not None:
        raise ConfigError(
            "stream_weights yields weights in 16 or 32 bits, and these are in 4 or 8 bits: merge the adapters "
            "(hfscale.merge_and_unload), stream a model that is not quantized, or the adapters (adapters_only=True)"
        )
    entries = tensors_to_save(runtime)
    merge = None if adapters is None else WholeMerge(adapters, runtime.plan)
    weights = [entry for entry in entries if merge is None or _owned(entry) not in merge.factors]
    stored = _Stored(runtime, weights, quantization_config, runtime.mesh.rank in chosen)
    if adapters is None or merge is None:
        return stored.of(_whole(runtime, entries, chosen))
    if merge_adapters:
        merge.refuse_tied()
        return stored.of(_merged(runtime, merge, entries, chosen))
    return chain(stored.of(_whole(runtime, weights, chosen)), _adapter(runtime, adapters, chosen, factors_only=True))


def _chosen(ranks: Sequence[int] | str, world: int) -> tuple[int, ...]:
    listed = isinstance(ranks, Sequence) and all(type(rank) is int for rank in ranks)
    chosen = tuple(range(world)) if ranks == "all" else tuple(map(int, ranks)) if listed else ()
    if not chosen or any(not 0 <= rank < world for rank in chosen):
        raise ConfigError(f"ranks must be 'all' or some of the ranks 0 to {world - 1}, got {ranks!r}")
    return chosen


def whole_tensors(runtime: Runtime, ranks: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield full tensors by the model's own names, adapters merged: for another model of the same class."""
    reshard(runtime.model)
    adapters, entries = runtime.part(Adapters), tensors_to_save(runtime)
    if adapters is None:
        found = _whole(runtime, entries, ranks)
    else:
        merge = WholeMerge(adapters, runtime.plan)
        merge.refuse_tied()
        found = _merged(runtime, merge, entries, ranks)
    return ((stock_name(entry.name), tensor) for entry, tensor in found)


class _Stored:
    """Convert a model's full tensors to the checkpoint's format, optionally quantized, on the chosen ranks."""

    def __init__(self, runtime: Runtime, entries: list[SavedTensor], quantization: Any, here: bool) -> None:
        self._model, self._here = runtime.model, here
        self._again = quantized_again(runtime.model) if quantization == "as_stored" else QuantizedAgain()
        self._encoder = None
        self._contents = {e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries}
        if quantization is not None and self._again.form is None:
            self._encoder = Fp8Encoder(runtime.model, quantization)
            for name, tensor in self._contents.items():
                self._refuse_parts_of_blocks(name, AsStored(self._model, {name: tensor}).layout)

    def of(self, whole: Iterator[tuple[SavedTensor, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors one after the other."""
        as_stored = AsStored(self._model, self._contents)
        for entry, tensor in whole:
            if not self._here:
                continue
            for key, made in as_stored.made_of(entry.name, tensor).items():
                yield from self._encoded(entry.name, key, made).items()
        for key, carried in carried_tensors(self._model, self._again.form is not None).items() if self._here else ():
            yield key, carried[...]

    def _encoded(self, name: str, key: str, tensor: Tensor) -> dict[str, Tensor]:
        if self._encoder is not None and self._encoder.wants(name):
            return self._encoder.made_of(key, tensor)
        return self._again.made_of(key, tensor)

    def _refuse_parts_of_blocks(self, name: str, layout: dict[str, Tensor]) -> None:
        """Refuse weights with partial blocks, on every rank alike, before anything is sent."""
        for key, tensor in layout.items():
            if self._encoder is not None and self._encoder.wants(name) and len(self._encoded(name, key, tensor)) == 1:
                raise ConfigError(
                    f"{key} of shape {tuple(tensor.shape)} does not divide into blocks of weight_block_size: choose "
                    "another size, or name its module in modules_to_not_convert"
                )


def _merged(
    runtime: Runtime, merge: WholeMerge, entries: list[SavedTensor], chosen: Sequence[int]
) -> Iterator[tuple[SavedTensor, Tensor]]:
    by_name = {_owned(entry): entry for entry in entries}
    names = [name for name in by_name if name not in merge.factors]
    modules, merged = dict[str, list[str]](), set[str]()  # the first weight of a module -> all that it is merged from
    for name in names:
        if name not in merged:
            modules[name] = merge.parts(name)
            merged |= {name, *modules[name]} - merge.factors
    arriving = _whole(runtime, [by_name[part] for parts in modules.values() for part in parts], chosen)
    ready: dict[str, Tensor] = {}
    for name in names:
        if name in modules:
            parts = modules[name]
            found = {part: tensor for part, (_, tensor) in zip(parts, arriving, strict=False)}
            ready |= merge.merged(name, found) if runtime.mesh.rank in chosen else dict.fromkeys([name, *parts], _NONE)
        yield by_name[name], ready.pop(name)


def _adapter(
    runtime: Runtime, adapters: Adapters, chosen: Sequence[int], factors_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    for key, tensor in adapter_tensors(runtime, adapters.whole, adapters.name, chosen, factors_only=factors_only):
        yield key, tensor.cpu().contiguous()


def _owned(entry: SavedTensor) -> str:
    return entry.planned.name if entry.planned is not None else entry.name


def _whole(runtime: Runtime, entries: list[SavedTensor], chosen: Sequence[int]) -> Iterator[tuple[SavedTensor, Tensor]]:
    """Yield each full tensor on the chosen ranks; every rank must exhaust it, and gets empty tensors if not chosen."""
    for entry, (_, tensor) in zip(entries, full_tensors(runtime, entries, to=chosen), strict=True):
        yield entry, tensor.cpu().contiguous()
