"""Compiled kernels on disk: what is read, what is not, and what becomes of it."""

import errno
import json
import os
import shutil
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numba
import numpy as np
import platformdirs
import pytest
from child import run_python
from numba.core import types
from numba.core.registry import cpu_target

import bitnet_np
from bitnet_np.kernels.cache import cache_folder, disk_cache
from bitnet_np.kernels.launching import launch, parallel, serial, shared

ROOT = Path(bitnet_np.__file__).parents[1]


def add_one(x):
    return x + 1


def count(team, x):
    for i in shared(team, x.size):
        x[i] += 1


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A fresh cache for this test."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(cache):
    return sorted(cache.rglob(f"*{cache_folder.SUFFIX}"))


def run_once(x, function=add_one):
    """As a process that starts now: the result, and how often the cache served it."""
    dispatcher = serial(function)
    return dispatcher(x), dispatcher.stats.cache_hits.total()


# --- what is kept ---------------------------------------------------------------------------------------------------------------------


def test_what_one_process_compiles_the_next_one_reads(cache):
    assert [run_once(1), run_once(1), run_once(0.5), run_once(0.5)] == [(2, 0), (2, 1), (1.5, 0), (1.5, 1)]
    launch(parallel(count), 1, np.zeros(3))
    serial(count)((np.zeros(1, np.int64).ctypes.data, 1, 0), np.zeros(3))
    keys = [json.loads(disk_cache.read(file)[0]) for file in files(cache)]
    assert sorted(key["function"] for key in keys) == ["add_one", "add_one", "count", "count.run"]


SECOND_FIELD = """
import sys
import numpy as np
from bitnet_np.kernels.launching import serial

def second(x, i):
    # too long to be inlined where it is called twice: the linker sees its name
    STATEMENTS
    return i

def both(x):
    return second(x, 0) + second(x, 1)

second = serial(second)
for type_of_first in sys.argv[1:]:
    record = np.zeros(8, [("first", type_of_first), ("second", "i4"), ("third", "i8")])
    record["second"] = 7
    print(serial(both)(record))
""".replace("STATEMENTS", "i += x[i % x.size].second; " * 50)


def test_what_two_processes_compile_has_different_names(tmp_path):
    """Each meets one record type; to Numba it is the first one, of the first function. A third process reads both."""
    program, cache = tmp_path / "second_field.py", tmp_path / "cache"
    program.write_text(SECOND_FIELD)

    def printed(folder, *arguments):
        return run_python("import runpy, sys; runpy.run_path(sys.argv.pop(1))", program, *arguments, NUMBA_CACHE_DIR=str(folder))

    for type_of_first in ("i1", "i8"):
        assert printed(tmp_path / type_of_first, type_of_first) == "701\n"
        shutil.copytree(tmp_path / type_of_first, cache, dirs_exist_ok=True)
    entries = len(files(cache))
    assert printed(cache, "i1", "i8") == printed(cache, "i8", "i1") == "701\n701\n"
    assert len(files(cache)) == entries == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(numba.config, "OPT", 1),
        lambda patch: patch.setattr(numba.config, "BOUNDSCHECK", 1),
        lambda patch: patch.setattr(disk_cache, "SOURCES", "other"),
        lambda patch: patch.setattr(np, "__version__", "9.9.9"),
        lambda patch: patch.setattr(type(cpu_target.target_context.codegen()), "magic_tuple", lambda self: ("another", "processor")),
    ],
)
def test_another_state_does_not_read_it(cache, monkeypatch, change):
    run_once(1)
    change(monkeypatch)
    assert run_once(1) == (2, 0)


def test_a_closure_is_refused():
    factor = np.random.default_rng(0).integers(9)
    with pytest.raises(TypeError, match="closure"):
        serial(lambda x: factor * x)


def test_what_is_edited_while_a_process_runs_is_not_kept(cache, monkeypatch, tmp_path):
    """Modules may have been read before the edit or after it."""
    (tmp_path / "rows.py").touch()
    monkeypatch.setattr(disk_cache, "_FILES", [*disk_cache._FILES, tmp_path / "rows.py"])
    assert run_once(1) == (2, 0)
    assert files(cache) == []


# --- damage ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(cache, monkeypatch):
    """The entries of two signatures, and a list of what is unpickled from here on."""
    run_once(1), run_once(0.5)
    by_signature = {json.loads(disk_cache.read(file)[0])["signature"]: file for file in files(cache)}
    unpickled, unpickle = [], disk_cache.unpickle
    monkeypatch.setattr(disk_cache, "unpickle", lambda code, key: unpickled.append(key) or unpickle(code, key))
    return by_signature["(int64)"], by_signature["(float64)"], unpickled


