"""Use the private names of other libraries, one library per file. No other folder of hfscale uses private names (ruff's
SLF001 and TID251).

Each file states the library versions with which its names were read and run. It recognizes other versions by the names
that they have, not by their version numbers.
"""
