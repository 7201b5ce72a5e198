"""Infer the blueprint of a family without one from a tiny clone of the model, and prove it there.

How it goes (:mod:`.search_blueprint`): make a clone of a few layers (:mod:`.subject`), trace one forward pass
(:mod:`.forward_trace`), see which projections may make a block (:mod:`.candidate_blocks`), say in what ways they may
(:mod:`.hypotheses`), keep what two ranks can compute without any difference to one (:mod:`.lockstep`).
"""
