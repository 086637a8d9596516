"""Test vectors for engines in any language: inputs, what an engine should give, and how far it may be off.

pack.py        the files of a pack         operations.py  the cases of single operations
models.py      those of whole models       portable.py    float64 that has the same bits everywhere
choose.py      which of them a pack has

vectors.h and vectors.rs read a pack and compare; a copy of them lies in every pack.
"""
