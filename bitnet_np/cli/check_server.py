"""The part of `bitnet-np check` that judges a running server (--endpoint)."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..base.errors import ContextLimitError, OptionError, shown
from ..base.validate import integer
from ..judge.options import Options
from ..judge.report.report import Report
from ..judge.top_logprobs import FEWEST, check_completions
from ..judge.verdict import Verdict
from ..servers.client import client_of
from ..servers.endpoint import Server, server_at
from ..servers.words import quantised_name, stated_types
from . import progress
from .arguments import profile_of
from .inputs import Inputs, opened

_MOST = 1 << 12  # tokens to predict, and log-probabilities at each


def judged(arguments: argparse.Namespace) -> tuple[Report, str, dict[str, Any]]:
    """The report on the server, its heading, and what JSON says of the call."""
    profile_of(arguments)  # an option that is wrong, before anything is asked
    for name in ("theirs", "dump_format", "last", "plot"):
        if getattr(arguments, name):
            raise OptionError(f"--endpoint and --{name.replace('_', '-')} exclude each other")
    predict, k = integer("--predict", arguments.predict, 1, _MOST), integer("--top-logprobs", arguments.top_logprobs, FEWEST, _MOST)
    client = client_of(arguments.endpoint, arguments.timeout)
    inputs = opened(arguments)
    ids = inputs.token_ids()
    if ids.ndim != 1:
        raise OptionError(f"--endpoint takes one sequence of tokens, not {len(ids)}")
    model = inputs.model()
    if len(ids) + predict > model.config.context:
        raise ContextLimitError(f"{len(ids)} tokens and {predict} to predict, but the model's context has {model.config.context}")
    server = server_at(client)
    notes, difference = _of_tokenizer(inputs, server, ids.tolist())
    profile = profile_of(arguments, server.dialect)
    options = Options(
        profile.precision,
        bars=progress.bar,
        budget=arguments.budget,
        strict=arguments.strict,
        stated=stated_types(server.names),
        keeps_known=True,
    )
    completions = server.complete(ids.tolist(), predict, k)
    report = check_completions(model, completions, profile.dialect, options)
    if report.verdict == Verdict.WRONG and (quantised := quantised_name(server.names)):
        notes.append(f"the server's model is called {shown(quantised)}: are its weights quantised, and other than this file's?")
    report = replace(report, notes=(*notes, *report.notes))
    if difference is not None:
        verdict = max(report.verdict, Verdict.WRONG)
        report = replace(report, verdict=verdict, reason=f"{difference}; for our ids: {report.reason}")
    heading = f"{server.name} at {client.url} against {arguments.model}, as {arguments.profile or profile.dialect.name}"
    return report, heading, {"tokens": [ids.tolist()], "dialect": profile.dialect.name}


def _of_tokenizer(inputs: Inputs, server: Server, ids: list[int]) -> tuple[list[str], str | None]:
    """Notes on the token ids that were sent, and how the server's own of the same text differ."""
    text = inputs.arguments.text
    if text is None:
        return [f"{len(ids)} token ids were sent as the prompt, and no BOS was added to them"], None
    tokenizer = inputs.tokenizer()
    bos = f"with BOS {tokenizer.bos} in front" if tokenizer.add_bos else "without BOS"
    note = f"the text is {len(ids)} token ids, {bos} as the model's file says; they were sent as the prompt"
    theirs = server.tokenize(text)
    if theirs is None:
        return [note, "the server has no /tokenize: its tokenizer is not judged"], None
    return [note], tokenizer_difference(ids, theirs, tokenizer.bos)


def tokenizer_difference(ours: Sequence[int], theirs: Sequence[int], bos: int | None, whose: str = "the server's") -> str | None:
    """What another's token ids of a text are instead of ours; None if they are the same."""
    if list(ours) == list(theirs):
        return None
    if list(theirs) == [bos, *ours]:
        return f"{whose} tokenizer puts BOS {bos} in front of the text, and the model's file says not to"
    if list(ours) == [bos, *theirs]:
        return f"{whose} tokenizer puts no BOS in front of the text, and the model's file says to: {bos}"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    their_token, our_token = (f"token {x[at]}" if at < len(x) else "no token" for x in (theirs, ours))
    return f"{whose} tokenizer gives {len(theirs)} token ids, ours {len(ours)}: at index {at} it has {their_token}, ours {our_token}"
