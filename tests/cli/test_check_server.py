"""`bitnet-np check --endpoint`: a running server from its address to the exit code."""

from dataclasses import replace

import numpy as np
import pytest
from command_line import TINY, TOKENS, needs_text, save_array, with_commas
from completions import engine
from fake_server import llama_server, serving, sglang, vllm
from hf_models import FAMILIES, write_hf

from bitnet_np import EXACT
from bitnet_np.cli.check_server import tokenizer_difference
from bitnet_np.files.load import load
from bitnet_np.judge.law.roundings import to_bfloat16
from bitnet_np.judge.variant import Variant
from bitnet_np.servers.words import quantised_name, stated_types

IDS = with_commas(TOKENS)


@pytest.fixture(scope="module")
def honest(model):
    return engine(Variant("", model, EXACT))


@pytest.fixture
def check(run):
    """Checks the server with these answers, which must end with `code`."""

    def judged(answers, *options, code=0):
        with serving(answers) as (url, _):
            return run("check", TINY, "--endpoint", url, "--predict", 4, *options, code=code)

    return judged


def test_a_llama_server_is_judged_in_the_dialect_of_llama_cpp(check, honest):
    out = check(llama_server(honest), "--tokens", IDS)
    assert "llama-server at http://127.0.0.1:" in out
    assert f"against {TINY}, as llama.cpp\n" in out
    assert out.startswith("PASS (FLIPS): ")
    assert "note: 17 token ids were sent as the prompt, and no BOS was added to them\n" in out
    assert "note: 80 log-probabilities of positions 16 to 19 are judged" in out
    out = check(llama_server(honest), "--tokens", IDS, "--as", "exact")
    assert out.startswith("PASS (SAME_BITS): same bits\n")
    assert "as exact\n" in out


def test_an_sglang_is_judged_at_every_position(check, honest, model):
    result = check(sglang(honest), "--tokens", IDS, "--json")
    assert (result["verdict"], result["logits"]["compared"]) == ("SAME_BITS", list(range(20)))
    assert "SGLang at" in check(sglang(honest), "--tokens", IDS)
    wrong = engine(Variant("", model, EXACT).with_config(activation="silu"))
    assert "SiLU" in check(sglang(wrong), "--tokens", IDS, code=1)


def test_a_server_with_nan_ends_with_2(check, honest):
    def broken(answer):
        answer["choices"][0]["logprobs"]["top_logprobs"][1] = dict.fromkeys([f"token_id:{i}" for i in range(20)], float("nan"))
        return answer

    out = check(vllm(honest, change=broken), "--tokens", IDS, code=2)
    assert "FAIL (INVALID): cannot be compared\nat position 17 their log-probability of token 0 is nan\n" in out
    assert check(vllm(honest, change=broken), "--tokens", IDS, "--json", code=2)["verdict"] == "INVALID"


@needs_text
def test_a_text_is_tokenised_by_both_sides(check, honest, tokenizer):
    text = "Once upon <|begin_of_text|>"
    ids = tokenizer.encode(text)
    bos = f"with BOS {tokenizer.bos} in front" if tokenizer.add_bos else "without BOS"
    out = check(llama_server(honest, tokenize=tokenizer.encode), "--text", text)
    assert f"note: the text is {len(ids)} token ids, {bos} as the model's file says; they were sent as the prompt\n" in out
    assert "tokenizer" not in out
    out = check(vllm(honest), "--text", text)
    assert "note: the server has no /tokenize: its tokenizer is not judged\n" in out


@needs_text
def test_another_tokenizer_is_wrong_also_where_the_numbers_are_right(check, honest, tokenizer):
    def other(text):
        return [*tokenizer.encode(text)[:-1], 7, 8]

    out = check(llama_server(honest, tokenize=other), "--text", "Once upon a time", code=1)
    assert "FAIL (WRONG): differs by more than rounding explains\nthe server's tokenizer gives " in out
    assert "; for our ids: worst NMSE " in out


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([1, 5], [1, 5], None),
        ([5, 6], [1, 5, 6], "the server's tokenizer puts BOS 1 in front of the text, and the model's file says not to"),
        ([1, 5, 6], [5, 6], "the server's tokenizer puts no BOS in front of the text, and the model's file says to: 1"),
        ([5, 6, 7], [5, 8, 7], "the server's tokenizer gives 3 token ids, ours 3: at index 1 it has token 8, ours token 6"),
        ([5, 6], [5, 6, 7], "the server's tokenizer gives 3 token ids, ours 2: at index 2 it has token 7, ours no token"),
        ([5], [], "the server's tokenizer gives 0 token ids, ours 1: at index 0 it has no token, ours token 5"),
    ],
)
def test_how_tokenizers_differ(ours, theirs, said):
    assert tokenizer_difference(ours, theirs, 1) == said


