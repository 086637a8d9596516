"""Compilers that work here, and the checkers of test vectors built with them."""

import shutil
import subprocess
from pathlib import Path

import pytest

import bitnet_np

FOLDER = Path(bitnet_np.__file__).parent / "vectors"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
STRICT = ("-std=c99", "-Wall", "-Wextra", "-Wno-unused-function", "-pedantic", "-Werror", "-O1")

REPLAY_C = """
#include "vectors.h"
static int engine(const vec_case *c, void *folder) { /* the numbers of each output are in a file */
    char path[600];
    for (size_t i = 0; i < c->n_outs; i++) {
        snprintf(path, sizeof path, "%s/%s.%s", (const char *)folder, c->id, c->outs[i].name);
        FILE *file = fopen(path, "rb");
        if (!file) return VEC_SKIP;
        size_t some = fread(c->outs[i].numbers, 4, c->outs[i].value->count, file);
        fclose(file);
        if (some != c->outs[i].value->count) return 7;
    }
    return VEC_DONE;
}
int main(int n, char **arguments) {
    FILE *junit = n > 3 ? fopen(arguments[3], "w") : NULL;
    int failed = vec_run(arguments[1], "", engine, arguments[2], stdout, junit);
    if (junit) fclose(junit);
    return failed < 0 ? 2 : failed != 0;
}
"""
REPLAY_RUST = """
mod vectors;
fn main() {
    let given: Vec<String> = std::env::args().collect();
    let engine = |c: &mut vectors::Case| {
        for i in 0..c.outputs.len() {
            let name = c.outputs[i].name.clone();
            let Ok(data) = std::fs::read(format!("{}/{}.{name}", given[2], c.id)) else { return Ok(false) };
            c.set(&name, data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())?;
        }
        Ok(true)
    };
    let mut file = given.get(3).map(|path| std::fs::File::create(path).unwrap());
    let junit = file.as_mut().map(|file| file as &mut dyn std::io::Write);
    std::process::exit(vectors::run(&given[1], "", engine, &mut std::io::stdout(), junit).map_or(2, |failed| (failed > 0) as i32));
}
"""


def _built(folder, command, source, name):
    """The program that a compiler makes of a source; skips the test, by name, where the compiler is not there or cannot make one."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    (folder / name).write_text(source)
    program = folder / Path(name).with_suffix("")
    done = subprocess.run(
        [*command, name, "-o", str(program), *(["-lm"] if name.endswith(".c") else [])], cwd=folder, capture_output=True, text=True
    )
    return program, done


def needs_compiler(folder, compiler, *options):
    """Skips the test, by name, without a C compiler that works."""
    hello, done = _built(folder, [compiler, *options], "int main(void) { return 0; }", "hello.c")
    if done.returncode or subprocess.run([hello], check=False).returncode:
        pytest.skip(f"needs {compiler} that works with {' '.join(options)}: {done.stderr[:100]}")


def c_program(folder, source, *options, name="engine.c", compiler="cc"):
    """A C program that includes vectors.h."""
    needs_compiler(folder, compiler, *options)
    program, done = _built(folder, [compiler, *STRICT, *options, "-I", str(FOLDER)], source, name)
    assert done.returncode == 0, done.stderr
    return program


def rust_program(folder, source, name="engine.rs"):
    """A Rust program with the module vectors."""
    hello, done = _built(folder, ["rustc", "--edition", "2021"], "fn main() {}", "hello.rs")
    if done.returncode or subprocess.run([hello], check=False).returncode:
        pytest.skip(f"needs rustc that works: {done.stderr[:100]}")
    shutil.copy(FOLDER / "vectors.rs", folder / "vectors.rs")
    program, done = _built(folder, ["rustc", "--edition", "2021", "-O", "-D", "warnings"], source, name)
    assert done.returncode == 0, done.stderr
    return program


BUILDERS = {
    "C": lambda folder: c_program(folder, REPLAY_C),
    "Rust": lambda folder: rust_program(folder, REPLAY_RUST),
}
"""By language: a program that takes a pack, and a folder with the numbers of each output."""


def passed(program, pack, numbers, junit=None):
    """Whether each case passed, by its id; cases without numbers are left out. And the text that was printed."""
    done = subprocess.run([program, pack, numbers, *([junit] if junit else [])], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("ok", "not ok")) and "# SKIP" not in line]
    assert done.returncode in (0, 1), done.stdout[-300:] + done.stderr[-300:]
    return {line.split(" - ")[1].split(" #")[0]: line.startswith("ok") for line in lines}, done.stdout
