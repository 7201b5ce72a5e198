"""A feature from a file outside of the package: its plan, part, command, option, report and name come in by data."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hfscale
from hfscale import ConfigError, ParallelConfig, extensions
from hfscale.cli import _parser
from hfscale.extensions import SLOTS, Extension, register
from hfscale.optim.added_options import AddedOption
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]

FEATURE = '''
"""Count the steps of a model whose plan says so; shrink weights behind an optimizer's step."""

from dataclasses import dataclass

from hfscale.extensions import Extension
from hfscale.optim.added_options import AddedOption
from hfscale.optim.sharded import Stepper
from hfscale.plan.contents import Feature
from hfscale.train.runtime import Part

HELP = "say hello"
EXAMPLE = "hfscale hello"


@dataclass(frozen=True)
class StepsCounted(Feature):
    layers: int

    def describe(self, plan):
        return [f"steps of {self.layers} layers are counted"]


def plan(draft):
    draft.features.append(StepsCounted(len(draft.layers)))


class CountSteps(Part):
    steps = 0

    def is_needed(self, runtime):
        return runtime.plan.feature(StepsCounted) is not None

    def check_step(self, runtime, microbatches, user_loss):
        self.steps += 1

    def metrics(self, runtime):
        return {"steps_counted": self.steps}


class Shrink(Stepper):
    def __init__(self, factor, members, runtime):
        super().__init__((), runtime.mesh)
        self.factor = factor
        self.weights = [member.weight for member in members]

    def step(self, groups, state):
        for weight in self.weights:
            weight.mul_(self.factor)


def steppers(factor, members, runtime):
    return [Shrink(factor, members, runtime)]


def page_of(found, title):
    return f"page of {title}"


def add_arguments(parser):
    parser.add_argument("--loudly", action="store_true")


def run(arguments):
    print("HELLO" if arguments.loudly else "hello")


OPTION = AddedOption(optimizers=("sgd",), parse=float, steppers=steppers)
EXTENSION = Extension(
    name="counted steps",
    exports={"CountSteps": "counted_steps:CountSteps"},
    commands={"hello": "counted_steps"},
    optimizer_options={"shrink": "counted_steps:OPTION"},
    reports={"note": "counted_steps:page_of"},
    plan_parts={"counted steps": "counted_steps:plan"},
    parts={"counted steps": "counted_steps:CountSteps"},
)
'''


def added_on_this_rank(folder: str) -> None:
    sys.path.insert(0, folder)
    from counted_steps import EXTENSION  # type: ignore[import-not-found]

    register(EXTENSION)


def removed_on_this_rank(folder: str) -> None:
    sys.path.remove(folder)
    del extensions._registered["counted steps"]
    extensions._found.cache_clear()


def llama() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)


def trained(layout: dict[str, int]) -> tuple[str, dict[str, Any], float]:
    """The plan's table, the metrics and the sum of the weights after two steps that move nothing but by ``shrink``."""
    model = hfscale.parallelize(llama(), ParallelConfig(**layout))
    optimizer = hfscale.create_optimizer(model, "sgd", lr=0.0, optim_args="shrink=0.5")
    ids = torch.arange(12).view(2, 6)
    for _ in range(2):
        hfscale.train_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
    full = dict(hfscale.stream_weights(model))
    total = sum(float(weight.detach().double().abs().sum()) for weight in full.values())
    return str(hfscale.plan(model.config, ParallelConfig(**layout))), hfscale.metrics(model), total


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "counted_steps.py").write_text(FEATURE)
    yield str(tmp_path)
    sys.modules.pop("counted_steps", None)


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_a_feature_from_a_file_plans_and_runs(
    pools: Pools, folder: str, layout: dict[str, int]
) -> None:
    ranks = pools(2)
    before = sum(float(each.detach().abs().sum()) for each in llama().parameters())
    ranks.run(added_on_this_rank, folder)
    try:
        found = ranks.run(trained, layout)
    finally:
        ranks.run(removed_on_this_rank, folder)
    assert found[0][2] == pytest.approx(before / 4, rel=1e-12)  # weights are streamed to rank 0
    for table, metrics, _ in found:
        assert "steps of 2 layers are counted" in table
        assert metrics["steps_counted"] == 2


def test_an_installed_package_adds_names_commands_and_reports(folder: str) -> None:
    """By an entry point in its metadata, without a line of code."""
    metadata = Path(folder) / "counted_steps-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counted-steps\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[hfscale.extensions]\ncounted = counted_steps:EXTENSION\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); import hfscale, hfscale.cli; "
        "assert hfscale.CountSteps.__name__ == 'CountSteps' and 'CountSteps' in hfscale.__all__; "
        "assert hfscale.cli._parser().parse_args(['estimate', 'm', '--note', 'f']).note.name == 'f'; "
        "sys.exit(hfscale.cli.main(['hello', '--loudly']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "HELLO\n"), ended.stderr


def test_two_extensions_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "_registered", {})
    register(Extension(name="other", exports={"upcycle": "math:sqrt"}))
    try:
        with pytest.raises(ConfigError, match="'upcycle' must be added to exports by one"):
            extensions.added("exports")
    finally:
        extensions._registered.clear()
        extensions._found.cache_clear()


def test_a_place_must_name_a_module_and_a_name() -> None:
    with pytest.raises(
        ConfigError, match=r"proofs of the extension 'x' must be import paths.*'here'"
    ):
        Extension(name="x", proofs={"loss": "here"})


def test_everything_in_extras_is_an_extension_and_can_be_imported() -> None:
    root = Path(hfscale.__file__).parent / "extras"
    rooms = {path.name for path in root.iterdir() if (path / "__init__.py").exists()}
    places = {place for slot in SLOTS for place in extensions.added(slot).values()}
    own = {place for place in places if place.startswith("hfscale.extras.")}
    assert {place.split(".")[2].partition(":")[0] for place in own} == rooms
    for slot in SLOTS:
        for name in extensions.added(slot):
            assert extensions.provided(slot, name) is not None
    assert isinstance(extensions.provided("optimizer_options", "qk_clip"), AddedOption)
    assert _parser().parse_args(["schedule", "1f1b"]).name == "1f1b"
