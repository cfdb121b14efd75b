"""`python -m tests.attack`: draw models, habits, plans and engines at random, and compare with plain.

python -m tests.attack                          2,000 draws; a summary; status 1 if anything is wrong
python -m tests.attack --start 2000 --draws 500 --json found.json
python -m tests.attack --rows --draws 300       draws of declared sums alone: layers, head and loss in blocks of rows
python -m tests.attack --weights --draws 300    draws whose weights come and go alone
python -m tests.attack --seed 17                one draw, with its verdict; --shrink makes it as small as it can
python -m tests.attack --draw '{"seed":...}'    a draw that was printed
python -m tests.attack --class NAME --draws 20  draws for a class of faults that was found once (all: for each)
python -m tests.attack --broken all             each check of lowtide is switched off, and some draw must notice
python -m tests.attack --operators              every operator that torch has samples of, under saved-tensor hooks
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

from tests.attack import drive
from tests.attack.apart import judge_apart
from tests.attack.broken import CHECKS, prove
from tests.attack.classes import CLASSES, NOT_YET
from tests.attack.draw import Draw, Verdict, drawn_from, of_class
from tests.attack.operators import sweep
from tests.attack.shrink import shrunk

_DRAWS_A_CHECK = 200


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    given = _parser().parse_args(argv)
    torch.set_num_threads(1)
    try:
        if given.worker is not None:
            drive.work([int(seed) for seed in given.worker.split(",")])
            return 0
        if given.broken is not None:
            return _broken(given.broken, min(given.draws, _DRAWS_A_CHECK))
        if given.fault is not None:
            return _classes(given.fault, given.start, given.draws)
        if given.operators:
            return _operators(given.json)
        if given.seed is not None or given.draw is not None:
            return _one(drawn_from(given.seed) if given.draw is None else given.draw, given.shrink)
        return _many(given)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=2000, help="how many draws (2000)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (0)")
    for kind, text in (("rows", "layers, head and loss in blocks of rows"), ("weights", "weights that come and go")):
        parser.add_argument(f"--{kind}", dest="only", action="store_const", const=kind, help=f"only draws with {text}")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes (1)")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    parser.add_argument("--seed", type=int, help="judge this one draw")
    parser.add_argument("--draw", type=_read, help="judge this one draw, as it was printed")
    parser.add_argument("--shrink", action="store_true", help="make a draw that goes wrong as small as it can be")
    parser.add_argument("--broken", choices=[*CHECKS, "all"], help="switch a check off; the attack must notice")
    parser.add_argument("--class", dest="fault", choices=[*CLASSES, "all"], help="draws for this class of faults")
    parser.add_argument("--operators", action="store_true", help="the sweep over torch's operators")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.set_defaults(only="")
    return parser


def _read(text: str) -> Draw:
    try:
        return Draw.from_text(text)
    except (ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"not a draw that was printed ({type(error).__name__}: {error})") from None


def _many(given: argparse.Namespace) -> int:
    tally = drive.Tally(given.start, given.draws, only=given.only)
    is_terminal = sys.stderr.isatty()

    def say(draw: Draw, verdict: Verdict) -> None:
        done = len(tally.found)
        if verdict.kind in drive.WRONG:
            print(f"\n{verdict.kind}: {verdict.detail}\n  {draw.describe()}", file=sys.stderr)
            print(f"  again: python -m tests.attack --seed {draw.seed} --shrink", file=sys.stderr)
        if is_terminal or done % 100 == 0:
            left = (tally.asked - done) * tally.seconds / done
            line = f"{done} of {tally.asked} draws, {len(tally.wrong)} wrong, {left:.0f} s to go"
            print(
                f"\r{line:<70}" if is_terminal else line, end="" if is_terminal else "\n", file=sys.stderr, flush=True
            )

    status = 0
    try:
        drive.run(tally, num_jobs=given.jobs, say=say)
    except KeyboardInterrupt:
        status = 130
    print(f"\n{tally.table()}\n")
    print(f"{len(tally.found)} draws in {tally.seconds:.0f} s, seeds from {tally.first}; {len(tally.wrong)} wrong")
    if status:
        only = f"--{given.only} " if given.only else ""
        print(f"interrupted; go on with: python -m tests.attack {only}--start {tally.next_seed}")
    if given.json is not None:
        given.json.write_text(json.dumps(tally.to_json(), indent=1) + "\n")
    return status or (1 if tally.wrong else 0)


def _one(draw: Draw, is_shrunk: bool) -> int:
    print(draw.describe())
    verdict = judge_apart(draw)
    print(f"{verdict.kind}: {verdict.detail}" if verdict.detail else verdict.kind)
    if is_shrunk and verdict.is_wrong:
        draw, verdict = shrunk(draw, verdict)
        print(f"\nas small as it gets:\n{draw.describe()}\n{verdict.kind}: {verdict.detail}")
        print(f"python -m tests.attack --draw '{draw.to_text()}'")
    return 1 if verdict.is_wrong else 0


def _broken(name: str, num_draws: int) -> int:
    names = list(CHECKS) if name == "all" else [name]
    num_unnoticed = 0
    for each in names:
        draw = prove(each, range(num_draws))
        found = "NO DRAW NOTICES" if draw is None else f"noticed by draw {draw.seed}: {draw.describe()}"
        print(f"{each}, switched off: {found}", flush=True)
        num_unnoticed += draw is None
    return 1 if num_unnoticed else 0


def _classes(name: str, start: int, num_draws: int) -> int:
    """What came of some draws for a class, or for each."""
    num_wrong = 0
    for each in list(CLASSES) if name == "all" else [name]:
        verdicts = {seed: judge_apart(of_class(each, seed)) for seed in range(start, start + num_draws)}
        counts = Counter(verdict.kind for verdict in verdicts.values())
        shown = ", ".join(f"{kind} {num}" for kind, num in sorted(counts.items()))
        print(f"{each}{' (not yet)' if each in NOT_YET else ''}: {shown}", flush=True)
        wrong = [(seed, verdict) for seed, verdict in verdicts.items() if verdict.is_wrong]
        for seed, verdict in wrong[:2]:
            print(f"  seed {seed}, {of_class(each, seed).plan}: {verdict.kind}: {verdict.detail[:200]}", flush=True)
        num_wrong += len(wrong) if each not in NOT_YET else 0
    return 1 if num_wrong else 0


def _operators(path: Path | None) -> int:
    found = sweep(say=lambda line: print(line, file=sys.stderr, flush=True))
    print(found.summary())
    if path is not None:
        counts = {f"{way}: {verdict}": num for (way, verdict), num in sorted(found.counts.items())}
        path.write_text(json.dumps({"verdicts": counts, "wrong": found.unexpected}, indent=1) + "\n")
    return 1 if found.unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
