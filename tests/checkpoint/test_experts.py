"""Experts spread over ranks: each rank reads its own, the right ones, and saves them as they were (T24, T29)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    HrmTextConfig,
    JambaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

import hfscale
from hfscale import CheckpointError, ParallelConfig
from hfscale._compat.transformers.stored import Merge
from hfscale.checkpoint import load, merged
from hfscale.checkpoint.checksums import checksum, verify_experts
from hfscale.checkpoint.merged import parts_of_share
from hfscale.distributed.files.reader import SafetensorsFile, ShareOnDisk
from hfscale.plan import Cut, ParameterPlan
from hfscale.plan.cut import share_spans
from hfscale.testing import RankPool
from hfscale.train.runtime import runtime_of
from hfscale.train.runtime.shards import local_tensor

from ..sweeps import cases

Pools = Callable[[int], RankPool]
Layout = dict[str, int]

_SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "intermediate_size": 8,
}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2}
_SMALL |= {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "expert_layer_offset": 1}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_SMALL, num_local_experts=4),
    "mixtral of 6": MixtralConfig(
        **_SMALL, num_local_experts=6
    ),  # two ranks' 3 do not share out over two shards
    "qwen3_moe": Qwen3MoeConfig(**_SMALL, moe_intermediate_size=8, num_experts=12, head_dim=4),
    "deepseek_v3": DeepseekV3Config(
        **_SMALL,
        **_LATENT,
        moe_intermediate_size=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "gpt_oss": GptOssConfig(**_SMALL, num_local_experts=4, head_dim=4),
    "granitemoe": GraniteMoeConfig(**_SMALL, num_local_experts=4),
    "olmoe": OlmoeConfig(**_SMALL, num_experts=4),
    "jamba": JambaConfig(
        **_SMALL, **_MAMBA, num_experts=4, attn_layer_period=2, attn_layer_offset=1
    ),
}
COUNTS = {name: 6 if "6" in name else 12 if name == "qwen3_moe" else 4 for name in CONFIGS}
STORED_WHOLE = {"gpt_oss", "granitemoe"}
"""Their checkpoints have one tensor for all experts."""


@dataclass(frozen=True)
class Case:
    """A layout, and what each of its ranks reads: a chunk of the experts, and a part of each one's bytes."""

    layout: Layout
    chunks: tuple[int, ...]
    of: int
    tensor_cuts: int = 1


