"""Entries of hfscale's own table describe stock code, which releases of transformers change."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hfscale import PlanError
from hfscale.api import find_blueprint as found
from hfscale.extras.proofs.infer.search_blueprint import prove_holds
from hfscale.models import FAMILIES
from hfscale.models.blueprint import INFERRED, OWN_TABLE
from hfscale.models.class_source import _proved_sources, is_proved_source

from ..proved_anew import proved_anew

# No clone tells of them, in some release at least: the sweeps of families and classes do.
UNTOLD = {"flaubert", "hrm_text", "markuplm", "recurrent_gemma", "roc_bert", "xlm", "xmod"}
UNTOLD |= {"clip", "clip_vision_model", "siglip", "siglip_vision_model", "vit"}
UNTOLD |= {"m2m_100", "mt5", "t5", "t5gemma", "umt5"}


def _on_meta(family: str, auto_class: Any = AutoModelForCausalLM) -> Any:
    with torch.device("meta"):
        return auto_class.from_config(AutoConfig.for_model(family))


def _with(monkeypatch: pytest.MonkeyPatch, family: str, path: str, **wrong: Any) -> None:
    """Give a family a wrong entry, and code that the entry was not proved with."""
    entry = FAMILIES[family]
    blocks = {**entry.blocks, path: replace(entry.blocks[path], **wrong)}
    monkeypatch.setitem(FAMILIES, family, replace(entry, blocks=blocks))
    monkeypatch.setattr(found, "is_proved_source", lambda *_: False)


def test_entries_were_proved_with_this_transformers() -> None:
    """Where not, ``scripts/prove_entries.py`` proves them, and says which entry of ``hfscale/models`` to mend."""
    # This transformers may be older than a family. A config lies beside the models, whose import takes longer.
    families = (_proved_sources().keys() & CONFIG_MAPPING.keys()) - UNTOLD
    changed = [name for name in families if not is_proved_source(name, CONFIG_MAPPING[name])]
    assert changed == []


@pytest.mark.parametrize("family", ["codegen", "gpt_oss", "roformer"])
def test_entries_hold(family: str) -> None:
    """Heads in groups; biases that one rank adds; positions that enter every attention, and train once loaded."""
    assert prove_holds(_on_meta(family), FAMILIES[family]) == ("", True)


def test_an_entry_that_no_longer_holds_is_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "gpt2", "attn", local_attributes=())
    with proved_anew():
        assert found.find_blueprint(_on_meta("gpt2")).source.startswith(INFERRED)


def test_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _with(monkeypatch, "codegen", "attn", local_attributes=())
    monkeypatch.setattr(found, "infer", _nothing)
    with proved_anew(), pytest.raises(PlanError, match="rules that hfscale has for 'codegen'"):
        found.find_blueprint(_on_meta("codegen"))


def _nothing(model: Any) -> Any:
    raise PlanError("a blueprint could not be inferred")


def test_what_no_clone_can_tell_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(found, "is_proved_source", lambda *_: False)
    with proved_anew():
        assert found.find_blueprint(_on_meta("vit", AutoModel)).source == OWN_TABLE
    assert "ViTModel has changed since hfscale's entry of 'vit' was proved" in caplog.text
