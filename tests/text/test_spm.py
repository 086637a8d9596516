"""SentencePiece's BPE from the metadata of a GGUF file, judged by SentencePiece itself."""

import io
import json
import re

import numpy as np
import pytest
from corpus import CORPUS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import changed, from_json

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.cli import main as cli
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.testing.models import random_model
from bitnet_np.text.tokenizer import tokenizer_from
from bitnet_np.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

sentencepiece = pytest.importorskip("sentencepiece")
tokenizers = pytest.importorskip("tokenizers")

from sentencepiece.sentencepiece_model_pb2 import ModelProto  # noqa: E402
from tokenizers import models, normalizers, processors  # noqa: E402

TRAINING = {"model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "character_coverage": 0.98, "split_digits": True}
TRAINING |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True}
TRAINING |= {"minloglevel": 2}
PROTO_TYPES = {1: NORMAL, 2: UNKNOWN, 3: CONTROL, 4: USER_DEFINED, 5: UNUSED, 6: BYTE}


def trained(**options):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_writer=out, **(TRAINING | options))
    return ModelProto.FromString(out.getvalue())


def with_unused(proto):
    """Every third piece that other pieces are made of may not be used."""
    for i, piece in enumerate(proto.pieces):
        if piece.type == piece.NORMAL and i % 3 == 0:
            piece.type = piece.UNUSED
    return proto


PROTOS = {
    "llama": trained(),
    "no prefix": trained(add_dummy_prefix=False),
    "across words": trained(split_by_whitespace=False, split_by_unicode_script=False, split_by_number=False, split_digits=False),
    "unused": with_unused(trained()),
}


def metadata(proto, **changes):
    """The keys of a GGUF file; None removes one."""
    keys = {
        "model": "llama",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": np.array([piece.score for piece in proto.pieces], np.float32),
        "token_type": np.array([PROTO_TYPES[piece.type] for piece in proto.pieces], np.int32),
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
        "add_bos_token": False,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def both(proto, **changes):
    ours = tokenizer_from(metadata(proto, **changes), "spm.gguf")
    return ours, sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


BOTH = {name: both(proto) for name, proto in PROTOS.items()}
BY_NAME = pytest.mark.parametrize("name", BOTH)
texts = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([*CORPUS[:4], "<s>", "</s>", "<unk>", "<0x41>", "  ", "\n", "🙂", "é", "ｆ", "\x00"]),
        st.text(" \t\n\r\u00a0\u3000", max_size=6),
        st.text(" etaoin'd", max_size=12),
    ),
    max_size=6,
).map("".join)


@BY_NAME
@given(text=texts)
@settings(deadline=None, max_examples=150)
def test_ids_are_sentencepieces(name, text):
    ours, theirs = BOTH[name]
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids) == text.replace("\u2581", " ")


@BY_NAME
@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_any_ids_say_what_sentencepiece_says_and_a_stream_says_the_same(name, data):
    ours, theirs = BOTH[name]
    ids = data.draw(st.lists(st.integers(3, len(ours.tokens) - 1)))  # without <unk>, which SentencePiece shows as a sign of its own
    stream = ours.decode_stream()
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces) + stream.finish() == ours.decode(ids)
    if name != "unused":  # SentencePiece shows unused pieces, too
        assert one_sign(ours.decode(ids)) == one_sign(theirs.decode(ids))


def one_sign(text):
    """SentencePiece has a U+FFFD for each byte that is no UTF-8, Unicode's recommendation is one for the start of a character."""
    return re.sub("\ufffd+", "\ufffd", text)


@given(
    pieces=st.lists(st.text("ab\u2581", min_size=2, max_size=6), unique=True, max_size=12),
    scores=st.lists(st.integers(-4, 0), min_size=15, max_size=15),
    unused=st.sets(st.integers(0, 14)),
    text=st.text("ab ", max_size=24),
)
@settings(deadline=None, max_examples=500)
def test_vocabularies_that_no_training_makes(pieces, scores, unused, text):
    """Pieces without parts, equal scores, parts that score less than the whole."""
    proto = ModelProto()
    proto.CopyFrom(PROTOS["llama"])
    del proto.pieces[259:]
    for i, (piece, score) in enumerate(zip(["a", "b", "\u2581", *pieces], scores, strict=False)):
        proto.pieces.add(piece=piece, score=score, type=5 if i in unused else 1)
    ours, theirs = both(proto)
    assert ours.encode(text) == theirs.encode(text)