CASES = {
    "ep2": Case({"ep_size": 2}, (0, 1), 2),
    "ep4": Case({"ep_size": 4}, (0, 1, 2, 3), 4),
    "ep2-tp2": Case({"ep_size": 2, "tp_size": 2}, (0, 1), 2),
    "ep2-tp2-expert_tp2": Case(
        {"ep_size": 2, "tp_size": 2, "expert_tp_size": 2}, (0, 0, 1, 1), 2, tensor_cuts=2
    ),
    "ep2-shard4": Case({"ep_size": 2, "dp_shard_size": 4}, (0, 2, 1, 3), 4),
    "ep2-pp2": Case({"ep_size": 2, "pp_size": 2}, (0, 1, 0, 1), 2),
    "replicate2-ep2": Case({"ep_size": 2, "dp_replicate_size": 2}, (0, 1), 2),
    "replicate2-shard2-ep2": Case(
        {"ep_size": 2, "dp_replicate_size": 2, "dp_shard_size": 2}, (0, 1, 0, 1), 2
    ),
    "shard4": Case({"dp_shard_size": 4}, (0, 1, 2, 3), 4),
    "tp2": Case({"tp_size": 2}, (0, 0), 1, tensor_cuts=2),
}
SKIPPED = {("ep4", "mixtral of 6")}  # 4 does not divide 6
# Older transformers have no plan for some, and inferred ones leave these experts whole, or fail.
SKIPPED |= {
    (case, name)
    for case, name in product(CASES, ("granitemoe", "jamba"))
    if "tp" in case and not CONFIGS[name].base_model_tp_plan
}
CUT_BY_ROWS = ("gate_proj", "up_proj", "w1", "w3", "input_linear")
"""Weights of which a tensor rank reads its rows; of others, cut by columns, it reads all rows."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(len(directories))
        directories[name] = tmp_path_factory.mktemp("experts") / "in"
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            directories[name]
        )
    return directories


@contextmanager
def count_bytes() -> Iterator[dict[str, int]]:
    """Bytes read of each stored tensor."""
    read_of: dict[str, int] = {}
    original = SafetensorsFile.read

    def read(self: SafetensorsFile, offset: int, buffer: Tensor) -> None:
        places = {name: entry["data_offsets"] for name, entry in self.header.items()}
        (name,) = (name for name, (start, stop) in places.items() if start <= offset < stop)
        read_of[name] = read_of.get(name, 0) + buffer.numel() * buffer.element_size()
        original(self, offset, buffer)

    SafetensorsFile.read = read  # type: ignore[method-assign]
    try:
        yield read_of
    finally:
        SafetensorsFile.read = original  # type: ignore[method-assign]


@dataclass
class Found:
    """What one rank has of one model."""

    ranks: dict[str, int]
    shares: dict[str, Tensor]
    read: dict[str, int]
    checked: set[str]


def load_and_save(paths: dict[str, Path], out: Path, layout: Layout) -> dict[str, Found]:
    result = {}
    for name, path in paths.items():
        with count_bytes() as read:
            model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
        runtime = runtime_of(model)
        shares = {
            planned.name: local_tensor(p.detach()).clone() for planned, p in runtime.parameters()
        }
        checked = verify_experts(model, path)
        hfscale.save_pretrained(model, out / name)
        assert verify_experts(model, out / name) == checked
        result[name] = Found(runtime.mesh.ranks, shares, dict(read), set(checked))
    return result


@pytest.fixture(scope="module")
def outcome(
    pools: Pools, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, list[dict[str, Found]]]]:
    """What every rank of a case has of every model, and where it saved them."""
    made: dict[str, tuple[Path, list[dict[str, Found]]]] = {}

    def outcome(case: str) -> tuple[Path, list[dict[str, Found]]]:
        if case not in made:
            layout = CASES[case].layout
            out = tmp_path_factory.mktemp("out")
            paths = {
                name: path for name, path in checkpoints.items() if (case, name) not in SKIPPED
            }
            found = pools(ParallelConfig(**layout).total_size).run(
                load_and_save, paths, out, layout
            )
            made[case] = out, found
        return made[case]

    return outcome


DAILY = ("ep2-shard4",)
Outcome = Callable[[str], tuple[Path, list[dict[str, Found]]]]


@pytest.mark.parametrize("case", cases(CASES, daily=DAILY))
def test_shares_are_slices_of_the_checkpoint(
    checkpoints: dict[str, Path], outcome: Outcome, case: str
) -> None:
    for name in outcome(case)[1][0]:
        whole = AutoModelForCausalLM.from_pretrained(checkpoints[name]).state_dict()
        plan = hfscale.plan(checkpoints[name], ParallelConfig(**CASES[case].layout))
        experts = {planned.name for planned in plan.parameters if planned.cut_over("ep")}
        assert ("ep" in case) == bool(experts)
        seen: set[str] = set()
        for rank in outcome(case)[1]:
            for parameter, share in rank[name].shares.items():
                assert torch.equal(
                    share, plan.by_name[parameter].take(whole[parameter], rank[name].ranks)
                ), parameter
            assert rank[name].checked == experts
            seen |= rank[name].shares.keys()
        assert seen == {planned.name for planned in plan.owned()}


@pytest.mark.parametrize("case", cases(CASES, daily=DAILY))
def test_a_rank_reads_its_own_experts_only(
    checkpoints: dict[str, Path], outcome: Outcome, case: str
) -> None:
    """The chunks are written down above, and not asked of the plan."""
    of = CASES[case].of
    tensor_cuts = CASES[case].tensor_cuts
    stages = CASES[case].layout.get("pp_size", 1)
    for name in outcome(case)[1][0]:
        stored = load_file(checkpoints[name] / "model.safetensors")
        expert_keys = [key for key in stored if ".experts" in key or "put_linear" in key]
        for rank, chunk in enumerate(CASES[case].chunks):
            found = outcome(case)[1][rank][name]
            expected = 0
            chunk_of = of
            if name == "mixtral of 6" and case == "ep2-shard4":
                # whole experts by ep rank, rows of each by shard
                chunk = chunk // 2
                chunk_of = 2
            step = -(-COUNTS[name] // chunk_of)
            own = range(chunk * step, min((chunk + 1) * step, COUNTS[name]))
            for key in expert_keys:
                layer = int(key.split("layers.")[1].split(".")[0])
                tensor = stored[key]
                if stages == 2 and layer != found.ranks["pp"]:
                    continue
                size = tensor.numel() * 4 // (COUNTS[name] if name in STORED_WHOLE else 1)
                by_rows = (
                    name != "gpt_oss" and any(f"{mark}." in key for mark in CUT_BY_ROWS)
                ) or (name == "gpt_oss" and key.endswith("down_proj"))
                size //= (tensor_cuts if by_rows else 1) * (of // chunk_of)
                number = (
                    None if name in STORED_WHOLE else int(key.split("experts.")[1].split(".")[0])
                )
                expected += size * (len(own) if number is None else number in own)
            assert sum(found.read.get(key, 0) for key in expert_keys) == expected, (name, rank)


@pytest.mark.parametrize(
    ("case", "ranks"), cases([("ep2", 2), ("ep4", 4), ("ep2-shard4", 4)], daily=[("ep2-shard4", 4)])
)
def test_a_checkpoint_is_read_once_in_all(
    checkpoints: dict[str, Path], outcome: Outcome, case: str, ranks: int
) -> None:
    for name in {"mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "olmoe"}:
        whole = sum(
            t.numel() * 4 for t in load_file(checkpoints[name] / "model.safetensors").values()
        )
        for found in outcome(case)[1]:
            assert sum(found[name].read.values()) == whole // ranks, name


@pytest.mark.parametrize("case", cases(CASES, daily=DAILY))
def test_what_is_saved_is_what_was_loaded(
    checkpoints: dict[str, Path], outcome: Outcome, case: str
) -> None:
    """The same names and bytes as before: so what one layout saves, every other loads."""
    out, found = outcome(case)
    for name in found[0]:
        before, after = (
            load_file(path / "model.safetensors") for path in (checkpoints[name], out / name)
        )
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert torch.equal(tensor, after[key]), key


# Experts in the wrong place


def load_what_rank_zero_has(path: Path, layout: Layout) -> str:
    original = load._Loader.__init__

    def init(self: load._Loader, plan: Any, mesh: Any, *given: Any) -> None:
        original(self, plan, replace(mesh, ranks={**mesh.ranks, "ep": 0}), *given)

    load._Loader.__init__ = init  # type: ignore[method-assign]
    try:
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    finally:
        load._Loader.__init__ = original  # type: ignore[method-assign]
    return said_of(model, path)


def said_of(model: Any, path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify_experts(model, path)
    return str(caught.value)


@pytest.mark.daily("ep2-tp2-expert_tp2")
@pytest.mark.parametrize(
    "case", ["ep2", "ep2-tp2-expert_tp2", "replicate2-ep2", "replicate2-shard2-ep2"]
)
def test_rank_zeros_experts_on_every_rank_are_caught(
    pools: Pools, checkpoints: dict[str, Path], case: str
) -> None:
    layout = CASES[case].layout
    misled = [rank for rank, chunk in enumerate(CASES[case].chunks) if chunk == 1]
    for message in pools(len(CASES[case].chunks)).run(
        load_what_rank_zero_has, checkpoints["qwen3_moe"], layout
    ):
        assert "expert 9 of model.layers.1.mlp.experts.down_proj (rank " in message
        assert message.count("is not the checkpoint's but expert 3") == 4 * (
            2 if "shard2" in case else 1
        )
        assert "expert 5 of" not in message
        assert all(f"{rank}" in message for rank in misled)


def disturb(path: Path, layout: Layout) -> str:
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    if torch.distributed.get_rank() == 3:
        with torch.no_grad():
            experts = local_tensor(model.model.layers[0].mlp.experts.down_proj.detach())
            experts[1, 0, :2] = experts[1, 0, :2].flip(0)  # what a sum without places would not see
    return said_of(model, path)


def test_two_numbers_in_each_others_place_are_caught(
    pools: Pools, checkpoints: dict[str, Path]
) -> None:
    for message in pools(4).run(
        disturb, checkpoints["qwen3_moe"], CASES["ep2-tp2-expert_tp2"].layout
    ):
        assert (
            "expert 7 of model.layers.0.mlp.experts.down_proj (rank 2, 3) is not the checkpoint's. "
            in message
        )


def test_checksums_of_parts_add_up() -> None:
    whole = torch.randn(5, 6, dtype=torch.bfloat16)
    cuts = (Cut("tp", 0, 2, (2, 3)), Cut("edp_shard", 1, 4))
    parts = 0
    for tp, shard in product(range(2), range(4)):
        ranks = {"tp": tp, "edp_shard": shard}
        share = ParameterPlan("t", (5, 6), whole.dtype, cuts=cuts).take(whole, ranks)
        parts += checksum(share, share_spans((5, 6), cuts, ranks), (5, 6))
    assert parts % 2**64 == checksum(whole, [[(0, 5)], [(0, 6)]], (5, 6))
    assert parts % 2**64 != checksum(whole.roll(1, 0), [[(0, 5)], [(0, 6)]], (5, 6))


# Parts of stored tensors


def merged_from(
    tensors: dict[str, Tensor], directory: Path, planned: ParameterPlan, ranks: dict[str, int]
) -> Tensor:
    """What the host makes of the parts that it is shown of ``gate.0``, ``gate.1`` ... ``up.0`` ..."""
    save_file(tensors, directory / "f.safetensors")
    stored = SafetensorsFile(directory / "f.safetensors").slices()
    shown = parts_of_share(
        planned, [(key, Merge(key[0] == "u", 0, 1)) for key in tensors], stored, ranks
    )
    if planned.name in shown:
        return shown[planned.name]
    return torch.cat(
        [torch.stack([t[...] for key, t in shown.items() if key[0] == kind]) for kind in "gu"], 1
    )


@pytest.mark.parametrize(
    "cuts",
    [
        (Cut("ep", 0, 2), Cut("tp", 1, 2, (5, 5))),
        (Cut("ep", 0, 3), Cut("tp", 1, 4, (5, 5)), Cut("edp_shard", 1, 3)),
        (Cut("ep", 0, 2), Cut("edp_shard", 1, 2)),  # all of gate, all of up
        (Cut("ep", 0, 2), Cut("edp_shard", 0, 2)),
        (Cut("dp_shard", 0, 4),),  # none on the last rank
        (Cut("tp", 2, 2), Cut("dp_shard", 0, 4)),
    ],
)
def test_merged_parts_are_the_share(tmp_path: Path, cuts: tuple[Cut, ...]) -> None:
    tensors = {f"{kind}.{n}": torch.randn(5, 3) for kind in ("gate", "up") for n in range(6)}
    whole = torch.cat(
        [torch.stack([tensors[f"{kind}.{n}"] for n in range(6)]) for kind in ("gate", "up")], 1
    )
    planned = ParameterPlan("fused", (6, 10, 3), whole.dtype, cuts=cuts)
    for coordinates in product(*(range(cut.size) for cut in cuts)):
        ranks = dict(zip([cut.axis for cut in cuts], coordinates, strict=True))
        assert torch.equal(
            merged_from(tensors, tmp_path, planned, ranks), planned.take(whole, ranks)
        )


@pytest.mark.parametrize("lost", ["gate.2", "gate", "cut"])
def test_an_incomplete_checkpoint_is_named(tmp_path: Path, lost: str) -> None:
    tensors = {f"{kind}.{n}": torch.randn(5, 3) for kind in ("gate", "up") for n in range(6)}
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(lost)}
    if lost == "cut":
        tensors["up.4"] = torch.randn(5, 2)
    planned = ParameterPlan("fused", (6, 10, 3), torch.float32, cuts=(Cut("ep", 0, 2),))
    with pytest.raises(CheckpointError, match=r"fused of shape \(6, 10, 3\).* is incomplete"):
        merged_from(tensors, tmp_path, planned, {"ep": 0})


def test_rows_of_stacked_matrices_are_read_alone(tmp_path: Path) -> None:
    whole = torch.randn(6, 10, 3)
    save_file({"t": whole}, tmp_path / "f.safetensors")
    cuts = (Cut("ep", 0, 2), Cut("tp", 1, 2, (4, 6)))
    for ep, tp in product(range(2), range(2)):
        share = ShareOnDisk(
            SafetensorsFile(tmp_path / "f.safetensors").slices()["t"], cuts, {"ep": ep, "tp": tp}
        )
        with count_bytes() as read:
            found = share[...]
        expected = ParameterPlan("t", (6, 10, 3), whole.dtype, cuts=cuts).take(
            whole, {"ep": ep, "tp": tp}
        )
        assert torch.equal(found, expected)
        assert read == {"t": expected.numel() * 4}


# Weights that the host makes in other ways


def shares_read_whole(path: Path, layout: Layout) -> tuple[dict[str, int], dict[str, Tensor]]:
    original = merged.merged_parameters
    merged.merged_parameters = lambda found: {}  # as for a converter that is not known
    try:
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    finally:
        merged.merged_parameters = original
    return shares(model)


def shares(model: Any) -> tuple[dict[str, int], dict[str, Tensor]]:
    runtime = runtime_of(model)
    return runtime.mesh.ranks, {
        p.name: local_tensor(t.detach()).clone() for p, t in runtime.parameters()
    }


@pytest.mark.daily("ep2-tp2-expert_tp2")
@pytest.mark.parametrize("case", ["ep2-tp2-expert_tp2", "ep2-shard4"])
def test_unknown_converters_read_whole(
    pools: Pools, checkpoints: dict[str, Path], case: str
) -> None:
    path = checkpoints["mixtral of 6"]
    layout = CASES[case].layout
    whole = AutoModelForCausalLM.from_pretrained(path).state_dict()
    plan = hfscale.plan(path, ParallelConfig(**layout))
    for ranks, found in pools(4).run(shares_read_whole, path, layout):
        for name, share in found.items():
            assert torch.equal(share, plan.by_name[name].take(whole[name], ranks)), name


def shares_of(path: Path, layout: Layout) -> tuple[dict[str, int], dict[str, Tensor]]:
    return shares(hfscale.from_pretrained(path, parallel=ParallelConfig(**layout)))


def test_several_parameters_of_one_stored_tensor(pools: Pools, tmp_path: Path) -> None:
    sizes = {
        name: value
        for name, value in _SMALL.items()
        if name in ("hidden_size", "vocab_size", "intermediate_size")
    }
    config = HrmTextConfig(
        **sizes, num_attention_heads=4, head_dim=4, num_hidden_layers=4, num_layers_per_stack=1
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    assert any("gqkv_proj" in key for key in load_file(tmp_path / "model.safetensors"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    plan = hfscale.plan(tmp_path, ParallelConfig(dp_shard_size=2))
    for ranks, found in pools(2).run(shares_of, tmp_path, {"dp_shard_size": 2}):
        for name, share in found.items():
            assert torch.equal(share, plan.by_name[name].take(whole[name], ranks)), name


# A run that stops and goes on


def stop_and_go(path: Path, directory: Path, layout: Layout) -> None:
    runs = []
    for run in range(2):
        model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if run == 1:
            train(model, optimizer, 5)  # elsewhere
            hfscale.load_state(model, directory, optimizer=optimizer)
        else:
            train(model, optimizer, 0)
            hfscale.save_state(model, directory, optimizer=optimizer)
        train(model, optimizer, 1)
        runs.append(
            {name: local_tensor(p.detach()).clone() for name, p in model.named_parameters()}
        )
    for name, tensor in runs[0].items():
        assert torch.equal(tensor, runs[1][name]), name


def train(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + hfscale.batch_rank(model))
    ids = torch.randint(0, 32, (2, 7), generator=generator)
    hfscale.train_step(model, {"input_ids": ids, "labels": ids})
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.daily("replicate2-ep2")
@pytest.mark.parametrize("case", ["ep2", "replicate2-ep2", "ep2-shard4", "ep2-tp2-expert_tp2"])
def test_a_run_goes_on(
    pools: Pools, checkpoints: dict[str, Path], tmp_path: Path, case: str
) -> None:
    world = len(CASES[case].chunks)
    pools(world).run(stop_and_go, checkpoints["qwen3_moe"], tmp_path / "state", CASES[case].layout)
