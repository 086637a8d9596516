"""For tests, of this package and of other engines.

models.py      random models, in memory and as GGUF files
space.py       cases: models and calls as a few numbers, around the edges of engines
strategies.py  the same for Hypothesis
hf_files.py    models as Hugging Face folders
noise.py       numbers that are the same on every machine
selftest.py    known bits of every kernel, and the kernels against the contract
model_cases.py whole models for it
part_cases.py  every number of rows and outputs for it
"""

from .models import random_model, random_table, write_gguf

__all__ = ["random_model", "random_table", "write_gguf"]
