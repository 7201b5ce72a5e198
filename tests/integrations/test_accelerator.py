"""A stock-looking Accelerate loop gives the right numbers on every layout (traps T4, T5, T18, T19)."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import AutoModelForCausalLM, get_scheduler

import hfscale
from hfscale import ConfigError, ParallelConfig
from hfscale.testing import RankPool

from ..tiny_models import tiny

Pools = Callable[[int], RankPool]
LAYOUTS = [
    {"tp_size": 2},
    {"tp_size": 2, "dp_shard_size": 2},
    {"tp_size": 2, "dp_replicate_size": 2},
]
LAYOUTS += [{"cp_size": 2}, {"cp_size": 2, "dp_shard_size": 2}]
STAGES = [{"pp_size": 2}, {"pp_size": 2, "tp_size": 2}, {"pp_size": 2, "dp_shard_size": 2}]


class Rows(Dataset):
    """Row ``i`` starts with the token ``i``, so that samples can be told apart."""

    def __init__(self, length: int, width: int = 9) -> None:
        generator = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, 67, (length, width), generator=generator)
        self.ids[:, 0] = torch.arange(length)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.rows = Rows(length)

    def __iter__(self) -> Any:
        return (self.rows[i] for i in range(len(self.rows)))


def build(path: str, layout: dict[str, int], **asked: Any) -> Any:
    asked = {"dtype": torch.float64, **asked}
    return hfscale.from_pretrained(path, parallel=ParallelConfig(**layout), **asked).train()


def train(
    path: str, layout: dict[str, int], out: str, precision: str = "no", **asked: Any
) -> dict[str, Any]:
    """The loop of Accelerate's documentation."""
    around = "bf16" if precision in ("fp8", "bf16_params") else precision
    # A process has one precision, and this one is used again.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = hfscale.Accelerator(gradient_accumulation_steps=2, mixed_precision=around)
    model = build(path, layout, mixed_precision=precision, **asked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = get_scheduler(
        "linear", optimizer, 0, num_training_steps=10 * accelerator.num_processes
    )
    loader = DataLoader(Rows(16), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    norms = []
    updates = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            if norm is not None:
                norms.append(norm.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
    accelerator.save_model(model, out)
    return {"norms": norms, "updates": updates, "epochs": scheduler.scheduler.last_epoch}


def train_stock(stock: Any, per_update: int, rows: int | None = None) -> list[float]:
    """Take the steps of :func:`train` in one process, ``rows`` in a pass; return the norms."""
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.5)
    norms = []
    rows = rows or per_update
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=10)
    for start in range(0, 16, per_update):
        for ids in Rows(16).ids[start : start + per_update].split(rows):
            (stock(input_ids=ids, labels=ids).loss * (rows / per_update)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


def assert_trained_alike(
    found: list[dict[str, Any]], norms: list[float], out: Path, stock: Any
) -> None:
    """Compare what ranks returned and saved with the stock model after its steps."""
    for result in found:
        assert result["norms"] == pytest.approx(norms, rel=1e-6)
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).state_dict()
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.daily("layout0")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loop_equals_one_process(pools: Pools, layout: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)
    stock.save_pretrained(tmp_path / "start")
    parallel = ParallelConfig(**layout)
    found = pools(parallel.total_size).run(
        train, str(tmp_path / "start"), layout, str(tmp_path / "out")
    )

    norms = train_stock(stock, 2 * 2 * parallel.batch_world)
    for result in found:
        assert result["updates"] == result["epochs"] / parallel.batch_world == len(norms)
    assert_trained_alike(found, norms, tmp_path / "out", stock)


def first_tokens(path: str, layout: dict[str, int], kind: str) -> tuple[int, list[int], list[int]]:
    """Batch rank, the samples this rank saw, and what ``gather_for_metrics`` made of them on all."""
    # Processes seeded apart must still shuffle alike.
    torch.manual_seed(100 + torch.distributed.get_rank())
    accelerator = hfscale.Accelerator()
    model = build(path, layout)
    dataset = Stream(13) if kind == "stream" else Rows(13)
    loader = DataLoader(dataset, batch_size=3, shuffle=kind == "shuffled")
    model, loader = accelerator.prepare(model, loader)
    seen = []
    gathered = []
    for batch in loader:
        seen += batch["input_ids"][:, 0].tolist()
        gathered += accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
    return hfscale.batch_rank(model), seen, gathered


def train_stages(path: str, layout: dict[str, int], out: str) -> dict[str, Any]:
    """The same loop where the model is cut into stages: ``train_step`` in the place of forward and backward."""
    accelerator = hfscale.Accelerator()
    model = build(path, layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = get_scheduler(
        "linear", optimizer, 0, num_training_steps=10 * accelerator.num_processes
    )
    loader = DataLoader(Rows(16), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    norms = []
    losses = []
    rows = []
    for batch in loader:
        loss = hfscale.train_step(model, batch)
        norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss, "mean").item())
        rows.append(accelerator.gather(batch["input_ids"][:, 0]).tolist())
    accelerator.save_model(model, out)
    return {
        "norms": norms,
        "losses": losses,
        "rows": rows,
        "epochs": scheduler.scheduler.last_epoch,
    }


@pytest.mark.daily("layout0")
@pytest.mark.parametrize("layout", STAGES)
def test_a_loop_over_stages_equals_one_process(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(
        tiny("llama", tie_word_embeddings=True), dtype=torch.float64
    )
    stock.save_pretrained(tmp_path / "start")
    parallel = ParallelConfig(**layout)
    found = pools(parallel.total_size).run(
        train_stages, str(tmp_path / "start"), layout, str(tmp_path / "out")
    )

    rows = Rows(16)
    per_update = 4 * parallel.batch_world
    optimizer = torch.optim.SGD(stock.parameters(), lr=0.5)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=10)
    norms = []
    losses = []
    for start in range(0, 16, per_update):
        ids = rows.ids[start : start + per_update]
        loss = stock(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(stock.parameters(), 0.5).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for result in found:
        assert result["epochs"] == len(norms) * parallel.batch_world
        assert result["norms"] == pytest.approx(norms, rel=1e-6)
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        assert [sorted(step) for step in result["rows"]] == [
            list(range(start, start + per_update)) for start in range(0, 16, per_update)
        ]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.daily("layout1-shuffled", "layout2-ordered", "layout3-stream", "layout0-stream")
@pytest.mark.parametrize("kind", ["ordered", "shuffled", "stream"])
@pytest.mark.parametrize("layout", [*LAYOUTS[:2], LAYOUTS[4], STAGES[2]])
def test_each_sample_once(pools: Pools, layout: dict[str, int], kind: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    parallel = ParallelConfig(**layout)
    found = pools(parallel.total_size).run(first_tokens, str(tmp_path), layout, kind)
    by_batch_rank: dict[int, list[int]] = {}
    for batch_rank, seen, gathered in found:
        assert by_batch_rank.setdefault(batch_rank, seen) == seen, (
            "ranks that share a batch saw different samples"
        )
        # A stream has no length, so, as with Accelerate, the samples that even out its end are the caller's to drop.
        assert sorted(gathered[:13] if kind == "stream" else gathered) == list(range(13))
    assert len(by_batch_rank) == parallel.batch_world
    if len(by_batch_rank) > 1:
        assert by_batch_rank[0] != by_batch_rank[1]
    if kind == "shuffled":
        assert by_batch_rank[0] != sorted(by_batch_rank[0])


class Seeds(Dataset):
    """What a worker draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(3, 1000, (5,))}


def seeds_of_workers(path: str, layout: dict[str, int]) -> tuple[list[list[int]], list[int]]:
    model = build(path, layout)
    accelerator = hfscale.Accelerator()
    _, loader = accelerator.prepare(model, DataLoader(Seeds(), batch_size=2, num_workers=1))
    torch.manual_seed(5 + torch.distributed.get_rank())
    seen = [batch["input_ids"].flatten().tolist() for batch in loader]
    seen += [
        batch["input_ids"].flatten().tolist() for batch in accelerator.skip_first_batches(loader, 1)
    ]
    return seen, torch.randint(1000, (4,)).tolist()


def test_workers_of_ranks_that_share_a_batch_draw_alike(pools: Pools, tmp_path: Path) -> None:
    """And each stream of a process goes on as in one process, which draws a seed each time that workers start."""
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    results = pools(2).run(seeds_of_workers, str(tmp_path), {"tp_size": 2})
    for rank, (_, after) in enumerate(results):
        torch.manual_seed(5 + rank)
        for _ in range(2):
            torch.empty((), dtype=torch.int64).random_()
        assert after == torch.randint(1000, (4,)).tolist()
    one, other = (seen for seen, _ in results)
    assert one == other
    assert len(one) == len({str(batch) for batch in one}) == 3


def stop_and_go(path: str, layout: dict[str, int], directory: str) -> None:
    accelerator = hfscale.Accelerator()
    model = build(path, layout)
    optimizer = hfscale.create_optimizer(model, "adafactor", lr=0.1)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=10)
    model, loader, optimizer, scheduler = accelerator.prepare(
        model, DataLoader(Rows(8), batch_size=2), optimizer, scheduler
    )
    batch = next(iter(loader))

    def step() -> float:
        if "pp_size" in layout:
            loss = hfscale.train_step(model, batch)
        else:
            loss = model(**batch).loss
            accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item()

    step()
    accelerator.save_state(directory)
    hfscale.save_state(
        model,
        f"{directory}-own",
        optimizer=optimizer,
        scheduler=scheduler,
        dataloader=loader,
        step=1,
    )
    expected = [step(), step()]
    accelerator.load_state(directory)
    assert [step(), step()] == expected
    assert (
        hfscale.load_state(model, f"{directory}-own", optimizer=optimizer, scheduler=scheduler).step
        == 1
    )
    assert [step(), step()] == expected


@pytest.mark.daily("layout2", "layout0")
@pytest.mark.parametrize("layout", [*LAYOUTS[:2], *STAGES])
def test_state(pools: Pools, layout: dict[str, int], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "model")
    world = ParallelConfig(**layout).total_size
    pools(world).run(stop_and_go, str(tmp_path / "model"), layout, str(tmp_path / "state"))


def saves_within_steps(path: str, layout: dict[str, int], directory: str) -> dict[str, int]:
    """How often a save warns: behind each batch of two in a step, of either way to accumulate."""
    AcceleratorState._reset_state()
    accelerator = hfscale.Accelerator(gradient_accumulation_steps=2)
    model = hfscale.from_pretrained(path, parallel=ParallelConfig(**layout))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(Rows(8), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batch = next(iter(loader))

    def warned(where: str) -> int:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            accelerator.save_state(f"{directory}-{where}")
        return sum("within an accumulation" in str(each.message) for each in found)

    told = {"before": warned("before")}
    for where in ("first", "second"):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            told[f"{where} before zero_grad"] = warned(where)
            optimizer.zero_grad()
        told[where] = warned(where)
    with accelerator.no_sync(model):
        accelerator.backward(model(**batch).loss)
    told["not synchronized"] = warned("no_sync")
    accelerator.backward(model(**batch).loss)
    told["synchronized"] = warned("sync")
    return told


def test_a_save_within_an_accumulation_warns(pools: Pools, tmp_path: Path) -> None:
    """On the first rank, and never between a step and its zero_grad."""
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "model")
    given = str(tmp_path / "model"), {"dp_shard_size": 2}, str(tmp_path / "state")
    first, second = pools(2).run(saves_within_steps, *given)
    warn = {"first before zero_grad", "first", "not synchronized"}
    assert first == {where: int(where in warn) for where in first}
    assert not any(second.values())


def _named(path: str, layout: dict[str, int], project: str) -> tuple[list[str], list[Any]]:
    AcceleratorState._reset_state()
    configuration = ProjectConfiguration(
        project_dir=project, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = hfscale.Accelerator(project_config=configuration)
    model = accelerator.prepare(hfscale.from_pretrained(path, parallel=ParallelConfig(**layout)))
    called: list[Any] = []
    accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: called.append(
            (models == [model], weights, Path(directory).is_dir())
        )
    )
    accelerator.register_load_state_pre_hook(
        lambda models, directory: called.append((models == [model], Path(directory).name))
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saved = []
    for number in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        saved.append(Path(accelerator.save_state()).name)
        assert accelerator.save_iteration == number + 1
    accelerator.load_state(str(Path(project) / "checkpoints" / "checkpoint_1"))
    for parameter, first in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, first + 1.0 + 1.0)
    accelerator.load_state()
    for parameter, first in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, first + 1.0 + 1.0 + 1.0)
    configuration.iteration = 2
    with pytest.raises(ConfigError, match="checkpoint_2 exists already"):
        accelerator.save_state()
    return saved, called


@pytest.mark.parametrize("layout", [{}, {"tp_size": 2}])
def test_states_that_the_project_names(
    pools: Pools, layout: dict[str, int], tmp_path: Path
) -> None:
    """As in Accelerate, and its hooks are called: once the directory is there, without weights, as over FSDP."""
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path / "model")
    given = (str(tmp_path / "model"), layout, str(tmp_path))
    found = pools(2).run(_named, *given) if layout else [_named(*given)]
    for saved, called in found:
        assert saved == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
        assert called[:3] == [(True, [], True)] * 3
        assert called[3:] == [(True, "checkpoint_1"), (True, "checkpoint_2")]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["checkpoint_1", "checkpoint_2"]


def refusals(path: str) -> list[str]:
    messages = []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))

    AcceleratorState._reset_state()  # a precision that another test has asked for
    accelerator = hfscale.Accelerator()
    model = hfscale.from_pretrained(path)
    refused(lambda: accelerator.prepare(AutoModelForCausalLM.from_pretrained(path)))
    model = accelerator.prepare(model)
    refused(lambda: accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0))
    refused(lambda: accelerator.save_state())
    refused(lambda: hfscale.Accelerator(parallelism_config=ParallelConfig()))
    refused(
        lambda: hfscale.Accelerator().prepare(hfscale.from_pretrained(path, mixed_precision="bf16"))
    )
    return messages


def test_refusals(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    found = refusals(str(tmp_path))
    for message, part in zip(
        found,
        ["LlamaForCausalLM was not parallelized by hfscale", "pass model.parameters()", "a directory is needed",
         "parallelism_config would shard", "mixed_precision='no'"],
        strict=True,
    ):  # fmt: skip
        assert part in message


def refusals_over_stages(path: str) -> list[str]:
    accelerator = hfscale.Accelerator()
    model = accelerator.prepare(hfscale.from_pretrained(path, parallel=ParallelConfig(pp_size=2)))
    batch = {"input_ids": Rows(4).ids, "labels": Rows(4).ids}
    messages = []
    for call in (
        lambda: model(**batch),
        lambda: accelerator.backward(hfscale.train_step(model, batch)),
        lambda: accelerator.clip_grad_norm_(list(model.parameters())[:2], 1.0),
        lambda: model.generate(batch["input_ids"]),
        lambda: hfscale.train_step(torch.compile(model), batch),
        lambda: hfscale.train_step(model, {name: ids.tolist() for name, ids in batch.items()}),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_refusals_over_stages(pools: Pools, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny("llama")).save_pretrained(tmp_path)
    for called, backward, clipped, generated, compiled, listed in pools(2).run(
        refusals_over_stages, str(tmp_path)
    ):
        assert "cannot be called by itself: use hfscale.train_step" in called
        assert (
            "accelerator.backward cannot run backward through pipeline stages: use loss = hfscale"
            in backward
        )
        assert "pass model.parameters()" in clipped
        assert (
            "generate with hfscale.from_pretrained(directory, parallel=hfscale.ParallelConfig(tp_size="
            in generated
        )
        assert "torch.compile(model) compiles a forward pass that stages do not call" in compiled
        assert "input_ids is a list: give tensors, [rows, tokens]" in listed


def norm_of_the_last_stage(path: str, given: str) -> float:
    """Nothing trains on the first stage."""
    accelerator = hfscale.Accelerator()
    model = accelerator.prepare(
        hfscale.from_pretrained(path, parallel=ParallelConfig(pp_size=2), dtype=torch.float64)
    )
    if torch.distributed.get_rank() == 0:
        model.requires_grad_(False)
    hfscale.train_step(model, {"input_ids": Rows(4).ids, "labels": Rows(4).ids})
    parameters = [p for p in model.parameters() if given == "all" or p.requires_grad]
    norm = accelerator.clip_grad_norm_(parameters, 1e-3)
    assert norm is not None
    return norm.item()


@pytest.mark.parametrize("given", ["all", "trained"])
def test_a_stage_without_gradients_takes_part_in_the_norm(
    pools: Pools, tmp_path: Path, given: str
) -> None:
    stock = AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64)
    stock.save_pretrained(tmp_path)
    stock.requires_grad_(False)
    for module in (stock.model.layers[1], stock.model.norm, stock.lm_head):
        module.requires_grad_(True)
    stock(input_ids=Rows(4).ids, labels=Rows(4).ids).loss.backward()
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in stock.parameters() if p.grad is not None]
    ).item()
    assert pools(2).run(norm_of_the_last_stage, str(tmp_path), given) == pytest.approx(
        [expected] * 2, rel=1e-6
    )


def orders_of_ones_own(path: str, layout: dict[str, int]) -> tuple[list[int], list[int]]:
    """The order that the default generator gives before and after the model is prepared."""
    torch.manual_seed(3)
    model = build(path, layout)
    accelerator = hfscale.Accelerator()
    before = torch.random.get_rng_state()
    first = torch.randperm(20).tolist()
    torch.random.set_rng_state(before)
    accelerator.prepare(model)
    return first, torch.randperm(20).tolist()


@pytest.mark.parametrize("layout", [{"dp_shard_size": 2}, {"dp_replicate_size": 2}, {"tp_size": 2}])
def test_preparing_leaves_the_default_generator_alone(
    pools: Pools, tmp_path: Path, layout: dict[str, int]
) -> None:
    AutoModelForCausalLM.from_config(tiny("llama"), dtype=torch.float64).save_pretrained(tmp_path)
    first, second = pools(2).run(orders_of_ones_own, str(tmp_path), layout)
    assert first == second
    assert first[0] == first[1]
