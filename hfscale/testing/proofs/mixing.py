"""Prove, on a tiny clone, that attention is all that mixes the tokens of a family.

A few passes in float64, in one process. First the clone as it is, and with attention answered here: the same output
means that its attention is the one that is built here. Then attention is taken for a function of one token (its own
query, key and value); over parts of the sequence the output must be what it is over the whole one. Where it is not,
something else reads other tokens, or counts its own: a convolution, a recurrence, positions made of local shapes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.transformers.classes import takes_argument
from ..._compat.transformers.experts import use_eager_experts
from ..._compat.transformers.hidden_states import hidden_states_of
from ...errors import ConfigError
from ...models.fields import field
from ...models.precision import keep_float64
from ...parallel.context.attention_override import Attend, AttentionCall, AttentionOverride, attention_configs
from ...parallel.context.cut_batch import CutBatch, cut_batch
from ...parallel.context.inner_hooks import WholeSequences, ask_for_all_positions, cut_inside, own_tokens
from ...parallel.context.key_sources import OwnBlocks
from ...parallel.context.masks import MaskBlocks
from ...parallel.context.methods import read
from ...parallel.context.plan import modules_in_layers
from .clones import tiny_model_of

_NO_CLONE = "no tiny clone of it can be built, on which to prove what reads which tokens"
_WINDOWS = ("sliding_window", "attention_chunk_size")
_WINDOW = 5
_TOLERANCE = 1e-9
_TOKENS, _PARTS = 13, 2
_PICTURE = slice(5, 9)
_PADDED = 3  # tokens at the left of the first row, and at the right of the second


def prove_mixing(model: Any, text: str, layers: int) -> tuple[dict[str, Any], bool]:
    """Prove it on a tiny model of ``layers`` layers in float64; some take half a minute.

    Args:
        text: name of the model inside of it where sequences are cut; empty: it is the model itself.

    Returns:
        ``mixing``: why its sequences cannot be cut, in words; whether it ``pads``; and the names of the classes of
        modules that mix, ``kinds``, and of those that were looked at, ``seen``.
    """
    clone = tiny_model_of(type(model), model.config, torch.float64, layers=layers, **_short(model.config))
    if clone is None:
        return {"mixing": _NO_CLONE}, True
    clone = clone.double()  # what a family keeps in 32 bits by itself, too: nothing but the arithmetic is compared
    use_eager_experts(clone)  # the host's grouped products take no float64
    candidates = list(modules_in_layers(clone, text).values())
    mixing, kinds = find_mixing(clone, False, candidates, text)
    if mixing:
        return {"mixing": mixing}, True
    with_padding, more = find_mixing(clone, True, candidates, text)
    pads, seen = not with_padding and more <= kinds, set(map(type, candidates))
    names = [sorted({kind.__name__ for kind in each}) for each in (kinds, seen)]
    return {"mixing": "", "pads": pads, "kinds": names[0], "seen": names[1]}, True


def _short(config: Any) -> dict[str, int]:
    """Return config changes that make windows and chunks shorter than the tried sequences."""
    return {name: _WINDOW for name in _WINDOWS if isinstance(field(config, name), int)}


def find_mixing(
    model: Any, padded: bool, candidates: Sequence[nn.Module] = (), text: str = ""
) -> tuple[str, set[type]]:
    """Find the modules that read other tokens in ``model``, which is tiny and in float64.

    Args:
        padded: whether rows have padding.
        candidates: modules that may mix tokens, and can be given whole sequences.
        text: name of the model inside of it where sequences are cut; empty: it is the model itself.

    Returns:
        why its sequences cannot be cut, in words, empty where they can; and the classes of those that mix.
    """
    try:
        with keep_float64(), torch.no_grad(), _as_in_training(model), _Mixers(candidates) as mixers:
            return _compare(_Subject(model, text), _batch(model, padded, bool(text)), mixers), mixers.mix
    except ConfigError as error:
        return str(error), set()
    except Exception as error:  # whatever stock code says of a part of a sequence
        said = (str(error).splitlines() or [""])[0][:100]
        if MaskBlocks.__name__ in said:
            return "it attends by code of its own, which reads the mask, and not through transformers' interface", set()
        return f"it cannot run on a part of a sequence ({type(error).__name__}: {said})", set()


class _Mixers:
    """Find modules that compute something else on a part of a sequence than on all of it, and make them return the
    result for all of it.
    """

    def __init__(self, candidates: Sequence[nn.Module]) -> None:
        self._candidates, self._handles = candidates, list[Any]()
        self._calls_of: dict[int, list[tuple[Any, Any]]] = {}
        self._calls: dict[int, int] = {}
        self._part: CutBatch | None = None
        self._records = False
        self.mix: set[type] = set()

    def __enter__(self) -> "_Mixers":
        self._handles = [m.register_forward_hook(self._after, with_kwargs=True) for m in self._candidates]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def found(self) -> list[nn.Module]:
        """Return the modules that mix tokens."""
        return [module for module in self._candidates if type(module) in self.mix]

    def rest(self) -> None:
        """Stop comparing."""
        self._records, self._part = False, None

    def record(self) -> None:
        """Begin a pass over full sequences."""
        self._records, self._part = True, None

    def compare(self, part: CutBatch) -> None:
        """Begin a pass over a part."""
        self._records, self._part, self._calls = False, part, {}

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = hidden_states_of(args, kwargs)
        if self._records:
            self._calls_of.setdefault(id(module), []).append((given, output))
            return output
        if self._part is None:
            return output
        call = self._calls[id(module)] = self._calls.get(id(module), -1) + 1
        whole_given, whole = self._calls_of[id(module)][call]
        first, every = (x[0] if isinstance(x, (tuple, list)) else x for x in (output, whole))
        if not _of_tokens(whole_given) or not _of_tokens(every):
            return output  # of tokens that are laid out in another way, the model's output tells
        if apart(given, own_tokens(whole_given, self._part), {}) > _TOLERANCE:
            return output  # something before it mixes
        if apart(first, own_tokens(every, self._part), {}) <= _TOLERANCE:
            return output
        self.mix.add(type(module))
        return own_tokens(whole, self._part)


def _of_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 2 and x.shape[1] == _TOKENS


class _Subject:
    """Hold a model whose attention is computed here, and whose sequences are cut as in a run."""

    def __init__(self, model: Any, text: str) -> None:
        self.model, self.seam = model, AttentionOverride(attention_configs(model))
        inner = model.get_submodule(text)
        self._handles = ask_for_all_positions(inner)
        self._inside = bool(text)
        if self._inside:
            self._handles.append(cut_inside(inner))
        self._takes_positions = takes_argument(model, "position_ids")

    def restore(self) -> None:
        """Remove the hooks."""
        self.seam.remove()
        for handle in self._handles:
            handle.remove()

    def part(self, batch: dict[str, Tensor], parts: int = 1, rank: int = 0) -> tuple[CutBatch, dict[str, Any]]:
        """Return the part of the batch that a rank gets."""
        return cut_batch(batch, parts, rank, 0, self._takes_positions, self._inside)

    def passed(self, part: tuple[CutBatch, dict[str, Any]], attend: Attend) -> Tensor:
        """Return the model's output for a part."""
        with self.seam.passing(part[0], attend):
            return _run(self.model, part[1])


