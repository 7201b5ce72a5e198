"""Look up proved facts about model classes, and prove missing ones on request.

``facts.json`` holds answers by class, for groups of configs with the same answers, by digest (:func:`digest`), which
counts the class's source in: a release of transformers that leaves a family as it was finds its answers.
``python scripts/prove_facts.py`` writes it, for one release after the other. A model in it costs a lookup. Any other is
proved when asked for, once per user, by the proofs that wrote the table: those of ``hfscale/extras/proofs``.
"""

import hashlib
import json
import logging
from collections.abc import Hashable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .._compat.torch import passes_otherwise
from .._compat.transformers.added_layers import without_added
from ..errors import PlanError
from ..extensions import added, provided
from .class_source import source_hash
from .clone import PER_LAYER, tiny_clone
from .kept_facts import KeptFacts, kept_facts
from .names import wild_name

_UNREAD = {
    "_name_or_path",
    "_commit_hash",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "task_specific_params",
    "id2label",
    "label2id",
    "initializer_range",
    "use_cache",
}
"""Fields that no forward pass reads; labels are counted."""

_SCALES = {"rope_theta", "original_max_position_embeddings", "sliding_window", "max_window_layers"}
_SCALES |= {"query_pre_attn_scalar", "rotary_emb_base", "attention_chunk_size"}
"""Whole numbers that make nothing another shape, and are no switch but where they are 0 or absent."""

_STOCK = ("transformers", "torch")
_TRIED = range(3, 67)  # tokens that proofs feed
_MANY_LABELS = 3
TABLE = Path(__file__).with_name("facts.json")
_MOST = 256  # answers kept that no table has
_log = logging.getLogger(__name__)
Answers = dict[str, dict[str, dict[str, Any]]]  # class -> digest -> question -> answer


def digest(kind: type, config: Any, model: nn.Module | None = None) -> str:
    """Return the digest of all that an answer about a stock class and config depends on, as its key in tables; empty if
    no entry could apply to them, or if ``model`` has hooks, foreign classes or a changed ``forward``.

    It is made of the tiny clone's config, in which sizes are constants, without fields that no forward pass reads, and
    with only the sign of numbers that scale; of the full config's kinds of layers; of the classes of modules; and of
    the code in the modeling files of all families among them.
    """
    classes = {
        kind,
        *(map(type, model.modules()) if model is not None else ()),
    }
    if not all(map(_is_stock, classes)) or (
        model is not None and any(map(passes_otherwise, model.modules()))
    ):
        return ""
    try:
        small = tiny_clone(config)
    except Exception:  # whatever stock code says of sizes that it checks against one another
        return ""
    labels = min(int(getattr(config, "num_labels", 0) or 0), _MANY_LABELS)
    ends_texts = bool(getattr(config, "is_encoder_decoder", False))
    said = [
        f"{kind.__module__}.{kind.__qualname__}",
        labels,
        _meaning("", small.to_dict(), ends_texts),
        sorted(_layer_kinds(config.to_dict())),
        [] if model is None else sorted(_structure(model)),
        source_hash({*classes, *_config_classes(config)}),
    ]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _config_classes(config: Any) -> Iterator[type]:
    """Yield the classes of a config and of those inside it."""
    yield type(config)
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from _config_classes(inner)


def _is_stock(kind: type) -> bool:
    """Return whether a class and its ``forward`` are unpatched transformers code."""
    forward = getattr(kind, "forward", None)
    modules = (kind.__module__, getattr(forward, "__module__", None) or "torch")
    return all(name.partition(".")[0] in _STOCK for name in modules)