def assert_compiled_and_replaced(file, whole):
    """A bad file is not used; and then it is as good as it was."""
    assert [run_once(1), run_once(0.5)].count((2, 0)) == 1
    assert disk_cache.read(file)[0] == whole.split(b"\n")[1]
    assert [run_once(1), run_once(0.5)] == [(2, 1), (1.5, 1)]


def test_no_damage_is_unseen(pair):
    """What is torn or too long, and flipped bits in every part of the file: 300 places, and each byte of what is no code."""
    file, _, unpickled = pair
    whole = file.read_bytes()
    start = whole.index(b"\n", 100) + 40
    rng = np.random.default_rng(0)
    dispatcher = serial(add_one)
    for place in [*range(start), *rng.integers(start, len(whole), 300)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.integers(8)
        file.write_bytes(flipped)
        assert dispatcher._cache.load_overload((types.int64,), cpu_target.target_context) is None
    assert unpickled == []
    for damaged in (b"", whole[:500], whole + b"\0"):
        file.write_bytes(damaged)
        assert_compiled_and_replaced(file, whole)


def forge(file, key, code):
    """An entry whose checksum holds, as no accident makes it."""
    line = json.dumps(key, sort_keys=True).encode()
    file.unlink(missing_ok=True)
    disk_cache._write(file.with_name(disk_cache.file_name(key)), line, code)


@pytest.mark.parametrize("code", [lambda other: disk_cache.read(other)[1], lambda other: b"no pickle"])
def test_other_code_under_a_valid_checksum_is_not_run(pair, code):
    one, two, _ = pair
    key, whole = json.loads(disk_cache.read(one)[0]), one.read_bytes()
    forge(one, key, code(two))
    assert_compiled_and_replaced(one, whole)


def test_a_whole_file_of_another_state_under_this_ones_name_is_not_run(pair, monkeypatch):
    one, _, _ = pair
    whole = one.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(numba.config, "OPT", 1)
        run_once(1)
    (other,) = (file for file in files(one.parents[2]) if file.parent != one.parent)
    shutil.copy(other, one)
    assert_compiled_and_replaced(one, whole)


# --- folders --------------------------------------------------------------------------------------------------------------------------


def test_the_states_used_last_are_kept(cache, monkeypatch):
    run_once(1)
    (first,) = cache_folder.states()
    for n in range(20):
        old = first.with_name(f"compiled-{n:016}")
        old.mkdir()
        (old / f"x{cache_folder.SUFFIX}").touch()
        os.utime(old, (n, n))
    monkeypatch.setattr(numba.config, "OPT", 1)
    run_once(1)
    names = [path.name for path in cache_folder.states()]
    assert len(names) == cache_folder.STATES_KEPT
    assert names[2:] == [f"compiled-{n:016}" for n in range(19, 19 - cache_folder.STATES_KEPT + 2, -1)]
    assert first.name in names[:2]


def test_reading_counts_as_use(cache):
    run_once(1)
    (state,) = cache_folder.states()
    os.utime(state, (1, 1))
    cache_folder.set_time_of_use.cache_clear()
    run_once(1)
    assert state.stat().st_mtime > 1


def test_installations_do_not_delete_what_others_use(cache, monkeypatch):
    run_once(1)
    own = cache_folder.folder()
    used, unused, foreign = (own.with_name(name) for name in ("a" * 16, "b" * 16, "notes"))
    for other in (used, unused, foreign):
        (other / "compiled-1").mkdir(parents=True)
    for other, days in ((own, 100), (used, 89), (unused, 91), (foreign, 91)):
        os.utime(other, (time.time() - 24 * 3600 * days,) * 2)
    cache_folder.set_time_of_use.cache_clear()
    run_once(1)
    cache_folder.delete_old()
    assert sorted(own.parent.iterdir()) == sorted([own, used, foreign])


def test_another_checkout_has_another_folder_of_the_same_cache(cache, monkeypatch):
    own = cache_folder.folder()
    monkeypatch.setattr(cache_folder, "HERE", Path("/elsewhere/bitnet_np/kernels"))
    other = cache_folder._folder.__wrapped__(str(cache))
    assert own != other
    assert own.parent == other.parent == cache / "bitnet_np"


def test_without_a_setting_the_folder_is_the_users(tmp_path, monkeypatch):
    def no_home(*args, **kwargs):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name, appauthor: tmp_path / name)
    assert cache_folder._folder.__wrapped__("").parent == tmp_path / "bitnet_np"
    monkeypatch.setattr(platformdirs, "user_cache_path", no_home)
    assert cache_folder._folder.__wrapped__("").parent.parent == Path(tempfile.gettempdir())


