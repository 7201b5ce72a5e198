"""Prove, on a tiny clone, that only attention mixes the tokens of a family.

The proof takes a few passes in float64, in one process. First the clone runs with its own attention, then with
hfscale's: equal outputs mean that both attentions are the same. Then attention is replaced by a function of each single
token (its query, key and value), and so are convolutions and scans whose states can be passed on between
context-parallel ranks. Now the output over parts of a sequence must equal the output over the whole sequence. If it
does not, something else reads other tokens or counts tokens: a recurrence in a family's own code, or positions made
from local shapes.
"""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat.torch import tree_map
from ..._compat.transformers.classes import takes_argument
from ..._compat.transformers.computing import position_counter
from ..._compat.transformers.experts import use_eager_experts
from ..._compat.transformers.hidden_states import hidden_states_of
from ..._compat.transformers.recurrences import reads_by_functions
from ...distributed.ops.segments import keep_states_apart
from ...errors import ConfigError
from ...models.fields import field
from ...models.precision import keep_float64
from ...parallel.context import attention_override, inner_hooks
from ...parallel.context.cut_batch import CutBatch, MaskBlocks, cut_batch
from ...parallel.context.sequence_plan import modules_in_layers
from .probe import TokenByToken, apart, perturb, tiny_model_of, without_cache

_WINDOWS = ("sliding_window", "attention_chunk_size")
_WINDOW = 5
_TOLERANCE = 1e-9
_TOKENS = 13
_PARTS = 2
_PICTURE = slice(5, 9)
_PADDED = 3  # padding on the left of the first row, and on the right of the second


def prove_mixing(
    model: Any,
    text: str,
    layers: int,
) -> tuple[dict[str, Any], bool]:
    """Prove on a tiny model with ``layers`` layers, in float64, which modules mix tokens; this may take half a minute.

    Sequences are split in the submodule named ``text``, or in the model itself if the name is empty. The answer has:

    - ``mixing``: why sequences cannot be split; empty if they can.
    - ``pads``: whether rows may be padded.
    - ``kinds``: names of module classes that mix tokens and need whole sequences.
    - ``handing``: names of module classes that mix tokens, but need only the state at the end of the preceding part.
    - ``seen``: names of all module classes that were examined.
    """
    # Windows and chunks must be shorter than the sequences of the proof.
    short = {name: _WINDOW for name in _WINDOWS if isinstance(field(model.config, name), int)}
    clone = tiny_model_of(type(model), model.config, torch.float64, layers=layers, **short)
    if clone is None:
        return {
            "mixing": "no tiny clone of it can be built, on which to prove what reads which tokens"
        }, True
    # Also convert tensors that a family keeps in 32 bits, so that only the arithmetic is compared.
    clone = clone.double()
    use_eager_experts(clone)  # transformers' grouped products lack float64
    candidates = list(modules_in_layers(clone, text).values())
    keep_states_apart(
        clone,
        lambda: TokenByToken() if isinstance(attention_override.attending(), _OneToken) else None,
    )
    mixers = _Mixers(candidates)
    mixing = _find_mixing(clone, False, mixers, text)
    if mixing and mixers.read_masks and not text and takes_argument(clone, "attention_mask"):
        mixers.whole_mask = True
        mixing = _find_mixing(clone, False, mixers, text)
    if mixing:
        return {"mixing": mixing}, True
    kinds = set(mixers.mix)
    seen = set(map(type, candidates))
    pads = not _find_mixing(clone, True, mixers, text) and mixers.mix <= kinds
    handing = {
        type(module) for module in candidates if any(map(reads_by_functions, module.modules()))
    } - kinds
    facts = {"kinds": kinds, "seen": seen, "handing": handing, "reads_masks": mixers.read_masks}
    names = {name: sorted({kind.__name__ for kind in each}) for name, each in facts.items()}
    answer = {
        "mixing": "",
        "pads": pads,
        "kinds": names.pop("kinds"),
        "seen": names.pop("seen"),
    }
    answer |= {name: each for name, each in names.items() if each}
    return {**answer, "whole_mask": True} if mixers.whole_mask else answer, True


def _find_mixing(model: Any, padded: bool, mixers: "_Mixers", text: str) -> str:
    """Return why a tiny model's sequences cannot be split over ranks (empty if they can); ``mixers`` then has the
    classes of modules that mix tokens.
    """
    mixers.mix = set(mixers.read_masks)
    try:
        with keep_float64(), torch.no_grad(), _as_in_training(model), mixers:
            return _compare(
                _Subject(model, text, mixers), _batch(model, padded, bool(text)), mixers
            )
    except Exception as error:
        # An error of the attention override, or any error of stock code about masks and parts of sequences.
        kind = None if padded else mixers.raised_in(error)
        if kind is not None and kind not in mixers.read_masks:
            mixers.read_masks.add(kind)
            return _find_mixing(model, padded, mixers, text)
        said = (str(error).splitlines() or [""])[0]
        if isinstance(error, ConfigError):
            return said
        if MaskBlocks.__name__ in said:
            return "it computes with masks in code of its own, outside of its attention"
        return f"it cannot run on a part of a sequence ({type(error).__name__}: {said[:100]})"


