"""What a plain run imports: what nobody asks for stays unread."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hfscale.api.assemble import PARTS
from hfscale.extensions import imported
from hfscale.train.runtime import Part

MOST = 170
"""Modules of hfscale's in each of two tensor ranks that load a tiny Llama and train it for a step."""
_RUN = """
import json, sys
import torch, torch.distributed as dist
directory, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
import hfscale
model = hfscale.from_pretrained(directory, parallel=hfscale.ParallelConfig(tp_size=2)).train()
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.arange(12).view(2, 6)
hfscale.train_step(model, {"input_ids": ids, "labels": ids})
hfscale.clip_grad_norm_(model, 1.0)
optimizer.step()
from hfscale.train.runtime import runtime_of
parts = [type(part).__module__ for part in runtime_of(model).parts]
imported = [name for name in sys.modules if name.partition(".")[0] == "hfscale"]
print(json.dumps({"imported": imported, "parts": parts}))
"""


def _modules_of_a_step(directory: Path) -> dict[str, list[str]]:
    """Return the modules that each of two fresh ranks has imported, and those of its parts, which are the same."""
    from transformers import AutoModelForCausalLM

    from ..tiny_models import tiny

    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(directory)
    command = [sys.executable, "-c", _RUN, str(directory)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [json.loads(rank.communicate()[0].splitlines()[-1]) for rank in ranks]
    assert told[0] == told[1]
    return dict(told[0])


def test_a_plain_step_imports_what_it_needs(tmp_path: Path) -> None:
    modules = _modules_of_a_step(tmp_path)
    assert len(modules["imported"]) <= MOST, sorted(modules["imported"])
    places = {place.partition(":")[0] for place in PARTS}
    assert places & set(modules["imported"]) == places & set(modules["parts"])
    assert len(places & set(modules["parts"])) < len(places) / 2


@pytest.mark.parametrize("place", PARTS)
def test_a_part_is_asked_for_by_its_own_plan(place: str) -> None:
    """Its place is below ``api``, and what says whether it is needed lies beside it, and imports nothing that runs."""
    part: Any = imported(place)
    assert issubclass(part, Part)
    room = part.__module__.rpartition(".")[0]
    assert room.startswith(("hfscale.features.", "hfscale.parallel.", "hfscale.train."))
    asked_in = PARTS[place].__module__
    assert asked_in in (f"{room}.plan", "hfscale.api.assemble")
