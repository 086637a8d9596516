"""`bitnet-np check`: judge another engine's dump or a running server, or with no arguments the embedded recording of bitnet.cpp.

Examples:
  bitnet-np check model.gguf --tokens 1,2,3 --theirs dump
  bitnet-np check model.gguf --text "Once upon a time" --endpoint http://127.0.0.1:8080
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..base.errors import OptionError, listed
from ..base.validate import integer
from ..base.whole_file import whole_file
from ..engine import machine
from ..engine.dialects import BITNET_CPP, DIALECTS, EXACT
from ..engine.forward_pass import compute_logits
from ..engine.machine import digest_of
from ..engine.network import Runtime
from ..engine.tokens import check_tokens, pad
from ..files import embedded
from ..hunt.api import check_engine
from ..hunt.outcome import Judge
from ..judge.law.precision import FLOAT32
from ..judge.measures import Judgement, judge
from ..judge.options import USUAL_BUDGET, Options
from ..judge.partial import check_partial, check_records
from ..judge.report.detail import Details
from ..judge.report.pictures import check_plot, plot
from ..judge.report.report import CLOSER_HEADER, TABLE_HEADER, Report, closer_rows, closer_summary, heat_map, next_step, table_rows
from ..judge.sequences import judge_sequences, read_dump
from ..judge.top_logprobs import check_completions
from ..judge.verdict import Verdict
from ..model.families import FAMILIES
from ..testing import selftest
from ..traces.formats import COMPLETIONS, FORMATS, bitnet_rs, detect, eval_callback
from . import check_server, progress
from .arguments import A_MODEL, DOWNLOAD, MODEL_OPTIONS, PROFILE, REPORT, TOKENS, profile_of
from .inputs import Inputs, opened
from .printing import answer, coloured, fitted, outcome, printable, table, width
from .trace import show_layers

SUMMARY = "Judge another engine's dump, or a running server; without arguments, the embedded recording of bitnet.cpp."
LARGEST_TABLE = 12  # lines of wrong tensors, of causes and of sequences; the rest is only counted

JUDGEMENT_HEADER = ("tokens", "max error", "mean error", "NMSE", "scale", "KL", "top-1", "top-5", "verdict")


def _judgement_row(name: str, j: Judgement) -> tuple:
    """A row of the table of logits."""
    return (name, j.max_error, j.mean_error, j.nmse, j.scale, j.kl, j.top1, j.top5, j.verdict.name)


ARGUMENTS = f"""
[what to judge]
MODEL?: {A_MODEL} (default: the embedded one, and its recording)
at most one of
{TOKENS}

--theirs DUMP: the dump to judge: intermediate tensors or logits, [T, width], or [B, T, width] of several sequences
--engine CMD: run this command and judge what it writes: its words are those of `hunt`, {{model}}, {{tokens}} and {{out}} among them
{check_server.ENDPOINT}
--format {"|".join(FORMATS)}: format of the dump (default: recognised by its content)
--last: the dump holds logits of the last position only
--prefix N = 0: the dump has no rows of the first N tokens: the engine reused their keys and values
[the engine]
{PROFILE}
--strict: roundings that are not declared are WRONG, not NARROW
[output]
{REPORT}
[rarely needed]
--budget S = {USUAL_BUDGET}: seconds of computing that the search for causes may take, 0 for the verdict alone
{check_server.ARGUMENTS}
{DOWNLOAD}
{MODEL_OPTIONS}
"""


def details_of(arguments: argparse.Namespace) -> Details | None:
    """What is to collect the numbers for --html and --plot, if one is given. Raises OptionError, or UnsupportedError without the extra."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    return None if arguments.html is None and arguments.plot is None else Details()


