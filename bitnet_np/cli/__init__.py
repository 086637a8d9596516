"""The command line: `bitnet-np COMMAND`.

main.py         runs a command, turns errors into exit codes

A file for each command has SUMMARY, ARGUMENTS, examples in its docstring and run(arguments) -> exit code: check.py, compare.py,
completion.py, convert.py, demo.py, generate.py, grad.py, hunt.py, inspect.py, logits.py, mask.py, nll.py, selftest.py, sweep.py,
tokenize.py, trace.py, vectors.py. Parts of commands: check_server.py for `check --endpoint`, compare_models.py for `compare --models`,
generate_many.py for `generate --prompts-file`, cluster.py for clusters.

parser.py       arguments that are declared as text; errors that name what a mistyped word may have meant
arguments.py    arguments that several commands share
inputs.py       the model file of a command, and token ids from the command line and from files
schemas.py      the JSON Schemas of what commands print
printing.py     verdicts and JSON, text that fits a terminal
progress.py     progress bars on standard error
"""
