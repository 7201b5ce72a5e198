"""Yield a model's full tensors one by one, named as in a Hugging Face checkpoint, for example for an inference
engine.
"""

from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import chain, compress, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._compat.transformers.stored import AsStored, Fp8Encoder, loaded_conversions
from ..distributed.mesh import Mesh
from ..errors import CheckpointError, ConfigError, check_count, check_switch, in_words
from ..features.adapters.merge_adapters import WholeMerge
from ..features.adapters.prompts import is_computed
from ..features.adapters.storage import adapter_tensors
from ..train.guards.replicas import checksum
from ..train.runtime import Runtime, runtime_of
from ..train.runtime.full_tensors import SavedTensor, full_tensors, shares, tensors_to_save
from ..train.runtime.parameter_names import stock_name
from .copied import carried_tensors
from .written_form import written_form

_NONE = torch.empty(0)  # yielded on ranks that get no weights


class WeightStream(Iterator[tuple[str, Tensor]]):
    """Iterate over a model's full weights at one step of training; :func:`stream_weights` returns it.

    Attributes:
        version: the number that the caller gave to these weights, such as the step; ``None`` if there is none.
        committed: whether every rank has sent and received all tensors. Until then, an inference engine may have
            received only some of the new weights.
    """

    def __init__(
        self,
        version: int | None,
        asked: tuple[Any, ...],
        sums: dict[str, int],
    ) -> None:
        self.version = version
        self.committed = False
        # the arguments that a later ``changed_since`` stream must repeat, and the checksums that it compares
        self.asked = asked
        self.sums = sums
        self.tensors: Iterator[tuple[str, Tensor]] = iter(())

    def __next__(self) -> tuple[str, Tensor]:
        return next(self.tensors)

    def until_committed(
        self, mesh: Mesh, tensors: Iterator[tuple[str, Tensor]], staged: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the received tensors, and set :attr:`committed` when every rank has sent and received all. If
        ``staged``, yield the first tensor only after that.
        """
        aside: deque[tuple[str, Tensor]] = deque()
        try:
            for name, tensor in tensors:
                if staged:
                    aside.append((name, tensor.clone()))
                else:
                    yield name, tensor
            versions = mesh.all_gather_object(self.version)
        except Exception as lost:  # for example, a lost connection to a rank
            raise CheckpointError(
                f"version {self.version} of the weights did not arrive completely: let the engine keep its previous "
                f"version, and stream again ({in_words(lost)})"
            ) from lost
        if len(set(versions)) > 1:
            raise CheckpointError(
                f"version must be the same on every rank, got {versions}: pass one number on all ranks"
            )
        self.committed = True
        while aside:
            yield aside.popleft()


def stream_weights(
    model: nn.Module,
    *,
    ranks: Sequence[int] | Literal["all"] = (0,),
    merge_adapters: bool = False,
    adapters_only: bool = False,
    quantization_config: Any = None,
    version: int | None = None,
    staged: bool = False,
    changed_since: WeightStream | None = None,
) -> WeightStream:
    """Yield ``(name, full tensor)`` of every weight, on the CPU, with the names and the order of a Hugging Face
    checkpoint.

    Call it and exhaust the iterator on every rank, because every rank sends its shards; only ``ranks`` get the full
    tensors. No rank holds more than one full tensor and its conversion to the checkpoint's format (for example, one
    tensor per expert). A yielded tensor is valid until the next one is requested, and must not be changed. Tensors of
    the checkpoint that transformers' model class does not load come last, unchanged.

    Args:
        ranks: the global ranks that get the tensors, or ``"all"``.
        merge_adapters: yield weights with the adapters merged into them, as PEFT's own merge computes them; the model
            itself is unchanged. Otherwise the adapters' tensors follow the weights, under the keys of PEFT's files.
        adapters_only: yield only the adapter: the tensors of PEFT's ``adapter_model.safetensors``, by its keys. The
            base weights may be held in 4 or 8 bits.
        quantization_config: a ``transformers.FineGrainedFP8Config``: weights that transformers would quantize on
            loading are yielded in the same 8-bit floating point, bit by bit, each followed by the scales of its blocks
            (``KEY_scale_inv``). ``"as_stored"``: weights that the checkpoint stores quantized are quantized again in
            the checkpoint's format, as :func:`hfscale.save_pretrained` does.
        version: a number for these weights, such as the step; the same on every rank.
        staged: yield nothing before every rank has sent and received everything. The ranks in ``ranks`` then hold all
            tensors in memory.
        changed_since: an earlier stream with a version; tensors whose bits have not changed since then are omitted.

    Raises:
        ConfigError: a rank does not exist, the weights are held in 4 or 8 bits, adapters cannot be merged, a weight
            does not divide into whole blocks, or an argument does not fit the model or another argument.
        CheckpointError: during the iteration, if a rank is lost or streams another version.
    """
    runtime = runtime_of(model)
    runtime.data.release()
    for name, switch in (
        ("merge_adapters", merge_adapters),
        ("adapters_only", adapters_only),
        ("staged", staged),
    ):
        check_switch(name, switch)
    if version is not None:
        check_count("version", version, 0)
    adapters = runtime.adapters
    chosen = _chosen(ranks, runtime.mesh.layout.total_size)
    if adapters_only and (adapters is None or merge_adapters or quantization_config is not None):
        raise ConfigError(
            "adapters_only=True needs a model with adapters, and cannot be combined with merge_adapters= or "
            "quantization_config=, which concern the full weights: leave adapters_only= out, or leave these two out"
        )
    if adapters is not None and is_computed(adapters.whole, adapters.name):
        raise ConfigError(
            "stream_weights cannot stream a prompt that PEFT computes with an encoder: write the prompt with "
            "hfscale.save_pretrained"
        )
    entries = tensors_to_save(runtime)
    asked = (model, chosen, merge_adapters, adapters_only, repr(quantization_config))
    sums = {} if version is None else _checksums(runtime, entries)
    changed = None if changed_since is None else _changed(runtime, changed_since, asked, sums)
    stream = WeightStream(version, asked, sums)
    if adapters is not None and adapters_only:
        tensors = adapter_tensors(runtime, adapters.whole, adapters.name, chosen, among=changed)
    else:
        tensors = _weights(runtime, entries, chosen, merge_adapters, quantization_config, changed)
    stream.tensors = stream.until_committed(runtime.mesh, tensors, staged)
    return stream


def _checksums(runtime: Runtime, entries: list[SavedTensor]) -> dict[str, int]:
    """Return, by parameter name, the checksum of this rank's shard of each tensor in ``entries``; 0 if this rank holds
    no shard. A tied parameter has its first name.
    """
    share_of = shares(runtime)
    held = {entry.owned: share_of(entry) for entry in entries}
    nothing = torch.zeros(0, device=runtime.mesh.device)
    sums = [
        checksum(nothing if share is None else share).to(runtime.mesh.device)
        for share in held.values()
    ]
    return dict(zip(held, torch.stack(sums).tolist(), strict=True))  # one transfer from the device


def _changed(
    runtime: Runtime, since: Any, asked: tuple[Any, ...], sums: dict[str, int]
) -> set[str]:
    """Return the names of the parameters whose bits have changed on any rank since the earlier stream ``since``, which
    keeps their checksums; collective.
    """
    fits = isinstance(since, WeightStream) and since.committed and since.asked == asked
    if not (fits and sums and since.sums.keys() == sums.keys()):
        raise ConfigError(
            "changed_since must be a committed stream of this model (one that every rank sent and received in full) "
            "that had version= and the same arguments, and the new stream needs version= too: stream all weights "
            "first, without changed_since"
        )
    return set(
        compress(
            sums,
            runtime.mesh.largest(*(since.sums[name] != sums[name] for name in sums)),
        )
    )


def _weights(
    runtime: Runtime,
    entries: list[SavedTensor],
    chosen: Sequence[int],
    merge_adapters: bool,
    quantization_config: Any,
    changed: Set[str] | None,
) -> Iterator[tuple[str, Tensor]]:
    if runtime.plan.quantized is not None:
        raise ConfigError(
            "stream_weights yields weights in 16 or 32 bits, but this model holds its weights in 4 or 8 bits: merge "
            "the adapters (hfscale.merge_and_unload), stream a model that is not quantized, or the adapters "
            "(adapters_only=True)"
        )
    adapters = runtime.adapters
    factors = {adapter.name for adapter in runtime.plan.adapters}
    merge = WholeMerge(
        adapters, adapters.stock_plan if adapters and not merge_adapters else runtime.plan
    )
    weights = [entry for entry in entries if entry.owned not in factors]
    stored = _Stored(runtime, weights, quantization_config, runtime.mesh.rank in chosen)
    if changed is not None:
        weights = [
            entry for entry in weights if not changed.isdisjoint(stored.made_from(entry, merge))
        ]
    converted = stored.converted(
        _full(runtime, merge, entries, weights, chosen), carried=changed is None
    )
    if adapters is None or merge_adapters:
        return converted
    among = factors if changed is None else factors & changed
    return chain(
        converted, adapter_tensors(runtime, adapters.whole, adapters.name, chosen, among=among)
    )


def _chosen(ranks: Sequence[int] | str, world: int) -> tuple[int, ...]:
    listed = isinstance(ranks, Sequence) and all(type(rank) is int for rank in ranks)
    chosen = tuple(range(world)) if ranks == "all" else tuple(map(int, ranks)) if listed else ()
    if not chosen or any(not 0 <= rank < world for rank in chosen):
        raise ConfigError(
            f"ranks must be 'all' or some of the ranks 0 to {world - 1}, got {ranks!r}: pass a list of such ranks"
        )
    return chosen


def whole_tensors(runtime: Runtime, ranks: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield every full tensor of a model, with adapters merged, under its name in the model (not in the checkpoint), so
    that another model of the same class can load it.
    """
    runtime.data.release()
    entries = tensors_to_save(runtime)
    merge = WholeMerge(runtime.adapters, runtime.plan)
    weights = [entry for entry in entries if entry.owned not in merge.factors]
    tensors = _full(runtime, merge, entries, weights, ranks)
    return ((stock_name(entry.name), tensor) for entry, tensor in tensors)


