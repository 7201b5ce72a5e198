"""Load a tiny model of every causal-LM family in bfloat16 and train it for a step, as users do, against one process of
plain transformers in bfloat16; write docs/dtypes.md.

    python scripts/dtype_sweep.py [--only gemma opt] [--out docs/dtypes.md]

With ``--only``, other rows of the file stay as they are.

Equal: every parameter and buffer has the type that it has in stock, so has its gradient, and loss and gradient norm are
within bfloat16's noise of stock's in bfloat16 (BOUND). Refused: hfscale names what is missing before training.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from family_sweep import STAGE_LAYERS, trainable, two_stages
from notes import note
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hfscale
from hfscale.models.clone import LAYERS
from hfscale.testing import Case, RankPool
from hfscale.train.runtime import local_tensor, runtime_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.families import config_of

WRONG = {"FAILS", "DIFFERS"}
EPSILON = torch.finfo(torch.bfloat16).eps
FACTOR = 4.0
BOUND = f"""\
The noise of a loss or a gradient norm is the rounding error of one process: |stock transformers in bfloat16 -
stock transformers in float32|, with the same weights. A layout rounds in other places than one process and adds
in another order, so its result may differ from that of one process by up to {FACTOR:g} times the noise. By
chance the noise of a single number may be 0; it is therefore taken as at least 2**-7 of this number, one unit
in the last place of bfloat16."""
# Columns: the layout, and how it computes.
COLUMNS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "tp2": ({"tp_size": 2}, {"dtype": torch.bfloat16}),
    "dp_shard2": ({"dp_shard_size": 2}, {"dtype": torch.bfloat16}),
    "pp2": (None, {"dtype": torch.bfloat16}),
    "mixed, tp2": ({"tp_size": 2}, {"dtype": torch.float32, "mixed_precision": "bf16"}),
    "mixed, dp_shard2": ({"dp_shard_size": 2}, {"dtype": torch.float32, "mixed_precision": "bf16"}),
}
HEAD = [
    "# Types of numbers",
    "",
    "Written by `scripts/dtype_sweep.py`. For each model type below, stock transformers saves a tiny",
    "causal language model; hfscale loads it by `from_pretrained` in a layout of two ranks and trains it",
    "for a step. Each parameter and buffer must have the dtype that it has in stock transformers, and",
    "each gradient the dtype of its parameter. Loss and gradient norm must equal those of stock",
    "transformers in one process, up to the rounding of bfloat16 (defined in the next paragraph). The",
    "columns `tp2`, `dp_shard2` and `pp2` of the table have `dtype=torch.bfloat16`. The columns `mixed`",
    'have float32 weights and `mixed_precision="bf16"`, and are compared with torch\'s autocast.',
    "",
]
COUNTS = [
    "The counts below are numbers of model types (families). tp2, dp_shard2 and pp2 are two tensor ranks,",
    "two data ranks and two pipeline stages. equal: dtypes, loss and gradient norm are those of stock",
    "transformers. refused: hfscale raises an error before training. no clone: stock transformers cannot",
    "train the tiny model with this dtype.",
]
IDS = torch.randint(3, 60, (4, 8), generator=torch.Generator().manual_seed(0))
Step = tuple[float, float]
Types = dict[str, torch.dtype]


def stock_step(directory: str, mixed: bool, dtype: torch.dtype) -> tuple[Step, Types]:
    """Loss and gradient norm of one process, and the types of its tensors."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return (float(loss.detach()), _norm(gradients)), _types(model)


def layout_step(
    directory: str, layout: hfscale.ParallelConfig, kwargs: dict[str, Any], types: Types
) -> Step:
    """The same by the layout, on a rank; types are checked here."""
    model = hfscale.from_pretrained(directory, parallel=layout, **kwargs).train()
    runtime = runtime_of(model)
    world = hfscale.batch_world(model)
    ids = IDS[hfscale.batch_rank(model) * len(IDS) // world :][: len(IDS) // world]
    # A class with a loss of its own; labels are as many on every rank.
    if runtime.plan.loss is None:
        output = model(input_ids=ids, labels=ids, use_cache=False).loss
        output.backward()
        loss = output.detach().float()
        if world > 1:
            torch.distributed.all_reduce(loss)
            loss = loss / world
    else:
        loss = hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    for planned, parameter in runtime.parameters():
        expected = types[planned.name]
        assert parameter.dtype == expected, (
            f"{planned.name} is {parameter.dtype}, in stock {expected}"
        )
        gradient = parameter.grad
        assert gradient is None or gradient.dtype == expected, (
            f"gradient of {planned.name} is {gradient.dtype}"
        )
    for name, buffer in model.named_buffers():
        assert buffer.dtype == types.get(name, buffer.dtype), (
            f"{name} is {buffer.dtype}, in stock {types[name]}"
        )
    norm = hfscale.clip_grad_norm_(model, 1.0)
    torch.optim.SGD(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1
    ).step()
    assert all(
        bool(local_tensor(parameter).isfinite().all()) for _, parameter in runtime.parameters()
    )
    return float(loss), float(norm)


def _types(model: nn.Module) -> Types:
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: tensor.dtype for name, tensor in tensors}


def _norm(tensors: list[Tensor]) -> float:
    return float(
        torch.stack([tensor.detach().double().square().sum() for tensor in tensors]).sum().sqrt()
    )