# --- what goes wrong ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["no folder", "full disk", "no sources"])
def test_a_cache_that_cannot_be_written_is_one_warning_and_a_working_program(tmp_path, monkeypatch, trouble):
    monkeypatch.setattr(disk_cache, "_warned", False)
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / ("file" if trouble == "no folder" else "cache")))
    if trouble == "full disk":

        def full(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_bytes", full)
    if trouble == "no sources":
        monkeypatch.setattr(disk_cache, "SOURCES", "")
        monkeypatch.setattr(disk_cache, "_FILES", [])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert [run_once(1), run_once(0.5), run_once(1)] == [(2, 0), (1.5, 0), (2, 0)]
    assert [str(warning.message).startswith("compiled kernels cannot be kept in ") for warning in seen] == [True]
    assert files(tmp_path) == []
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".part"] == []


UNIX = pytest.mark.skipif(os.name == "nt", reason="access is by lists there")
OTHER = 12345  # another user


def give_to_another(path):
    os.chown(path, OTHER, -1, follow_symlinks=False)


def link_from_elsewhere(path):
    """The folder is moved, and a link of another user's leads there: an archive that the victim unpacked looks the same."""
    path.rename(path.parent.parent / "archive")
    path.symlink_to(path.parent.parent / "archive")
    give_to_another(path)


def link_to_a_folder_of_all(path):
    """A link of the user's own."""
    target = path.rename(path.with_name("moved"))
    path.symlink_to("moved")
    target.chmod(0o777)


ATTACKS = {
    "an entry that others may write": (0, lambda path: path.chmod(0o666), r"others may write to .*kernel \(mode 666\)"),
    "an entry of another's": (0, give_to_another, rf"kernel belongs to user {OTHER}"),
    "a state that others may write": (1, lambda path: path.chmod(0o777), r"others may write to .*compiled-\w+ \(mode 777\)"),
    "a state whose sticky bit is set": (1, lambda path: path.chmod(0o1777), r"others may write to .*compiled-\w+ \(mode 777\)"),
    "a state of another's": (1, give_to_another, rf"compiled-\w+ belongs to user {OTHER}"),
    "a link to a state": (1, link_from_elsewhere, rf"compiled-\w+ belongs to user {OTHER}"),
    "an installation that others may write": (2, lambda path: path.chmod(0o777), r"others may write to .*/\w{16} \(mode 777\)"),
    "a link to an installation": (2, link_from_elsewhere, rf"/\w{{16}} belongs to user {OTHER}"),
    "a parent of another's": (4, give_to_another, rf"cache belongs to user {OTHER}"),
    "a parent that a group may write": (4, lambda path: (os.chown(path, -1, OTHER), path.chmod(0o775)), r"cache \(mode 775\)"),
    "an own link to what others may write": (4, link_to_a_folder_of_all, r"moved \(mode 777\)"),
    "a link to the cache": (4, link_from_elsewhere, rf"cache belongs to user {OTHER}"),
}


@UNIX
@pytest.mark.skipif(getattr(os, "geteuid", int)() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_another_user_may_have_written_is_not_loaded_and_one_warning_says_so(cache, monkeypatch, attack):
    run_once(1)
    (file,) = files(cache)
    monkeypatch.setattr(disk_cache, "_warned", False)
    depth, change, reason = ATTACKS[attack]
    change([file, *file.parents][depth])
    with pytest.warns(RuntimeWarning, match=reason) as seen:
        assert [run_once(1), run_once(1)] == [(2, 0), (2, 0 if depth else 1)]  # a file is replaced
    assert len(seen) == 1


@UNIX
def test_own_links_and_folders_with_a_sticky_bit_are_trusted_on_the_way(cache, monkeypatch):
    run_once(1)
    cache.chmod(0o1777)
    assert run_once(1) == (2, 1)
    cache.rename(cache.with_name("moved"))
    cache.symlink_to(Path("..") / cache.parent.name / "moved")
    assert run_once(1) == (2, 1)
    cache.unlink()
    cache.symlink_to(cache)
    with pytest.raises(OSError, match="symbolic links"):
        cache_folder.check_trusted(cache / "x")


@UNIX
def test_the_group_of_a_users_name_may_write(cache, monkeypatch):
    """As umask 002 makes folders where each user has a group."""
    import grp
    import pwd

    def is_trusted(name="me", members=(), group=OTHER):
        cache_folder._has_others.cache_clear()
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=group))
        monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=name, gr_mem=list(members)))
        return not cache_folder._has_others(OTHER)

    found = [is_trusted(), is_trusted(members=["me"]), is_trusted("staff"), is_trusted(members=["me", "you"]), is_trusted(group=1)]
    cache_folder._has_others.cache_clear()
    assert found == [True, True, False, False, False]


