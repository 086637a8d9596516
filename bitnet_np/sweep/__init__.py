"""Sweeps: many models, many texts, many dumps, in one process or on the workers of a Dask cluster.

plan.py     a TOML file, read and checked whole                tasks.py    what one row does, on any machine
run.py      the sweep and its files; it resumes where it was   cluster.py  cases on Dask's workers
"""
