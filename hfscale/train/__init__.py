"""Run training and evaluation steps in any layout; clip gradients; stop before a preemption; and report ranks that wait
forever.
"""
