"""Answers of servers that were saved as they came: judged as `check --endpoint` judges them."""

import json
from pathlib import Path

import numpy as np
import pytest
from dumps import MODEL, TOKENS

import bitnet_np as bn
from bitnet_np.base.errors import FileFormatError, OptionError
from bitnet_np.traces.formats import detect, server_answer

DATA = Path(__file__).parents[2] / "data" / "servers"
PATHS = {"vllm": "/v1/completions", "sglang": "/generate"}


def saved(path, value):
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("server", PATHS)
def test_recorded_answers_are_read(tmp_path, server):
    recorded = json.loads((DATA / f"{server}.json").read_text("utf-8"))
    path = saved(tmp_path / "a.json", recorded["answers"][PATHS[server]]["body"])
    assert detect(path) == "server-answer"
    made = server_answer.read(path, np.array(recorded["ids"]))
    assert made.tokens.tolist() == recorded["tokens"]
    assert [
        [row.position, {str(i): x for i, x in zip(row.ids.tolist(), row.logprobs.tolist(), strict=True)}] for row in made.top
    ] == recorded["top"]
    assert made.dialect is None


def answer(sign=1):
    """What a llama-server says that continues the prompt by two tokens."""
    ids, entries = TOKENS.tolist(), []
    for _ in range(2):
        logits = bn.compute_logits(MODEL, [ids])[0, -1].astype(np.float64)
        logprobs = sign * (logits - np.log(np.exp(logits).sum()))
        top = np.argsort(-logprobs)[:8].tolist()
        entries.append({"id": top[0], "top_logprobs": [{"id": i, "logprob": logprobs[i]} for i in top]})
        ids.append(top[0])
    return {"tokens_evaluated": len(TOKENS), "tokens": ids[len(TOKENS) :], "completion_probabilities": entries}


def test_an_answer_of_llama_server_is_judged(tmp_path):
    path = saved(tmp_path / "a.json", answer())
    assert bn.check(MODEL, TOKENS, path).verdict <= bn.Verdict.FLIPS
    assert server_answer.read(path, TOKENS).dialect == "llama.cpp"
    assert bn.check(MODEL, TOKENS, saved(path, answer(-1))).verdict >= bn.Verdict.WRONG


def test_what_does_not_go_with_the_prompt_is_refused(tmp_path):
    path = saved(tmp_path / "a.json", answer())
    with pytest.raises(FileFormatError, match=rf"a\.json: /completion: tokens_evaluated is {len(TOKENS)}, but 2 token ids were sent"):
        bn.check(MODEL, TOKENS[:2], path)
    with pytest.raises(OptionError, match="format server-answer holds one sequence"):
        bn.check(MODEL, [TOKENS, TOKENS], path)
    with pytest.raises(FileFormatError, match="no answer of a server"):
        server_answer.read(saved(path, {"text": "meta_info"}), TOKENS)
