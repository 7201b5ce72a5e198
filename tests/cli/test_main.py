"""The ``hfscale`` command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import hfscale
from hfscale import CheckpointError, ConfigError, ParallelConfig, __version__
from hfscale.cli import _COMMANDS, main
from tests.tiny_models import tiny


@pytest.fixture
def llama(tmp_path: Path) -> str:
    tiny("llama").save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def _refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_a_table(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--tp", "2", "--dp-shard", "4"]) == 0
    out = capsys.readouterr().out
    assert "on tp2 x dp_shard4 = 8 ranks" in out
    assert "model.layers.*.self_attn.q_proj.weight" in out
    assert not torch.distributed.is_initialized()


def test_a_config_file_and_json(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "plan",
        f"{llama}/config.json",
        "--tp",
        "2",
        "--dp-replicate",
        "3",
        "--dtype",
        "bfloat16",
        "--json",
    ]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ranks"] == 6
    assert document["layout"]["dp_replicate"] == 3
    assert {row["dtype"] for row in document["parameters"]} == {"bfloat16"}


def test_the_configs_type_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama", dtype="float16").save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["dtype"] for row in document["parameters"]} == {"float16"}


def test_what_a_rank_holds_in_training(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    adapted = [
        "plan",
        llama,
        "--tp",
        "2",
        "--lora",
        "--rank",
        "4",
        "--quantize",
        "nf4",
        "--tokens",
        "64",
        "--dtype",
    ]
    assert main([*adapted, "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "AdamW state" not in out  # of weights that do not train
    assert "fits 80 GB: yes, 0.0 GB of it" in out
    assert main([*adapted, "bfloat16", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    config = AutoConfig.from_pretrained(llama)
    layout = ParallelConfig(tp_size=2)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    planned = hfscale.plan(
        config, layout, dtype="bfloat16", peft_config=lora, quantization_config=four
    )
    expected = hfscale.memory_estimate(planned, tokens=64)
    assert memory == {**expected.kinds, "total": expected.total, "fits": True}
    # As PEFT has them.
    assert {planned.by_name[adapter.name].dtype for adapter in planned.adapters} == {torch.float32}
    assert memory["optimizer"] < 3 * memory["gradients"] == 3 * memory["adapters"]
    assert main(["plan", llama, "--optimizer", "adamw_8bit", "--gpu", "0.0001"]) == 0
    assert "fits 0.0001 GB: no, 0.0 GB, most of it" in capsys.readouterr().out
    assert "q_prj" in _refused(capsys, "plan", llama, "--lora", "q_prj")
    assert "needs --lora, got --rank 4" in _refused(capsys, "plan", llama, "--rank", "4")
    assert "--tokens 0 is no number of tokens" in _refused(capsys, "plan", llama, "--tokens", "0")


def test_amounts_have_units_in_every_command(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(*argv: str) -> Any:
        assert main([*argv, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plan = ("plan", llama, "--dtype", "bfloat16", "--tokens")
    assert of(*plan, "2K", "--gpu", "1GiB")["memory"] == of(*plan, "2048", "--gpu", "80")["memory"]
    for size, fits in {
        "80GB": "fits 80 GB: yes",
        "1GiB": "fits 1.07374 GB: yes",
        "1KiB": "fits 1.024e-06 GB: no",
    }.items():
        assert main(["plan", llama, "--gpu", size]) == 0
        assert fits in capsys.readouterr().out
    assert of("estimate", llama, "--sequence-length", "2K") == of(
        "estimate", llama, "--sequence-length", "2048"
    )
    assert "--gpu much is no size" in _refused(capsys, "plan", llama, "--gpu", "much")
    assert "--sequence-length 4KB is no number of tokens" in _refused(
        capsys, "estimate", llama, "--sequence-length", "4KB"
    )


def test_another_auto_class(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", llama, "--auto-class", "AutoModel", "--tp", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["head"] is None
    assert document["parameters"][0]["name"] == "embed_tokens.weight"


def test_all_problems_of_a_layout_on_stderr(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    axes = ["--tp", "3", "--ep", "6", "--cp", "2", "--cp-method", "heads", "--sequence-parallel"]
    message = _refused(capsys, "plan", llama, *axes)
    layout = "tp3 x cp2, sequence parallel, ep6"
    assert message.startswith(f"hfscale plan: {layout} does not fit LlamaForCausalLM:\n")
    for problem in ("tp_size=3", "ep_size=6", "cp_method='heads'"):
        assert f"  - {problem}" in message


def test_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("llama", num_hidden_layers=6).save_pretrained(tmp_path)
    flags = ["--pp", "2", "--schedule", "zbv", "--microbatches", "6", "--stage-layers", "1,2,2,1"]
    assert main(["plan", str(tmp_path), *flags, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]["stages"]
    assert [(stage["rank"], len(stage["layers"])) for stage in stages] == [
        (0, 1),
        (1, 2),
        (1, 2),
        (0, 1),
    ]
    assert (
        main(
            [
                "plan",
                str(tmp_path),
                "--pp",
                "3",
                "--schedule",
                "looped_bfs",
                "--virtual-stages",
                "2",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "on pp3 = 3 ranks" in out
    assert "    5     2       1  model.layers.5, model.norm, lm_head" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--schedule", "zbw"], "did you mean 'zbv'? use one of gpipe, 1f1b"),
        (
            ["--schedule", "zbv", "--virtual-stages", "3"],
            "virtual_stages=3 does not fit zbv: use 2",
        ),
        (
            ["--schedule", "dualpipev", "--microbatches", "3"],
            "num_microbatches=3 is too few for dualpipev over pp_size=2",
        ),
        (["--schedule", "interleaved1f1b", "--microbatches", "5"], "use 4 or 6"),
        (["--virtual-stages", "2"], "virtual_stages=2 does not fit 1f1b: use 1"),
        (["--microbatches", "0"], "--microbatches=0 is invalid: use a whole number of at least 1"),
        (["--stage-layers", "1,1,1"], "use one number per stage"),
        (["--stage-layers", "2,2"], "use numbers that sum up to 2"),
        (["--schedule", "absent.csv"], "no schedule could be read from absent.csv"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_impossible_pipelines(
    llama: str, capsys: pytest.CaptureFixture[str], command: str, flags: list[str], message: str
) -> None:
    assert message in _refused(capsys, command, llama, "--pp", "2", *flags)


def test_a_pipeline_of_one_stage_is_refused(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = _refused(
        capsys, "plan", llama, "--tp", "2", "--schedule", "gpipe", "--microbatches", "4"
    )
    assert (
        "--schedule, --microbatches can be used only with several pipeline stages: give --pp 2"
        in message
    )


def test_an_impossible_size(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = _refused(capsys, "plan", llama, "--tp", "two")
    assert message == "hfscale plan: tp_size='two' is invalid: use a whole number of at least 1\n"


def test_a_missing_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist: give a model directory" in _refused(
        capsys, "plan", str(tmp_path / "absent")
    )
    assert "has no config.json" in _refused(capsys, "plan", str(tmp_path))


def test_a_hub_that_is_away_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("hfscale._compat.hub.getproxies", dict)
    message = _refused(capsys, "plan", "nobody/nothing")
    assert "nobody/nothing is neither a directory nor in the cache of the Hub" in message
    with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
        hfscale.from_pretrained("nobody/nothing")


def test_a_damaged_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{not json")
    message = _refused(capsys, "plan", str(tmp_path))
    assert message.startswith(f"hfscale plan: no config could be read from {tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    assert "never_heard_of" in _refused(capsys, "plan", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "hidden_size",
            33,
            "is invalid: The hidden size (33) is not a multiple of the number of attention heads",
        ),
        ("hidden_size", "wide", "Field 'hidden_size' expected int"),
        ("num_attention_heads", 0, "one of its sizes is 0"),
        (
            "num_hidden_layers",
            -3,
            "num_hidden_layers=-3 of this llama config is invalid: use at least 1",
        ),
        ("vocab_size", 0, "vocab_size=0 of this llama config is invalid"),
    ],
)
def test_impossible_sizes(
    llama: str, capsys: pytest.CaptureFixture[str], name: str, value: Any, message: str
) -> None:
    path = Path(llama) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    assert message in _refused(capsys, "plan", llama, "--tp", "2")


def test_unknown_auto_classes(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = _refused(capsys, "plan", llama, "--auto-class", "AutoModelForEverything")
    assert "AutoModelForEverything is not one of transformers' Auto classes" in message
    assert "such as AutoModelFor" in message
    message = _refused(capsys, "plan", llama, "--auto-class", "AutoModelForMaskedLM")
    assert "AutoModelForMaskedLM cannot build a 'llama' model" in message
    assert "use the Auto class AutoModel, AutoModelForCausalLM" in message


def test_bad_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in _refused(capsys)
    assert "invalid choice: 'plain'" in _refused(capsys, "plain")
    assert "pln' is no command (did you mean plan?)" in _refused(capsys, "pln")
    assert "MODEL" in _refused(capsys, "plan")
    for theirs, ours in {
        "--tp-size": "--tp",
        "--pp_size": "--pp",
        "--tensor-parallel": "--tp",
        "--tensor-model-parallel-size": "--tp",
        "--fsdp": "--dp-shard",
    }.items():
        assert f"(did you mean {ours}?)" in _refused(capsys, "plan", "m", theirs, "2")
    assert "did you mean" not in _refused(capsys, "estimate", "m", "--gpu", "8")
    message = _refused(capsys, "plan", "m", "--tpp", "2")
    assert message.startswith("hfscale plan: ")
    assert message.endswith("\nsee hfscale plan --help\n")
    assert "unrecognized arguments: --tpp 2 (did you mean --tp?)" in message
    for line in (
        ["calibrate", "--out"],
        ["search", "m", "--gpus", "8", "--tokens-per-step", "1", "--html"],
    ):
        assert "/no/where is not a folder" in _refused(capsys, *line, "/no/where/x")


def test_a_merge_without_an_adapter(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nope does not exist: give the directory of an adapter" in _refused(
        capsys, "merge", llama, "nope", "out"
    )


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hfscale {__version__}\n"
    assert main(["plan", "--help"]) == 0
    assert "--dp-shard N" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_every_command_has_an_example_and_can_be_debugged(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"hfscale {name} " in text.partition("example:\n")[2]
    assert "--debug" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_flags_choices_and_recipes(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in _COMMANDS)
    assert "nf4 fp4 int8" in script
    assert "demo_pretrain" in script
    assert "virtual-stages" in script
    if shell == "bash":
        line = "COMP_WORDS=(hfscale plan --quantize n) COMP_CWORD=3; _hfscale; echo ${COMPREPLY[@]}"
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{line}"], capture_output=True, text=True, check=True
        )
        assert done.stdout == "nf4\n"


def test_what_commands_find_is_there_as_json(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["blueprint", llama, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "llama"
    assert found["blueprint"]["blocks"]["mlp"]["row"] == ["down_proj"]
    assert "0x" not in json.dumps(found)
    assert main(["completion", "bash", "--json"]) == 0
    assert "complete -o default" in json.loads(capsys.readouterr().out)["script"]
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(llama)).save_pretrained(
        tmp_path / "dense"
    )
    capsys.readouterr()
    assert (
        main(
            [
                "upcycle",
                str(tmp_path / "dense"),
                str(tmp_path / "experts"),
                "--num-experts",
                "4",
                "--json",
            ]
        )
        == 0
    )
    written = json.loads(capsys.readouterr().out)
    assert (written["num_experts"], written["top_k"]) == (4, 2)
    assert written["bytes"] == sum(
        file.stat().st_size for file in Path(written["directory"]).glob("*.safetensors")
    )
    again = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "experts")]
    assert (
        f"OUT {tmp_path}/experts has files already (config.json, generation_config.json"
        in _refused(capsys, *again)
    )
    assert main([*again, "--num-experts", "4", "--max-shard-size", "1MiB", "--overwrite"]) == 0
    capsys.readouterr()
    again[-1] = again[-2]
    assert "must not be the directory that is read as MODEL" in _refused(
        capsys, *again, "--overwrite"
    )


def test_with_debug_an_error_is_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="has no config"):
        main(["plan", str(tmp_path), "--debug"])


def test_what_nobody_foresaw_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import hfscale.cli as c, sys; sys.argv = ['hfscale', 'plan', 'm'{}]; c.cmd_plan.run = lambda _: {{}}['no']; "
        "c.main()"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code.format(more)], capture_output=True, text=True, check=False
        ).stderr
        for more in ("", ", '--debug'")
    ]
    assert said[0].startswith("hfscale: KeyError: 'no' (<string>:1)\n")
    assert "Traceback" not in said[0]
    assert "Traceback" in said[1]


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hfscale", "schedule", "zbv", "--pp", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "pp_size=0 is invalid" in done.stderr
    assert "Traceback" not in done.stderr
