"""The parts of fuzz_gguf.py: files to begin with, changes to them, and what is tried with the result."""
