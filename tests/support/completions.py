"""Completions as an honest or a faulty server would make them, and the answers in which servers of two APIs send them."""

import copy

import numpy as np

from bitnet_np.judge.dump import log_softmax
from bitnet_np.judge.variant import variant_logits
from bitnet_np.servers.completions import Completions, top_logprobs


def completions_by(logits_of, ids, predict=8, k=20, *, first=None, choose=np.argmax):
    """A completion of `ids` by an engine. logits_of: ids [T] -> [T, V]; first: position of the first log-probabilities; choose: a token."""
    ids, prompt = list(map(int, ids)), len(ids)
    for _ in range(predict):
        ids.append(int(choose(logits_of(np.array(ids))[-1])))
    rows = log_softmax(logits_of(np.array(ids[:-1])))
    top = [listed(p, rows[p], k) for p in range(prompt - 1 if first is None else first, len(ids) - 1)]
    return Completions(np.array(ids), prompt, k, tuple(top))


def listed(position, row, k):
    """The k largest of log-probabilities [V]."""
    best = np.argsort(-row, kind="stable")[:k]
    return top_logprobs(position, {int(i): float(row[i]) for i in best})


def engine(variant):
    """The function that computes a variant's logits."""
    return lambda ids: variant_logits(variant, ids[None])[0]


def llama_answer(completions):
    """llama-server's answer of `/completion`."""
    generated = completions.tokens[completions.prompt :].tolist()
    entries = []
    for row in completions.top:
        if row.position >= completions.prompt - 1:
            chosen = int(completions.tokens[row.position + 1])
            top = [{"id": int(i), "token": "?", "bytes": [63], "logprob": x} for i, x in zip(row.ids, row.logprobs.tolist(), strict=True)]
            entries.append({"id": chosen, "token": "?", "bytes": [63], "logprob": top[0]["logprob"], "top_logprobs": top})
    return {
        "content": "?",
        "tokens": generated,
        "tokens_predicted": len(generated),
        "tokens_evaluated": completions.prompt,
        "truncated": False,
        "completion_probabilities": entries,
    }


def vllm_answer(completions):
    """vLLM's answer of `/v1/completions` with prompt_logprobs and return_tokens_as_token_ids."""
    prompt, later = [None] * completions.prompt, []
    for row in completions.top:
        pairs = list(zip(row.ids.tolist(), row.logprobs.tolist(), strict=True))
        if row.position + 1 < completions.prompt:
            prompt[row.position + 1] = {str(i): {"logprob": x, "rank": n, "decoded_token": "?"} for n, (i, x) in enumerate(pairs, 1)}
        else:
            later.append({f"token_id:{i}": x for i, x in pairs})
    names = [f"token_id:{i}" for i in completions.tokens[completions.prompt :]]
    logprobs = {"tokens": names, "token_logprobs": [max(x.values()) for x in later], "top_logprobs": later, "text_offset": [0] * len(names)}
    choice = {"index": 0, "text": "?", "logprobs": logprobs, "prompt_logprobs": prompt if any(prompt) else None, "finish_reason": "length"}
    return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": completions.prompt}}


def sglang_answer(completions):
    """SGLang's answer of `/generate` with log-probabilities from the first token of the prompt on."""
    tokens, prompt = completions.tokens.tolist(), completions.prompt
    tops = [[[x, i, None] for i, x in zip(row.ids.tolist(), row.logprobs.tolist(), strict=True)] for row in completions.top]
    ones = [[top[0][0], token, None] for top, token in zip(tops, tokens[1:], strict=True)]
    meta = {"id": "0", "finish_reason": {"type": "length", "length": len(tokens) - prompt}, "prompt_tokens": prompt, "cached_tokens": 0}
    meta |= {"input_token_logprobs": [[None, tokens[0], None], *ones[: prompt - 1]], "input_top_logprobs": [None, *tops[: prompt - 1]]}
    meta |= {"output_token_logprobs": ones[prompt - 1 :], "output_top_logprobs": tops[prompt - 1 :]}
    return {"text": "?", "output_ids": tokens[prompt:], "meta_info": meta | {"completion_tokens": len(tokens) - prompt, "e2e_latency": 0.1}}


def changed(answer, path, value):
    """The answer with the value at a path replaced, or removed for `...`."""
    answer = at = copy.deepcopy(answer)
    for step in path[:-1]:
        at = at[step]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return answer


def assert_same(one, other):
    """Two records of completions hold the same tokens and numbers."""
    assert (one.tokens.tolist(), one.prompt, one.k, one.notes) == (other.tokens.tolist(), other.prompt, other.k, other.notes)
    rows = [[(row.position, row.ids.tolist(), row.logprobs.tolist()) for row in record.top] for record in (one, other)]
    assert rows[0] == rows[1]