def _compare(subject: _Subject, batch: dict[str, Tensor], mixers: _Mixers) -> str:
    try:
        whole = subject.part(batch)
        if apart(subject.passed(whole, _whole_attention), _run(subject.model, batch), batch) > _TOLERANCE:
            return "its attention is not the usual one"
        alone = _OneToken()
        mixers.record()
        local = subject.passed(whole, alone)
        for rank in range(_PARTS):
            part, own = subject.part(batch, _PARTS, rank)
            here = _OneToken()
            mixers.compare(part)
            if apart(subject.passed((part, own), here), local[:, part.places], _masked(batch, part)) > _TOLERANCE:
                return "something besides attention reads other tokens of a sequence, or counts them"
            if not here.sees_as(alone):
                return "its mask is made of more than places and padding"
        return _compare_gathered(subject, batch, mixers)
    finally:
        subject.restore()


def _compare_gathered(subject: _Subject, batch: dict[str, Tensor], mixers: _Mixers) -> str:
    """Compare again with mixers run on full sequences, as in a run: their inputs must have a token dim."""
    mixers.rest()
    tape, tape_place = list[Tensor](), [0]

    def record_or_play(x: Tensor, part: CutBatch) -> Tensor:
        if part.split.size == 1:
            tape.append(x)
            return x
        whole, tape_place[0] = tape[tape_place[0]], tape_place[0] + 1
        return whole

    gathered = WholeSequences(record_or_play, lambda: None)
    handles = [handle for module in mixers.found() for handle in gathered.install(module)]
    try:
        wanted = subject.passed(subject.part(batch), _whole_attention)
        if apart(wanted, _run(subject.model, batch), batch) > _TOLERANCE:
            return "a mixer in it cannot be given whole sequences"
        if not handles:
            return ""
        tape.clear()
        alone = subject.passed(subject.part(batch), _OneToken())
        for rank in range(_PARTS):
            tape_place[0] = 0
            part, own = subject.part(batch, _PARTS, rank)
            found = subject.passed((part, own), _OneToken())
            if apart(found, alone[:, part.places], _masked(batch, part)) > _TOLERANCE:
                return "a mixer in it is given more than tokens and their padding"
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _masked(batch: dict[str, Tensor], part: CutBatch) -> dict[str, Tensor]:
    """Return the padding mask of a part's tokens, if there is one."""
    mask = batch.get("attention_mask")
    return {} if mask is None else {"attention_mask": mask[:, part.places]}


