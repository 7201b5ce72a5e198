"""Infer the blueprint of a family that has none from a tiny clone of the model, and prove it on the clone.

The steps (:mod:`.search_blueprint`): make a clone of a few layers (:mod:`.subject`), trace one forward pass
(:mod:`.forward_trace`), find the projections that may form a block (:mod:`.candidate_blocks`), enumerate the ways in
which they may form it (:mod:`.hypotheses`), and keep those that two ranks compute exactly like one (:mod:`.lockstep`).
"""
