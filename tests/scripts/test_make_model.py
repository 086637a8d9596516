"""The maker of random models: the same bytes every time, in the released file's form, and nothing half-written."""

import hashlib
from math import prod
from pathlib import Path

import pytest
from benchmarks.released import SHAPES, released, tensor_table, vocabulary, write_released
from make_model import main

import bitnet_np
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.text.byte_level import BYTE_CHARACTERS

PACKAGED = Path(bitnet_np.__file__).parent / "data" / "tiny.gguf"  # a file of the released form, not made by this script
SMALL = ["--vocab", "300", "--context", "64", "--width", "128", "--layers", "2", "--ffn", "256", "--heads", "4", "--kv-heads", "2"]
SMALL += ["--head-dim", "32", "--eps", "1e-6", "--rope-base", "10000"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    assert main(["--shape", "tiny", "--seed", "7", str(path)]) == 0
    return open_gguf(path)


def make(path, *options):
    assert main([*SMALL, *options, str(path)]) == 0
    return path.read_bytes()


def test_the_seed_says_every_byte(tmp_path):
    first = make(tmp_path / "a.gguf", "--seed", "3")
    assert make(tmp_path / "b.gguf", "--seed", "3") == first
    assert make(tmp_path / "b.gguf", "--seed", "4") != first
    # On any machine, with any NumPy: a change of this number is a change of every model that a seed names.
    assert hashlib.sha256(first).hexdigest() == "6c8b0a0972db22eaa9bd870b0ed9b45ebec30920799915b4edebdece365f5d03"


def test_the_form_is_that_of_a_released_file(tiny):
    released = open_gguf(PACKAGED)
    kinds = [{key: type(value) for key, value in file.metadata.items()} for file in (tiny, released)]
    assert list(kinds[0].items()) == list(kinds[1].items())
    tables = [[(t.name, t.type, t.shape) for t in file.tensors.values()] for file in (tiny, released)]
    assert tables[0] == tables[1]
    names = [key for key in released.metadata if not key.startswith("tokenizer.") and key != "general.name"]
    assert len(names) == 13
    assert [tiny.metadata[name] for name in names] == [released.metadata[name] for name in names]


def test_wide_heads_and_another_gate_have_their_keys(tmp_path):
    make(tmp_path / "a.gguf", "--head-dim", "64", "--activation", "silu")
    metadata = open_gguf(tmp_path / "a.gguf").metadata
    assert metadata["general.architecture"] == "bitnet"
    assert [metadata[f"bitnet.{key}"] for key in ("rope.dimension_count", "attention.key_length", "attention.value_length")] == [64] * 3
    assert open_gguf(tmp_path / "a.gguf").tensors["blk.1.attn_sub_norm.weight"].shape == (256,)


def test_the_2b_shape_is_the_released_one():
    table = tensor_table(released(**SHAPES["2b"]))
    assert len(table) == 332
    kinds = [kind.name for _, kind, _ in table]
    assert [kinds.count(name) for name in ("F16", "I2_S", "F32")] == [1, 30 * 7, 30 * 4 + 1]
    data = sum(kind.nbytes(prod(shape)) for _, kind, shape in table)
    assert 0 < 1_187_801_280 - data < 10_000_000  # the released file less its header of tokens and merges


def test_the_vocabulary_of_the_2b_shape_has_the_size_of_llama_3s():
    tokens, merges, special = vocabulary(128256)
    assert (len(tokens), len(set(tokens)), len(merges), special) == (128256, 128256, 280147, 256)
    assert tokens[:4] == ["!", '"', "#", "$"]
    assert set(tokens[:256]) == set(BYTE_CHARACTERS)
    named = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
    assert {i: tokens[128000 + i] for i in named} == named
    assert tokens[-1] == "<|reserved_special_token_250|>"


@pytest.mark.parametrize("size", [512, 20000, 128256])
def test_merges_lead_to_every_token(size):
    tokenizers = pytest.importorskip("tokenizers")
    tokens, merges, special = vocabulary(size)
    ids = {token: i for i, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(ids, [tuple(merge.split(" ")) for merge in merges])
    for token in tokens[: size - special][:: 1 + size // 5000]:
        assert [piece.id for piece in bpe.tokenize(token)] == [ids[token]]


@pytest.mark.parametrize(("size", "merges"), [(3, 0), (258, 0), (259, 1), (262, 4), (300, 33)])
def test_small_vocabularies_are_the_same_idea_scaled_down(size, merges, tmp_path):
    tokens, made, special = vocabulary(size)
    assert (len(tokens), len(set(tokens)), len(made)) == (size, size, merges)
    assert tokens[-special:][:2] == ["<|begin_of_text|>", "<|end_of_text|>"]
    write_released(tmp_path / "a.gguf", released(vocab=size), 0)
    metadata = open_gguf(tmp_path / "a.gguf").metadata
    assert list(metadata["tokenizer.ggml.tokens"]) == tokens
    assert ("tokenizer.ggml.merges" in metadata) == bool(merges)
    assert metadata["tokenizer.ggml.token_type"].tolist() == [1] * (size - special) + [3] * special
    assert metadata["tokenizer.ggml.eos_token_id"] == metadata["tokenizer.ggml.bos_token_id"] + 1 == size - special + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--width", "200"], "width is 200, but rows of I2_S are whole blocks: it must be a multiple of 128"),
        (["--ffn", "100"], "ffn is 100, but"),
        (["--head-dim", "48"], "q_width is 192, but"),
        (["--heads", "8", "--kv-heads", "3"], "8 query heads cannot share 3 key-value heads evenly"),
        (["--vocab", "2"], "vocab is 2, but"),
        (["--eps", "nan"], "eps is nan, expected"),
        (["--seed", "-1"], "seed is -1, but"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_numbers(options, message, tmp_path, capsys):
    assert main([*SMALL, *options, str(tmp_path / "a.gguf")]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_it_prints_the_path_the_size_and_the_digest(tmp_path, capsys):
    path = tmp_path / "a.gguf"
    raw = make(path, "--sha256")
    assert capsys.readouterr() == (f"{path} {len(raw)} bytes\nsha256 {hashlib.sha256(raw).hexdigest()}\n", "")