def apart(found: Tensor, wanted: Tensor, batch: dict[str, Tensor]) -> float:
    """Return the largest difference relative to the largest entry, without padding."""
    if "attention_mask" in batch:
        real = batch["attention_mask"].bool()
        found, wanted = found[real], wanted[real]
    if found.shape != wanted.shape:
        return float("inf")
    largest = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
    return largest if largest == largest else float("inf")


def _run(model: Any, batch: dict[str, Any]) -> Tensor:
    cache = {"use_cache": False} if takes_argument(model, "use_cache") else {}
    output = model(**batch, **cache)
    found = getattr(output, "logits", None)
    result: Tensor = found if found is not None else output[0]
    return result


def _whole_attention(_: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall) -> Tensor:
    return read(q, k, v, call.sinks, mask, call, OwnBlocks())


class _OneToken:
    """Replace attention by a function of each token's own query, key and value; record the masks."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def __call__(self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: MaskBlocks, call: AttentionCall) -> Tensor:
        self.masks.append(mask.block((0, mask.batch.split.total), (0, mask.batch.split.total)))
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return v * torch.tanh((q * k).sum(-1, keepdim=True) * call.scale)

    def sees_as(self, other: "_OneToken") -> bool:
        """Return whether all calls hid the same of the full sequence."""
        return len(self.masks) == len(other.masks) and all(map(torch.equal, self.masks, other.masks))


def _batch(model: Any, padded: bool, marked: bool) -> dict[str, Tensor]:
    """Return a batch of tokens; ``marked``: some belong to a picture, whose other tokens may read them."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(3, vocabulary, (2, _TOKENS), generator=torch.Generator().manual_seed(5))
    batch = {"input_ids": ids}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if marked and takes_argument(model, name):
            batch[name] = torch.zeros_like(ids)
            batch[name][:, _PICTURE] = 1
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, :_PADDED], batch["attention_mask"][1, -_PADDED:] = 0, 0
    return batch


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """Disable dropout and perturb the weights, so that differences show, inside the with block."""
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        yield
