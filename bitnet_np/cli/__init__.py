"""The command line: `bitnet-np COMMAND`.

main.py         answers help and wrong usage, has a command run, turns errors into exit codes
commands.py     every command with its arguments, which commands.txt has, without the library
parser.py       reads that text; errors that name what a mistyped word may have meant
running.py      runs the module of a command, once its arguments are parsed

A file for each command has run(arguments) -> exit code: check.py, compare.py, completion.py, convert.py, demo.py, generate.py, grad.py,
hunt.py, inspect.py, logits.py, mask.py, nll.py, selftest.py, sweep.py, tokenize.py, trace.py, vectors.py. Parts of commands:
check_server.py for `check --endpoint`, compare_models.py for `compare --models`, cluster.py for clusters.

arguments.py    what arguments that several commands share say
inputs.py       the model file of a command, and token ids from the command line and from files
schemas.py      the JSON Schemas of what commands print
printing.py     verdicts and JSON, text that fits a terminal
progress.py     progress bars on standard error
compiling.py    kernels that compile meanwhile: shown, and not counted
"""