@UNIX
def test_nothing_is_made_or_deleted_where_another_user_leads(cache, tmp_path, monkeypatch):
    """A link to the victim's own folders, whose old ones look like those of installations."""
    (precious := tmp_path / "home" / ("a" * 16)).mkdir(parents=True)
    os.utime(precious, (1, 1))
    cache.mkdir()
    (cache / "bitnet_np").symlink_to(tmp_path / "home")
    link, lstat = cache / "bitnet_np", os.lstat
    others = SimpleNamespace(st_uid=OTHER, st_gid=0, st_mode=lstat(link).st_mode)
    monkeypatch.setattr(os, "lstat", lambda path: others if Path(path) == link else lstat(path))
    monkeypatch.setattr(disk_cache, "_warned", False)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        run_once(1)
    assert list((tmp_path / "home").iterdir()) == [precious]


@UNIX
def test_nobody_else_can_write_to_a_cache_whatever_the_mask(cache):
    before = os.umask(0)
    try:
        run_once(1)
    finally:
        os.umask(before)
    (file,) = files(cache)
    assert [path.stat().st_mode & 0o022 for path in (file, file.parent)] == [0, 0]
    assert file.parent.stat().st_mode & 0o777 == (0o755 if os.geteuid() == 0 else 0o700)
    assert run_once(1) == (2, 1)


def test_a_file_that_somebody_reads_on_windows_is_left_alone(cache, monkeypatch):
    run_once(1)
    (file,) = files(cache)
    torn = file.read_bytes()[:-1]
    file.write_bytes(torn)

    def held_open(source, target):
        raise PermissionError(errno.EACCES, "in use")

    monkeypatch.setattr(os, "replace", held_open)
    monkeypatch.setattr(disk_cache, "_ON_WINDOWS", True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_once(1) == (2, 0)
    assert file.read_bytes() == torn


ROUNDED = """
import numpy as np
from bitnet_np.kernels import rows
print(rows.exponential(np.ones(1, np.float32))[0], rows._exponential.kernel.run.stats.cache_misses.total())
"""


def test_edits_of_what_a_kernel_calls_are_noticed(tmp_path):
    shutil.copytree(ROOT / "bitnet_np", tmp_path / "bitnet_np", ignore=shutil.ignore_patterns("__pycache__"))
    scalar = tmp_path / "bitnet_np" / "kernels" / "scalar.py"
    there = {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    text, found = scalar.read_text("utf-8"), []
    for constant in ("0.49999994", "0.75", "0.49999994"):
        scalar.write_text(text.replace("_f(0.49999994)", f"_f({constant})"), "utf-8")
        value, compiled = run_python(ROUNDED, **there).split()
        found.append((value[:4], int(compiled) > 0))
    assert found == [("2.71", True), ("2.76", True), ("2.71", False)]


RACE = """
import random, sys, time
from pathlib import Path
import numpy as np
from bitnet_np.kernels import floats, launching
# bfloat16 holds these numbers
table, seed, ready = np.arange(-64, 64, dtype=np.float32).reshape(8, 16), int(sys.argv[1]), Path(sys.argv[2])
(ready / str(seed)).touch()
while len(list(ready.iterdir())) < 4:  # on a busy machine one would be done before another begins
    time.sleep(0.01)
kinds = {"float32": table, "bfloat16": (table.view(np.uint32) >> 16).astype(np.uint16)}
cases = [(kind, small) for kind in kinds for small in (0, 1 << 15)]
for kind, launching.SMALL in random.Random(seed).sample(cases, len(cases)):
    assert (floats.embed(kinds[kind], np.array([3, 0, 7])) == table[[3, 0, 7]]).all(), kind
print(floats._embed.run.stats.cache_misses.total())
"""


def test_processes_that_fill_one_cache_at_once_mix_nothing_up(tmp_path, monkeypatch):
    """Each compiles the same kernels in an order of its own. The next process compiles none, and every entry is what it says."""
    cache, ready = tmp_path / "cache", tmp_path / "ready"
    ready.mkdir()
    with ThreadPoolExecutor(4) as pool:
        compiled = list(pool.map(lambda seed: int(run_python(RACE, seed, ready, NUMBA_CACHE_DIR=str(cache))), range(4)))
    assert sum(compiled) > 2, "of two kernels none was compiled by two processes"
    assert run_python(RACE, 0, ready, NUMBA_CACHE_DIR=str(cache)) == "0\n"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(cache))
    for file in files(cache):
        line, code = disk_cache.read(file)
        disk_cache.unpickle(code, json.loads(line))
