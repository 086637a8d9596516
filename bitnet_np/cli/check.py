"""`bitnet-np check`: judge another engine's dump or a running server, or with no arguments the embedded recording of bitnet.cpp."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..base.errors import OptionError
from ..base.tables import printable, table
from ..base.validate import integer
from ..base.whole_file import whole_file
from ..engine.dialects import BITNET_CPP, DIALECTS, EXACT
from ..engine.forward_pass import compute_logits
from ..engine.network import Runtime
from ..engine.tokens import check_tokens, pad
from ..files import embedded
from ..files.digest import digest_of
from ..hunt.api import check_engine
from ..hunt.outcome import Judge
from ..judge.detail import Details
from ..judge.law.precision import FLOAT32
from ..judge.measures import Judgement, judge
from ..judge.options import Options
from ..judge.partial import check_partial, check_records
from ..judge.report.ci import Case, cases_of, github, junit, tap
from ..judge.report.pictures import check_plot, plot
from ..judge.report.report import Report
from ..judge.report.text import JUDGEMENT_HEADER, as_text, judgement_row
from ..judge.sequences import judge_sequences, read_dump
from ..judge.top_logprobs import check_completions
from ..judge.verdict import Verdict
from ..kernels import machine
from ..model.families import FAMILIES
from ..testing import selftest
from ..traces.formats import COMPLETIONS, bitnet_rs, detect, eval_callback
from . import check_server, progress
from .arguments import profile_of
from .inputs import Inputs, opened
from .printing import answer, coloured, fitted, outcome, width


def details_of(arguments: argparse.Namespace) -> Details | None:
    """What is to collect the numbers for --html and --plot, if one is given. Raises OptionError, or UnsupportedError without the extra."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    return None if arguments.html is None and arguments.plot is None else Details()


def run(arguments: argparse.Namespace) -> int:
    """Print the judgement; returns the exit code."""
    judged = (arguments.theirs, arguments.endpoint, arguments.engine)
    needed = {
        "MODEL": (arguments.model,),
        "token ids (--tokens, --tokens-file or --text)": (arguments.tokens, arguments.tokens_file, arguments.text),
        "--theirs, --engine or --endpoint": judged,
    }
    missing = [name for name, values in needed.items() if values == (None,) * len(values)]
    if len(missing) == len(needed):
        return _check_embedded(arguments)
    if missing:
        raise OptionError(f"check lacks {' and '.join(missing)}; without arguments it checks this machine")
    if arguments.engine is not None and judged.count(None) < 2:
        raise OptionError("--engine excludes --theirs and --endpoint")
    if arguments.endpoint is not None:
        report, heading, facts = check_server.judged(arguments)
        return show(arguments, report, heading, None, {"model": arguments.model}, facts)
    details = details_of(arguments)
    inputs, profile = opened(arguments), profile_of(arguments)
    facts = {"tokens": [row.tolist() for row in inputs.sequences()], "dialect": profile.dialect.name}
    if arguments.engine is not None:
        options = Options(profile.precision, arguments.prefix, progress.bar, details, arguments.budget, arguments.strict, keeps_known=True)
        judge = Judge(profile.dialect, options)
        report = check_engine(arguments.engine, inputs.source.path, inputs.model(), inputs.sequences(), judge, arguments.timeout)
        heading = f"the engine's output for {arguments.model}, {_declared(arguments)}"
        return show(arguments, report, heading, details, {"model": arguments.model}, facts)
    report, dialect = _judged(inputs, details)
    files = {"model": arguments.model, "dump": arguments.theirs}
    heading = f"{arguments.theirs} against {arguments.model}, {_declared(arguments)}"
    return show(arguments, report, heading, details, files, facts | {"dialect": dialect})


def _declared(arguments: argparse.Namespace) -> str:
    """What is declared of the engine, in words."""
    texts = [f"as {arguments.profile}" if arguments.profile else "", f"with {arguments.precision}" if arguments.precision else ""]
    return " ".join(filter(None, texts)) or "types read off the dump"


def _judged(inputs: Inputs, details: Details | None) -> tuple[Report, str]:
    """The report on the dump of one sequence, or of several, and the dialect that it is judged in."""
    arguments, config, rows = inputs.arguments, inputs.source.config, inputs.sequences()
    profile = profile_of(arguments)
    path, prefix = arguments.theirs, integer("--prefix", arguments.prefix, 0)
    name = arguments.dump_format or detect(path)
    if arguments.last and name not in ("logits", "raw", "text"):
        raise OptionError(f"{path}: --last and a dump of format {name}, expected logits alone: .npy, bare float32 or text")
    partial = name == "eval-callback" or name.startswith("bitnet-rs") or name in COMPLETIONS
    if partial and len(rows) > 1:
        raise OptionError(f"{path}: format {name} holds one sequence, and there are {len(rows)} sequences of tokens")
    if name == "eval-callback":
        printed, model = eval_callback.read(path), inputs.model()
        profile = profile_of(arguments, "bitnet.cpp" if FAMILIES[model.config.architecture].ternary else "llama.cpp")  # who printed it
        return check_partial(model, rows[0], printed, profile.dialect, profile.precision or FLOAT32), profile.dialect.name
    options = Options(profile.precision, prefix, progress.bar, details, arguments.budget, arguments.strict, keeps_known=True)
    if name in COMPLETIONS:
        completions = COMPLETIONS[name](path, rows[0])
        spoken = profile_of(arguments, completions.dialect).dialect
        return check_completions(inputs.model(), completions, spoken, options), spoken.name
    if partial:
        records = bitnet_rs.read(path)
        return check_records(inputs.model(), rows[0], records, profile.dialect, profile.precision or FLOAT32), profile.dialect.name
    tokens = check_tokens(config, *pad(rows))
    dump = read_dump(path, tokens, config, name, prefix)
    runtime = Runtime(inputs.model(), profile.dialect).checked()
    return judge_sequences(runtime, tokens, dump, options, arguments.last), profile.dialect.name


