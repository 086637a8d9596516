"""`bitnet-np generate`: the library's tokens, printed as they come, and chosen by seeds or by numbers."""

import io
import re
import sys
from itertools import islice

from command_line import HOT, TINY, needs_text, with_commas, write_file

from bitnet_np import BITNET_CPP, Sampling
from bitnet_np.cli import generate as generate_command
from bitnet_np.cli.main import main
from bitnet_np.generation.generate import generate
from bitnet_np.generation.sampling import uniforms
from bitnet_np.text.byte_level import BYTE_CHARACTERS


def test_each_token_is_printed_as_it_comes(monkeypatch):
    screen, seen = io.BytesIO(), []

    def slow(*args, **options):
        for token in (5, 60, 7):
            seen.append(screen.getvalue())
            yield token

    monkeypatch.setattr(generate_command, "stream", slow)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen))
    assert main(["generate", TINY, "--tokens", "1"]) == 0
    assert seen == [b"", b"5", b"5,60"]
    assert screen.getvalue() == b"5,60,7\n"


def test_tokens_are_the_librarys_and_speeds_are_kept_apart(printed, run, model):
    new = generate(model, [1, 2, 3], 6)[3:]
    out, err = printed("generate", TINY, "--tokens", "1,2,3", "-n", "6")
    assert out == with_commas(new) + "\n"
    assert re.fullmatch(r"prefill [\d.]+ tokens/s \(3 tokens\), decode [\d.]+ tokens/s \(6 tokens\)\n", err)
    result = run("generate", TINY, "--tokens", "1,2,3", "-n", "6", "--json")
    assert result.pop("prefill_tokens_per_second") > 0
    assert result.pop("decode_tokens_per_second") > 0
    assert result == {"prompt": [1, 2, 3], "tokens": new}
    assert run("generate", TINY, "--tokens", "1", "-n", "1", "--json")["decode_tokens_per_second"] is None
    assert run("generate", TINY, "--tokens", "1", "-n", "0", "--json")["tokens"] == []
    assert run("generate", TINY, "--tokens", "1", "-n", "0") == "\n"


@needs_text
def test_text_may_end_inside_a_character(run, tokenizer, monkeypatch):
    first, second = (list(tokenizer.tokens).index(BYTE_CHARACTERS[byte]) for byte in "é".encode())
    for new, expected in (([first, second], "é"), ([first], "\ufffd")):
        monkeypatch.setattr(generate_command, "stream", lambda *args, new=new, **options: iter(new))
        assert run("generate", TINY, "--prompt", "a") == expected + "\n"
        assert run("generate", TINY, "--prompt", "a", "--json")["text"] == expected


def test_the_demo_model_speaks_without_the_extra(monkeypatch, run):
    for name in ("tokenizers", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("generate", "--prompt", "Once upon a time", "-n", "8").startswith(", a young girl named Nora")


def test_seeds_and_numbers_say_every_token(run, model):
    def of(*options):
        return run("generate", TINY, "--tokens", "7,8", "-n", "12", *HOT, *options)

    assert of("--seed", "5") == of("--seed", "5") == of("--uniforms", with_commas(islice(uniforms(5), 12)))
    assert of("--seed", "5") != of("--seed", "6")
    assert of() == of("--seed", "0") == with_commas(generate(model, [7, 8], 12, sampling=Sampling(3.0))[2:]) + "\n"
    options = ["--top-k", "5", "--top-p", "0.9", "--seed", "2"]
    assert of(*options) == with_commas(generate(model, [7, 8], 12, sampling=Sampling(3.0, 5, 0.9), seed=2)[2:]) + "\n"
    assert of("--as", "bitnet.cpp") == with_commas(generate(model, [7, 8], 12, sampling=Sampling(3.0), dialect=BITNET_CPP)[2:]) + "\n"
    assert of("--threads", "2") == of("--threads", "1") == of("--device", "numpy") == of()


def test_generation_stops(run):
    new = run("generate", TINY, "--tokens", "7", "-n", "12", *HOT, "--json")["tokens"]
    first = new.index(new[4])
    assert run("generate", TINY, "--tokens", "7", "-n", "12", *HOT, "--json", "--stop", f"{new[4]}")["tokens"] == new[:first]
    assert run("generate", TINY, "--tokens", "7", "-n", "12", *HOT, "--json", "--stop", "")["tokens"] == new


@needs_text
def test_text_stops_at_the_files_end_tokens(run, model, tokenizer):
    prompt = tokenizer.encode("ab")
    seed = next(
        s for s in range(999) if set(tokenizer.stops) & set(generate(model, prompt, 40, sampling=Sampling(9.0), seed=s)[len(prompt) :])
    )
    options = ["--prompt", "ab", "-n", "40", "--temperature", "9", "--seed", seed, "--json"]
    whole = run("generate", TINY, *options, "--stop", "")["tokens"]
    first = min(whole.index(stop) for stop in tokenizer.stops if stop in whole)
    assert run("generate", TINY, *options)["tokens"] == whole[:first]


def test_without_n_as_many_tokens_as_fit(run):
    prompt = ",".join(["7"] * 500)
    assert len(run("generate", TINY, "--tokens", prompt, "--json")["tokens"]) == 12
    assert len(run("generate", TINY, "--tokens", "7", "--json")["tokens"]) == 64


def test_generate_takes_one_prompt(refused, tmp_path):
    path = write_file(tmp_path / "two.json", "[[1], [2]]")
    assert "token ids have shape [2, 1], expected [T]: one prompt" in refused("generate", TINY, "--tokens-file", path)
