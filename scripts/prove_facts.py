"""Prove what plans need to know of the classes of the sweeps, and write it to hfscale/models/facts.json.

    python scripts/prove_facts.py [--only llama gemma] [--anew] [--check] [--sample 100] [--seed 1]

Every family of causal language models is planned with its default config, variants of it and tiny clones, and so are
the other classes of scripts/family_clones.py, in each kind of layout: whatever is asked and the table does not say is
proved, once for each digest of a config, and written family by family. A digest has the class's source in it, so one
run for each release of transformers proves what that release has changed. With ``--anew`` the table is emptied first.

With ``--check`` it stays as it is, and what it does not say is an error. Everything is proved for each config then:
two of one digest that differ are an error, too, since the digest (hfscale/models/facts.py) leaves out what tells
them apart.
"""

import argparse
import copy
import json
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from family_clones import OTHERS
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

import hfscale
from hfscale.models.clone import tiny_clone
from hfscale.models.facts import TABLE, Facts, digest
from hfscale.train.packed_rows.guard import check_packed_rows

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.families import config_of
from tests.proved_anew import DoubtedFacts, proved_anew

STAGE_LAYERS = 4
_LONG = 10**9  # tokens: no config names a length that is longer
LAYOUTS = (
    {"tp_size": 2},
    {"tp_size": 2, "sequence_parallel": True},
    {"cp_size": 2},
    {"pp_size": 2},
    {"dp_shard_size": 2},
)


def variants(config: Any) -> Iterator[tuple[str, Any]]:
    """Configs of other members of a family, as far as it has the fields."""
    yield "default", config
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    keys = getattr(text, "num_key_value_heads", None)
    changes: dict[str, Any] = {"pad_token_id": 1000}
    if isinstance(heads, int) and isinstance(keys, int) and heads > 1:
        changes["num_key_value_heads"] = heads // 2 if keys == heads else heads
    if isinstance(getattr(config, "tie_word_embeddings", None), bool):
        changes["tie_word_embeddings"] = not config.tie_word_embeddings
    for name, value in changes.items():
        with suppress(Exception):  # a config that checks its fields against one another
            changed = copy.deepcopy(config)
            setattr(
                changed.get_text_config() if name != "tie_word_embeddings" else changed, name, value
            )
            yield f"{name}={value}", type(config).from_dict(changed.to_dict())


def cases(family: str) -> Iterator[tuple[str, Any, Any]]:
    """``(config in words, config, auto class)``."""
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with suppress(Exception):
            for words, config in variants(AutoConfig.for_model(family)):
                yield words, config, AutoModelForCausalLM
        for layers in (2, STAGE_LAYERS):
            with suppress(Exception):  # a family without a clone of so many layers
                yield f"tiny, {layers} layers", config_of(family, layers), AutoModelForCausalLM
    if (
        family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and family in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ):
        with suppress(Exception):
            for pad, labels in ((None, 2), (0, 2), (0, 1), (0, 3)):
                config = AutoConfig.for_model(family, pad_token_id=pad, num_labels=labels)
                yield (
                    f"pad_token_id={pad}, {labels} labels",
                    config,
                    AutoModelForSequenceClassification,
                )
    for name, auto_class, _, changes in OTHERS:
        if name == family:
            config = tiny_clone(AutoConfig.for_model(family), **{"pad_token_id": None, **changes})
            yield "tiny", config, auto_class
            start = {"decoder_start_token_id": 0} if config.is_encoder_decoder else {}
            yield "default", AutoConfig.for_model(family, **start), auto_class


def prove(
    chosen: Iterable[tuple[str, Any, Any]], doubted: bool, known: Any = None
) -> tuple[Any, dict[str, str]]:
    """All that is asked about some cases, and what config each digest is of.

    Args:
        doubted: also where another config of the digest has been asked about.
        known: answers that are not proved again.
    """
    configs: dict[str, str] = {}
    with proved_anew(known, doubted=doubted) as facts:
        for words, config, auto_class in chosen:
            try:
                with torch.device("meta"):
                    model = auto_class.from_config(copy.deepcopy(config))
            except Exception:  # whatever stock code says of a config it cannot build
                continue
            keys = [digest(type(model), model.config, each) for each in (model, None)]
            if keys[0] in configs and not doubted:
                continue
            configs.update({key: words for key in keys if key not in configs})
            for layout in LAYOUTS:
                with suppress(hfscale.HFScaleError):
                    hfscale.plan(config, hfscale.ParallelConfig(**layout), auto_class=auto_class)
            if auto_class is AutoModelForCausalLM:
                with suppress(hfscale.HFScaleError):
                    check_packed_rows(model, tokens=_LONG)
    return facts, configs