def run(arguments: argparse.Namespace) -> int:
    """Print the judgement; returns the exit code."""
    tokens = (arguments.tokens, arguments.tokens_file, arguments.text)
    judged = (arguments.theirs, arguments.endpoint, arguments.engine)
    named = [arguments.model is not None, judged.count(None) < 3, tokens != (None, None, None)]
    if not any(named):
        return _check_embedded(arguments)
    if not all(named):
        raise OptionError(
            "check needs MODEL, token ids (--tokens, --tokens-file or --text) and --theirs, --engine or --endpoint, or none of them"
        )
    if arguments.engine is not None and judged.count(None) < 2:
        raise OptionError("--engine excludes --theirs and --endpoint")
    if arguments.endpoint is not None:
        report, heading = check_server.judged(arguments)
        return show(arguments, report, heading, None, {"model": arguments.model})
    details = details_of(arguments)
    inputs = opened(arguments)
    if arguments.engine is not None:
        profile = profile_of(arguments)
        options = Options(profile.precision, 0, progress.bar, details, arguments.budget, arguments.strict, keeps_known=True)
        judge = Judge(profile.dialect, options)
        report = check_engine(arguments.engine, inputs.source.path, inputs.model(), inputs.sequences(), judge, arguments.timeout)
        return show(
            arguments, report, f"the engine's output for {arguments.model}, {_declared(arguments)}", details, {"model": arguments.model}
        )
    report = _judged(inputs, details)
    files = {"model": arguments.model, "dump": arguments.theirs}
    heading = f"{arguments.theirs} against {arguments.model}, {_declared(arguments)}"
    return show(arguments, report, heading, details, files)


def _declared(arguments: argparse.Namespace) -> str:
    """What is declared of the engine, in words."""
    texts = [f"as {arguments.profile}" if arguments.profile else "", f"with {arguments.precision}" if arguments.precision else ""]
    return " ".join(filter(None, texts)) or "types read off the dump"


def _judged(inputs: Inputs, details: Details | None) -> Report:
    """The report on the dump of one sequence, or of several."""
    arguments, config, rows = inputs.arguments, inputs.source.config, inputs.sequences()
    profile = profile_of(arguments)
    path, prefix = arguments.theirs, integer("--prefix", arguments.prefix, 0)
    name = arguments.format or detect(path)
    if arguments.last and name not in ("logits", "raw", "text"):
        raise OptionError(f"{path}: --last and a dump of format {name}, expected logits alone: .npy, bare float32 or text")
    partial = name == "eval-callback" or name.startswith("bitnet-rs") or name in COMPLETIONS
    if partial and len(rows) > 1:
        raise OptionError(f"{path}: format {name} holds one sequence, and there are {len(rows)} sequences of tokens")
    if name == "eval-callback":
        printed, model = eval_callback.read(path), inputs.model()
        profile = profile_of(arguments, "bitnet.cpp" if FAMILIES[model.config.architecture].ternary else "llama.cpp")  # who printed it
        return check_partial(model, rows[0], printed, profile.dialect, profile.precision or FLOAT32)
    options = Options(profile.precision, prefix, progress.bar, details, arguments.budget, arguments.strict, keeps_known=True)
    if name in COMPLETIONS:
        completions = COMPLETIONS[name](path, rows[0])
        return check_completions(inputs.model(), completions, profile_of(arguments, completions.dialect).dialect, options)
    if partial:
        records = bitnet_rs.read(path)
        return check_records(inputs.model(), rows[0], records, profile.dialect, profile.precision or FLOAT32)
    tokens = check_tokens(config, *pad(rows))
    dump = read_dump(path, tokens, config, name, prefix)
    runtime = Runtime(inputs.model(), profile.dialect).checked()
    return judge_sequences(runtime, tokens, dump, options, arguments.last)


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
    said = outcome(fine, f": {'the kernels on this machine give the known results' if fine else broken}")
    parts = [
        "The embedded model (BitNet b1.58, 3 layers, random weights) against logits recorded from bitnet.cpp.",
        "exact: the definition, no float16 anywhere. bitnet.cpp rounds its KV cache, queries, probabilities and head input to float16:",
        table(JUDGEMENT_HEADER, [_judgement_row(*item) for item in judgements["exact"].items()]),
        "bitnet.cpp: the same forward with those roundings:",
        table(JUDGEMENT_HEADER, [_judgement_row(*item) for item in judgements["bitnet.cpp"].items()]),
        *(f"{name}: {'' if ok else 'NOT '}the bits known for every machine" for name, ok in bits.items()),
    ]
    short = arguments.quiet or (fine and not arguments.verbose)
    text = "\n\n".join([said] if short else [said, *parts])
    return answer(arguments, {"fine": fine, "dialects": tables, "known_bits": bits}, text, 0 if fine else 1)


