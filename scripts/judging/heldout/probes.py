"""Probes in each fault of a set, of which the engine gives logits alone: `python probes.py public_faults_e OUT [--only X01 X02]`.

Each case is a `check --engine`, whose JSON goes to the folder OUT; one that is there is not run again. Printed is what a person has to compare:
the place or the cause beside the true one.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import bitnet_np as bn

HERE = Path(__file__).parent
CALL = "--what logits --model {model} --tokens {tokens}.npy --out {out}.npz --prefix {prefix}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", help="a module of this folder, such as public_faults_e")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--budget", default="15", help="seconds of a search for causes (default %(default)s)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for id, fault in importlib.import_module(options.set).FAULTS.items():
        if options.only and id not in options.only:
            continue
        path, model, begin = options.out / f"{id}.json", HERE / f"models/{fault.model}.gguf", time.monotonic()
        if not path.is_file():
            tokens = options.out / f"{id}.npy"
            np.save(tokens, np.random.default_rng(7).integers(1, bn.load(model).config.vocab, fault.tokens))
            how = f"--fault {id} --threads {fault.threads}" + (f" --chunk {fault.chunk}" if fault.chunk else "")
            command = [sys.executable, "-m", "bitnet_np", "check", model, "--tokens-file", tokens, "--json", "--budget", options.budget]
            command += ["--engine", f"{sys.executable} {HERE / 'engine.py'} {how} {CALL}", "--prefix", str(fault.prefix)]
            path.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
        report = json.loads(path.read_text() or '{"verdict": "none", "reason": "", "notes": []}')
        print(f"{id} {fault.model} {report['verdict']} in {time.monotonic() - begin:.0f} s: {report['reason']}")
        print(*(f"    {note}" for note in report["notes"] if note.startswith("probes")), sep="\n")
        print(f"    TRUE {fault.cause}", flush=True)


if __name__ == "__main__":
    main()
