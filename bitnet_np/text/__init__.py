"""Tokenizers and chat templates: text to token ids and back, from the keys that a GGUF file has for them.

tokenizer.py         tokenizer_from(metadata): encode, decode, chat; finds the special tokens in a text
vocabulary.py        the tokens of a file: spellings, types and scores, checked
byte_level.py        byte-level BPE ("gpt2"), and the rules that cut text into words
spm.py               SentencePiece's BPE ("llama"), by scores
chat_template.py     renders a file's Jinja template, which is somebody else's program
template_process.py  the process in which that happens
hf_tokenizer.py      tokenizer.json of a Hugging Face folder -> the same keys
"""
