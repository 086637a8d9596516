"""Files and dotted names that docstrings and comments of the package mention are there.

A file is looked up from the module's folder up to the repository's. A dotted name begins with a module, a folder or a class of the
package. It may also begin with a variable of the module, before an attribute of any class, or with a class in lower case.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache

import pages
import pytest
from imports import MODULES

FILE = re.compile(r"(?<![\w/.>*<-])((?:\w+/)*\w+\.py)\b")
DOTTED = re.compile(r"(?<![\w/.<>{}\"'*\\-])((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)(?![\w/*<>-])")
SUFFIXES = {"py", "json", "jsonl", "gguf", "npz", "npy", "md", "html", "toml", "safetensors", "part", "h", "kld", "txt"}
ELSEWHERE = {"integrations/bitnet.py", "tokenizer_manager.py", "trace_diff.py", "tokens.prompt_ids", "arguments.text"}
"""Names in other projects (transformers, SGLang, BitNet-rs) and of an option in an example."""


def texts(source):
    """The comments of a module and the strings that are statements."""
    yield from (token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT)
    strings = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    yield from (value.value for value in strings if isinstance(value, ast.Constant) and isinstance(value.value, str))


def bound(node):
    """The names that a statement binds, and those that blocks in it bind, but for bodies of functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    names = {alias.asname or alias.name.split(".")[0] for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)}
    names |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
    return names.union(*map(bound, ast.iter_child_nodes(node)))


def inside(trees):
    """What stands in each module and folder, by each ending of its dotted name, and in each class, with what its methods set."""
    found = defaultdict(set)
    for module, tree in trees.items():
        parts = module.split(".")
        for start in range(len(parts)):
            found[".".join(parts[start:])] |= bound(tree)
            found[".".join(parts[start:-1])].add(parts[-1])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found[node.name] |= set().union(*map(bound, node.body))
                found[node.name] |= {
                    x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute) and getattr(x.value, "id", "") == "self"
                }
    found["bitnet_np"] |= bound(ast.parse(MODULES["bitnet_np"].with_suffix(".pyi").read_text("utf-8")))
    return found


@cache
def known():
    """What is inside of what, the beginnings of names, attributes of classes, and strings that are no comments, such as keys of files."""
    trees = {module: ast.parse(path.read_text("utf-8")) for module, path in MODULES.items()}
    within, documented = inside(trees), {text for path in MODULES.values() for text in texts(path.read_text("utf-8"))}
    strings = (node.value for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    data = "\n".join(value for value in strings if isinstance(value, str) and value not in documented)
    attributes = set().union(*(names for owner, names in within.items() if owner[:1].isupper()))
    return within, {name.split(".")[0] for name in within}, attributes, data


def stale(module, source):
    """Files and dotted names in the comments of a module that are not there."""
    within, heads, attributes, data = known()
    folder = MODULES[module].parent
    folders = [each for each in (folder, *folder.parents) if each.is_relative_to(pages.ROOT)]
    variables = {
        node.id if isinstance(node, ast.Name) else node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name | ast.arg)
    }
    for text in texts(source):
        yield from (file for file in FILE.findall(text) if not any((each / file).exists() for each in folders))
        for name in DOTTED.findall(text):
            owner, _, last = name.rpartition(".")
            head = name.split(".")[0]
            if last in SUFFIXES or head not in heads or name in data:
                continue
            kind = owner.split(".")[-1]
            if last not in within[owner] | within[kind] | within[kind.title()] and not (head in variables and last in attributes):
                yield name


@pytest.mark.parametrize("module", MODULES)
def test_names_in_comments_are_there(module):
    assert set(stale(module, MODULES[module].read_text("utf-8"))) - ELSEWHERE == set()


@pytest.mark.parametrize(
    ("comment", "found"),
    [
        ("as records.Layer, records.Config.width, model.records, dump.json, base/errors.py and numpy.nothing say", []),
        ("as records.Nothing says", ["records.Nothing"]),
        ("as records.Config.nothing says", ["records.Config.nothing"]),
        ("as base/nothing.py says", ["base/nothing.py"]),
        ("as errors.py says", ["errors.py"]),
    ],
)
def test_stale_names_are_found(comment, found):
    assert list(stale("bitnet_np.files.load", f'"""{comment}"""')) == list(stale("bitnet_np.files.load", f"# {comment}")) == found
