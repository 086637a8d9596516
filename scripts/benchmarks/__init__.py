"""The parts of scripts/bench.py.

rounds.py     cases, checks before timing, rounds in which the sides alternate
peaks.py      the machine's peaks
models.py     random models, for us and for peers
released.py   random models in the exact form of the released BitNet file
peers.py      other engines, each in a process of its own; llama_bench.py  those that are timed by a llama-bench
report.py     tables, bars, JSON
forwards.py   prefill, decode, batch
operations.py  attention, products, masks
neighbours.py  prefill and decode beside busy processes
processes.py  load, compile
memory.py     bytes allocated, resident memory
workers/      programs that run in those processes
"""
