"""`bitnet-np generate --prompts-file`: the same line for each sequence, whatever the batch, and bad lines named by their number."""

import json
import random

import pytest
from command_line import TINY, needs_text

from bitnet_np.base.errors import NonFiniteError
from bitnet_np.engine import forward_pass
from bitnet_np.generation.batch import Request
from bitnet_np.generation.generate import generate
from bitnet_np.generation.sampling import Sampling


@pytest.fixture
def generate_many(printed, tmp_path):
    """Runs `generate` on these lines of a prompts file, which must end with `code`. Returns standard output and error."""

    def run_command(lines, *arguments, code=0):
        file = tmp_path / "prompts.jsonl"
        text = lines if isinstance(lines, bytes) else "".join(json.dumps(line) + "\n" for line in lines).encode()
        file.write_bytes(text)
        out, err = printed("generate", TINY, "--prompts-file", file, *arguments, code=code)
        return out, err.replace(str(file), "FILE")

    return run_command


def random_lines(n, vocabulary):
    """Lines of n prompts of 1 to 12 tokens."""
    rng = random.Random(n)
    return [{"id": f"q{i}", "tokens": [rng.randrange(vocabulary) for _ in range(rng.randint(1, 12))]} for i in range(n)]


def test_64_prompts_give_the_same_lines_at_any_batch(generate_many, model):
    lines = random_lines(64, model.config.vocab)
    options = ["-n", 5, "--temperature", 1, "--seed", 3, "--json"]
    outputs = {generate_many(lines, "--batch", batch, *options)[0] for batch in (1, 4, 16, 100)}
    (out,) = outputs
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["id"] for result in results] == [line["id"] for line in lines]
    for result, line in zip(results, lines, strict=True):
        assert result.keys() == {"id", "tokens"}
        numbers = Request(line["id"], line["tokens"], 5, seed=3).numbers()
        assert result["tokens"] == generate(model, line["tokens"], 5, sampling=Sampling(1.0), numbers=numbers)[len(line["tokens"]) :]
    by_id = {line["id"]: line for line in lines}
    shuffled = [by_id[name] for name in random.Random(0).sample(sorted(by_id), 64)]
    out, _ = generate_many(shuffled, "--batch", 7, *options)
    assert sorted(out.splitlines()) == sorted(map(json.dumps, results))
    assert [json.loads(line)["id"] for line in out.splitlines()] == [line["id"] for line in shuffled]


@needs_text
def test_text_in_and_out(generate_many, tokenizer):
    lines = [{"id": 1, "prompt": "Hello"}, {"id": 2, "tokens": [5, 6]}]
    out, err = generate_many(lines, "-n", 4, "--json")
    for line in map(json.loads, out.splitlines()):
        assert line["text"] == tokenizer.decode(line["tokens"])
    assert "2 sequences, 4 at a time" in err
    assert "tokens/s" in err
    plain, _ = generate_many(lines, "-n", 4)
    assert [line.split("\t")[0] for line in plain.splitlines()] == ["1", "2"]


@needs_text
def test_a_prompt_is_what_generate_makes_of_it(generate_many, run):
    for options in ([], ["--chat"]):
        out, _ = generate_many([{"id": "x", "prompt": "Hi"}], "-n", 6, "--json", *options)
        single = run("generate", TINY, "--prompt", "Hi", "-n", 6, "--json", *options)
        assert json.loads(out) == {"id": "x", "tokens": single["tokens"], "text": single["text"]}


def test_plain_output_is_a_line_for_each(generate_many, model):
    out, _ = generate_many([{"id": "a\n\x1b[2J", "tokens": [1]}, {"id": 7, "tokens": [2]}], "-n", 2)
    expected = [generate(model, [token], 2)[1:] for token in (1, 2)]
    assert out == f"a\\n\\x1b[2J\t{expected[0][0]},{expected[0][1]}\n7\t{expected[1][0]},{expected[1][1]}\n"


def test_blank_lines_are_passed_over_and_counted(generate_many):
    out, _ = generate_many(b'\n{"id": 1, "tokens": [1]}\r\n  \n', "-n", 1, "--json")
    assert json.loads(out)["id"] == 1
    _, err = generate_many(b'\n{"id": 1, "tokens": [1]}\n\n{"id": 2}', code=2)
    assert "FILE, line 4: ['id'], expected" in err


def test_a_sequence_that_fails_says_why_and_the_others_go_on(generate_many, monkeypatch):
    run_cached = forward_pass.run_cached

    def failing(runtime, tokens, *rest, **options):
        if (tokens.ids == 9).any():
            raise NonFiniteError("the model leaves float32's range")
        return run_cached(runtime, tokens, *rest, **options)

    monkeypatch.setattr(forward_pass, "run_cached", failing)
    out, _ = generate_many([{"id": "good", "tokens": [1]}, {"id": "bad", "tokens": [9]}], "-n", 1, "--json", code=2)
    good, bad = map(json.loads, out.splitlines())
    assert len(good["tokens"]) == 1
    assert bad == {"id": "bad", "tokens": [], "error": "the model leaves float32's range"}
    out, _ = generate_many([{"id": "bad", "tokens": [9]}], "-n", 1, code=2)
    assert out == "bad\t\tthe model leaves float32's range\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"id": 1, "tokens": [' + b"9" * 5000 + b"]}", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "[], expected an object with 'id', and 'prompt' or 'tokens'"),
        (b'{"id": 1}', "['id'], expected"),
        (b'{"tokens": [1]}', "['tokens'], expected"),
        (b'{"id": 1, "prompt": "a", "tokens": [1]}', "['id', 'prompt', 'tokens'], expected"),
        (b'{"id": 1, "tokens": [1], "seed": 2}', "['id', 'seed', 'tokens'], expected"),
        (b'{"id": true, "tokens": [1]}', "id is True"),
        (b'{"id": "first", "tokens": [1]}', "id 'first' is also that of line 1"),
        (b'{"id": 1, "prompt": ["a"]}', "prompt is ['a'], expected a string"),
        (b'{"id": 1, "tokens": "1"}', "tokens is '1', expected a list of integers"),
        (b'{"id": 1, "tokens": [1.0]}', "tokens is [1.0], expected a list of integers"),
        (b'{"id": 1, "tokens": [' + b"1," * 5000 + b"1]}", "exceed the model's context"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(generate_many, line, message):
    out, err = generate_many(b'{"id": "first", "tokens": [1]}\n' + line + b"\n", code=2)
    assert out == ""
    assert err.startswith("bitnet-np: FILE, line 2: ")
    assert message in err
    assert len(err) < 300


def test_wrong_options(generate_many, refused, tmp_path):
    line = [{"id": 1, "tokens": [1]}]
    assert "--batch is 0, expected at least 1" in generate_many(line, "--batch", 0, code=2)[1]
    assert "--uniforms is for one prompt" in generate_many(line, "--uniforms", "0.5", code=2)[1]
    assert "temperature is -1" in generate_many(line, "--temperature", -1, code=2)[1]
    assert "FILE: Empty batch provided" in generate_many([], code=2)[1]
    assert "none" in refused("generate", "--prompts-file", tmp_path / "none")
    assert "--batch needs --prompts-file" in refused("generate", "--tokens", "1", "--batch", "2")


@needs_text
def test_chat_needs_prompts(generate_many):
    assert "FILE, line 1: --chat needs a prompt, not tokens" in generate_many([{"id": 1, "tokens": [1]}], "--chat", code=2)[1]
