"""Hunts in each fault of a conditional set: `python hunts.py conditional_faults_b OUT [--only D01 D02] [--time 60]`.

The engine takes one sequence at a time, so `--single` draws no batches. Each hunt's JSON goes to the folder OUT; one that is there is not run
again. Printed is what a person has to compare: the smallest case and the condition beside the true edge.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CALL = "--model {model} --tokens {tokens} --out {out}.npz --chunk {chunk} --prefix {prefix} --threads {threads}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", choices=[f"conditional_faults{x}" for x in ("", "_b", "_c", "_d", "_e", "_f", "_g", "_h")])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--time", default="60", help="seconds of each hunt (default %(default)s)")
    parser.add_argument("--what", choices=("whole", "logits"), default="whole", help="what the engine writes (default %(default)s)")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    for id, fault in importlib.import_module(options.set).FAULTS.items():
        if options.only and id not in options.only:
            continue
        path = options.out / f"{id}.json"
        if not path.is_file():
            engine = f"{sys.executable} {HERE / 'engine.py'} --fault {id} --what {options.what} {CALL}"
            command = [sys.executable, "-m", "bitnet_np", "hunt", HERE / f"models/{fault.model}.gguf", "--engine", engine, "--single"]
            path.write_bytes(subprocess.run([*command, "--time", options.time, "--json"], stdout=subprocess.PIPE, check=False).stdout)
        result = json.loads(path.read_text() or '{"findings": [], "runs": 0, "seconds": 0}')
        print(f"{id} {fault.model}: {len(result['findings'])} findings in {result['runs']} runs, {result['seconds']} s")
        for finding in result["findings"]:
            print(*(f"    {finding[key]}" for key in ("where", "words", "text")), sep="\n")
            print(f"    {finding['cause'] or finding['place'] or (finding['report'] or {}).get('reason')}")
        print(f"    TRUE {getattr(fault, 'smallest', '')} {fault.edge}: {fault.what}", flush=True)


if __name__ == "__main__":
    main()
