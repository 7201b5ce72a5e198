"""Print which modules of a model tensor parallelism shards (its blueprint), and the source of this knowledge: hfscale's
table of families, transformers' plan, or inference. Inference finds the modules in a tiny model of the same classes,
and checks there that sharding does not change the result. Needs no weights and no GPU.
"""

import argparse

from .look import print_json
from .model_flags import add_model_arguments, auto_class_of, building, load_config, remote_code

HELP = "print which modules of a model tensor parallelism shards, as an entry for hfscale's table of families"
EXAMPLE = "hfscale blueprint Qwen/Qwen3-8B --infer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--infer",
        action="store_true",
        help="infer the blueprint, even if the family is in the table",
    )


def run(arguments: argparse.Namespace) -> None:
    import torch

    from ..api.blueprint_entry import blueprint_entry, describe_blueprint

    auto_class = auto_class_of(arguments.auto_class)
    config = load_config(arguments.model, arguments.trust_remote_code)
    with building(arguments, config), torch.device("meta"):
        model = auto_class.from_config(config, **remote_code(arguments))
    if arguments.json:
        print_json(blueprint_entry(model, arguments.infer))
    else:
        print(describe_blueprint(model, arguments.infer))
