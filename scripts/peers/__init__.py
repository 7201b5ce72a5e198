"""Run the tests of transformers, accelerate, TRL and PEFT with hfscale's classes in place of theirs."""