class _Mixers:
    """Find modules whose output for a part of a sequence differs from their output for the full sequence. In passes on
    a part, replace their output by this part of the output for the full sequence.
    """

    def __init__(self, candidates: Sequence[nn.Module]) -> None:
        self._candidates, self._handles = candidates, list[Any]()
        self.mix: set[type] = set()
        # Classes of attention modules with their own code, which need masks as tensors.
        self.read_masks: set[type] = set()
        self.whole_mask = False  # whether the model gets the attention_mask of all tokens

    def __enter__(self) -> "_Mixers":
        self._calls_of: dict[int, list[tuple[Any, Any]]] = {}
        self._given: dict[int, list[tuple[Any, Any]]] = {}
        self.gathers = False
        self.begin()
        self._handles = [
            m.register_forward_hook(self._after, with_kwargs=True) for m in self._candidates
        ]
        reading = (module for module in self._candidates if type(module) in self.read_masks)
        self._handles += [
            m.register_forward_pre_hook(self._run_alone, with_kwargs=True) for m in reading
        ]
        return self

    def raised_in(self, error: BaseException) -> type | None:
        """Return the class of the examined module in whose forward pass an error was raised; ``None`` if it was raised
        elsewhere.
        """
        objects = [
            frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)
        ]
        return next(
            (type(obj) for obj in objects if any(obj is module for module in self._candidates)),
            None,
        )

    def _run_alone(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run attention modules with their own code on all tokens, also if their input is only a part of a sequence."""
        if self.gathers:  # :class:`WholeSequences` gathers the tokens
            return None
        if self._part is None:
            args = tuple(_as_tensor(value) for value in args)
            kwargs = {name: _as_tensor(value) for name, value in kwargs.items()}
            if self._records:
                self._given.setdefault(id(module), []).append((args, kwargs))
        else:
            given = hidden_states_of(args, kwargs)
            args, kwargs = self._given[id(module)][self._calls.get(id(module), -1) + 1]
            if (
                apart(given, inner_hooks.own_tokens(hidden_states_of(args, kwargs), self._part))
                > _TOLERANCE
            ):
                raise ConfigError(
                    "a module before its attention reads other tokens of a sequence than its own, or counts tokens"
                )
        return args, kwargs

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def found(self) -> list[nn.Module]:
        return [module for module in self._candidates if type(module) in self.mix]

    def begin(self, part: CutBatch | None = None, records: bool = False) -> None:
        """Begin a pass. With ``records``, it runs full sequences and records outputs; with ``part``, it runs this part;
        with neither, nothing is recorded or compared.
        """
        self._records, self._part, self._calls = records, part, dict[int, int]()

    def _after(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        given = hidden_states_of(args, kwargs)
        if self._records:
            # Clone, because later code may add to the output in place.
            kept = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, output)
            self._calls_of.setdefault(id(module), []).append((given, kept))
            return output
        if self._part is None:
            return output
        call = self._calls[id(module)] = self._calls.get(id(module), -1) + 1
        whole_given, whole = self._calls_of[id(module)][call]
        if type(module) in self.read_masks:
            return inner_hooks.own_tokens(whole, self._part)
        first, every = (x[0] if isinstance(x, (tuple, list)) else x for x in (output, whole))
        if not _of_tokens(whole_given) or not _of_tokens(every):
            return output  # other layouts of tokens: judged by the model's output
        if apart(given, inner_hooks.own_tokens(whole_given, self._part)) > _TOLERANCE:
            return output  # an earlier module mixes tokens
        if apart(first, inner_hooks.own_tokens(every, self._part)) <= _TOLERANCE:
            return output
        self.mix.add(type(module))
        return inner_hooks.own_tokens(whole, self._part)


def _as_tensor(value: Any) -> Any:
    return value.dense if isinstance(value, MaskBlocks) else value


def _of_tokens(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 2 and x.shape[1] == _TOKENS


class _Subject:
    """Hold a tiny model with hfscale's attention in place of its own, and sequences that are split as over context
    ranks.
    """

    def __init__(self, model: Any, text: str, mixers: "_Mixers") -> None:
        self._whole_mask, self._count = mixers.whole_mask, position_counter(model)
        self.model, self.seam = (
            model,
            attention_override.AttentionOverride(attention_override.attention_configs(model)),
        )
        for module in mixers.found():  # at first only those that read masks
            self.seam.leave_out(module)
        inner = model.get_submodule(text)
        self._handles = inner_hooks.ask_for_all_positions(inner)
        self._inside = bool(text)
        if self._inside:
            self._handles.append(inner_hooks.cut_inside(inner))

    def restore(self) -> None:
        self.seam.remove()
        for handle in self._handles:
            handle.remove()

    def part(
        self, batch: dict[str, Tensor], parts: int = 1, rank: int = 0
    ) -> tuple[CutBatch, dict[str, Any]]:
        return cut_batch(
            batch,
            parts,
            rank,
            0,
            self._count(batch),
            self._inside,
            self._whole_mask,
        )

    def passed(
        self, part: tuple[CutBatch, dict[str, Any]], attend: attention_override.Attend
    ) -> Tensor:
        with self.seam.passing(part[0], attend):
            return _run(self.model, part[1])


def _compare(subject: _Subject, batch: dict[str, Tensor], mixers: _Mixers) -> str:
    try:
        whole = subject.part(batch)
        if _differ(
            subject.passed(whole, inner_hooks.read_alone), _run(subject.model, batch), batch
        ):
            return "its attention is not the usual one"
        alone = _OneToken()
        mixers.begin(records=True)
        local = subject.passed(whole, alone)
        for rank in range(_PARTS):
            part, own = subject.part(batch, _PARTS, rank)
            here = _OneToken()
            mixers.begin(part)
            if _differ(
                subject.passed((part, own), here),
                local[:, part.places()],
                batch,
                part,
            ):
                return (
                    "something besides attention reads other tokens of a sequence, or counts them"
                )
            if len(here.masks) != len(alone.masks) or not all(
                map(torch.equal, here.masks, alone.masks)
            ):
                return "its mask is made of more than places and padding"
        return _compare_gathered(subject, batch, mixers)
    finally:
        subject.restore()


def _compare_gathered(subject: _Subject, batch: dict[str, Tensor], mixers: _Mixers) -> str:
    """Check that parts of sequences give the same output if modules that mix tokens get full sequences, gathered as in
    a run. Return why not, or an empty string. Gathering needs inputs with a token dim.
    """
    mixers.begin()
    mixers.gathers = True
    tape = list[Tensor]()
    tape_place = [0]

    def record_or_play(x: Tensor, part: CutBatch) -> Tensor:
        if part.split.size == 1:
            tape.append(x)
            return x
        whole, tape_place[0] = tape[tape_place[0]], tape_place[0] + 1
        if (
            "attention_mask" not in batch
            and apart(x, inner_hooks.own_tokens(whole, part)) > _TOLERANCE
        ):
            raise ConfigError(
                "a token mixer of the model gets values that were counted in one part of a sequence only"
            )
        return whole

    gathered = inner_hooks.WholeSequences(record_or_play)
    reads = mixers.read_masks
    handles = [
        handle
        for module in mixers.found()
        for handle in gathered.install(module, type(module) in reads)
    ]
    try:
        wanted = subject.passed(subject.part(batch), inner_hooks.read_alone)
        if _differ(wanted, _run(subject.model, batch), batch):
            return "a mixer in it cannot be given whole sequences"
        if not handles:
            return ""
        tape.clear()
        alone = subject.passed(subject.part(batch), _OneToken())
        for rank in range(_PARTS):
            tape_place[0] = 0
            part, own = subject.part(batch, _PARTS, rank)
            output = subject.passed((part, own), _OneToken())
            if _differ(output, alone[:, part.places()], batch, part):
                return "a mixer in it is given more than tokens and their padding"
    finally:
        for handle in handles:
            handle.remove()
    return ""


def _differ(
    outputs: Tensor, wanted: Tensor, batch: dict[str, Tensor], part: CutBatch | None = None
) -> bool:
    """Return whether outputs for a batch, or for a part of it, differ from the outputs ``wanted`` at any token that is
    not padding.
    """
    mask = batch.get("attention_mask")
    if mask is not None:
        real = (mask if part is None else mask[:, part.places()]).bool()
        outputs = outputs[real]
        wanted = wanted[real]
    return apart(outputs, wanted) > _TOLERANCE


def _run(model: Any, batch: dict[str, Any]) -> Tensor:
    output = model(**batch, **without_cache(model))
    logits = getattr(output, "logits", None)
    return logits if logits is not None else output[0]


class _OneToken:
    """Replace attention by a function of each single token's query, key and value; record the masks."""

    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def __call__(
        self,
        _: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskBlocks,
        call: attention_override.AttentionCall,
    ) -> Tensor:
        self.masks.append(
            mask.block(
                (0, mask.batch.split.total),
                (0, mask.batch.split.total),
            )
        )
        groups = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(groups, 1)
        v = v.repeat_interleave(groups, 1)
        return v * torch.tanh((q * k).sum(-1, keepdim=True) * call.scale)


def _batch(model: Any, padded: bool, marked: bool) -> dict[str, Tensor]:
    """Return a batch of tokens, with padding if ``padded``; if ``marked``, some tokens belong to a picture, whose
    tokens may read each other.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(
        3,
        vocabulary,
        (2, _TOKENS),
        generator=torch.Generator().manual_seed(5),
    )
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
    """Switch dropout off, and perturb the weights so that differences show, inside the ``with`` block."""
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        perturb(model, 0.05)
        yield
