"""The parts of scripts/bench.py.

rounds.py     cases, checks before timing, rounds in which the sides alternate
peaks.py      the machine's peaks
models.py     random models, for us and for peers
peers.py      llama.cpp in a process of its own
report.py     tables, JSON
forwards.py   prefill, decode, batch
processes.py  load, compile
workers/      programs that run in those processes
"""
