"""Training and evaluation steps, gradient clipping, preemption and the watchdog, in any layout."""
