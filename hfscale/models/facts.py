"""Look up what was proved about model classes (*facts*), and prove missing facts on request.

A fact is the answer to a question about a model class and its config, for example which modules mix tokens.
``facts.json`` holds answers by class and by :func:`digest` of the config. Configs with the same answers are grouped.
The digest includes the source of the class, so answers stay valid in a new release of transformers with the same
source. ``python scripts/prove_facts.py`` writes the file, for several releases of transformers.

Facts that the file lacks are proved on request, once per user, by the same proofs (``hfscale/extras/proofs``).
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
from ..config.environment import cache_directory
from ..errors import PlanError
from ..extensions import added, provided
from .class_source import source_hash
from .clone import PER_LAYER, tiny_clone
from .kept_facts import KeptFacts
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
"""Config fields that no forward pass reads. Of a classifier's labels (``id2label``), only the number matters, which is
read separately.
"""

_SCALES = {"rope_theta", "original_max_position_embeddings", "sliding_window", "max_window_layers"}
_SCALES |= {"query_pre_attn_scalar", "rotary_emb_base", "attention_chunk_size"}
"""Integer fields that change no tensor's shape. They only matter in that they may be 0 or missing."""

_STOCK = ("transformers", "torch")
_TRIED = range(3, 67)  # token ids that proofs use as input
_MANY_LABELS = 3
TABLE = Path(__file__).with_name("facts.json")
_MOST = 256  # number of answers cached in this process
_log = logging.getLogger(__name__)
Answers = dict[str, dict[str, dict[str, Any]]]  # class -> digest -> question -> answer


def digest(kind: type, config: Any, model: nn.Module | None = None) -> str:
    """Return a digest of everything on which proved facts about a stock class and config depend: their key in
    ``facts.json``. Return an empty string if no entry can apply: no tiny copy (*clone*) of the model can be made, or
    ``model`` has hooks, classes that are not transformers', or a changed ``forward``.

    The digest includes:

    - the config of the tiny clone, in which sizes are constants. Fields that no forward pass reads are omitted; of
      numbers that change no shape, like ``rope_theta``, only the sign counts, and whether they are 0 or 1;
    - the kinds of layers in the full config;
    - the classes of all modules;
    - the code of the modeling files of all these classes.
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
    except Exception:  # stock code raises various errors for sizes that do not fit together
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
    """Yield the classes of a config and of its nested configs."""
    yield type(config)
    for name in getattr(config, "sub_configs", ()):
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from _config_classes(inner)


def _is_stock(kind: type) -> bool:
    """Return whether a class and its ``forward`` are code of transformers or torch, unpatched."""
    forward = getattr(kind, "forward", None)
    modules = (kind.__module__, getattr(forward, "__module__", None) or "torch")
    return all(name.partition(".")[0] in _STOCK for name in modules)


def _meaning(name: str, value: Any, ends_texts: bool) -> Any:
    """Return the value of a config field as it enters the digest: without details on which no proved fact depends, such
    as the exact value of a scale. ``ends_texts`` is whether ``eos_token_id`` counts.
    """
    if isinstance(value, dict):
        return {
            str(key): _meaning(str(key), each, ends_texts)
            for key, each in value.items()
            if key not in _UNREAD
            and (ends_texts or key != "eos_token_id")  # this id only ends generation
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
    """Return a number of a config as it enters the digest. A size is unchanged. Of a number that changes no shape, like
    a float or ``rope_theta``, only 0, 1 and the sign remain, in words; so do token ids that proofs do not use.
    """
    if name.endswith("_token_id") and value not in _TRIED:
        return "unused token"
    if isinstance(value, int) and name not in _SCALES:
        return value
    return str(float(value)) if value in (0, 1) else "positive" if value > 0 else "negative"


def _layer_kinds(fields: dict[str, Any]) -> Iterator[str]:
    """Yield, for each per-layer field, a text with its different entries in order of appearance, and its last entry."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _layer_kinds(value)
        elif name in PER_LAYER and isinstance(value, (list, tuple)) and value:
            kinds = list(dict.fromkeys(map(repr, value)))
            yield f"{name}: {', '.join(kinds)}; {value[-1]!r}"


def _structure(model: nn.Module) -> set[str]:
    """Return the classes of all modules by name, and the names of tied tensors, with ``*`` for layer indices."""
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
    """Hold what was proved about model classes: the entries of ``facts.json``, and what earlier processes and this
    process have proved.
    """

    def __init__(self, kept: KeptFacts | None = None) -> None:
        self._kept = kept or KeptFacts(None)
        # Facts that the file lacks, and that hold for all models of the same digest
        self.proved: Answers = {}
        self._latest: dict[Hashable, Any] = {}
        self._told: set[type] = set()

    @cached_property
    def written(self) -> Answers:
        """The entries of ``facts.json``: model class -> digest of the config -> question -> answer."""
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
        """Return the answer (JSON data) to a question about ``model``, for example which modules mix tokens. If neither
        ``facts.json`` nor a cache contains the answer, a proof finds it, which runs a tiny copy of the model.

        Args:
            question: the name of a proof that an extension provides.
            about: further words that are part of the question, like the name of a module.
            stock: the stock class, if ``model`` is parallelized; a tiny clone of the class is examined instead.
            given: arguments of the proof; they must follow from ``model`` and ``about``.
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
                return kept[name]
            if kind not in self._told:
                self._told.add(kind)
                told = "%s with this config is not among hfscale's facts: a tiny clone is run; its answers are kept %s"
                _log.info(told, kind.__name__, self._kept.place)
            answer, lasts = prove(question, model, **given)
        if lasts and key:
            self.proved.setdefault(kind.__name__, {}).setdefault(key, {})[name] = answer
            self._kept.add(kind.__name__, key, name, answer)
        if exact is not None:
            self._latest[exact] = answer
            if len(self._latest) > _MOST:
                del self._latest[next(iter(self._latest))]
        return answer


def prove(question: str, model: Any, **given: Any) -> tuple[Any, bool]:
    """Run the proof that answers ``question`` about ``model``. Return the answer as JSON data, and whether it holds for
    all models of the same digest (same classes, config and source).
    """
    proof = provided("proofs", question)
    if proof is None:
        raise PlanError(
            f"hfscale has no stored measurements of {type(model).__name__}, and the measurement {question!r} can be "
            "made only by an extension, but the extensions that are installed can make only "
            f"{sorted(added('proofs'))}: install hfscale with its extras"
        )
    answer, lasts = proof(model, **given)
    return json.loads(json.dumps(answer)), lasts


_facts = Facts(KeptFacts(cache_directory()))


def ask(
    question: str,
    model: Any,
    *about: str,
    stock: type | None = None,
    **given: Any,
) -> Any:
    """Return the answer to a question about ``model`` (which modules mix tokens, for example), from ``facts.json`` or
    by a proof: see :meth:`Facts.ask`.
    """
    return _facts.ask(question, model, *about, stock=stock, **given)


def _exactly(name: str, kind: type, model: Any, structure: bool) -> Hashable | None:
    """Return a key for this process's cache of proved answers, with everything about the model on which an answer
    depends; ``None`` if the model has hooks, which cannot be compared.
    """
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
