"""Derive the blueprint (the roles of modules under tensor parallelism) of a family from a tiny clone, and prove it on
this clone.

The steps (:mod:`.search_blueprint`): make a clone of a few layers (:mod:`.subject`), trace one forward pass
(:mod:`.forward_trace`), find the projections that may form a block (:mod:`.candidate_blocks`), enumerate the ways in
which they may form it (:mod:`.hypotheses`), and keep those that two ranks compute exactly like one (:mod:`.lockstep`).
"""