# The same in a tokenizer.json: as transformers converts such models, scores become merges of all pairs that make a token.


def converted(proto):
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = []
    for token, piece in zip(vocab, proto.pieces, strict=True):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
        merges += [(*pair, piece.score) for pair in sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))]
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    model = models.BPE(vocab, [(left, right) for left, right, _ in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.add_special_tokens([tokenizers.AddedToken(piece.piece, normalized=False) for piece in proto.pieces[:3]])
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return json.loads(library.to_str())


METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never", "split": False}


@pytest.fixture(scope="module", params=["prefix", "no prefix"])
def json_and_library(request):
    told = converted(PROTOS["llama"])
    if request.param == "no prefix":
        told |= {"normalizer": None, "pre_tokenizer": METASPACE}
    return from_json(told), tokenizers.Tokenizer.from_str(json.dumps(told))


@given(text=texts)
@settings(deadline=None, max_examples=100)
def test_tokenizer_json_gives_the_ids_of_the_library(json_and_library, text):
    ours, library = json_and_library
    assert ours.encode(text, special=True) == library.encode(text).ids


CONVERTED = converted(PROTOS["llama"])
MERGES = CONVERTED["model"]["merges"]
AGAIN = next(i for i in range(1, len(MERGES)) if "".join(MERGES[i]) == "".join(MERGES[i - 1]))  # the second pair that makes a token


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model.merges": MERGES[1:]}, "model.merges with byte_fallback are not what scores of tokens can say"),
        ({"model.merges": [*MERGES[:AGAIN], *MERGES[AGAIN + 1 :], MERGES[AGAIN]]}, "model.merges with byte_fallback are not"),
        ({"model.ignore_merges": True}, "model.ignore_merges is True"),
        ({"normalizer": None}, "normalizer is None and pre_tokenizer None, supported with byte_fallback are"),
        ({"normalizer": {"type": "NFC"}}, r"normalizer is \{'type': 'NFC'\} and"),
        ({"normalizer": None, "pre_tokenizer": METASPACE | {"prepend_scheme": "always"}}, "'prepend_scheme': 'always'"),
        ({"added_tokens": [{"id": 1, "content": "<s>", "normalized": True}]}, "the added token '<s>' is normalized"),
        ({"post_processor": {"type": "TemplateProcessing", "single": []}}, r"post_processor makes \[\], supported is a text"),
    ],
)
def test_what_is_no_such_tokenizer_json_is_refused_by_name(changes, match):
    told = CONVERTED
    for path, value in changes.items():
        told = changed(told, path, value)
    with pytest.raises(UnsupportedError, match=r"m/tokenizer\.json: .*" + match):
        from_json(told)


def test_a_tokenizer_json_says_what_a_text_gets():
    ours = from_json(converted(PROTOS["llama"]))
    assert (ours.bos, ours.eos, ours.add_bos, ours.add_eos) == (1, 2, True, False)
    assert ours.types[:4].tolist() == [UNKNOWN, CONTROL, CONTROL, BYTE]
    step = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    ours = from_json(changed(CONVERTED, "post_processor.single", [{"Sequence": {"id": "A", "type_id": 0}}, step]))
    assert (ours.add_bos, ours.add_eos) == (False, True)
    assert ours.encode("it")[-1] == 2


# What SentencePiece leaves to others: tokens that are found in a text. The rules are llama.cpp's.


@pytest.fixture(scope="module")
def special():
    proto = ModelProto()
    proto.CopyFrom(PROTOS["llama"])
    proto.pieces.add(piece="<user>", score=0, type=4)
    proto.pieces.add(piece="\u2581\u2581\u2581", score=0, type=4)
    return tokenizer_from(metadata(proto, add_bos_token=None), "spm.gguf")


def spelled(tokenizer, ids):
    return [tokenizer.tokens[i] for i in ids]


def test_user_defined_tokens_spelled_as_ordinary_ones_are_made_like_them(special):
    ids = special.encode("it   it", add_bos=False)
    assert spelled(special, ids) == ["\u2581it", "\u2581\u2581\u2581", "it"]
    assert special.decode(ids) == "it   it"


