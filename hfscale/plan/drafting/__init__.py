"""Model and layout in, plan out: one file per part; no process group, no weights, no GPU."""
