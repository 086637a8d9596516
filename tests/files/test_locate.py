"""A model is found by what users call it, and what is no model is answered with what to do instead."""

import gzip
import hashlib
import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
from hf_models import DATA, OFFLINE

import bitnet_np as bn
from bitnet_np.base.errors import UnsupportedError
from bitnet_np.files import embedded
from bitnet_np.files.locate import locate

REPOSITORY = "models--org--name"
FOLDER = DATA / "hf" / OFFLINE


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home with a small GGUF file in it, in which the test runs."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with embedded.model_path() as path:
        shutil.copy(path, "model.gguf")
    return tmp_path


def cached(home, files):
    """A snapshot in Hugging Face's cache whose files are links to blobs, as that library makes them. Returns the snapshot."""
    folder = home / ".cache/huggingface/hub" / REPOSITORY
    snapshot = folder / "snapshots" / ("0" * 40)
    for part in (snapshot, folder / "blobs", folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs/main").write_text(snapshot.name)
    for name, source in files.items():
        shutil.copy(source, folder / "blobs" / name.upper())
        (snapshot / name).symlink_to(Path("../../blobs") / name.upper())
    return snapshot


def test_a_folder_in_the_cache_of_hugging_face(home):
    snapshot = cached(home, {file.name: file for file in FOLDER.iterdir()})
    assert locate("org/name") == locate(snapshot.parents[1]) == locate(snapshot / "model.safetensors") == snapshot
    hub = pytest.importorskip("huggingface_hub")
    assert hub.try_to_load_from_cache("org/name", "config.json", snapshot.parents[2]) == str(snapshot / "config.json")
    assert bn.load("org/name").config == bn.load(FOLDER).config


def test_a_file_in_the_cache_of_hugging_face(home):
    snapshot = cached(home, {"a.gguf": "model.gguf", "mmproj-a.gguf": "model.gguf", "README.md": "model.gguf"})
    assert locate("org/name") == locate("org/name/a.gguf") == snapshot / "a.gguf"
    (snapshot / "b-00001-of-00002.gguf").touch()
    (snapshot / "b-00002-of-00002.gguf").touch()
    with pytest.raises(bn.Error, match=r"has 2 GGUF files, expected one to be named: a\.gguf, b-00001-of-00002\.gguf$"):
        locate("org/name")


def test_models_of_ollama(home):
    content = Path("model.gguf").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest, blob = (
        home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest",
        home / f".ollama/models/blobs/sha256-{digest}",
    )
    for path in (manifest, blob):
        path.parent.mkdir(parents=True)
    blob.write_bytes(content)
    layers = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"} for kind in ("model", "params")]
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    assert locate("tiny") == locate("tiny:latest") == locate(manifest) == locate(blob) == blob
    assert bn.load("tiny").config.n_layers == 3
    for wrong in ({"layers": layers[:1] * 2}, {"layer": layers}, {"layers": [[], *layers]}):
        manifest.write_text(json.dumps(wrong))
        with pytest.raises(bn.Error, match="expected a manifest of Ollama with one model"):
            locate("tiny")


def test_folders_of_lm_studio(home):
    path = home / ".lmstudio/models/org/name/a.gguf"
    path.parent.mkdir(parents=True)
    shutil.copy("model.gguf", path)
    assert locate("org/name") == locate(path.parent) == path


PARTS = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
DUMP = "a dump of tensors, which goes after --theirs; expected a model"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.gguf", None, "none.gguf: no such file or folder"),
        ("org/name", None, "org/name: no such file or folder, nor a model of that name in the caches of Hugging Face, Ollama and"),
        ("https://example.org/a.gguf", None, "a.gguf is a URL, expected a file: fetch it first, as by curl -LO https://"),
        ("https://huggingface.co/org/name/tree/main", None, "/main is a URL, expected a file: name it org/name, with --download"),
        ("a.gguf.gz", gzip.compress(b"GGUF", mtime=0), "compressed by gzip, expected GGUF: gunzip it first"),
        ("a.npy", b"\x93NUMPY\1\0", DUMP),
        ("a.bin", b"PK\3\4" + 26 * b"\0" + b"archive/data.pkl", "weights that torch.save wrote, expected safetensors"),
        ("a.safetensors", b"\2\0\0\0\0\0\0\0{}", "no config.json in the same folder, expected one as in a Hugging Face folder, unless"),
        ("a.onnx", b"\x08\x08", "an ONNX graph; name the GGUF file or Hugging Face folder that it was exported from"),
        ("dump/l_out-0.npy", b"", f"dump: {DUMP}"),
    ],
)
def test_what_is_no_model_is_answered_with_what_to_do(home, name, content, message):
    path = Path(name)
    if content is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(bn.Error) as raised:
        bn.load("dump" if name.startswith("dump") else name)
    assert message in str(raised.value).replace("\\", "/")


def test_a_missing_file_is_an_error_of_both_families(home):
    model = bn.load("model.gguf")
    for read in (lambda: bn.load("none"), lambda: bn.open_gguf("none"), lambda: bn.check(model, [1], "none.npz")):
        with pytest.raises(bn.Error, match="no such file or folder") as raised:
            read()
        assert isinstance(raised.value, FileNotFoundError)


def test_a_model_is_no_dump(home):
    model = bn.load("model.gguf")
    for path, what in (("model.gguf", "a GGUF file"), (FOLDER, "a Hugging Face folder")):
        with pytest.raises(bn.Error, match=f"{what}, which is a model"):
            bn.check(model, [1], path)


@pytest.mark.parametrize(
    ("names", "asked", "fetched"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], "org/name", ["config.json", "model.safetensors"]),
        (["a.gguf", "README.md"], "org/name", ["a.gguf"]),
        ([*PARTS, "b.gguf"], f"org/name/{PARTS[0]}", PARTS),
        (["a.gguf", "b.gguf"], "org/name", "org/name has 2 GGUF files, expected one to be named, org/name/FILE: a.gguf, b.gguf"),
        (None, "org/name", "org/name could not be fetched from Hugging Face: no network"),
    ],
)
def test_a_repository_is_fetched_on_demand_only(home, monkeypatch, names, asked, fetched):
    folder = home / "fetched"

    def listing(repository):
        if names is None:
            raise OSError("no network")
        return names

    def snapshot(repository, allow_patterns):
        folder.mkdir()
        for name in (name for name in names if any(fnmatch(name, pattern) for pattern in allow_patterns)):
            (folder / name).touch()
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(list_repo_files=listing, snapshot_download=snapshot))
    with pytest.raises(bn.Error, match="--download fetches it"):
        locate(asked)
    if isinstance(fetched, str):
        with pytest.raises(bn.Error, match=fetched):
            locate(asked, download=True)
    else:
        assert locate(asked, download=True) == (folder if fetched[0] == "config.json" else folder / fetched[0])
        assert sorted(file.name for file in folder.iterdir()) == fetched


@pytest.mark.parametrize("name", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_an_adaptor_is_refused_by_what_it_is(tmp_path, name):
    for file in ("adapter_config.json", "adapter_model.safetensors", "config.json"):
        (tmp_path / file).write_text("{}")
    with pytest.raises(UnsupportedError, match=r"an adaptor \(LoRA\) without its base model"):
        bn.load(tmp_path / name)


def test_a_file_of_a_folder_stands_for_the_folder():
    assert locate(FOLDER / "config.json") == FOLDER
