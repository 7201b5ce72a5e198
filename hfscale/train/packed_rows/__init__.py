"""Support packed rows: several documents in one row, which must not affect each other."""
