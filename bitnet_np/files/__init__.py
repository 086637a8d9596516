"""Model files: read, checked, converted, written.

locate.py          what a user calls a model -> its file or folder, also in the caches of other programs
load.py            load(path): a GGUF file or a Hugging Face folder -> Model; open_model(path): the same, only opened
gguf_source.py     a GGUF file as a source                  hf_folder.py       a Hugging Face folder as a source; hf_weights.py: its tensors
gguf_config.py     GGUF metadata -> Config, and back        hf_config.py       config.json -> Config, and how tensors are stored
gguf_names.py      the names of GGUF keys and tensors       hf_model_types.py  the names of transformers' keys and modules
gguf_file.py       the GGUF format                          safetensors_file.py   the format of the folder's tensors
tensors.py         the tensors of a file, each taken once, checked    mlx_groups.py      tensors that mlx-lm quantised in groups
overrides.py       settings that replace a file's            embedded.py        the models and recordings of the package
gguf_writer.py     a Model -> a GGUF file                   convert.py         a loaded model -> a GGUF file of given types
digest.py          SHA-256 of files, folders, and models in parts
"""
