"""What a draw has beyond a layout and a loop: levers of memory, a loss of the user's, another layout to go on in: pure.

They are drawn by themselves, so that a seed's families and layouts are those they were before.
"""

from random import Random
from typing import Any

from .draw import TORCH, Draw
from .layouts import choose_stage_layers, stages_of

_LOOKS = ("scores", "outputs")
_MEANING = ("overlap", "reduce_each_microbatch", "weights_regather")
"""Fields that do not make a layout another one."""


def choose_more(random: Random, draw: Draw) -> Draw:
    """The same draw, with some of them."""
    if random.random() < 0.2:
        draw = draw.change(memory=_memory(random, draw))
    if not draw.delayed and random.random() < 0.15 and _plain_steps(draw):
        draw = draw.change(user_loss=True)
    if not draw.delayed and draw.loop == "train_step" and not draw.empty_rank:
        draw = draw.change(
            between=(*draw.between, *(name for name in _LOOKS if random.random() < 0.1))
        )
    if random.random() < 0.12 and not draw.delayed:  # one call makes an update there
        draw = draw.change(accelerate=True, calls=1)
    if draw.resume and random.random() < 0.6:
        another = _another(random, draw)
        if another is not None and _knows(draw, another):
            draw = draw.change(resume_layout=another)
    return draw


def _knows(draw: Draw, layout: dict[str, Any]) -> bool:
    """Whether the draw's loop runs in another layout: own losses want whole sequences, plain loops a model."""
    return not (draw.user_loss and "cp_size" in layout) and not (
        draw.loop == "plain" and "pp_size" in layout
    )


def _plain_steps(draw: Draw) -> bool:
    """Whether a step's loss is that of its tokens and nothing else, which whole sequences show."""
    bare = draw.loop == "train_step" and not draw.label_smoothing and draw.routing is None
    return bare and draw.layout.get("cp_size", 1) == 1


def _memory(random: Random, draw: Draw) -> dict[str, Any]:
    """Fields of a :class:`hfscale.MemoryConfig` that change no number."""
    chosen: dict[str, Any] = {}
    if not draw.checkpointing and random.random() < 0.6:
        chosen["recompute"] = random.choice(
            ("full", "full", "selective", 1, 2, ["mlp"], "100KiB", "1GiB")
        )
        if chosen["recompute"] in ("full", 1, 2) and random.random() < 0.3:
            chosen["recompute_keep"] = ["aten.mm", "aten.addmm"]
    if random.random() < 0.4:
        chosen["offload_activations"] = random.choice((True, "1B", "1KiB"))
    if draw.optimizer not in TORCH and random.random() < 0.5:
        chosen["offload_optimizer"] = True
    if draw.distinct > 1 and random.random() < 0.2:
        chosen["offload_parameters"] = True
    return chosen or {"recompute": "full"}


def _another(random: Random, draw: Draw) -> dict[str, Any] | None:
    """A layout of as many ranks with the same batches; ``None`` where there is nothing to exchange."""
    old = draw.layout
    layout = dict[str, Any]()
    if "ep_size" in old or "expert_tp_size" in old:  # they decide what data ranks there are
        return None
    data = [old.get("dp_shard_size", 1), old.get("dp_replicate_size", 1)]
    model = [old.get("tp_size", 1), old.get("pp_size", 1), old.get("cp_size", 1)]
    random.shuffle(data)
    random.shuffle(model)
    names = ("dp_shard_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size")
    layout = {name: size for name, size in zip(names, (*data, *model), strict=True) if size > 1}
    if layout.get("tp_size", 1) > 1 and random.random() < 0.5:
        layout["sequence_parallel"] = True
    if layout.get("cp_size", 1) > 1 and min(draw.lengths) <= layout["cp_size"]:
        return None
    if layout.get("pp_size", 1) > 1 and not _cut_into_stages(random, draw, layout):
        return None
    return (
        layout
        if layout != {name: value for name, value in old.items() if name not in _MEANING}
        else None
    )


def _cut_into_stages(random: Random, draw: Draw, layout: dict[str, Any]) -> bool:
    """Add a schedule to ``layout``; False where the draw's layers and batches fit none that is drawn."""
    layout["pipeline_schedule"] = random.choice(("gpipe", "1f1b", "zbv", "interleaved1f1b"))
    stages = stages_of(layout)
    passes = draw.microbatches or layout["pp_size"]
    if (
        draw.layers < stages
        or passes % layout["pp_size"]
        or (not draw.microbatches and draw.rows % passes)
    ):
        return False
    layout["num_microbatches"] = passes
    if random.random() < 0.3:
        layout["stage_layers"] = choose_stage_layers(random, draw.layers, stages)
    return True