# The worst verdict on the recording that sound kernels can get: with its float16 roundings followed, all but long sequences agree.
_EXPECTED = {("bitnet.cpp", n): Verdict.ROUNDING if n <= 17 else Verdict.FLIPS for n in embedded.LENGTHS}


def _check_embedded(arguments: argparse.Namespace) -> int:
    with embedded.model_path() as path:
        model = opened(arguments, path).model()
    recording = embedded.recording()
    judgements: dict[str, dict[str, Judgement]] = {}
    fine = True
    for name in (EXACT.name, BITNET_CPP.name):
        for n in embedded.LENGTHS:
            logits = compute_logits(model, recording[f"tokens_T{n}"][None], dialect=DIALECTS[name])[0]
            for path_name in ("prefill", "decode"):
                judgement = judge(logits, recording[f"logits_{path_name}_T{n}"])
                judgements.setdefault(name, {})[f"{n} {path_name}"] = judgement
                fine &= judgement.verdict <= _EXPECTED.get((name, n), Verdict.FLIPS)
    bits = dict(selftest.run("forward"))
    fine &= all(bits.values())
    tables = {name: {row: j.as_dict() for row, j in rows.items()} for name, rows in judgements.items()}
    broken = "the kernels are broken on this machine, see bitnet-np selftest"
    reason = "the kernels on this machine give the known results" if fine else broken
    first = outcome(fine, f": {reason}")
    parts = [
        "The embedded model (BitNet b1.58, 3 layers, random weights) against logits recorded from bitnet.cpp.",
        "exact: the definition, no float16 anywhere. bitnet.cpp rounds its KV cache, queries, probabilities and head input to float16:",
        table(JUDGEMENT_HEADER, [judgement_row(*item) for item in judgements["exact"].items()]),
        "bitnet.cpp: the same forward with those roundings:",
        table(JUDGEMENT_HEADER, [judgement_row(*item) for item in judgements["bitnet.cpp"].items()]),
        *(f"{name}: {'' if ok else 'NOT '}the bits known for every machine" for name, ok in bits.items()),
    ]
    short = arguments.quiet or (fine and not arguments.verbose)
    text = "\n\n".join([first] if short else [first, *parts])
    case = Case("the embedded model", "" if fine else "failure", reason)
    return _print(arguments, {"fine": fine, "dialects": tables, "known_bits": bits}, text, [case], 0 if fine else 1)


_FORMS = {"github": github, "junit": junit, "tap": tap}
SCHEMA_VERSION = 1  # of what --json prints of a report; another one has keys that are gone or mean something else


def _print(arguments: argparse.Namespace, facts: object, text: str, cases: Sequence[Case], code: int) -> int:
    """Print what was judged in the form that --format names; returns the exit code."""
    if form := _FORMS.get(arguments.format):
        text = f"{text}\n" * (form is github) + form("bitnet-np", cases)
    return answer(arguments, facts, text, code)


def show(
    arguments: argparse.Namespace,
    report: Report,
    heading: str,
    details: Details | None,
    files: Mapping[str, Path],
    facts: Mapping[str, Any],
) -> int:
    """Print a report, and write it with --html and --plot; returns the exit code.

    details: what the judge collected for them. files: those that were read, by what they are. facts: what JSON says of the call. Raises
    OptionError if there is nothing to draw.
    """
    if arguments.html is not None:
        with whole_file(arguments.html) as part:
            part.write_text(report.html(details, _about(arguments, files)), "utf-8", "backslashreplace")  # of names that are no UTF-8
    if arguments.plot is not None:
        plot(report, arguments.plot, details)
    progress.clear()  # of a search that ended early
    columns = width()
    text = fitted(as_text(report, printable(heading), 0 if arguments.quiet else 1 + arguments.verbose, columns), columns)
    text = re.sub(r"(?m)(?<= )[X!](?= |$)", lambda sign: coloured(sign[0], False), text) if columns else text
    text = re.sub(r"(?m)^(PASS|FAIL)(?=:| \()", lambda sign: coloured(sign[0], report.passed), text)
    head: dict[str, Any] = {}
    if arguments.json:  # digests take time
        digests = {what: {"path": str(path), "sha256": digest_of(path)} for what, path in files.items()}
        head = {"version": __version__, "schema_version": SCHEMA_VERSION, "files": digests, **facts}
    return _print(arguments, head | report.as_dict(), text, cases_of(report, heading), report.verdict.exit_code)


def _about(arguments: argparse.Namespace, files: Mapping[str, Path]) -> dict[str, str]:
    """What an HTML report says of itself: the files with their digests, the precision, the machine and the versions."""
    facts: dict[str, str] = {}
    for what, path in files.items():
        facts |= {what: str(path), f"SHA-256 of the {what}": digest_of(path)}
    if "profile" in arguments:
        facts["judged"] = _declared(arguments)
    return facts | machine.facts()
