"""What scripts/bench.py is made of.

stats.py    numbers about samples          rounds.py   cases, checks before timing, rounds in which the sides alternate
machine.py  what it was measured on         peaks.py    what the machine can do at most
models.py   random models, for us and for peers  peers.py    other engines, each in a process of its own
report.py   tables, bars, JSON              setup.py    what every bench is told
forwards.py prefill, decode, batch, modes, fit         kernel_calls.py   matmul, attention
processes.py  load, compile                memory.py   bytes allocated, resident memory
mask_arrays.py  causal masks as arrays     gpu.py      what scripts/gpu_check.py measures a GPU with
workers/    what runs in those processes
"""