def mixed(draw_texts):
    return st.lists(draw_texts | st.sampled_from(["<s>", "</s>", "<user>", "   "]), max_size=8).map("".join)


@given(text=mixed(texts).filter(lambda text: "\u2581" not in text and "<unk>" not in text))
@settings(deadline=None, max_examples=75)
def test_round_trips_with_tokens_that_are_found(special, text):
    ids = special.encode(text, special=True)
    assert ids[0] == 1
    assert special.decode(ids[1:], skip_special=False) == text
    for cut in range(1, len(ids)):  # what comes after a prompt is what the whole says after it
        stream = special.decode_stream(skip_special=False)
        before = "".join(map(stream.feed, ids[1:cut]))
        waiting = stream.finish()
        if not waiting:
            assert before + special.decode(ids[cut:], after=ids[:cut], skip_special=False) == text


def test_what_is_generated_goes_on_where_the_prompt_ends(tmp_path, capsys):
    """Its first space is the text's."""
    path, spaces = tmp_path / "t.gguf", 0
    for seed in range(8):
        model = random_model(
            seed, family="llama", weights="float32", vocab=420, width=16, ffn=16, heads=2, kv_heads=1, head_dim=8, n_layers=1
        )
        write_model(path, model, metadata(PROTOS["llama"]))
        assert cli.main(["generate", str(path), "--prompt", "it", "-n", "3", "--json"]) == 0
        one = json.loads(capsys.readouterr().out)
        first = PROTOS["llama"].pieces[one["tokens"][0]]
        spaces += first.type == first.NORMAL and first.piece[0] == "\u2581"
        assert first.type != first.NORMAL or one["text"].startswith(first.piece.replace("\u2581", " "))
    assert spaces


def test_the_files_ids_are_added_as_it_says_and_the_caller_before_the_file():
    ours = tokenizer_from(metadata(PROTOS["llama"], add_eos_token=True, bos_token_id=2, eos_token_id=1), "spm.gguf")
    assert spelled(ours, ours.encode("it")) == ["\u2581it", "<s>"]
    assert spelled(ours, ours.encode("it", add_eos=False, add_bos=True)) == ["</s>", "\u2581it"]


def scores(**changes):
    found = np.array([piece.score for piece in PROTOS["llama"].pieces], np.float32)
    for i, score in changes.items():
        found[int(i[1:])] = score
    return found


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (FileFormatError, r"scores has the shape \(0,\), but there are 420 tokens", {"scores": None}),
        (FileFormatError, r"scores is NaN for token 7, expected a number", {"scores": scores(_7=np.nan)}),
        (FileFormatError, r"scores are of type <U1, expected numbers", {"scores": ["a"] * 420}),
        (FileFormatError, r"add_space_prefix is 1, expected bool", {"add_space_prefix": 1}),
        (UnsupportedError, r"remove_extra_whitespaces is True, which is not supported", {"remove_extra_whitespaces": True}),
        (UnsupportedError, r"precompiled_charsmap is .*, which is not supported", {"precompiled_charsmap": np.zeros(3, np.int8)}),
        (FileFormatError, r"add_eos_token is 2, expected bool", {"add_eos_token": 2}),
    ],
)
def test_a_bad_file_is_refused_by_key_and_value(error, match, changes):
    with pytest.raises(error, match=r"spm\.gguf: tokenizer\.ggml\." + match):
        tokenizer_from(metadata(PROTOS["llama"], **changes), "spm.gguf")


def test_a_character_that_nothing_spells_is_refused():
    ours = tokenizer_from(metadata(trained(byte_fallback=False, vocab_size=160)), "spm.gguf")
    with pytest.raises(UnsupportedError, match=r"spm\.gguf: no token spells '語', nor its bytes"):
        ours.encode("the 語")


def test_a_long_piece_that_may_not_be_used_is_taken_apart_without_recursion():
    tokens = ["<unk>", "<s>", "</s>", "a", *("a" * n for n in range(2, 3000))]
    keys = {"tokens": tokens, "scores": [0.0] * len(tokens), "token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL] + [UNUSED] * 2998}
    ours = tokenizer_from(metadata(PROTOS["llama"], add_space_prefix=False, **keys), "spm.gguf")
    assert ours.encode("a" * 2999) == [3] * 2999
