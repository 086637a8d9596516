"""The trainer of the demo model: its text, its tokenizer, its optimiser, and that a run says every bit of what comes out."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from models import threads

pytest.importorskip("tokenizers")
import train
from trainer import adamw, bpe, checkpoint, evaluate, export
from trainer.settings import DEMO, Settings
from writer import corpus
from writer.corpus import document, held_out, sequence
from writer.document import Question

from bitnet_np import load
from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.generation.nll import token_nll
from bitnet_np.testing.selftest import digest, noise
from bitnet_np.text.tokenizer import tokenizer_from
from bitnet_np.training.gradients import loss_and_gradients

TINY = Settings(
    vocabulary=320, tokenizer_documents=40, context=48, width=128, layers=1, ffn=128, heads=4, kv_heads=2, batch=3, steps=6, warmup=2
)


def documents(split, n, seed=0, first=0):
    return [document(split, seed, first + i) for i in range(n)]


# --- the text -------------------------------------------------------------------------------------------------------------------------


def test_the_text_is_always_the_same():
    """On any machine: a change of these numbers is another demo model, or another grade of it."""
    texts = [made.text for split in ("train", "held-out") for made in documents(split, 300)]
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest() == "8950d6b1c1fbf5d82ac4c22caf3436abd753c83c6c6de3190900447188c29f36"
    every = [*documents("train", 3000), *documents("held-out", 500)]
    asked = [f"{made.text}\0{question}" for made in every for question in (*made.questions, *made.combinations)]
    assert hashlib.sha256("\0".join(asked).encode()).hexdigest() == "1adf5ffab15d669df34a5edb72bc63555223d585bdfc4a7dd165f7a7b92891d5"


def test_grading():
    question = Question("sum", "How many?", "7")
    assert all(map(question.right, (" 7", "7\nQ: Who", " 7.", "7 ")))
    assert not any(map(question.right, ("", " 17", " 7 8", "\n7", " seven")))


# --- tokens ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_from(train.learned_tokenizer(TINY), "tiny")


def test_text_survives_the_tokenizer(tokenizer):
    for text in [made.text for made in documents("held-out", 50)] + ["Zoë \U0001f642\r\n\t\0 12345", " "]:
        assert tokenizer.decode(tokenizer.encode(text)[1:]) == text
    assert len(tokenizer.tokens) == TINY.vocabulary
    assert tokenizer.encode("a")[0] == tokenizer.bos == tokenizer.eos == TINY.vocabulary - 1
    assert tokenizer.tokens[tokenizer.eos] == bpe.END
    assert tokenizer.chat_text([{"role": "user", "content": " Why? "}]) == "Q: Why?\nA:"


def test_a_vocabulary_that_the_text_cannot_fill():
    with pytest.raises(OptionError, match="the vocabulary is 400, but the texts and the end of text make 25"):
        bpe.train(["a b"], 400)


def test_sequences_are_whole_documents(tokenizer):
    ids = sequence("train", 0, 3, tokenizer.encode, tokenizer.eos, 200)
    texts = [f"{document('train', 0, corpus._DOCUMENTS * 3 + i).text}" for i in range(20)]
    assert ids.shape == (200,)
    assert ids[0] == tokenizer.eos
    assert ("".join(texts)).startswith(tokenizer.decode(ids))


# --- the optimiser --------------------------------------------------------------------------------------------------------------------


def test_rates_rise_and_fall():
    settings = replace(DEMO, steps=100, warmup=10, learning_rate=1.0, last_rate=0.1, fall=0.5)
    rates = [settings.rate(step) for step in range(101)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert set(rates[10:51]) == {1.0}
    assert rates[75] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert (np.diff(rates[50:]) < 0).all()


def adam_by_definition(w, gradients, s, scale):
    """Algorithm 2 of arXiv 1711.05101 in float64; the decay times the learning rate, as PyTorch has it."""
    m = v = np.zeros_like(w)
    for step, g in enumerate(gradients):
        g, rate = g * scale[step], s.rate(step)
        m, v = s.beta1 * m + (1 - s.beta1) * g, s.beta2 * v + (1 - s.beta2) * g * g
        corrected = m / (1 - s.beta1 ** (step + 1)), v / (1 - s.beta2 ** (step + 1))
        w = w - rate * (corrected[0] / (np.sqrt(corrected[1]) + s.epsilon) + (s.weight_decay * w if w.ndim == 2 else 0))
    return w


@pytest.mark.parametrize("shape", [(7, 5), (37,)])
def test_adamw_follows_its_definition(shape):
    settings = replace(DEMO, steps=9, warmup=3, learning_rate=0.1, weight_decay=0.3)
    first = noise(1, *shape)
    gradients = [noise(2 + i, *shape) * np.float32(10.0 ** (i - 2)) for i in range(5)]
    w, m, v = {"w": first.copy()}, {"w": np.zeros_like(first)}, {"w": np.zeros_like(first)}
    norms = [adamw.update(w, {"w": g}, m, v, step, settings) for step, g in enumerate(gradients)]
    assert norms == pytest.approx([np.linalg.norm(g.astype(np.float64)) for g in gradients], rel=1e-14)
    scale = [min(1, settings.clip / norm) for norm in norms]
    assert min(scale) < 0.1 < max(scale) == 1  # some are clipped, some are not
    expected = adam_by_definition(first.astype(np.float64), [g.astype(np.float64) for g in gradients], settings, scale)
    np.testing.assert_allclose(w["w"], expected, rtol=2e-6, atol=2e-7)


# --- runs -----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train.train(TINY, folder, every=2)


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_an_interrupted_run_ends_in_the_same_bits(run, tmp_path):
    folder, whole = run
    with threads(2):
        train.train(TINY, tmp_path, stop=3, every=99)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 0}\n')  # what was done after the checkpoint was made is done again
    other = train.train(TINY, tmp_path, every=2)
    for group in ("parameters", "first", "second"):
        assert digest(*getattr(whole, group).values()) == digest(*getattr(other, group).values())
    assert (tmp_path / "model.gguf").read_bytes() == (folder / "model.gguf").read_bytes()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines(tmp_path)] == [line["loss"] for line in lines(folder)]
    assert [line["step"] for line in lines(folder) if "held_out" in line] == [2, 4, 6]


def test_a_checkpoint_is_of_one_run(run, tmp_path):
    for name, value, was in (("steps", 12, 6), ("seed", 1, 0)):
        with pytest.raises(OptionError, match=f"{name} is {was}, but this run has {value}"):
            train.train(replace(TINY, **{name: value}), run[0])
    (tmp_path / "checkpoint.npz").write_bytes(b"PK")
    with pytest.raises(FileFormatError, match="no checkpoint"):
        checkpoint.load(tmp_path / "checkpoint.npz", TINY)


def test_the_file_is_what_training_computed(run, tmp_path):
    """With an embedding that float16 holds, the loss of training is the file's."""
    folder, state = run
    keys = checkpoint.load(folder / "checkpoint.npz", TINY)[1]
    parameters = state.parameters | {"token_embd.weight": state.parameters["token_embd.weight"].astype(np.float16).astype(np.float32)}
    export.write(tmp_path / "m.gguf", TINY.config, parameters, keys)
    tokens = train.batch(TINY, tokenizer_from(keys, "m"), "held-out", 0, 1)
    loss, _ = loss_and_gradients(TINY.config, parameters, tokens)
    assert token_nll(load(tmp_path / "m.gguf"), tokens[0]).mean() == pytest.approx(loss, rel=1e-6)
    assert load(tmp_path / "m.gguf").config == TINY.config
    assert open_gguf(tmp_path / "m.gguf").metadata["tokenizer.ggml.model"] == "llama"


