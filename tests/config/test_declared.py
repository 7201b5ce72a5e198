"""Options are declared once: flags, their help and sections of recipes come from the config classes."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.cli import main
from hfscale.config.declared import declared, described
from hfscale.config.layout import LayoutFields
from hfscale.config.options import Options
from hfscale.config.sections import SECTIONS, OptionSections


@pytest.mark.parametrize("kind", [LayoutFields, *SECTIONS.values()])
def test_every_field_is_described(kind: type) -> None:
    assert list(described(kind))
    assert set(described(kind)) == {each.name for each in fields(kind)}
    for each in declared(kind):
        assert each.text
        assert not each.text.endswith((".", ";", ":"))


def test_every_field_of_a_layout_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    said = capsys.readouterr().out
    for each in declared(LayoutFields):
        assert f" {each.flag}" in said
    by_name = {each.name: each for each in declared(LayoutFields)}
    assert (
        by_name["num_microbatches"].help
        == "with --pp: microbatches that train_step makes of one batch"
    )
    assert by_name["gradient_compression"].help.endswith(": no, bf16, fp16, powersgd (default: no)")
    assert (by_name["tp_size"].flag, by_name["tp_size"].kind, by_name["overlap"].kind) == (
        "--tp",
        int,
        bool,
    )


def test_a_layout_has_the_declared_defaults() -> None:
    layout = ParallelConfig()
    left = {"virtual_stages"}  # of which a pipeline has a default of its own
    assert all(
        getattr(layout, each.name) == each.default
        for each in declared(LayoutFields)
        if each.name not in left
    )
    assert {"dp_shard_size", "overlap"} <= set(described(ParallelConfig))


def test_sections_are_options_of_their_classes() -> None:
    of = {each.name: str(each.type) for each in fields(Options)}
    assert all(kind.__name__ in of[name] for name, kind in SECTIONS.items())
    assert list(SECTIONS) == [each.name for each in fields(OptionSections)]
    made = OptionSections(memory={"recompute": "full"}).sections("no")
    assert made == {"memory": hfscale.MemoryConfig(recompute="full")}
    assert (
        OptionSections(float8={"recipe": "rowwise"}).sections("fp8")["float8"].recipe == "rowwise"
    )
    with pytest.raises(ConfigError, match=r"float8 needs training.mixed_precision=fp8"):
        OptionSections(float8={"recipe": "rowwise"}).sections("bf16")
    with pytest.raises(ConfigError, match=r"no field 'recomputed'; did you mean 'recompute'"):
        OptionSections(memory={"recomputed": "full"}).sections("no")


def test_recipes_and_commands_name_no_section_but_by_its_class() -> None:
    root = Path(hfscale.__file__).parent
    files = [*root.glob("recipes/**/*.py"), *root.glob("cli/**/*.py")]
    found = [file.name for file in files if re.search("fp8|float8|cp_size", file.read_text())]
    assert set(found) <= {"cmd_plan.py"}
