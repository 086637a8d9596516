"""A plan is checked whole: every error names the line, and nothing has started then."""

import numpy as np
import pytest
from command_line import TINY
from sweep_plans import PLAN, written

from bitnet_np import Error
from bitnet_np.sweep.plan import read_plan


def test_every_model_goes_with_every_sequence(tmp_path):
    plan = read_plan(written(tmp_path, PLAN))
    random = [f"random-{n}" for n in range(6)]
    assert [(t.operation, t.tokens) for t in plan] == [("logits", name) for name in ["short", *random]] + [("nll", n) for n in random]
    assert len({task.ids.tobytes() for task in plan}) == 7


def test_folders_globs_texts_and_files_of_tokens(tmp_path):
    (tmp_path / "zoo").mkdir()
    for name in "ab":
        (tmp_path / "zoo" / f"{name}.gguf").symlink_to(TINY)
    np.save(tmp_path / "x.npy", np.arange(6).reshape(2, 3))
    (tmp_path / "y.txt").write_text("1 2 3 4")
    tokens = '[tokens]\nf = { files = ["x.npy", "*.txt"] }\nt = { text = "hello" }\n[[run]]\ndo = "logits"\n'
    labels = {}
    for models in ("zoo", "zoo/[ab].gguf"):
        plan = read_plan(written(tmp_path, f'[models]\nm = "{models}"\n{tokens}'))
        labels[models] = [task.tokens for task in plan]
    assert list(labels.values()) == [["f-x-0", "f-x-1", "f-y", "t"]] * 2  # the two files are one model, so each row is one


def test_keys_follow_what_a_result_depends_on(tmp_path):
    base = read_plan(written(tmp_path, PLAN))
    (tmp_path / "other").mkdir()
    again = read_plan(written(tmp_path / "other", PLAN.replace("short", "brief")))
    assert [task.key for task in again] == [task.key for task in base]
    for old, new in (
        ("bitnet.cpp", "llama.cpp"),
        ("1, 2, 3", "1, 2, 4"),
        ("seed = 5", "seed = 6"),
        ('"nll"', '"nll"\nat_most = 9'),
    ):
        changed = read_plan(written(tmp_path, PLAN.replace(old, new)))
        assert [task.key for task in changed] != [task.key for task in base]


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('do = "logits"', 'do = "logitz"', 9, "do is 'logitz', expected one of logits, nll, check"),
        ('as = "bitnet.cpp"', 'as = "gguf"', 12, "as is 'gguf', expected one of exact, bitnet.cpp, llama.cpp"),
        ('as = "bitnet.cpp"', "as = 1", 12, "as is 1, expected a string"),
        ('as = "bitnet.cpp"', "shell = true", 12, "unknown key 'shell', expected do"),
        ('as = "bitnet.cpp"', 'precision = "act=bf16"', 12, "precision is 'act=bf16', expected kv=TYPE alone"),
        ('as = "bitnet.cpp"', 'precision = "kv=x"', 12, "precision: kv: the type is 'x'"),
        ('as = "bitnet.cpp"', 'models = ["huge"]', 12, "models has 'huge', expected names of [models]: tiny"),
        ('tokens = ["random"]', 'tokens = [["random"]]', 13, "expected texts"),
        ("ids = [1, 2, 3]", "ids = [1, 2, 512]", 8, "token 512"),
        ("ids = [1, 2, 3]", "ids = [[1], [1, 2]]", 6, "short"),
        ("ids = [1, 2, 3]", "ids = [1, 2], text = 'x'", 6, "expected one of ids, files, text, random"),
        ("ids = [1, 2, 3]", "files = 'no/*.npy'", 6, "no such file or folder"),
        ("random = 20", "random = 1000000000000", 7, "random is 1000000000000, expected 1 to 512"),
        ("count = 6", "count = 1000000000000", 7, "count is"),
        ("seed = 5", "seed = -5", 7, "seed is -5"),
        ("tiny.gguf", "none.gguf", 4, "no such file or folder"),
        ("tiny.gguf", "report.css", 4, "report.css"),
        ("# a comment", "models = ", 2, "no TOML"),
        ("# a comment", "run = 5", 0, "no TOML"),
        ("# a comment", "x = " + "[" * 5000, 0, "no TOML"),
        ("# a comment", "x = " + "9" * 5000, 0, "no TOML"),
        ('do = "logits"', 'do = "check"', 8, "dump is missing"),
        ('do = "logits"', 'do = "check"\ndump = "{tokens}.npz"', 10, "short.npz: no such file or folder"),
        ('do = "logits"', 'do = "check"\ndump = "{tokens.__class__}{home}"', 10, "dump has {home}, expected {model}, {tokens}"),
        ('do = "logits"', 'do = "check"\ndump = "x"\naccept = "WRONG"', 11, "accept is 'WRONG', expected one of SAME_BITS"),
        ('do = "logits"', 'do = "logits"\ncommand = "rm -rf x"', 10, "unknown key 'command'"),
    ],
)
def test_hostile_plans_are_refused(tmp_path, old, new, line, message):
    assert old in PLAN
    path = written(tmp_path, PLAN.replace(old, new))
    with pytest.raises(Error) as refused:
        read_plan(path)
    assert message in str(refused.value)
    assert not line or f"line {line}" in str(refused.value)
