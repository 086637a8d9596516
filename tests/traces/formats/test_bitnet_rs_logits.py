"""BitNet-rs's JSON of the largest logits: of its `run` and its `eval`, judged, and files that break a rule."""

import json

import numpy as np
import pytest
from completions import engine

from bitnet_np import EXACT, Verdict
from bitnet_np.base.errors import FileFormatError
from bitnet_np.cli.main import main
from bitnet_np.judge.top_logprobs import check_completions
from bitnet_np.judge.variant import Variant
from bitnet_np.testing.models import random_model
from bitnet_np.traces.formats import bitnet_rs_logits, detect

MODEL = random_model(4, n_layers=2, width=128, ffn=256, heads=4, kv_heads=2, head_dim=32, vocab=200, tied=False)
PROMPT, STEPS, K = np.random.default_rng(5).integers(0, 200, 12), 6, 20
LOGITS_OF = engine(Variant("", MODEL, EXACT))


def of_run(logits_of=LOGITS_OF):
    """The JSON of `run`, as bitnet-rs-swarm writes it: step 0 follows the prompt."""
    ids, steps = PROMPT.tolist(), []
    for step in range(STEPS):
        row = logits_of(np.array(ids))[-1]
        best = np.argsort(-row, kind="stable")[:K]
        top = [{"token_id": int(i), "logit": float(row[i])} for i in best]
        steps.append({"chosen_id": int(best[step % 2]), "logits_vector_length": 200, "step": step, "top_logits": top})  # not greedy
        ids.append(int(best[step % 2]))
    return {"prompt": "?", "logits_dump": steps, "tokens": {"prompt": 12, "ids": ids[12:], "prompt_ids": ids[:12]}}


def of_eval():
    """The JSON of `eval` with forced tokens: step 0 follows the first of them."""
    rows = LOGITS_OF(PROMPT)[:STEPS]
    top = [[[int(i), float(row[i])] for i in np.argsort(-row, kind="stable")[:K]] for row in rows]
    steps = [{"step": i, "topk": each, "chosen_id": int(PROMPT[i + 1])} for i, each in enumerate(top)]
    return {"text_file": "teacher-forced", "logits_dump": steps, "tf_path_head": PROMPT.tolist()}


@pytest.mark.parametrize(("value", "first"), [(of_run(), 11), (of_eval(), 0)], ids=["run", "eval"])
def test_logits_of_each_step_are_judged(tmp_path, value, first):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(value, indent=2))
    assert detect(path) == "bitnet-rs-logits"
    completions = bitnet_rs_logits.read(path, PROMPT)
    assert [row.position for row in completions.top] == [*range(first, first + STEPS)]
    report = check_completions(MODEL, completions)
    assert report.verdict <= Verdict.ROUNDING, report.reason
    assert report.notes == (
        f"120 logits of positions {first} to {first + 5} are judged, the most probable at each; all other tokens must not be more probable",
    )


def with_step(value, i, **changes):
    steps = [step | (changes if i == n else {}) for n, step in enumerate(value["logits_dump"])]
    return value | {"logits_dump": steps}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (of_run(lambda ids: LOGITS_OF(ids) + np.float32(20)), "correct apart from a constant at each position"),
        (of_run(lambda ids: LOGITS_OF(ids) * np.float32(1.25)), "1.25"),
        (of_run(lambda ids: LOGITS_OF(ids) * np.float32(np.nan)), "their logit of token 0 is nan"),
        (with_step(of_run(), 1, top_logits=of_run()["logits_dump"][1]["top_logits"][1:]), "is not listed, though its logit is"),
    ],
)
def test_wrong_logits_are_called_so(tmp_path, value, said):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(value).replace("NaN", "null"))
    report = check_completions(MODEL, bitnet_rs_logits.read(path, PROMPT))
    assert report.verdict >= Verdict.WRONG
    assert said in report.reason


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is [], expected an object"),
        ({"logits_dump": None}, "logits_dump is None, expected an array"),
        (of_run() | {"tokens": {"prompt_ids": [1, 2]}}, "holds the tokens [1, 2], expected ["),
        (of_eval() | {"tf_path_head": [3]}, "holds the tokens [3], expected ["),
        (with_step(of_run(), 1, step=2), "logits_dump[1].step is 2, expected 1"),
        (with_step(of_run(), 2, top_logits=[[1, 2, 3]]), "top_logits[0] is [1, 2, 3], expected a token id and its logit"),
        (with_step(of_run(), 2, top_logits=[{"token_id": -1, "logit": 1.0}]), "top_logits[0]: the id is -1, expected a token id"),
        (with_step(of_eval(), 2, topk=[[1, 2.0], [1, 3.0]]), "topk[1] has the id 1, which is there twice"),
        (with_step(of_run(), 0, chosen_id=None), "logits_dump[0].chosen_id is None"),
        (of_eval() | {"logits_dump": [step | {"step": i} for i, step in enumerate(of_eval()["logits_dump"] * 3)]}, "18 steps of forced"),
    ],
)
def test_files_that_break_a_rule_are_refused(tmp_path, value, message):
    path = tmp_path / "out.json"
    path.write_text(json.dumps(value))
    with pytest.raises(FileFormatError, match=r"out\.json") as error:
        bitnet_rs_logits.read(path, PROMPT)
    assert message in str(error.value)


def test_the_command_judges_such_a_file(tmp_path, written, capsys):
    (tmp_path / "out.json").write_text(json.dumps(of_run()))
    arguments = ["check", written(MODEL), "--tokens", ",".join(map(str, PROMPT)), "--theirs", tmp_path / "out.json"]
    assert main([str(argument) for argument in arguments]) == 0
    assert capsys.readouterr().out.startswith("PASS")
