"""`python -m tests.mutants`: makes each wrong change of mutants.py in a copy of the package and runs the tests that
should notice it.

A mutant is killed if its tests fail or do not end, and has survived if they pass. Before that, the same tests have to
pass without any change, and `lowtide` has to be the one of the copy. Nothing of the checkout is written to but the file
of results, where a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.edits import changed, function_in
from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "build" / "mutants.json"
WANTED_SHARE = 0.95
TEST_SECONDS = 120
ALL_SECONDS = 300

KILLED, SURVIVED, TIMEOUT, BROKEN, EQUIVALENT = "killed", "survived", "timeout", "broken", "equivalent"
# Of pytest: some tests failed. Anything else but 0 means that they did not run.
_FAILED, _NOT_RUN = 1, 3
_POLL_SECONDS = 0.02
_PRELOADED = (
    "scipy.optimize",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.testing",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


class Copy:
    """The package and its tests in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("lowtide", "tests", "benchmarks"):  # the last for its figures, which tests read too
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def test(self, tests: Sequence[str], *, is_whole: bool) -> tuple[int, list[str]]:
        """pytest on these tests; to the end if `is_whole`, else to the first failure. What it gave and said.

        Raises TimeoutError. In a child of this process, which has imported already what takes longer than the tests.
        """
        flags = ["-q", "--no-header", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
        flags += [f"--timeout={TEST_SECONDS}", f"--rootdir={self.folder}", *([] if is_whole else ["-x"])]
        if not any("::" in test for test in tests):  # else what is named is meant
            flags += ["-m", "not extended"]
        said = self.folder / "said.txt"
        child = os.fork()
        if not child:
            self._become_pytest([*flags, *(f"tests/{test}" for test in tests)], said)
        end = float("inf") if is_whole else time.monotonic() + ALL_SECONDS
        status = None
        try:
            while status is None:
                time.sleep(_POLL_SECONDS)
                found, status_now = os.waitpid(child, os.WNOHANG)
                status = status_now if found else None
                if time.monotonic() > end:
                    raise TimeoutError
        finally:
            if status is None:
                # With all ranks that its tests may have started.
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), said.read_text(errors="replace").splitlines() or [""]

    def _become_pytest(self, arguments: list[str], said: Path) -> None:
        """Never returns."""
        code = _NOT_RUN
        try:
            os.setsid()
            output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "lowtide", "benchmarks")]:
                del sys.modules[name]
            sys.path[:] = [str(self.folder), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
            import lowtide

            assert lowtide.__file__ == str(self.folder / "lowtide" / "__init__.py"), f"lowtide is {lowtide.__file__}"
            code = int(pytest.main(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def judge(self, mutant: Mutant) -> tuple[str, str]:
        """What became of a mutant, and the last line that pytest said."""
        path = self.folder / "lowtide" / mutant.file
        text = path.read_text()
        path.write_text(changed(text, mutant.function, mutant.edit))
        try:
            code, lines = self.test(mutant.tests, is_whole=False)
        except TimeoutError:
            return TIMEOUT, f"not over after {ALL_SECONDS} s"
        finally:
            path.write_text(text)
        said = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
        if code == 0:
            return (EQUIVALENT if mutant.equivalent else SURVIVED), said
        # A process that died of a signal was noticed as well.
        return (KILLED if code == _FAILED or code < 0 else BROKEN), said


def key_of(mutant: Mutant) -> str:
    """Changes when the mutant, the function or one of its tests does: then an older result says nothing."""
    function = function_in(ast.parse((ROOT / "lowtide" / mutant.file).read_text()), mutant.function)
    tests = [ROOT / "tests" / test.partition("::")[0] for test in mutant.tests]
    files = [file for test in tests for file in (sorted(test.rglob("test_*.py")) if test.is_dir() else [test])]
    parts = [repr(mutant.edit), *mutant.tests, ast.unparse(function), *(file.read_text() for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def chosen(only: Sequence[str], areas: Sequence[str]) -> list[Mutant]:
    """The mutants with one of these words in their name, of these areas."""
    return [
        mutant
        for mutant in MUTANTS
        if (not only or any(word in mutant.name for word in only)) and (not areas or mutant.area in areas)
    ]


def table(mutants: Sequence[Mutant], fates: dict[str, str]) -> str:
    """Killed, survived and equivalent, by area."""
    lines = ["| area | mutants | killed | survived | equivalent |", "|---|---|---|---|---|"]
    for area in [*dict.fromkeys(mutant.area for mutant in mutants), "all"]:
        found = [fates[mutant.name] for mutant in mutants if area in (mutant.area, "all")]
        num_killed = found.count(KILLED) + found.count(TIMEOUT)
        num_alive = found.count(SURVIVED) + found.count(BROKEN)
        lines.append(f"| {area} | {len(found)} | {num_killed} | {num_alive} | {found.count(EQUIVALENT)} |")
    return "\n".join(lines)


def share_killed(fates: Sequence[str]) -> float:
    """Of those that somebody could notice."""
    counted = [fate for fate in fates if fate != EQUIVALENT]
    return sum(fate in (KILLED, TIMEOUT) for fate in counted) / max(len(counted), 1)


def _preload() -> None:
    """Import once what nearly all tests need. No tensor is made: torch's threads would not outlive a fork."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Only what the tests need: plugins of everything that is installed take longer than most of them.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in _PRELOADED:
        importlib.import_module(name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_copy(copy: Copy, mutants: Sequence[Mutant]) -> bool:
    """Whether the copy is what is imported, and all tests pass as long as nothing is changed."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    _say(f"{len(tests)} tests without any change ...")
    code, lines = copy.test(tests, is_whole=True)
    if code:
        _say("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or lines[-1])
        _say("these tests fail without any change; what they notice says nothing")
    return not code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="mutants with this in their name")
    parser.add_argument("--area", action="append", default=[], choices=list(dict.fromkeys(m.area for m in MUTANTS)))
    parser.add_argument("--results", type=Path, default=RESULTS, help="what is known already, and what is found")
    parser.add_argument("--again", action="store_true", help="run also what is known already")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without any change first")
    parser.add_argument("--json", action="store_true", help="the results on standard output, in place of the table")
    options = parser.parse_args()
    mutants = chosen(options.only, options.area)
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    keys = {mutant.name: key_of(mutant) for mutant in mutants}
    todo = [m for m in mutants if options.again or known.get(m.name, {}).get("key") != keys[m.name]]
    try:
        with tempfile.TemporaryDirectory(prefix="lowtide-mutants-") as folder:
            copy = Copy(Path(folder).resolve())
            if todo:
                _preload()
            if todo and not options.no_check and not _check_copy(copy, todo):
                return 2
            for number, mutant in enumerate(todo, 1):
                start = time.perf_counter()
                fate, said = copy.judge(mutant)
                seconds = time.perf_counter() - start
                known[mutant.name] = {
                    "key": keys[mutant.name],
                    "fate": fate,
                    "said": said,
                    "seconds": round(seconds, 1),
                }
                options.results.parent.mkdir(parents=True, exist_ok=True)
                options.results.write_text(json.dumps(known, indent=1))
                _say(f"{number}/{len(todo)} {fate:10} {mutant.area}: {mutant.name} ({seconds:.1f} s) {said[:120]}")
    except KeyboardInterrupt:
        _say(f"stopped; what is known is in {options.results}, and the same command goes on from there")
        return 130
    fates = {mutant.name: known[mutant.name]["fate"] for mutant in mutants}
    if options.json:
        print(json.dumps({mutant.name: {"area": mutant.area, **known[mutant.name]} for mutant in mutants}, indent=1))
    else:
        print(table(mutants, fates))
    for mutant in mutants:
        if fates[mutant.name] in (SURVIVED, BROKEN):
            _say(f"{fates[mutant.name]}: {mutant.name}, lowtide/{mutant.file}: {mutant.why}")
    share = share_killed(list(fates.values()))
    _say(f"{share:.1%} noticed, {WANTED_SHARE:.0%} wanted")
    return 0 if share >= WANTED_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
