"""Look up proved facts about model classes, and prove missing ones on request.

``facts.json`` holds answers by version of transformers and class, for groups of configs with the same answers, by
digest (:mod:`.digest`); ``python scripts/prove_facts.py`` writes it. A model in it costs a lookup. Any other is proved
when asked for, once per process, by the proofs that wrote the table (:mod:`hfscale.testing.proofs`).
"""

import importlib
import json
import logging
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from torch import nn

from .._compat.torch import passes_otherwise
from .._compat.transformers.prediction import without_prediction
from .digest import digest

TABLE = Path(__file__).with_name("facts.json")
PROOFS = "hfscale.testing.proofs"
"""Imported when a proof is needed, here and nowhere else (pyproject.toml)."""

_MOST = 256  # answers kept that no table has
_log = logging.getLogger(__name__)

Answers = dict[str, dict[str, dict[str, Any]]]
"""Class -> digest -> question -> answer."""


class Facts:
    """Hold the facts in the table and those proved since."""

    def __init__(self, written: Answers | None = None, doubted: bool = False) -> None:
        if written is not None:
            self.written = written
        self._doubted = doubted
        self.proved: Answers = {}  # what no table had, and holds for all models of the same digest
        self.contradictions: list[str] = []  # models of one digest for which different answers were proved, in words
        self._latest: dict[Hashable, Any] = {}
        self._told: set[type] = set()

    @cached_property
    def written(self) -> Answers:
        """The table for the installed transformers; empty where there is none."""
        table = json.loads(TABLE.read_text()).get(transformers.__version__, {})
        return {
            name: {key: group["answers"] for group in groups for key in group["configs"]}
            for name, groups in table.items()
        }

    def ask(self, question: str, model: Any, *about: str, stock: type | None = None, **given: Any) -> Any:
        """Return the answer to a question of :data:`hfscale.testing.proofs.PROOFS`, which is JSON.

        Args:
            about: what the question is about, besides the model.
            stock: the class whose tiny clone answers, where ``model`` is one that was parallelized.
            given: to the proof; nothing that ``about`` does not name.
        """
        with without_prediction(model):
            return self._ask(question, model, *about, stock=stock, **given)

    def _ask(self, question: str, model: Any, *about: str, stock: type | None, **given: Any) -> Any:
        kind, name = stock or type(model), " ".join((question, *about))
        key = digest(kind, model.config, None if stock else model)
        for known in (self.written, {} if self._doubted else self.proved):
            answers = known.get(kind.__name__, {}).get(key, {})
            if key and name in answers:
                return answers[name]
        exact = _exactly(name, kind, model, stock is None)
        if exact is not None and exact in self._latest:
            return self._latest[exact]
        if kind not in self._told:
            self._told.add(kind)
            _log.info("%s with this config is not among hfscale's facts: a tiny clone is run", kind.__name__)
        answer, lasts = importlib.import_module(PROOFS).prove(question, model, **given)
        if lasts and key:
            before = self.proved.setdefault(kind.__name__, {}).setdefault(key, {}).setdefault(name, answer)
            if before != answer:
                self.contradictions.append(f"{kind.__name__} {key}: {name}: proved both {before} and {answer}")
        if exact is not None:
            self._latest[exact] = answer
            if len(self._latest) > _MOST:
                del self._latest[next(iter(self._latest))]
        return answer


_facts = Facts()


def ask(question: str, model: Any, *about: str, stock: type | None = None, **given: Any) -> Any:
    """Answer a question from the table, or by a proof now: :meth:`Facts.ask` of this process's facts."""
    return _facts.ask(question, model, *about, stock=stock, **given)


@contextmanager
def proved_anew(written: Answers | None = None, doubted: bool = False) -> Iterator[Facts]:
    """Prove every question inside the with block except facts that are ``written``; each config anew if ``doubted``."""
    global _facts
    before, _facts = _facts, Facts(written or {}, doubted)
    try:
        yield _facts
    finally:
        _facts = before


def _exactly(name: str, kind: type, model: Any, structure: bool) -> Hashable | None:
    """Return everything that an answer depends on; ``None`` if the model has hooks, which cannot be compared."""
    if structure and any(passes_otherwise(module) for module in model.modules()):
        return None
    said = model.config.to_json_string(use_diff=False)
    return (name, kind, said, _modules(model) if structure else ())


def _modules(model: nn.Module) -> Hashable:
    """Return name, class and forward of all modules, and the names that share a tensor."""
    modules = tuple((name, type(module), type(module).forward) for name, module in model.named_modules())
    firsts: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return modules, tuple((name, firsts.setdefault(id(p), name), p.dtype, p.device.type) for name, p in named)