def test_the_command_trains(tmp_path, capsys, monkeypatch):
    """The loss falls, and the bits are told."""
    monkeypatch.setattr(train, "DEMO", replace(TINY, learning_rate=0.02))
    assert train.main(["--out", str(tmp_path), "--steps", "20", "--threads", "1"]) == 0
    out = capsys.readouterr().out
    assert "bytes after 20 steps\nsha256 of the parameters " in out
    losses = [line["loss"] for line in lines(tmp_path)]
    assert sum(losses[-3:]) / 3 < 0.95 * losses[0]


def test_evaluation_counts_every_question(run):
    model, tokenizer = train.load_model(run[0] / "model.gguf")
    model = replace(model, config=replace(model.config, context=512))
    silent = lambda done, total: None  # noqa: E731
    grades = evaluate.grade(model, tokenizer, "held-out", 0, 5, silent)
    questions = [q for made in documents("held-out", 5, first=corpus.FRESH) for q in made.questions]
    asked = [q.kind for q in questions if not q.combination or held_out(q.combination)]
    assert len(asked) < len(questions)
    assert grades.asked == {kind: asked.count(kind) for kind in asked}
    found = evaluate.perplexity(model, tokenizer, 0, 3, silent)
    texts = [made.text for made in documents("held-out", 3)]
    nats = [token_nll(model, [*tokenizer.encode(text), tokenizer.eos]).sum() for text in texts]
    assert found.bytes == sum(len(text) + 1 for text in texts)
    assert np.log(found.token) * found.tokens == pytest.approx(sum(nats)) == pytest.approx(np.log(found.byte) * found.bytes)


def test_what_cannot_be_evaluated_is_refused(run, capsys):
    for name, message in (("model.gguf", "exceed the model's context of 48"), ("none.gguf", "none.gguf")):
        assert train.main(["--evaluate", str(run[0] / name), "--documents", "2"]) == 2
        assert message in capsys.readouterr().err
