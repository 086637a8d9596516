"""The file formats of dumps, ours and other projects'. No file is trusted: every reader checks what it uses.

registry.py     the table of formats, and the detection of a file's format
output.py       the Writer that each format has               arrays.py     the trace of a file's arrays by their labels
loose_labels.py labels in other spellings, and layers that are counted from 1
npy.py, safetensors.py, torch_file.py                         arrays by label
text.py         one array of numbers as text
nodes.py        nodes of a ggml graph
aprt.py         aprender's stage files                        bitnet_rs.py  BitNet-rs's trace records: hashes
eval_callback.py                                              what llama.cpp's llama-eval-callback prints
json_arrays.py  arrays by label as JSON                       server_answer.py  an answer of a server, saved as it came
llama_logits.py llama.cpp's --kl-divergence-base             bitnet_rs_logits.py  the largest logits, as BitNet-rs writes them
"""

from .registry import COMPLETIONS, FORMATS, detect, read_any, read_arrays, writer

__all__ = ["COMPLETIONS", "FORMATS", "detect", "read_any", "read_arrays", "writer"]
