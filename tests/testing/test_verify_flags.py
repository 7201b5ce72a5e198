"""Every flag of `hfscale verify` is honoured or refused."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig

from hfscale.cli import main
from hfscale.models.clone import tiny_clone
from hfscale.testing import Case, RankPool, measure_parity, verify

from ..plan.drafting.test_infer import write_checkpoint

Pools = Callable[[int], RankPool]


@pytest.fixture
def run(
    pools: Pools,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[int, str, list[Case]]]:
    """One command line over a family: exit code, what was printed, what was measured."""
    monkeypatch.setattr(verify, "RankPool", lambda world: nullcontext(pools(world)))
    measured: list[Case] = []
    monkeypatch.setattr(
        verify,
        "measure_parity",
        lambda case, *rest: (measured.append(case), measure_parity(case, *rest))[1],
    )

    def command(family: str, *flags: str, **changes: Any) -> tuple[int, str, list[Case]]:
        measured.clear()
        config = LlamaConfig() if family == "llama" else AutoConfig.for_model(family)
        for name, value in changes.items():
            setattr(config, name, value)
        config.save_pretrained(tmp_path)
        code = main(["verify", str(tmp_path), "--tp", "2", *flags])
        printed = capsys.readouterr()
        return code, printed.out + printed.err, list(measured)

    return command


CLASSES: list[tuple[str, str, dict[str, Any]]] = [
    ("bert", "AutoModelForSequenceClassification", {}),
    (
        "roberta",
        "AutoModelForTokenClassification",
        {"num_labels": 1, "problem_type": "multi_label_classification"},
    ),
    ("bert", "AutoModelForMaskedLM", {}),
    ("llama", "AutoModelForSequenceClassification", {}),
    ("t5", "AutoModelForSeq2SeqLM", {}),
    ("vit", "AutoModelForImageClassification", {}),
    ("whisper", "AutoModelForSpeechSeq2Seq", {}),
]


@pytest.mark.daily("bert-AutoModelForMaskedLM-{}", "vit-AutoModelForImageClassification-{}")
@pytest.mark.parametrize(
    ("family", "auto_class", "changes"), CLASSES, ids=lambda value: str(value)[:40]
)
def test_the_class_asked_for_is_the_one_compared(
    run: Any, family: str, auto_class: str, changes: dict[str, Any]
) -> None:
    code, printed, measured = run(family, "--auto-class", auto_class, **changes)
    assert code == 0, printed
    assert [case.auto_class.__name__ for case in measured] == [auto_class]
    assert f"a tiny {family} ({auto_class}) in tp2" in printed
    assert "equal to rounding" in printed


@pytest.mark.parametrize(
    ("family", "flags", "says"),
    [
        (
            "llama",
            ["--auto-class", "AutoModelForFoo"],
            "--auto-class AutoModelForFoo is not one of transformers' Auto",
        ),
        (
            "bert",
            ["--auto-class", "AutoModelForQuestionAnswering"],
            "but not for this class. Compare it in",
        ),
        ("t5", [], "AutoModelForCausalLM cannot build a 't5' model"),
        ("llava", [], "AutoModelForCausalLM cannot build a 'llava' model"),
        (
            "llama",
            ["--lora", "q_proj,vproj"],
            "target_modules names 'vproj', which matches nothing in the model",
        ),
        ("llama", ["--dtype", "bfloat16"], "--dtype bfloat16 must be float64"),
        (
            "bart",
            ["--auto-class", "AutoModelForSeq2SeqLM", "--pp", "2", "--schedule", "pipedream"],
            "while microbatches are",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    run: Any, family: str, flags: list[str], says: str
) -> None:
    code, printed, measured = run(family, *flags)
    assert code == 2
    assert says in printed
    assert "Traceback" not in printed
    assert not measured


def test_code_that_comes_with_a_model_may_run(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "own", "own_llama")
    code = main(["verify", str(tmp_path / "own"), "--tp", "2", "--trust-remote-code"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "a tiny own_llama in tp2" in printed.out


def test_what_stock_cannot_train_is_said() -> None:
    config = tiny_clone(LlamaConfig())
    config.hidden_act = "nothing"
    with pytest.raises(
        verify.ConfigError,
        match=r"cannot be trained by stock transformers .* nothing to compare with",
    ):
        verify.check_stock(Case(config))
