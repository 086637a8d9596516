"""A user's name for a model -> the GGUF file or Hugging Face folder that holds it, or one sentence that says what the name means instead.

A name that is not a path is looked up where other programs keep models: Ollama, LM Studio, Hugging Face's cache. Nothing is fetched unless
the caller says so.
"""

import os
import re
from pathlib import Path

from ..base.errors import FileFormatError, MissingFileError, OptionError, ServerError, UnsupportedError, listed, shortened
from ..base.extras import extra
from ..base.validate import check_file, path_of, text_of
from .safetensors_file import json_of

_DUMP = "a dump of tensors, which goes after --theirs; expected a model"
_TORCH = "weights that torch.save wrote, expected safetensors: load them in transformers and write them with save_pretrained"
_ONNX = "an ONNX graph; name the GGUF file or Hugging Face folder that it was exported from, and judge what runs it by a dump (--theirs)"
_ADAPTOR = "adapter_config.json"
_LORA = "an adaptor (LoRA) without its base model; expected a whole model: merge it, as PEFT's merge_and_unload does, and name the result"
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_REPOSITORY = re.compile(r"([\w-][\w.-]*/[\w.-]*(?<!\.gguf))(?:/(.+\.gguf))?")
_OLLAMA = re.compile(r"(?:([\w-][\w.-]*)/)?([\w-][\w.-]*)(?::([\w.-]+))?")
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OF_FOLDERS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
"""What to fetch of a repository whose model is a folder: not its weights in other forms."""


def locate(path: str | os.PathLike[str], download: bool = False) -> Path:
    """The file or folder of a model.

    path: a file, a folder, a repository ORG/NAME of Hugging Face or a GGUF file in it, ORG/NAME/FILE.gguf, or a name of Ollama's,
    NAME:TAG. download: fetch a repository that is not in the cache, by the extra `hub`.

    Raises MissingFileError; OptionError if several models have that name; UnsupportedError or FileFormatError for a file that is no model.
    """
    path = path_of(path)
    path = path if path.exists() else _named(path, download)
    check_file(path)
    return _in_folder(path) if path.is_dir() else _of_file(path)


def _named(path: Path, download: bool) -> Path:
    """The file or folder that a name stands for which is no path."""
    name = path.as_posix()
    if url := re.fullmatch(r"(https?):/+(.+)", name):
        site = re.match(r"huggingface\.co/([^/]+/[^/]+)", url[2])
        advice = f"name it {site[1]}, with --download" if site else f"fetch it first, as by curl -LO {url[1]}://{url[2]}"
        raise UnsupportedError(f"{url[1]}://{url[2]} is a URL, expected a file: {advice}")
    repository, ollama = _REPOSITORY.fullmatch(name), _OLLAMA.fullmatch(name)
    places = []
    if ollama:
        manifests = _folder("OLLAMA_MODELS", "~/.ollama/models") / "manifests/registry.ollama.ai"
        places.append(manifests / (ollama[1] or "library") / ollama[2] / (ollama[3] or "latest"))
    if repository:
        places.append(_folder("", "~/.lmstudio/models") / path)
        hub = _folder("HF_HUB_CACHE", str(_folder("HF_HOME", "~/.cache/huggingface") / "hub"))
        if snapshot := _snapshot(hub / f"models--{repository[1].replace('/', '--')}"):
            places.append(snapshot / (repository[2] or ""))
    for place in places:
        if place.exists():
            return place
    if repository and download:
        return _downloaded(repository[1], repository[2])
    hint = ", nor a model of that name in the caches of Hugging Face, Ollama and LM Studio" if repository or ":" in name else ""
    raise MissingFileError(f"{path}: no such file or folder{hint}{'; --download fetches it from Hugging Face' if repository else ''}")


def _folder(variable: str, default: str) -> Path:
    """Where a program keeps its models: the folder named by its environment variable, or its default folder."""
    return Path(os.path.expanduser(os.environ.get(variable) or default))


def _snapshot(folder: Path) -> Path | None:
    """The newest snapshot in a repository's folder of Hugging Face's cache, whose files are links to blobs."""
    main = folder / "refs" / "main"
    return folder / "snapshots" / text_of(main, 1 << 10).strip() if main.exists() else None


def _downloaded(repository: str, file: str | None) -> Path:
    """A repository of Hugging Face, or a GGUF file in it with all its parts, fetched into the cache."""
    hub = extra("huggingface_hub", "hub", "--download")
    try:
        names = hub.list_repo_files(repository) if file is None else [file]
        files = [name for name in names if name.endswith(".gguf") and not _LATER_PART.search(name)]
        if "config.json" not in names or not any(name.endswith(".safetensors") for name in names):
            if len(files) != 1:
                raise OptionError(f"{repository} has {len(files)} GGUF files, expected one to be named, {repository}/FILE: {listed(files)}")
            file = files[0]
        patterns = _OF_FOLDERS if file is None else [re.sub(r"-\d{5}-of-", "-*-of-", file)]
        return Path(hub.snapshot_download(repository, allow_patterns=patterns)) / (file or "")
    except OptionError:
        raise
    except Exception as error:  # whatever that library and what it is built on raise
        raise ServerError(f"{repository} could not be fetched from Hugging Face: {shortened(str(error).strip())}") from None


def _in_folder(path: Path) -> Path:
    """The model in a folder, which is the folder itself if it has a config.json."""
    if (path / _ADAPTOR).exists():
        raise UnsupportedError(f"{path}: {_LORA}")
    if (path / "config.json").exists():
        return path
    if snapshot := _snapshot(path):
        return _in_folder(snapshot)
    files = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj") and not _LATER_PART.search(file.name)]
    if len(files) > 1:
        raise OptionError(f"{path} has {len(files)} GGUF files, expected one to be named: {listed([file.name for file in files])}")
    if not files and any(path.glob("*.npy")):
        raise FileFormatError(f"{path}: {_DUMP}")
    return files[0] if files else path


def _of_file(path: Path) -> Path:
    """The model that a file belongs to."""
    if path.name in ("config.json", _ADAPTOR, "model.safetensors.index.json"):
        return _in_folder(path.parent)
    with open(path, "rb") as file:
        head = file.read(4096)
    if head[:2] == b"\x1f\x8b":
        raise UnsupportedError(f"{path}: compressed by gzip, expected GGUF: gunzip it first")
    if head[:2] == b"PK" or head[:6] == b"\x93NUMPY":
        raise UnsupportedError(f"{path}: {_TORCH if b'data.pkl' in head[:256] else _DUMP}")
    if path.suffix == ".onnx":
        raise UnsupportedError(f"{path}: {_ONNX}")
    if path.suffix == ".safetensors":
        if (path.parent / _ADAPTOR).exists():
            return _in_folder(path.parent)
        if not (path.parent / "config.json").exists():
            raise FileFormatError(
                f"{path}: no config.json in the same folder, expected one as in a Hugging Face folder, unless it is {_DUMP}"
            )
        return path.parent
    if head[:1] != b"{" or _OLLAMA_MODEL.encode() not in head:
        return path
    content = json_of(path, 1 << 20)
    try:  # a manifest of Ollama, MODELS/manifests/HOST/USER/NAME/TAG, whose model is in MODELS/blobs
        (digest,) = (layer["digest"] for layer in content["layers"] if layer["mediaType"] == _OLLAMA_MODEL)
        return path.absolute().parents[4] / "blobs" / digest.replace(":", "-")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise FileFormatError(f"{path}: expected a manifest of Ollama with one model, in manifests/HOST/USER/NAME/") from None
