"""The parts of scripts/bench.py.

stats.py    numbers about samples          rounds.py   cases, checks before timing, rounds in which the sides alternate
machine.py  the machine that was measured   peaks.py    the machine's peaks
models.py   random models, for us and for peers  peers.py    other engines, each in a process of its own
report.py   tables, bars, JSON              setup.py    the model and the options of every bench
forwards.py prefill, decode, batch, modes, fit         kernel_calls.py   matmul, attention
processes.py  load, compile                memory.py   bytes allocated, resident memory
mask_arrays.py  causal masks as arrays
workers/    programs that run in those processes
"""
