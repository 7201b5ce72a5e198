"""Fine-tune a checkpoint, of ``scripts/pretrain.py``, in any other directory or on the Hub: all its parameters, or an
adapter over it, quantized or not, in any layout.

    accelerate launch --multi_gpu --num_processes 2 scripts/finetune.py --config scripts/recipes/demo_lora.yaml

As for pretraining, any key of the recipe can be given behind it, and results go to ``runs/<name>``.
``--max-memory`` says what each rank will need before training starts, and ``--max-memory=40`` stops where that is more
than 40 GiB. ``hfscale train demo_lora`` does the same, and starts the ranks itself.
"""

from hfscale.recipes import check_installed

if __name__ == "__main__":
    check_installed()
    from recipe_flags import recipe_and_limit

    from hfscale.recipes.main_process import run
    from hfscale.recipes.run import start
    from hfscale.recipes.schema import FinetuneRecipe

    run(
        lambda: start(
            *recipe_and_limit(FinetuneRecipe, "Fine-tune a checkpoint, or an adapter over it.")
        )
    )