def written(proved: dict[str, Any], configs: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """Class -> groups of configs that have the same answers."""
    table: dict[str, list[dict[str, Any]]] = {}
    for name in sorted(proved):
        groups: dict[str, dict[str, Any]] = {}
        for key, answers in proved[name].items():
            ordered = dict(sorted(answers.items()))
            group = groups.setdefault(json.dumps(ordered), {"configs": {}, "answers": ordered})
            group["configs"][key] = configs.get(key, "a model inside")
        table[name] = list(groups.values())
    return table


def read(table: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """What :func:`written` was given."""
    answers = {
        name: {key: group["answers"] for group in g for key in group["configs"]}
        for name, g in table.items()
    }
    return answers, {
        key: words
        for groups in table.values()
        for g in groups
        for key, words in g["configs"].items()
    }


def as_text(releases: list[str], table: dict[str, list[dict[str, Any]]]) -> str:
    """JSON with a line for each answer."""
    classes = []
    for name, groups in sorted(table.items()):
        each = []
        for group in groups:
            answers = [
                f"   {json.dumps(question)}: {json.dumps(a)}"
                for question, a in group["answers"].items()
            ]
            listed = ",\n".join(answers)
            each.append(
                f'  {{"configs": {json.dumps(group["configs"])}, "answers": {{\n{listed}}}}}'
            )
        classes.append(f" {json.dumps(name)}: [\n" + ",\n".join(each) + "]")
    listed = ",\n".join(classes)
    return f'{{"transformers": {json.dumps(sorted(releases))},\n"classes": {{\n{listed}}}}}\n'


def plain(answer: Any) -> Any:
    """An answer without the roundings of its proof, which machines differ in."""
    if isinstance(answer, dict) and "proof" in answer:
        return {name: value for name, value in answer.items() if name not in ("proof", "source")}
    return answer


def differences(facts: DoubtedFacts) -> list[str]:
    """What was proved and the table does not say."""
    known = Facts().written
    found = list(facts.contradictions)
    for name, digests in facts.proved.items():
        for key, answers in digests.items():
            table = known.get(name, {}).get(key, {})
            for question, answer in answers.items():
                if question not in table:
                    found.append(f"{name} {key}: {question}: not in the table")
                elif plain(table[question]) != plain(answer):
                    found.append(
                        f"{name} {key}: {question}: proved {answer}, and the table has {table[question]}"
                    )
    return found


def add(facts: Facts, configs: dict[str, str]) -> None:
    """Write what was proved into the table."""
    stored = json.loads(TABLE.read_text())
    answers, words = read(stored["classes"])
    for name, digests in facts.proved.items():
        of_class = answers.setdefault(name, {})
        for key, proved in digests.items():
            of_class[key] = {**of_class.get(key, {}), **proved}
    TABLE.write_text(as_text(stored["transformers"], written(answers, {**configs, **words})))


def note_release() -> None:
    """Write into the table that it has been made for this transformers, too."""
    stored = json.loads(TABLE.read_text())
    releases = {*stored["transformers"], transformers.__version__}
    TABLE.write_text(as_text([*releases], stored["classes"]))


def check(families: list[str], sample: int, seed: int) -> list[str]:
    """What is wrong with the table, as far as a sample of its cases shows."""
    chosen = [case for family in families for case in cases(family)]
    if sample:
        chosen = random.Random(seed).sample(chosen, min(sample, len(chosen)))
    return differences(prove(tqdm(chosen, desc="configs"), doubted=True)[0])


def main() -> int:
    """Write or check the table; the exit status is 1 where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--sample", type=int, default=0, help="how many configs to check; all by default"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    families = arguments.only or sorted(
        {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(name for name, *_ in OTHERS)}
    )
    if arguments.check:
        wrong = check(families, arguments.sample, arguments.seed)
        print("\n".join(wrong) or "the table says what is proved")
        return int(bool(wrong))
    if arguments.anew:
        TABLE.write_text(as_text([], {}))
    for family in tqdm(families, desc="families"):
        # written at once: what is proved is not lost with what comes later
        add(*prove(list(cases(family)), doubted=False, known=Facts().written))
    if not arguments.only:
        note_release()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