def _meaning(name: str, value: Any, ends_texts: bool) -> Any:
    """Return a config field without the parts that change no answer."""
    if isinstance(value, dict):
        return {
            str(key): _meaning(str(key), each, ends_texts)
            for key, each in value.items()
            if key not in _UNREAD
            and (ends_texts or key != "eos_token_id")  # which only ends what is generated
        }
    if isinstance(value, (list, tuple)):
        each = [_meaning(name, item, ends_texts) for item in value]
        return (
            sorted(set(each)) if value and all(isinstance(item, float) for item in value) else each
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    return _number(name, value)


def _number(name: str, value: int | float) -> int | str:
    """Return a size unchanged, and the sign (0 or 1) of a number that only scales."""
    if name.endswith("_token_id") and value not in _TRIED:
        return "unused token"
    if isinstance(value, int) and name not in _SCALES:
        return value
    return str(float(value)) if value in (0, 1) else "positive" if value > 0 else "negative"


def _layer_kinds(fields: dict[str, Any]) -> Iterator[str]:
    """Yield each per-layer list as its kinds in order of appearance, and its last entry."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _layer_kinds(value)
        elif name in PER_LAYER and isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(map(repr, value)))
            yield f"{name}: {', '.join(kinds)}; {value[-1]!r}"


def _structure(model: nn.Module) -> set[str]:
    """Return the classes of all modules and the names of tied tensors, with layer indices as wildcards."""
    entries = {
        f"{wild_name(name)}: {type(module).__name__}" for name, module in model.named_modules()
    }
    firsts: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        if first != name:
            entries.add(f"{wild_name(name)} is {wild_name(first)}")
    return entries


class Facts:
    """Hold the facts in the table, those that earlier processes kept, and those proved since."""

    def __init__(self, kept: KeptFacts | None = None) -> None:
        self._kept = kept or KeptFacts(None)
        self.proved: Answers = {}  # what no table had, and holds for all models of the same digest
        self._latest: dict[Hashable, Any] = {}
        self._told: set[type] = set()

    @cached_property
    def written(self) -> Answers:
        """The table."""
        table = json.loads(TABLE.read_text())["classes"]
        return {
            name: {key: group["answers"] for group in groups for key in group["configs"]}
            for name, groups in table.items()
        }

    def ask(
        self,
        question: str,
        model: Any,
        *about: str,
        stock: type | None = None,
        **given: Any,
    ) -> Any:
        """Return the answer to a question that an extension proves, which is JSON. The question is
        ``about`` more than the model; the proof is ``given`` nothing else. The tiny clone of the class ``stock``
        answers, where ``model`` is one that was parallelized.
        """
        kind = stock or type(model)
        name = " ".join((question, *about))
        with without_added(model):
            key = digest(kind, model.config, None if stock else model)
            for known in (self.written, self.proved):
                answers = known.get(kind.__name__, {}).get(key, {})
                if key and name in answers:
                    return answers[name]
            exact = _exactly(name, kind, model, stock is None)
            if exact is not None and exact in self._latest:
                return self._latest[exact]
            kept = self._kept.read(kind.__name__, key) if key else {}
            if name in kept:
                self._note(kind, key, name, kept[name])
                return kept[name]
            if kind not in self._told:
                self._told.add(kind)
                told = "%s with this config is not among hfscale's facts: a tiny clone is run; its answers are kept %s"
                _log.info(told, kind.__name__, self._kept.place)
            answer, lasts = prove(question, model, **given)
        if lasts and key:
            self._note(kind, key, name, answer)
            self._kept.add(kind.__name__, key, name, answer)
        if exact is not None:
            self._latest[exact] = answer
            if len(self._latest) > _MOST:
                del self._latest[next(iter(self._latest))]
        return answer

    def _note(self, kind: type, key: str, name: str, answer: Any) -> None:
        self.proved.setdefault(kind.__name__, {}).setdefault(key, {})[name] = answer


def prove(question: str, model: Any, **given: Any) -> tuple[Any, bool]:
    """Prove an answer now; return it as JSON has it, and whether it holds for all sizes."""
    proof = provided("proofs", question)
    if proof is None:
        raise PlanError(
            f"{type(model).__name__} must be among hfscale's facts, or an extension must prove {question!r}, got "
            f"proofs of {sorted(added('proofs'))}: install hfscale with its extras"
        )
    answer, lasts = proof(model, **given)
    return json.loads(json.dumps(answer)), lasts


_facts = Facts(kept_facts())


def ask(
    question: str,
    model: Any,
    *about: str,
    stock: type | None = None,
    **given: Any,
) -> Any:
    """Answer a question from the table, or by a proof now: :meth:`Facts.ask` of this process's facts."""
    return _facts.ask(question, model, *about, stock=stock, **given)


def _exactly(name: str, kind: type, model: Any, structure: bool) -> Hashable | None:
    """Return everything that an answer depends on; ``None`` if the model has hooks, which cannot be compared."""
    if structure and any(passes_otherwise(module) for module in model.modules()):
        return None
    said = model.config.to_json_string(use_diff=False)
    return (name, kind, said, _modules(model) if structure else ())


def _modules(model: nn.Module) -> Hashable:
    """Return name, class and forward of all modules, and the names that share a tensor."""
    modules = tuple(
        (name, type(module), type(module).forward) for name, module in model.named_modules()
    )
    firsts: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return modules, tuple(
        (
            name,
            firsts.setdefault(id(p), name),
            p.dtype,
            p.device.type,
        )
        for name, p in named
    )