class _Stored:
    """Convert a model's full tensors to the tensors that the checkpoint's format has for them, and quantize them if
    requested.
    """

    def __init__(
        self, runtime: Runtime, entries: list[SavedTensor], quantization: Any, here: bool
    ) -> None:
        self._model = runtime.model
        self._here = here
        self._owned = {entry.name: entry.owned for entry in entries}
        by_host = not isinstance(quantization, str | None)
        self._again = written_form(None if by_host else quantization, runtime.model)
        self._encoder = None
        self._contents = {
            e.name: torch.empty(e.shape, dtype=e.dtype, device="meta") for e in entries
        }
        if by_host:
            self._encoder = Fp8Encoder(runtime.model, quantization)
            # Checked on every rank before anything is sent.
            for name in filter(self._encoder.wants, self._contents):
                for key, tensor in AsStored(
                    self._model, {name: self._contents[name]}
                ).layout.items():
                    if len(self._encoder.made_of(key, tensor)) == 1:
                        raise ConfigError(
                            f"{key} of shape {tuple(tensor.shape)} cannot be divided into blocks of weight_block_size: "
                            "choose another weight_block_size, or name the module of this weight in "
                            "modules_to_not_convert"
                        )
        conversions = loaded_conversions(self._model)
        like = (
            [(e.name, e.shape, e.dtype) for e in entries],
            None if conversions is None else id(conversions),
        )
        known = runtime.stored_layout
        if (
            known is None or known[0] != like
        ):  # cached, because transformers needs a third of a stream's time for it
            runtime.stored_layout = known = like, AsStored(self._model, self._contents)
        self._as_stored = known[1].again()

    def made_from(self, entry: SavedTensor, merge: WholeMerge) -> set[str]:
        """Return the names of all parameters that determine the checkpoint's tensors for ``entry``, such as adapters
        that are merged into it. A tied parameter has its first name.
        """
        names = self._as_stored.together.get(entry.name, (entry.name,))
        return {part for name in names for part in merge.parts(self._owned[name])}

    def converted(
        self, whole: Iterator[tuple[SavedTensor, Tensor]], carried: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors in the checkpoint's format. If ``carried``, then also yield the checkpoint's
        tensors that the model class does not load, unchanged.
        """
        for entry, tensor in whole:
            stored = self._as_stored.made_of(entry.name, tensor) if self._here else {}
            encodes = (
                self._encoder
                if self._encoder is not None and self._encoder.wants(entry.name)
                else self._again
            )
            for key, made in stored.items():
                yield from encodes.made_of(key, made).items()
        if self._here and carried:
            for key, on_disk in carried_tensors(self._model, self._again).items():
                yield key, on_disk[...]


def _full(
    runtime: Runtime,
    merge: WholeMerge,
    entries: list[SavedTensor],
    weights: list[SavedTensor],
    chosen: Sequence[int],
) -> Iterator[tuple[SavedTensor, Tensor]]:
    """Yield each of ``weights`` with the full tensor, adapters merged: on the ranks in ``chosen``, an empty tensor on
    other ranks. ``entries`` contain the weights and the adapters' matrices.
    """
    by_name = {entry.owned: entry for entry in entries}
    names = [entry.owned for entry in weights]
    # the first weight of a module -> all entries from which the module is merged
    modules = dict[str, list[str]]()
    merged = set[str]()
    for name in names:
        if name not in merged:
            modules[name] = merge.parts(name)
            merged |= {name, *modules[name]} - merge.factors
    wanted = [by_name[part] for parts in modules.values() for part in parts]
    gathered = full_tensors(runtime, wanted, to=chosen)
    arriving = ((entry.owned, tensor.cpu().contiguous()) for entry, tensor in gathered)
    ready: dict[str, Tensor] = {}
    for name in names:
        if name in modules:
            parts = modules[name]
            arrived = dict(islice(arriving, len(parts)))
            ready |= (
                merge.merged(name, arrived)
                if runtime.mesh.rank in chosen
                else dict.fromkeys([name, *parts], _NONE)
            )
        yield by_name[name], ready.pop(name)
