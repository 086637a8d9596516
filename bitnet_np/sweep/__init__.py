"""Sweeps: many models, many texts, many dumps, in one process or on the workers of a Dask cluster.

plan.py         a TOML file, read and checked whole     tasks.py        what one row does, on any machine
rows.py         results on disk, a JSON line each       process.py      what a process has once: selftest, model
run.py          the sweep, which goes on where it was   table.py        the rows as CSV
cluster.py      rows and windows on Dask's workers      lock.py         one sweep at a time for each folder
"""
