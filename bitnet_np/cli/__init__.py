"""The command line: `bitnet-np COMMAND`.

main.py         parses arguments, runs a command, turns errors into exit codes
NAME.py         one file for each command: SUMMARY, add_arguments(parser), run(arguments) -> exit code
generate_many   `generate --prompts-file`
arguments.py    arguments that several commands share
inputs.py       the model file of a command, and token ids from the command line and from files
printing.py     tables, JSON, text that is safe for a terminal
progress.py     progress bars on standard error
"""
