"""Sweeps: many models, many texts, many dumps, in one process or on the workers of a Dask cluster.

plan.py         a TOML file, read and checked whole     tasks.py        what one row does, on any machine
rows.py         results on disk, a JSON line each       command.py      an engine's own command, run in time
run.py          the sweep, which goes on where it was   process.py      what a process has once: selftest, model
cluster.py      rows and windows on Dask's workers      table.py        CSV and HTML
lock.py         one sweep at a time for each folder
"""