def judge(
    family: str, pool: RankPool, columns: dict[str, Any] | None = None
) -> tuple[list[str], str] | None:
    """A verdict for each of the columns and the details; ``None`` where stock code cannot train a clone."""
    config, _ = trainable(family)
    if config is None:
        return None
    kinds = []
    details = list[str]()
    ready = dict[tuple[int, bool], Any]()
    with tempfile.TemporaryDirectory(prefix="hfscale-types-") as name:
        for layout_kwargs, kwargs in (columns or COLUMNS).values():
            layers = LAYERS if layout_kwargs is not None else STAGE_LAYERS
            directory = f"{name}/{layers}"
            mixed = "mixed_precision" in kwargs
            try:
                if not Path(directory).exists():
                    _save(config if layers == LAYERS else _deeper(family, config), directory)
                if (layers, mixed) not in ready:
                    ready[layers, mixed] = _reference(directory, mixed)
            except Exception as error:  # stock code that cannot do it in bfloat16
                kinds.append("no clone")
                details.append(note(f"stock: {type(error).__name__}: {error}".split("\n")[0], 100))
                continue
            kind, detail = _measure(directory, layout_kwargs, kwargs, ready[layers, mixed], pool)
            kinds.append(kind)
            details += [detail] if detail else []
    return kinds, "; ".join(dict.fromkeys(details))


def _deeper(family: str, config: Any) -> Any:
    try:
        return config_of(family, STAGE_LAYERS)
    except Exception:  # a config that checks its numbers of layers against one another
        return config


def _save(config: Any, directory: str) -> None:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def _reference(directory: str, mixed: bool) -> tuple[Step, Step, Types]:
    """What stock gives, its noise, and types.

    Data ranks in mixed precision have the stream between layers in bfloat16 too, which autocast leaves in float32: the
    noise is that of a whole model in bfloat16, where it is more (a mixture then sends a token to other experts).
    """
    exact, _ = stock_step(directory, False, torch.float32)
    found, types = stock_step(directory, mixed, torch.float32 if mixed else torch.bfloat16)
    rough = [found, stock_step(directory, False, torch.bfloat16)[0]] if mixed else [found]
    loss, norm = (
        max(EPSILON * abs(fine), *(abs(each[index] - fine) for each in rough))
        for index, fine in enumerate(exact)
    )
    return found, (loss, norm), types


def _measure(
    directory: str,
    layout_kwargs: dict[str, Any] | None,
    kwargs: dict[str, Any],
    reference: Any,
    pool: RankPool,
) -> tuple[str, str]:
    expected, noise, types = reference
    config = transformers.AutoConfig.from_pretrained(directory)
    try:
        layout = (
            two_stages(Case(config))
            if layout_kwargs is None
            else hfscale.ParallelConfig(**layout_kwargs)
        )
        hfscale.plan(directory, layout)
        if layout.size("pp") > 1 and hfscale.plan(directory).loss is None:
            return "refused", ""
    except hfscale.HFScaleError:
        return "refused", ""
    try:
        found = pool.run(layout_step, directory, layout, kwargs, types)
    except Exception as error:  # a family that breaks is a row, not the end of the sweep
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "FAILS", note(f"{layout.describe()}: {lines[-1] if lines else error}", 200)
    for what, index in (("loss", 0), ("gradient norm", 1)):
        off = max(abs(step[index] - expected[index]) for step in found)
        if not off <= FACTOR * noise[index]:
            return (
                "DIFFERS",
                f"{layout.describe()}: {what} off by {off:.1e}, noise {noise[index]:.1e}",
            )
    return "equal", ""


def summarize(rows: dict[str, str]) -> str:
    """``170 families; tp2: 160 equal, 10 refused; ...``."""
    lines = [f"{len(rows)} families"]
    for index, name in enumerate(COLUMNS):
        counted = Counter(row.split(" | ")[index + 1] for row in rows.values())
        lines.append(
            f"{name}: " + ", ".join(f"{number} {kind}" for kind, number in counted.most_common())
        )
    return "; ".join(lines)


def read(path: Path | None) -> dict[str, str]:
    """The rows of a table that was written before, by family."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| family ")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def write(path: Path, rows: dict[str, str]) -> None:
    """The whole file."""
    summary = summarize(rows).replace("; ", ";\n")
    columns = [f"| family | {' | '.join(COLUMNS)} | |", "|---" * (len(COLUMNS) + 2) + "|"]
    title = f"transformers {transformers.__version__}: {summary}."
    path.write_text(
        "\n".join(
            [*HEAD, BOUND, "", *COUNTS, title, "", *columns, *(rows[name] for name in sorted(rows))]
        )
        + "\n"
    )


def main() -> int:
    """Write the table; the exit status is 1 where a family fails or differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = read(arguments.out) if arguments.only else {}
    with RankPool(2) as pool:
        for family in tqdm(
            arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), desc="types"
        ):
            judged = judge(family, pool)
            if judged is None:
                continue
            rows[family] = f"| {family} | {' | '.join(judged[0])} | {judged[1]} |"
            if arguments.only or WRONG & set(judged[0]):
                tqdm.write(rows[family])
            if arguments.out:
                write(arguments.out, rows)
    print(summarize(rows))
    return int(any(f" {kind} |" in row for row in rows.values() for kind in WRONG))


if __name__ == "__main__":
    raise SystemExit(main())