def test_options_that_do_not_go_together(refused, tmp_path):
    url, dump = "http://127.0.0.1:9", save_array(tmp_path / "x.npy", np.zeros((17, 512), np.float32))
    for options, said in (
        (["--theirs", dump], "--endpoint and --theirs exclude each other"),
        (["--dump-format", "logits"], "--endpoint and --dump-format exclude each other"),
        (["--last"], "--endpoint and --last exclude each other"),
        (["--plot", tmp_path / "x.png"], "--endpoint and --plot exclude each other"),
        (["--predict", "0"], "--predict is 0, expected 1 to 4096"),
        (["--top-logprobs", "4"], "--top-logprobs is 4, expected 5 to 4096"),
        (["--timeout", "0"], "the timeout is 0 s"),
        (["--predict", "4096"], "17 tokens and 4096 to predict, but the model's context has"),
    ):
        assert said in refused("check", TINY, "--tokens", IDS, "--endpoint", url, *options)
    assert "--endpoint takes one sequence of tokens, not 2" in refused(
        "check", TINY, "--endpoint", url, "--tokens-file", save_array(tmp_path / "b.npy", np.stack([TOKENS, TOKENS]))
    )
    assert "check lacks token ids (--tokens" in refused("check", TINY, "--endpoint", url)
    assert "the endpoint is 'localhost', expected an address such as" in refused("check", TINY, "--tokens", IDS, "--endpoint", "localhost")


def test_a_server_that_fails_ends_with_2(refused, honest):
    answers = llama_server(honest) | {"/completion": (500, {"error": {"message": "out of memory"}}, {})}
    with serving(answers) as (url, _):
        assert "HTTP status 500: 'out of memory'" in refused("check", TINY, "--tokens", IDS, "--endpoint", url)


# --- what the server and the folder say of themselves ------------------------------------------------------------------------------------


def in_bfloat16(model):
    """A server's engine in bfloat16, whatever type the weights have: all of them, and all tensors, are rounded."""
    variant = Variant("", model, EXACT, edit=lambda name, n, x: to_bfloat16(x).astype(x.dtype) if x.dtype == np.float32 else x)
    return engine(variant)


@pytest.mark.parametrize(
    ("dtype", "names", "says"),
    [
        ("bfloat16", {}, "in bfloat16, the type that the model's file states"),
        ("float32", {"owned_by": "vllm"}, "in bfloat16, as the engine says of itself"),
        ("float32", {"root": "tiny-BF16"}, "in bfloat16, as the engine says of itself"),
    ],
)
def test_the_type_that_a_server_computes_in_is_read_in_its_words(run, tmp_path, dtype, names, says):
    folder = write_hf(tmp_path / "model", FAMILIES["qwen2_linear"] | {"dtype": dtype}, floats="F32")
    model = load(folder)
    models = {"/v1/models": {"data": [{"id": "tiny", **names}]}}
    with serving(vllm(in_bfloat16(model)) | models) as (url, _):
        out = run("check", folder, "--endpoint", url, "--tokens", "1,2,3,4,5,6,7,8,9")
    assert out.startswith("PASS (NARROW): ")
    assert says in out
    wrong = replace(model, layers=tuple(replace(layer, ffn_norm=np.ones_like(layer.ffn_norm)) for layer in model.layers))
    models["/v1/models"]["data"][0]["id"] = "tiny-AWQ-int4"
    with serving(vllm(in_bfloat16(wrong)) | models) as (url, _):
        out = run("check", folder, "--endpoint", url, "--tokens", "1,2,3,4,5,6,7,8,9", code=1)
    assert "the norm's weight is missing" in out
    assert "note: the server's model is called 'tiny-AWQ-int4': are its weights quantised" in out


@pytest.mark.parametrize(
    ("names", "types", "is_quantised"),
    [
        (("org/Model-7B", "vllm"), ("bfloat16", "float16"), False),
        (("org/Model-7B-fp16", "vllm"), ("float16", "bfloat16"), False),
        (("model.BF16.gguf",), ("bfloat16",), False),
        (("Model-8B-FP8-dynamic", "x"), (), True),
        (("model-q4_k_m",), (), True),
        (("half-life", "calf16"), ("float16",), False),
        (("4-bit/model",), (), True),
        (("gpt-3", "organization-owner"), (), False),
    ],
)
def test_the_words_of_names(names, types, is_quantised):
    assert (stated_types(names), quantised_name(names) is not None) == (types, is_quantised)