def show(arguments: argparse.Namespace, report: Report, heading: str, details: Details | None, files: Mapping[str, Path]) -> int:
    """Print a report, and write it with --html and --plot; returns the exit code.

    details: what the judge collected for them. files: those that were read, by what they are. Raises OptionError if there is nothing to
    draw.
    """
    if arguments.html is not None:
        with whole_file(arguments.html) as part:
            part.write_text(report.html(details, _about(arguments, files)), "utf-8", "backslashreplace")  # of names that are no UTF-8
    if arguments.plot is not None:
        plot(report, arguments.plot, details)
    progress.clear()  # of a search that ended early
    verbosity = 0 if arguments.quiet else 1 + arguments.verbose
    return answer(arguments, report.as_dict(), _printed(report, verbosity, heading, width()), report.verdict.exit_code)


def _about(arguments: argparse.Namespace, files: Mapping[str, Path]) -> dict[str, str]:
    """What an HTML report says of itself: the files with their digests, the precision, the machine and the versions."""
    facts: dict[str, str] = {}
    for what, path in files.items():
        facts |= {what: str(path), f"SHA-256 of the {what}": digest_of(path)}
    if "profile" in arguments:
        facts["judged"] = _declared(arguments)
    return facts | machine.facts()


def _printed(report: Report, verbosity: int, heading: str, columns: int | None) -> str:
    """The report for people in so many columns; None: in lines as long as they are. verbosity: 0, 1 or 2, for -q, nothing and -v."""
    passed, outcome_of = report.passed, report.verdict.outcome
    last = [f"{outcome_of}: {printable(report.said)}"]
    if step := next_step(report):
        last.append(f"next: {step}")
    first = [f"{outcome_of} ({report.verdict}): {report.verdict.text}", printable(report.reason), *last[1:], printable(heading)]
    middle = [*_notes(report), *(_tables(report, columns, verbosity > 1) if verbosity > 1 or not passed else ())]
    parts = ["\n".join(first), *middle, *["\n".join(last)] * bool(middle and not passed)] if verbosity else last[:1]
    text = fitted("\n\n".join(parts), columns)
    text = re.sub(r"(?m)(?<= )[X!](?= |$)", lambda sign: coloured(sign[0], False), text) if columns else text
    return re.sub(f"(?m)^{outcome_of}(?=:| \\()", coloured(outcome_of, passed), text)


def _notes(report: Report) -> Iterator[str]:
    """What is known of a dump apart from its verdict and numbers."""
    if report.notes:
        yield "\n".join(f"note: {note}" for note in report.notes)


def _tables(report: Report, columns: int | None, every: bool) -> Iterator[str]:
    """Sequences, causes and the map of tensors: what is wrong of them, or with `every` all, and the tables of numbers."""
    reports = dict(enumerate(report.sequences))
    if reports:
        said = [f"  sequence {b}: {printable(one.said)}" for b, one in reports.items() if every or not one.passed]
        yield "\n".join([f"of {len(reports)} sequences:", *_first(said), f"what follows is on sequence {report.sequence}"])
    if len(report.causes) > 1:
        yield "\n".join(["causes:", *_first([f"  {cause}: {listed(places)}" for cause, places in report.causes.items()])])
    logits, operations = report.logits, report.operations
    if every and logits is not None and logits.verdict != Verdict.INVALID:
        yield table(JUDGEMENT_HEADER, [_judgement_row("logits", logits)])
    if len(operations) > 1:
        layers = {o.key.layer for o in operations if o.key.layer is not None}
        odd = {o.key.layer for o in operations if o.key.layer is not None and o.verdict > Verdict.ROUNDING}
        rest = f"layers {show_layers([*layers - odd])}: all = or ." if layers - odd and not every else ""
        yield heat_map(report, columns, layers if every else odd) + f"\n{rest}" * bool(rest)
    if every and len(operations) > 1:
        if bad := [o for o in operations if not o.verdict.passed]:
            yield "\n".join(_first(table(TABLE_HEADER, table_rows(bad)).splitlines(), 1))
        if summary := closer_summary(report):
            yield f"RMS errors, in units of 2^-24 of a tensor's RMS:\n{table(CLOSER_HEADER, closer_rows(report))}\n{summary}"


def _first(lines: list[str], header: int = 0) -> list[str]:
    """The first lines below a header, and how many more there are."""
    most = header + LARGEST_TABLE
    return lines[:most] + [f"and {len(lines) - most} more"] * (len(lines) > most)
