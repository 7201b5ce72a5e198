"""Pretrain a small Llama, or a decoder of another family, with a tokenizer of its own, from random weights.

    accelerate launch --multi_gpu --num_processes 2 scripts/pretrain.py --config scripts/recipes/demo_pretrain.yaml

starts two ranks, over gloo where there are no GPUs (then set OMP_NUM_THREADS=1). Any key of the recipe can be given
behind it: ``training.steps=20 parallel.tp_size=1 parallel.dp_shard_size=2``. Results go to ``runs/<name>``.
``hfscale train demo_pretrain`` does the same, and starts the ranks itself.
"""

from hfscale.recipes import check_installed

if __name__ == "__main__":
    check_installed()
    from recipe_flags import recipe_and_limit

    from hfscale.recipes.main_process import run
    from hfscale.recipes.run import start
    from hfscale.recipes.schema import PretrainRecipe

    run(
        lambda: start(
            *recipe_and_limit(PretrainRecipe, "Pretrain a small model from random weights.")
        )
    )
